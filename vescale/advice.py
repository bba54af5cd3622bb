"""Advice: what to change, in the order in which people decide, each with the numbers that say so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

HSDP_RANKS = 512  # a ring's latency grows with its ranks; groups of this size and smaller are left alone
RING_LATENCY = 0.1  # share of a gather's time that is latency, above which smaller groups are worth their memory
PIPELINE_LAYERS = 60  # fewer layers leave a stage too few to hide its bubble
NOT_YET = "this release cannot do it yet"


class Advice(NamedTuple):
    """One step of the decision.

    Args:
        question: What is decided.
        verdict: "yes", "no", or "not enough": needed, and more than it.
        because: The numbers.
        available: Whether this release can.
    """

    question: str
    verdict: str
    because: str
    available: bool

    def __str__(self) -> str:
        later = f" ({NOT_YET})" if self.verdict == "yes" and not self.available else ""
        return f"{self.question}: {self.verdict}, {self.because}{later}"


class Facts(NamedTuple):
    """What the decisions look at; bytes per rank.

    Args:
        available: Bytes that a device has for the run.
        peaks: Peak by ZeRO stage, as configured.
        recomputed: Peak with recomputation, at the stage of the run.
        kept: Peak without.
        layer: Bytes that the largest layer needs whole: gathered, its gradients, and its activations.
        layers: Number of them.
        ranks: That share the model.
        devices: Of a node.
        latency: Share of a gather's time that is latency.
        replicated_state: Bytes of states of a rank if every group of HSDP_RANKS held a copy of the model.
        bubble: Idle share of a pipeline of 8 stages with few and with many micro-batches.
    """

    available: float
    peaks: Mapping[int, int]
    recomputed: int
    kept: int
    layer: int
    layers: int
    ranks: int
    devices: int
    latency: float
    replicated_state: int
    bubble: tuple[float, float]

    def fits(self, nbytes: float) -> bool:
        """Whether a device has that much."""
        return nbytes <= self.available


def advise(facts: Facts) -> list[Advice]:
    """Returns the decisions in order; those that do not apply say why."""
    return [decide(facts) for decide in _ORDER]


def gb(nbytes: float) -> str:
    """Returns bytes as a reader wants them: 1 GB is 10**9 bytes."""
    return f"{nbytes / 1e9:,.2f} GB" if nbytes < 1e11 else f"{nbytes / 1e9:,.0f} GB"


def _yes(wanted: bool) -> str:
    return "yes" if wanted else "no"


def _data_parallel(facts: Facts) -> Advice:
    need = f"one card would hold {gb(facts.peaks[0])} of {gb(facts.available)}"
    return Advice("data parallel alone (ZeRO 0)", _yes(facts.fits(facts.peaks[0])), need, True)


def _zero(stage: int) -> Callable[[Facts], Advice]:
    words = {1: "cut the optimizer state (ZeRO 1)", 2: "and the gradients (ZeRO 2)", 3: "and the parameters (ZeRO 3)"}

    def decide(facts: Facts) -> Advice:
        before, after = facts.peaks[stage - 1], facts.peaks[stage]
        because = f"stage {stage - 1} needs {gb(before)}, stage {stage} {gb(after)}, of {gb(facts.available)}"
        needed = not any(facts.fits(facts.peaks[lower]) for lower in range(stage))
        verdict = "not enough" if needed and not facts.fits(after) else _yes(needed)
        return Advice(words[stage], verdict, because, True)

    return decide


def _recompute(facts: Facts) -> Advice:
    because = f"{gb(facts.kept)} without recomputation, {gb(facts.recomputed)} with it, of {gb(facts.available)}"
    needed = not facts.fits(facts.kept)
    verdict = "not enough" if needed and not facts.fits(facts.recomputed) else _yes(needed)
    return Advice("activation checkpointing", verdict, because, True)


def _tensor_parallel(facts: Facts) -> Advice:
    because = (
        f"the largest layer needs {gb(facts.layer)} of {gb(facts.available)}; inside a node of {facts.devices} only"
    )
    return Advice("tensor parallel", _yes(not facts.fits(facts.layer)), because, False)


def _pipeline(facts: Facts) -> Advice:
    few, many = facts.bubble
    wanted = facts.layers >= PIPELINE_LAYERS and not facts.fits(facts.recomputed)
    because = f"{facts.layers} layers; 8 stages idle {few:.1%} with 8 micro-batches, {many:.1%} with 64"
    return Advice("pipeline parallel, with many micro-batches", _yes(wanted), because, False)


def _hsdp(facts: Facts) -> Advice:
    wanted = facts.ranks > HSDP_RANKS and facts.latency > RING_LATENCY
    because = (
        f"{facts.ranks:,} ranks, latency is {facts.latency:.0%} of a layer's gather; with a copy of the model in every "
        f"{min(facts.ranks, HSDP_RANKS)} ranks each holds {gb(facts.replicated_state)} of states"
    )
    return Advice(f"HSDP, above {HSDP_RANKS} ranks", _yes(wanted), because, True)


_ORDER: tuple[Callable[[Facts], Advice], ...] = (
    _data_parallel,
    _zero(1),
    _zero(2),
    _zero(3),
    _recompute,
    _tensor_parallel,
    _pipeline,
    _hsdp,
)
