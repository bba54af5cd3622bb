"""Which tensors of a unit share a buffer, and which granules are kept when padding has a budget.

One buffer for rows of different lengths needs shards that all of them divide, which explodes at many ranks. A second
buffer is a second collective and usually the cure. A layer of GPT-OSS-120B with granules of 16 rows on 1024 ranks::

    one segment                                                                      88 % padding
    segments of different granularities, chosen over all set partitions              2.0 %, the proven bound

``plan_model`` plans all units of a model under one budget, ``plan_unit`` one; granularity is a preference of both.
``plan_hard`` keeps every granule or refuses; ``lower_bound`` is what no plan of that kind gets below.

A plan is chosen so: (1) if nothing need be cut within the budget, the fewest segments that do it; else (2) the least
of ``6 * ranks * padding + bytes of cut granules``. The first term is what padding costs the world in a step (two
all-gathers and a reduce-scatter, 2 bytes an element, received by every rank), the second what the optimizer's step has
to send. A further segment has to save ``SEGMENT`` elements of padding or their equal.

Tensors lie in the order of their definition. Another one is taken where nothing is cut and it saves ``SEGMENT``
elements: of 925 random layers of three to six tensors at least 14, by up to 3.9 % of their elements; no layer of
``tests/bench/planner.py``.

Tried and not worth it: splitting by granularity alone, and keeping equal matrices together (5.9 % against 2.0 % for
granules of 32 rows of Llama-3-70B at 256 ranks, where ``gate`` goes with ``down`` and ``up`` with the rest); one of
those other orders for all (each loses about as often as it wins); a further segment charged in the second rule's bytes
where the first one applies (cuts every row that a second segment keeps).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from vescale.partitions import SEGMENT, Choice, by_kind, lower_bound, splits
from vescale.planner import COLLECTIVE, SegmentPlan, TensorSpec, check
from vescale.shards import Ranks

# Most segments that one kind of tensors is split into: with granules kept at any price, and as a preference.
MOST_HARD, MOST_SOFT = 4, 3
# Most sets of kept granularities tried for one kind of one unit, and most tensors placed over all of them.
MOST_KEPT, MOST_PLACED = 128, 8_000
# Most tensors in all buffers tried for one set of kept granularities.
MOST_TRIED = 2000
# The same where all are kept.
MOST_WHOLE = 10_000
# Most sums of choices carried from group to group.
MOST_SUMS = 1000
_NONE: frozenset[int] = frozenset()


# What each rank can hold, in any unit; None: all the same.
Capacity = Sequence[int | Fraction] | None


def plan_unit(
    tensors: Sequence[TensorSpec], *, num_ranks: int, max_padding: float = 0.01, capacity: Capacity = None
) -> tuple[SegmentPlan, ...]:
    """Returns the segments of one unit, as ``plan_model`` of nothing else."""
    return plan_model([tensors], num_ranks=num_ranks, max_padding=max_padding, capacity=capacity)[0]


def plan_model(
    units: Sequence[Sequence[TensorSpec]], *, num_ranks: int, max_padding: float = 0.01, capacity: Capacity = None
) -> list[tuple[SegmentPlan, ...]]:
    """Returns the segments of every unit, kinds in order of appearance, that keep granules as padding allows.

    Padding that the finest plans need anyhow is allowed. A kind of a unit so small that COLLECTIVE elements per rank
    (and unit of capacity) are more than its share of the budget is one segment that has those instead. Equal units are
    planned once.

    Args:
        units: Tensors of each, in the order in which each segment shall hold them.
        num_ranks: Ranks that share each buffer.
        max_padding: Most padding, as a fraction of the elements of all units.
        capacity: What each rank can hold, in any unit; shards are in this ratio. None: equal ones.

    Raises:
        ValueError: If names repeat within a unit or a number is out of its range.
    """
    columns = [tuple(zip(*tensors, strict=True)) for tensors in units]
    equal: dict[Hashable, list[Sequence[TensorSpec]]] = {}  # by everything but the names
    for tensors, column in zip(units, columns, strict=True):
        alike = equal.setdefault(column[1:], [])
        if not alike or len(set(*column[:1])) < len(tensors):
            check(tensors, num_ranks=num_ranks, max_padding=max_padding)
        alike.append(tensors)
    check([], num_ranks=num_ranks, max_padding=max_padding)
    ranks = Ranks.of(num_ranks, capacity)
    groups = [
        (alike, _Group(members, len(alike), ranks))
        for alike in equal.values()
        for members in by_kind(alike[0]).values()
    ]
    plans: dict[int, list[SegmentPlan]] = {id(alike): [] for alike in equal.values()}
    chosen = _choose([group for _, group in groups], max_padding)
    for (alike, _), choice in zip(groups, chosen, strict=True):
        plans[id(alike)] += choice.plans
    copies = {signature: _copies(plans[id(alike)], alike) for signature, alike in equal.items()}
    return [next(copies[column[1:]]) for column in columns]


def plan_hard(
    tensors: Sequence[TensorSpec], *, num_ranks: int, max_padding: float | None = None, capacity: Capacity = None
) -> tuple[SegmentPlan, ...]:
    """Returns the segments of one unit that cut no granule, kinds in order of appearance.

    Args:
        tensors: In the order in which each segment shall hold them. Granularity is a demand.
        num_ranks: Ranks that share each buffer.
        max_padding: Most padding, as a fraction of the elements of all tensors; None for any.
        capacity: What each rank can hold, in any unit; shards are in this ratio. None: equal ones.

    Raises:
        ValueError: If names repeat, a number is out of its range, or padding exceeds the budget: the message says the
            smallest budget for which a plan was found, and whether there can be one for less.
    """
    check(tensors, num_ranks=num_ranks, max_padding=max_padding or 0.0)
    ranks, total = Ranks.of(num_ranks, capacity), sum(tensor.numel for tensor in tensors)
    allowed = math.inf if max_padding is None else max_padding * total
    kinds = by_kind(tensors).values()
    best = [min(splits(members, ranks, most=MOST_HARD), key=lambda choice: choice.cost) for members in kinds]
    if sum(choice.waste for choice in best) > allowed:  # segments are no object now
        found = (splits(members, ranks, most=MOST_HARD, gain=0) for members in kinds)
        best = [min(choices, key=lambda choice: choice.waste) for choices in found]
    waste = sum(choice.waste for choice in best)
    if waste > allowed:
        bound = lower_bound(tensors, num_ranks=num_ranks, capacity=capacity)
        raise ValueError(
            f"max_padding: {_smallest_budget(waste, bound, total)} in which no granule of these {len(tensors)} tensors"
            f" on {num_ranks} ranks is cut, got {max_padding}"
        )
    return tuple(plan for choice in best for plan in choice.plans)


def _smallest_budget(waste: int, bound: int, total: int) -> str:
    """What to ask for, in parts per million rounded up, and whether that is proven to be the least."""
    if not total:
        return "expected more than a fraction of no elements can say: there is no budget"
    least, proven = (f"{math.ceil(elements / total * 1e6) / 1e6:.6f}" for elements in (waste, bound))
    known = "the smallest there is" if least == proven else f"the smallest found (there is none below {proven})"
    return f"expected at least {least}, {known}"


# --- what fits the budget ---


class _Group(NamedTuple):
    """The tensors of one kind in one unit, and how many units have the like."""

    members: list[TensorSpec]
    equals: int
    ranks: Ranks

    @property
    def numel(self) -> int:
        return sum(tensor.numel for tensor in self.members)


def _choose(groups: Sequence[_Group], max_padding: float) -> list[Choice]:
    """One choice for each group: those large enough share the budget, each other one has a collective's quantum."""
    budget = int(max_padding * sum(group.numel * group.equals for group in groups))
    large = [group for group in groups if max_padding * group.numel >= COLLECTIVE * group.ranks.total]
    chosen = dict(zip(map(id, large), _within(large, budget, most=MOST_SOFT), strict=True))
    for group in groups:
        if id(group) not in chosen:
            alone = group._replace(equals=1)
            chosen[id(group)] = _within([alone], COLLECTIVE * group.ranks.total, most=1)[0]
    return [chosen[id(group)] for group in groups]


