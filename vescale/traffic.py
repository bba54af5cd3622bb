"""Traffic: the collectives of a step, their bytes, their time on a machine, and what of it hides behind compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vescale.blueprint import Blueprint, PlannedBucket
from vescale.live import Collective
from vescale.machine import Machine
from vescale.memory import Dtypes, copies

OVER_COPIES = "gradients, over copies"  # the line whose group is not the ranks that share a copy
TO_COPIES = "directions to copies"
TOKENS = "tokens to experts and back"
EXPERTS = ", experts"
LOGITS = "largest logits"
NORM = 4  # bytes of the gradient norm's square, summed over the ranks by clip_grad_norm_
_SHARED = ("parameters, forward", "parameters, backward", "gradients")


class Line(NamedTuple):
    """One kind of collective of a step.

    Args:
        what: What it is for.
        collective: Its name.
        calls: In a step.
        nbytes: Of all of them, as ``vescale.live.Collective`` counts.
        seconds: Of all of them, one after another.
    """

    what: str
    collective: str
    calls: int
    nbytes: int
    seconds: float


def model_collectives(
    blueprint: Blueprint,
    dtypes: Dtypes,
    *,
    micro_batches: int,
    regathers: bool | None,
    stage: int = 3,
    replicas: int = 1,
) -> dict[str, Counter[Collective]]:
    """Returns the collectives of forward and backward, as ``fully_shard`` calls them in a step.

    Stages 0 to 2 gather once after the step; 0 and 1, and 3 where each reduction is a step, reduce after the last
    micro-batch alone. A group of one rank is called too, and moves nothing. Dealt experts have lines of their own,
    which end with ``EXPERTS``.

    Args:
        blueprint: Of the ranks that share a copy; at stage 0 of one rank.
        dtypes: Of gathered parameters and of reduced gradients.
        micro_batches: Of a step.
        regathers: ``reshard_after_forward``: gather again for backward; None does, except the root.
        stage: ZeRO stage.
        replicas: Copies of the model, over which the shards of gradients are summed too.
    """
    lines: dict[str, Counter[Collective]] = {
        what + whose: Counter() for whose in ("", EXPERTS) for what in (*_SHARED, OVER_COPIES)
    }
    reduces_each = stage == 2 or (stage == 3 and not blueprint.in_backward)
    gathers, reduces = (micro_batches if stage == 3 else 1), (micro_batches if reduces_each else 1)
    for unit in blueprint.units:
        again = (unit is not blueprint.root) if regathers is None else regathers
        for plan, trains, itemsize, parts in zip(unit.plans, unit.trainable, unit.itemsizes, unit.parts, strict=True):
            whose = EXPERTS if parts > 1 else ""
            if copies(plan, dtypes, itemsize):
                gathered = Collective("all_gather", plan.numel * dtypes.param)
                lines["parameters, forward" + whose][gathered] += gathers
                lines["parameters, backward" + whose][gathered] += micro_batches * again if stage == 3 else 0
            if trains:
                lines["gradients" + whose][Collective("reduce_scatter", plan.numel * dtypes.reduce)] += reduces
                if stage == 0 or replicas > 1:
                    reduced = Collective("all_reduce", plan.shard_size * dtypes.reduce)
                    lines[OVER_COPIES + whose][reduced] += reduces
    return {what: +calls for what, calls in lines.items() if +calls}


def token_collectives(
    layers: int, *, nbytes: int, num_experts: int, micro_batches: int, recomputed: bool
) -> dict[str, Counter[Collective]]:
    """Returns the exchanges of tokens where experts are dealt, as ``models.expert_parallel`` calls them in a step.

    Forward first tells how many tokens go where, sends them and gets what became of them; backward sends the gradients
    the same two ways.

    Args:
        layers: With experts.
        nbytes: Of a micro-batch's tokens, each as often as it has experts.
        num_experts: Of a layer.
        micro_batches: Of the step.
        recomputed: Whether backward computes forward again.
    """
    times = layers * micro_batches
    forwards = times * (2 if recomputed else 1)
    told, sent = Collective("all_to_all", 8 * num_experts), Collective("all_to_all", nbytes)  # counts are int64
    return {TOKENS: Counter({told: forwards, sent: 2 * forwards + 2 * times})} if times else {}


def step_collectives(buckets: Sequence[PlannedBucket], *, dealt: bool = False) -> dict[str, Counter[Collective]]:
    """Returns the collectives of clipping and of the optimizer's step on one rank.

    Args:
        buckets: Of that rank.
        dealt: Whether experts are, whose gradients add up over two more groups.
    """
    lines = {"norm of the gradient": Counter({Collective("all_reduce", NORM): 3 if dealt else 1})}
    there: Counter[Collective] = Counter()
    back: Counter[Collective] = Counter()
    shared: Counter[Collective] = Counter()
    for bucket in buckets:
        if bucket.sharing:
            mine, others = bucket.sharing.sizes[bucket.sharing.replica], len(bucket.sharing.sizes) - 1
            shared[Collective("all_to_all", bucket.rule.wire_dtype.itemsize * mine * others)] += 1
        if bucket.exchange:
            itemsize = bucket.rule.wire_dtype.itemsize
            for calls, moves in ((there, bucket.exchange.outgoing), (back, bucket.exchange.incoming)):
                calls[Collective("all_to_all", itemsize * sum(move.stop - move.start for move in moves))] += 1
    named = (("blocks to owners", there), ("directions back", back), (TO_COPIES, shared))
    return lines | {what: calls for what, calls in named if calls}


def total(lines: Iterable[Counter[Collective]]) -> Counter[Collective]:
    """Returns all of them together."""
    return sum(lines, Counter())


def timed(
    lines: dict[str, Counter[Collective]], machine: Machine, ranks: int, replicas: int = 1, *, ep: int = 1
) -> list[Line]:
    """Returns one line for each kind of call.

    Args:
        lines: Calls by what they are for.
        machine: That they run on.
        ranks: That share a copy of the model, neighbours on the machine.
        replicas: Copies; the ranks that hold the same part are ``ranks`` apart.
        ep: Neighbours that deal the experts; those with the same ones are so far apart.
    """
    groups = {
        TOKENS: (ep, 1),
        OVER_COPIES: (replicas, ranks),
        TO_COPIES: (replicas, ranks),
        OVER_COPIES + EXPERTS: (max(replicas // ep, 1), max(ranks, ep)),
        **{what + EXPERTS: (max(ranks // ep, 1), ep) for what in _SHARED},
    }
    found = []
    for what, calls in lines.items():
        group, stride = groups.get(what, (ranks, 1))
        seconds = sum(n * machine.seconds(call.name, call.nbytes, group, stride) for call, n in calls.items())
        nbytes = sum(call.nbytes * count for call, count in calls.items())
        found.append(Line(what, next(iter(calls)).name, calls.total(), nbytes, seconds))
    return found


class Exposure(NamedTuple):
    """What of a step's communication hides behind compute, in seconds."""

    compute: float
    communication: float
    hidden: float
    exposed: float

    @property
    def fraction(self) -> float:
        """Of the step, exposed."""
        return self.exposed / (self.compute + self.exposed) if self.exposed else 0.0


def exposure(passes: Iterable[tuple[float, float]], *, units: int, alone: float) -> Exposure:
    """Returns what hides when each unit's collectives run behind the compute of its neighbours.

    A gather runs behind the unit before it, a reduction behind the unit after it in backward: of each pass one unit's
    share of the communication has nothing to run behind, and so has what is longer than the compute it runs behind.

    Args:
        passes: Seconds of compute and of communication of each pass over the layers.
        units: Layers.
        alone: Seconds of communication that never overlaps: the root's gather and reduction, and the optimizer's.
    """
    passes = list(passes)
    compute, communication = (sum(seconds) for seconds in zip(*passes, strict=True))
    hidden = sum((units - 1) * min(seconds) / units for seconds in passes) if units else 0.0
    return Exposure(compute, communication + alone, hidden, communication + alone - hidden)
