"""Advice: what to change, in the order in which people decide, each with the numbers that say so.

A decision is taken with those before it: whether to compute layers again, at the lowest ZeRO stage that fits, and so
on. What a run is configured with already is never advised, and a decision that would have to be taken and cannot be
(``MISSING``) names nothing to write on a command line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

HSDP_RANKS = 512  # a ring's latency grows with its ranks; groups of this size and smaller are left alone
RING_LATENCY = 0.1  # share of a gather's time that is latency, above which smaller groups are worth their memory
PIPELINE_LAYERS = 60  # fewer layers leave a stage too few to hide its bubble

YES, NO, KEEP, SHORT = "yes", "no", "as configured", "not enough"
MISSING = "needed, and vescale cannot do it yet"


class Setting(NamedTuple):
    """What a command line chooses.

    Args:
        stage: ZeRO stage.
        recomputed: Whether layers are computed again in backward.
        micro_batch: Sequences of one forward.
    """

    stage: int
    recomputed: bool
    micro_batch: int


class Advice(NamedTuple):
    """One decision.

    Args:
        question: What is decided.
        verdict: ``YES``: to be changed; ``NO``: not needed; ``KEEP``: needed, and so it is; ``SHORT``: needed, and more
            than it; ``MISSING``.
        because: The numbers.
        change: What to write on the command line; "" where it stands already, or would not help.
    """

    question: str
    verdict: str
    because: str
    change: str = ""

    def __str__(self) -> str:
        change = f" ({self.change})" if self.change else ""
        return f"{self.question}: {self.verdict}{change}, {self.because}"


class Facts(NamedTuple):
    """What the decisions look at; bytes per rank.

    Args:
        available: Bytes that a device has for the run.
        configured: What the run asks for.
        peak: Most bytes at any moment of a step with a setting.
        micro_batches: Sizes that divide a rank's share of the batch, the largest first.
        layer: Bytes that the largest layer needs whole with one sequence: gathered, its gradients, its activations.
        layers: Number of them.
        ranks: That share a copy of the model, above stage 0.
        replicas: Copies of the model.
        dealt: Whether experts are, which one copy of the model alone can have.
        devices: Of a node.
        latency: Share of a gather's time that is latency.
        copies: Bytes that smaller groups of ranks, each with a copy of the model, would hold more.
        bubble: Idle share of a pipeline of 8 stages with few and with many micro-batches.
    """

    available: float
    configured: Setting
    peak: Callable[[Setting], int]
    micro_batches: Sequence[int]
    layer: int
    layers: int
    ranks: int
    replicas: int
    dealt: bool
    devices: int
    latency: float
    copies: int
    bubble: tuple[float, float]

    def fits(self, setting: Setting) -> bool:
        """Whether a device has that much."""
        return self.peak(setting) <= self.available


class Advised(NamedTuple):
    """The decisions in order, and what comes of them."""

    conclusion: str
    decisions: list[Advice]


def group_size(ranks: int) -> int:
    """Returns how many ranks would share a copy where there are many: at most HSDP_RANKS, which divide ``ranks``."""
    return next(size for size in divisors(ranks) if size <= HSDP_RANKS)


def divisors(number: int) -> list[int]:
    """Returns those of a number, the largest first."""
    return [size for size in range(number, 0, -1) if number % size == 0]


def advise(facts: Facts) -> Advised:
    """Returns the decisions; those that do not apply say why."""
    setting, decisions = facts.configured, []
    for decide in (_zero, _recompute, _micro_batch):
        setting, found = decide(facts, setting)
        decisions += found
    decisions += [_tensor_parallel(facts), _pipeline(facts, setting), _hsdp(facts, setting)]
    return Advised(_conclusion(facts, setting, decisions), decisions)


def readable(nbytes: float) -> str:
    """Returns bytes as a reader wants them, 1 GB is 10**9: 1,129 GB, 4.41 GB, 12.35 MB, 64 B."""
    if nbytes >= 1e11:
        return f"{nbytes / 1e9:,.0f} GB"
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size / 10:
            return f"{nbytes / size:,.2f} {unit}"
    return f"{nbytes:,.0f} B"


def _conclusion(facts: Facts, setting: Setting, decisions: Sequence[Advice]) -> str:
    now, then = facts.peak(facts.configured), facts.peak(setting)
    needs = f"the worst moment holds {readable(now)} of {readable(facts.available)}"
    changes = " ".join(advice.change for advice in decisions if advice.change)
    if then > facts.available:
        missing = " and ".join(advice.question.partition(",")[0] for advice in decisions if advice.verdict == MISSING)
        more = "fewer copies of the model, parallelism.dp_shard=-1," if facts.replicas > 1 else "more ranks"
        how = f"it would take {missing or more}"
        least = f"{readable(then)} of {readable(facts.available)} at the least"
        return f"no setting makes it fit: {least}; {how}, or larger devices"
    if not changes:
        return f"it fits, and nothing is to change: {needs}"
    if now > facts.available:
        return f"it does not fit as configured ({needs}); it does with {changes}: {readable(then)}"
    return f"it fits as configured ({needs}); less communication or computation with {changes}: {readable(then)}"


def _judged(question: str, because: str, *, needed: bool, enough: bool, change: str) -> Advice:
    """``change`` is "" where it is configured already."""
    verdict = NO if not needed else SHORT if not enough else YES if change else KEEP
    return Advice(question, verdict, because, change)


def _zero(facts: Facts, setting: Setting) -> tuple[Setting, list[Advice]]:
    """The lowest stage that fits, else the last."""
    if facts.ranks == 1:
        return setting, [Advice("ZeRO", KEEP, "a rank that shares with nobody holds everything at any stage")]
    peaks = [facts.peak(setting._replace(stage=stage)) for stage in range(4)]
    stage = next((stage for stage, peak in enumerate(peaks) if peak <= facts.available), 3)
    decisions = []
    for at, question in enumerate(_STAGES):
        because = f"{readable(peaks[at])} of {readable(facts.available)}"
        change = f"parallelism.zero={at}" if at == stage != setting.stage else ""
        enough = peaks[at] <= facts.available
        decisions.append(_judged(question, because, needed=at <= stage, enough=enough, change=change))
    return setting._replace(stage=stage), decisions


def _recompute(facts: Facts, setting: Setting) -> tuple[Setting, list[Advice]]:
    without, again = (facts.peak(setting._replace(recomputed=recomputed)) for recomputed in (False, True))
    because = f"{readable(without)} without recomputation, {readable(again)} with it, of {readable(facts.available)}"
    needed, enough = without > facts.available, again <= facts.available
    change = "" if needed == setting.recomputed else f"model.checkpoint={'full' if needed else 'none'}"
    advice = _judged("activation checkpointing", because, needed=needed, enough=enough, change=change)
    return setting._replace(recomputed=needed), [advice]


def _micro_batch(facts: Facts, setting: Setting) -> tuple[Setting, list[Advice]]:
    now, question = facts.peak(setting), "smaller micro-batches, more of them"
    sizes = [size for size in facts.micro_batches if size < setting.micro_batch]
    if now <= facts.available or not sizes:
        because = f"{readable(now)} of {readable(facts.available)} with trainer.micro_batch={setting.micro_batch}"
        return setting, [Advice(question, NO, because)]
    fitting = (size for size in sizes if facts.fits(setting._replace(micro_batch=size)))
    fewer = setting._replace(micro_batch=next(fitting, sizes[-1]))
    because = f"{readable(now)} with {setting.micro_batch} sequences at a time, {readable(facts.peak(fewer))} with "
    because += f"{fewer.micro_batch}, of {readable(facts.available)}"
    change = f"trainer.micro_batch={fewer.micro_batch}"
    return fewer, [_judged(question, because, needed=True, enough=facts.fits(fewer), change=change)]


def _tensor_parallel(facts: Facts) -> Advice:
    needs = f"the largest layer needs {readable(facts.layer)} of {readable(facts.available)}"
    verdict = MISSING if facts.layer > facts.available else NO
    return Advice("tensor parallel", verdict, f"{needs}; inside a node of {facts.devices} only")


def _pipeline(facts: Facts, setting: Setting) -> Advice:
    """A stage has a layer at least: one that is too large stays so."""
    few, many = facts.bubble
    needed = facts.layers >= PIPELINE_LAYERS and not facts.fits(setting) and facts.layer <= facts.available
    because = f"{facts.layers} layers; 8 stages idle {few:.1%} with 8 micro-batches, {many:.1%} with 64"
    return Advice("pipeline parallel, with many micro-batches", MISSING if needed else NO, because)


def _hsdp(facts: Facts, setting: Setting) -> Advice:
    group, holds = group_size(facts.ranks), facts.peak(setting) + facts.copies
    slow = facts.ranks > HSDP_RANKS and facts.latency > RING_LATENCY and group >= facts.devices
    because = f"{facts.ranks:,} ranks share, and latency is {facts.latency:.0%} of a layer's gather"
    if facts.ranks > HSDP_RANKS:
        because += f"; with a copy of the model in every {group} ranks {readable(holds)} of {readable(facts.available)}"
    wanted = slow and not facts.dealt and setting.stage > 0 and holds <= facts.available
    change = f"parallelism.dp_shard={group}" if wanted else ""
    return _judged(f"HSDP, above {HSDP_RANKS} ranks", because, needed=wanted, enough=True, change=change)


_STAGES = (
    "data parallel alone (ZeRO 0)",
    "cut the optimizer state (ZeRO 1)",
    "and the gradients (ZeRO 2)",
    "and the parameters (ZeRO 3)",
)