def _within(groups: Sequence[_Group], budget: int, *, most: int) -> list[Choice]:
    """One choice for each group, together within ``budget`` elements of padding or what their finest plans pad."""
    finest = [splits(g.members, g.ranks, relaxed=_relaxable(g.members), most=1)[0] for g in groups]
    needed = sum(choice.waste * group.equals for choice, group in zip(finest, groups, strict=True))
    slack = max(budget - needed, 0)
    limits = [choice.waste + slack // group.equals for choice, group in zip(finest, groups, strict=True)]
    whole = [splits(g.members, g.ranks, most=1, within=limit) for g, limit in zip(groups, limits, strict=True)]
    kept = _least(groups, whole, needed + slack, [[0] * len(choices) for choices in whole])
    if kept is not None:
        return kept
    options = [
        _options(group, choice, limit, most=most) for group, choice, limit in zip(groups, finest, limits, strict=True)
    ]
    cheapest = _least(groups, options, needed + slack, [[choice.cost for choice in choices] for choices in options])
    assert cheapest is not None  # the finest of all
    uncut = [[choice for choice in choices if not choice.cut] for choices in options]
    fewest = _least(groups, uncut, needed + slack, [[len(choice.plans) for choice in choices] for choices in uncut])
    return cheapest if fewest is None else fewest


def _least(
    groups: Sequence[_Group], options: Sequence[Sequence[Choice]], budget: int, values: Sequence[Sequence[int]]
) -> list[Choice] | None:
    """One option for each group, together within the budget and of the least value; of equal ones the least padding.

    None if there is no such. Sums are extended group by group, only those kept that nothing beats in both respects.
    """
    sums: list[tuple[int, int, list[Choice]]] = [(0, 0, [])]
    for group, choices, worth in zip(groups, options, values, strict=True):
        longer = [
            (waste + choice.waste * group.equals, value + more * group.equals, [*chosen, choice])
            for waste, value, chosen in sums
            for choice, more in zip(choices, worth, strict=True)
        ]
        sums = []
        for waste, value, chosen in sorted(longer, key=lambda item: item[:2]):
            if waste <= budget and (not sums or value < sums[-1][1]):
                sums.append((waste, value, chosen))
        sums = sums[:MOST_SUMS]
    return min(sums, key=lambda item: item[1])[2] if sums else None


def _options(group: _Group, finest: Choice, within: int, *, most: int) -> list[Choice]:
    """Choices of at most ``within`` elements of padding: those that keep everything, and those that may cost less.

    The more granularities are kept the less fits, so sets of kept ones grow from none, and one that does not fit, or
    whose padding alone costs more than another choice, is grown no further. No fixed order of relaxing is best; those
    that would cut the most bytes are kept first.
    """
    members, ranks, relaxable = group.members, group.ranks, _relaxable(group.members)
    limit, tries = max(min(MOST_KEPT, MOST_PLACED // len(members)), 2), max(MOST_TRIED // len(members), 2)
    whole = _whole(members, ranks, within, most=most)
    found = [finest, *whole]

    def keep(kept: frozenset[int]) -> bool:
        affordable = min(within, *((choice.cost - 1) // (6 * ranks.count) for choice in found))
        choices = splits(members, ranks, relaxed=relaxable - kept, most=most, within=affordable, tries=tries)
        least = min(choice.cost for choice in found)
        found.extend(choice for choice in choices if len(choice.plans) == 1 or choice.cost < least)
        return bool(choices)

    tried = {_NONE: True, relaxable: bool(whole)}
    by_stake = _by_stake(finest.plans[0], relaxable)[: limit - 1]
    singles = [frozenset({granularity}) for granularity in by_stake]
    tried.update((kept, keep(kept)) for kept in singles if kept not in tried)
    order = [granularity for granularity in by_stake if tried[frozenset({granularity})]]
    waiting = [(_NONE, -1)]
    while waiting and len(tried) < limit:
        kept, last = waiting.pop()
        if any(not fits and misfit <= kept for misfit, fits in tried.items()):
            continue
        if kept not in tried:
            tried[kept] = keep(kept)
        if tried[kept]:
            waiting += [(kept | {order[i]}, i) for i in reversed(range(last + 1, len(order)))]
    # Of equal ones the one that keeps the most granularities comes first, and is the one taken.
    return sorted(found, key=lambda choice: (choice.waste, choice.cut, _relaxed_tensors(choice)))


def _whole(members: Sequence[TensorSpec], ranks: Ranks, within: int, *, most: int) -> list[Choice]:
    """Choices that keep everything. A further segment saves ``SEGMENT`` elements, even if fewer exceed ``within``."""
    (one,) = splits(members, ranks, most=1)
    tries = max(MOST_WHOLE // len(members), 4)
    more = splits(members, ranks, most=most, within=min(within, one.waste - SEGMENT), tries=tries)
    return [one, *more] if one.waste <= within else more


def _relaxed_tensors(choice: Choice) -> int:
    return sum(grain % t.granularity > 0 for p in choice.plans for t, grain in zip(p.tensors, p.planned, strict=True))


def _relaxable(members: Sequence[TensorSpec]) -> frozenset[int]:
    """Granularities that some tensor wants beyond its finest."""
    return frozenset(tensor.granularity for tensor in members if tensor.finest % tensor.granularity)


def _by_stake(finest: SegmentPlan, relaxable: frozenset[int]) -> list[int]:
    """Relaxable granularities, those with the most bytes cut in the finest plan first."""
    stake = dict.fromkeys(relaxable, 0)
    for i, tensor in enumerate(finest.tensors):
        if tensor.granularity in stake:
            stake[tensor.granularity] += finest.boundary(i).elements * tensor.itemsize
    return sorted(relaxable, key=lambda granularity: (-stake[granularity], granularity))


def _copies(plans: Sequence[SegmentPlan], units: Sequence[Sequence[TensorSpec]]) -> Iterator[tuple[SegmentPlan, ...]]:
    """The plans of the first of equal units, and the same under the names of each other one."""
    yield tuple(plans)
    index = {tensor.name: i for i, tensor in enumerate(units[0])}
    places = [[index[tensor.name] for tensor in plan.tensors] for plan in plans]
    for unit in units[1:]:
        yield tuple(
            replace(plan, tensors=tuple([unit[i] for i in place])) for plan, place in zip(plans, places, strict=True)
        )
