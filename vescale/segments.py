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

Tried and not worth it: splitting by granularity alone, and keeping equal matrices together (5.9 % against 2.0 % for
granules of 32 rows of Llama-3-70B at 256 ranks, where ``gate`` goes with ``down`` and ``up`` with the rest); longest
tensors first, longest or shortest granules first (no layer of ``tests/bench/planner.py`` pads less); a further segment
charged in the second rule's bytes where the first one applies (cuts every row that a second segment keeps).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from vescale.planner import ALIGN, COLLECTIVE, SegmentPlan, TensorSpec, check, plan_within

# Elements of padding that cost as much as one more collective: 10 microseconds of launch and latency, at 50 GB/s for
# each rank (a 400 Gbit/s adapter) and 2 bytes an element.
SEGMENT = 2**18
# Most segments that one kind of tensors is split into: with granules kept at any price, and as a preference.
MOST_HARD, MOST_SOFT = 4, 3
# Most groups of equal tensors that are distributed over segments one by one; the smallest share one beyond that.
MOST_ATOMS = 8
# The same for the bound over all set partitions, whose number of steps is 3 to the power of it.
MOST_BOUND = 9
# Most sets of kept granularities tried for one kind of one unit, and most tensors placed over all of them.
MOST_KEPT, MOST_PLACED = 128, 8_000
# Most tensors in all buffers tried for one set of kept granularities.
MOST_TRIED = 2000
# The same where all are kept.
MOST_WHOLE = 10_000
# Most sums of choices carried from group to group.
MOST_SUMS = 1000
_NONE: frozenset[int] = frozenset()


class Choice(NamedTuple):
    """One way to plan the tensors of one kind.

    Args:
        plans: One for each segment.
        waste: Elements of padding.
        cut: Bytes of granules that edges cut.
    """

    plans: tuple[SegmentPlan, ...]
    waste: int
    cut: int

    @property
    def cost(self) -> int:
        """What padding, boundary and further segments cost the world, in bytes a step."""
        per_element = 6 * self.plans[0].num_ranks
        return per_element * (self.waste + SEGMENT * (len(self.plans) - 1)) + self.cut


def plan_unit(tensors: Sequence[TensorSpec], *, num_ranks: int, max_padding: float = 0.01) -> tuple[SegmentPlan, ...]:
    """Returns the segments of one unit, as ``plan_model`` of nothing else."""
    return plan_model([tensors], num_ranks=num_ranks, max_padding=max_padding)[0]


def plan_model(
    units: Sequence[Sequence[TensorSpec]], *, num_ranks: int, max_padding: float = 0.01
) -> list[tuple[SegmentPlan, ...]]:
    """Returns the segments of every unit, kinds in order of appearance, that keep granules as padding allows.

    Padding that the finest plans need anyhow is allowed. A kind of a unit so small that COLLECTIVE elements per rank
    are more than its share of the budget is one segment that has those instead. Equal units are planned once.

    Args:
        units: Tensors of each, in the order in which each segment shall hold them.
        num_ranks: Ranks that share each buffer.
        max_padding: Most padding, as a fraction of the elements of all units.

    Raises:
        ValueError: If names repeat within a unit or a number is out of its range.
    """
    for tensors in units:
        check(tensors, num_ranks=num_ranks, max_padding=max_padding)
    check([], num_ranks=num_ranks, max_padding=max_padding)
    signatures = [tuple(tensor[1:] for tensor in tensors) for tensors in units]
    counts, first = Counter(signatures), dict(zip(reversed(signatures), reversed(units), strict=True))
    groups = [
        (signature, _Group(members, count, num_ranks))
        for signature, count in counts.items()
        for members in _by_kind(first[signature]).values()
    ]
    plans: dict[Hashable, list[SegmentPlan]] = {signature: [] for signature in counts}
    chosen = _choose([group for _, group in groups], max_padding)
    for (signature, _), choice in zip(groups, chosen, strict=True):
        plans[signature] += choice.plans
    return [
        _renamed(plans[signature], first[signature], tensors)
        for signature, tensors in zip(signatures, units, strict=True)
    ]


def plan_hard(
    tensors: Sequence[TensorSpec], *, num_ranks: int, max_padding: float | None = None
) -> tuple[SegmentPlan, ...]:
    """Returns the segments of one unit that cut no granule, kinds in order of appearance.

    Args:
        tensors: In the order in which each segment shall hold them. Granularity is a demand.
        num_ranks: Ranks that share each buffer.
        max_padding: Most padding, as a fraction of the elements of all tensors; None for any.

    Raises:
        ValueError: If names repeat, a number is out of its range, or padding exceeds the budget: the message says the
            smallest budget that can be met.
    """
    check(tensors, num_ranks=num_ranks, max_padding=max_padding or 0.0)
    best = [
        min(_splits(members, num_ranks, most=MOST_HARD), key=lambda choice: choice.cost)
        for members in _by_kind(tensors).values()
    ]
    total = sum(tensor.numel for tensor in tensors)
    allowed = math.inf if max_padding is None else max_padding * total
    if sum(choice.waste for choice in best) > allowed:  # segments are no object now
        best = [
            min(_splits(members, num_ranks, most=MOST_HARD, gain=0), key=lambda choice: choice.waste)
            for members in _by_kind(tensors).values()
        ]
    waste = sum(choice.waste for choice in best)
    if waste > allowed:
        least = f"{math.ceil(waste / total * 1e6) / 1e6:.6f}" if total else "none for a unit without elements"
        raise ValueError(
            f"max_padding: expected at least {least}, the smallest budget in which no granule of these {len(tensors)} "
            f"tensors on {num_ranks} ranks is cut, got {max_padding}"
        )
    return tuple(plan for choice in best for plan in choice.plans)


# --- bounds and other rules ---


def lower_bound(tensors: Sequence[TensorSpec], *, num_ranks: int) -> int:
    """Returns elements of padding below which no plan gets that cuts no granule.

    A buffer holds its elements; an edge lies a whole step inside a tensor or not at all, so ``S >= min(step, e)``; no
    rank holds more than ``S // g`` of the granules that are g or longer; and a tensor of two shards or more contains a
    whole one, so its step divides S. Over segments it is the least sum over all set partitions, however many segments
    that takes; of more than ``MOST_BOUND`` tensors, over those that keep equal tensors, and the smallest, together.
    """
    check(tensors, num_ranks=num_ranks)
    total = 0
    for members in _by_kind(tensors).values():
        search = _Search(_atoms(members, most=MOST_BOUND), num_ranks)
        everything = (1 << len(search.atoms)) - 1
        least = {0: 0}
        for some in range(1, everything + 1):
            first = some & -some  # is in one part of every partition
            parts = (part for part in _subsets(some) if part & first)
            least[some] = min(search.bound(part) + least[some ^ part] for part in parts)
        total += least[everything]
    return total


def even_padding(shapes: Sequence[Sequence[int]], *, num_ranks: int) -> int:
    """Returns elements that FSDP2's ``Shard(0)`` pads: every rank has as many of each tensor's rows as the fullest."""
    padding = 0
    for shape in shapes:
        rows, row = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
        padding += (-(-rows // num_ranks) * num_ranks - rows) * row
    return padding


def lcm_padding(tensors: Sequence[TensorSpec], *, num_ranks: int) -> int:
    """Returns elements padded by the rule that every granularity divides the shard, all tensors in one buffer."""
    lcm = math.lcm(*(tensor.granularity for tensor in tensors))
    numel = sum(tensor.numel for tensor in tensors)
    return -(-numel // (num_ranks * lcm)) * num_ranks * lcm - numel


# --- what fits the budget ---


class _Group(NamedTuple):
    """The tensors of one kind in one unit, and how many units have the like."""

    members: list[TensorSpec]
    equals: int
    num_ranks: int

    @property
    def numel(self) -> int:
        return sum(tensor.numel for tensor in self.members)


def _choose(groups: Sequence[_Group], max_padding: float) -> list[Choice]:
    """One choice for each group: those large enough share the budget, each other one has a collective's quantum."""
    budget = int(max_padding * sum(group.numel * group.equals for group in groups))
    large = [group for group in groups if max_padding * group.numel >= COLLECTIVE * group.num_ranks]
    chosen = dict(zip(map(id, large), _within(large, budget, most=MOST_SOFT), strict=True))
    for group in groups:
        if id(group) not in chosen:
            alone = group._replace(equals=1)
            chosen[id(group)] = _within([alone], COLLECTIVE * group.num_ranks, most=1)[0]
    return [chosen[id(group)] for group in groups]


def _within(groups: Sequence[_Group], budget: int, *, most: int) -> list[Choice]:
    """One choice for each group, together within ``budget`` elements of padding or what their finest plans pad."""
    finest = [_splits(g.members, g.num_ranks, relaxed=_relaxable(g.members), most=1)[0] for g in groups]
    needed = sum(choice.waste * group.equals for choice, group in zip(finest, groups, strict=True))
    slack = max(budget - needed, 0)
    limits = [choice.waste + slack // group.equals for choice, group in zip(finest, groups, strict=True)]
    whole = [_splits(g.members, g.num_ranks, most=1, within=limit) for g, limit in zip(groups, limits, strict=True)]
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
    members, num_ranks, relaxable = group.members, group.num_ranks, _relaxable(group.members)
    limit, tries = max(min(MOST_KEPT, MOST_PLACED // len(members)), 2), max(MOST_TRIED // len(members), 2)
    whole = _whole(members, num_ranks, within, most=most)
    found = [finest, *whole]

    def keep(kept: frozenset[int]) -> bool:
        affordable = min(within, *((choice.cost - 1) // (6 * num_ranks) for choice in found))
        choices = _splits(members, num_ranks, relaxed=relaxable - kept, most=most, within=affordable, tries=tries)
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


def _whole(members: Sequence[TensorSpec], num_ranks: int, within: int, *, most: int) -> list[Choice]:
    """Choices that keep everything. A further segment saves ``SEGMENT`` elements, even if fewer exceed ``within``."""
    (one,) = _splits(members, num_ranks, most=1)
    tries = max(MOST_WHOLE // len(members), 4)
    more = _splits(members, num_ranks, most=most, within=min(within, one.waste - SEGMENT), tries=tries)
    return [one, *more] if one.waste <= within else more


def _relaxed_tensors(choice: Choice) -> int:
    return sum(t.granularity % wanted > 0 for p in choice.plans for t, wanted in zip(p.tensors, p.wanted, strict=True))


def _relaxable(members: Sequence[TensorSpec]) -> frozenset[int]:
    """Granularities that some tensor wants beyond its finest."""
    return frozenset(tensor.granularity for tensor in members if tensor.finest % tensor.granularity)


def _by_stake(finest: SegmentPlan, relaxable: frozenset[int]) -> list[int]:
    """Relaxable granularities, those with the most bytes cut in the finest plan first."""
    stake = dict.fromkeys(relaxable, 0)
    for i, (tensor, wanted) in enumerate(zip(finest.tensors, finest.wanted, strict=True)):
        if wanted in stake:
            stake[wanted] += finest.boundary(i).elements * tensor.itemsize
    return sorted(relaxable, key=lambda granularity: (-stake[granularity], granularity))


# --- which tensors share a buffer ---


def _splits(
    members: Sequence[TensorSpec],
    num_ranks: int,
    *,
    most: int,
    relaxed: frozenset[int] = _NONE,
    within: int | None = None,
    gain: int = SEGMENT,
    tries: int | None = None,
) -> list[Choice]:
    """The least padding found with one segment, two, and so on up to ``most``, as far as each saves ``gain`` elements.

    Set partitions of the groups of equal tensors, those of the least proven padding first: what is found ends the
    search as soon as no partition left could be better.

    Args:
        members: Of one kind.
        num_ranks: Ranks that share each buffer.
        most: Most segments.
        relaxed: Granularities that are not kept.
        within: Most elements of padding; None for any.
        gain: Elements of padding that one more segment has to save.
        tries: Most buffers planned; None for any number.
    """
    search = _Search(_atoms(members, relaxed, most=MOST_ATOMS if most > 1 else 1), num_ranks, relaxed, tries)
    found: list[Choice] = []
    for count in range(1, most + 1):
        limit = found[-1].waste - max(gain, 1) if found else within
        choice = search.best(count, limit)
        if choice is not None:
            found.append(choice)
    return found


class _Search:
    """Plans of sets of atoms, each made once. Sets are bits of an integer."""

    def __init__(
        self,
        atoms: Sequence[Sequence[tuple[int, TensorSpec]]],
        num_ranks: int,
        relaxed: frozenset[int] = _NONE,
        tries: int | None = None,
    ) -> None:
        self.atoms, self.num_ranks, self.relaxed, self.tries = atoms, num_ranks, relaxed, tries
        self.numels = [sum(tensor.numel for _, tensor in atom) for atom in atoms]
        self.steps = [
            _steps((step, _Step(t.numel, t.numel // step)) for _, t in atom for step in [t.step(relaxed)])
            for atom in atoms
        ]
        self.bounds: dict[int, int] = {}
        self.plans: dict[int, SegmentPlan] = {}
        self.misfits: dict[int, int] = {}  # largest shard known to be too small

    def best(self, count: int, limit: int | None) -> Choice | None:
        """The partition into ``count`` segments of the least padding, at most ``limit``."""
        if limit is not None and limit < 0:
            return None
        partitions = [(sum(map(self.bound, parts)), parts) for parts in _partitions(len(self.atoms), count)]
        found: Choice | None = None
        for bound, parts in sorted(partitions):
            if limit is not None and bound > limit:
                break
            plans = self.plan_all(parts, bound, limit)
            if plans is not None:
                waste = sum(plan.numel - plan.useful for plan in plans)
                found = Choice(tuple(plans), waste, sum(plan.cut_bytes for plan in plans))
                limit = waste - 1
        return found

    def plan_all(self, parts: Sequence[int], bound: int, limit: int | None) -> list[SegmentPlan] | None:
        """Plans of all parts, in order of their first tensors, or None if they pad more than ``limit``."""
        plans = []
        for part in parts:
            plan = self.plan(part, None if limit is None else self.bound(part) + limit - bound)
            if plan is None:
                return None
            bound += plan.numel - plan.useful - self.bound(part)
            if limit is not None and bound > limit:
                return None
            plans.append(plan)
        return plans

    def plan(self, part: int, within: int | None) -> SegmentPlan | None:
        """The plan of one part, or None if it pads more than ``within`` or nothing may be tried any more."""
        if part in self.plans:
            return self.plans[part]
        size = None if within is None else (within + self.numel(part)) // self.num_ranks
        if self.tries == 0 or (size is not None and size <= self.misfits.get(part, -1)):
            return None
        self.tries = None if self.tries is None else self.tries - 1
        plan = plan_within(_union(self.atoms, part), self.num_ranks, relaxed=self.relaxed, limit=size)
        if plan is not None:
            self.plans[part] = plan
        elif size is not None:
            self.misfits[part] = size
        return plan

    def numel(self, part: int) -> int:
        return sum(numel for i, numel in enumerate(self.numels) if part >> i & 1)

    def bound(self, part: int) -> int:
        """Elements of padding that a part needs at least."""
        if part not in self.bounds:
            steps = _steps(pair for i, known in enumerate(self.steps) if part >> i & 1 for pair in known.items())
            self.bounds[part] = _bound(steps, self.numel(part), self.num_ranks)
        return self.bounds[part]


class _Step(NamedTuple):
    """Tensors of one step: what their bound depends on."""

    longest: int  # elements of the longest
    granules: int  # whole ones of all


def _steps(parts: Iterable[tuple[int, _Step]]) -> dict[int, _Step]:
    """What is known of tensors by their step, of several sets together."""
    found: dict[int, _Step] = {}
    for step, (longest, granules) in parts:
        known = found.get(step, _Step(0, 0))
        found[step] = _Step(max(known.longest, longest), known.granules + granules)
    return found


def _bound(steps: Mapping[int, _Step], numel: int, num_ranks: int) -> int:
    """Elements of padding that one segment of these tensors needs at least: see ``lower_bound``."""
    longest = sorted(((known.longest, step) for step, known in steps.items()), reverse=True)
    least, granules = max(-(-numel // num_ranks), *map(min, longest), 1), 0
    for step in sorted(steps, reverse=True):
        granules += steps[step].granules
        least = max(least, -(-granules // num_ranks) * step)
    # Shards of at most half a tensor are multiples of its step. The tensors of which that holds are the longest ones,
    # fewer for larger shards: for each such number the least size, if it is short enough for the shortest of them.
    modulus, best = COLLECTIVE, math.inf
    for index in range(len(longest) + 1):
        longer = longest[index][0] // 2 + 1 if index < len(longest) else 0
        size = -(-max(least, longer) // modulus) * modulus
        if index == 0 or 2 * size <= longest[index - 1][0]:
            best = min(best, size)
        if index == len(longest) or modulus >= best:
            break
        modulus = math.lcm(modulus, longest[index][1])
    return int(best) * num_ranks - numel


def _atoms(
    members: Sequence[TensorSpec], relaxed: frozenset[int] = _NONE, *, most: int
) -> list[list[tuple[int, TensorSpec]]]:
    """Tensors that stay together, each with its place in the order: those that no edge can disturb, and equal ones.

    Up to ``most`` equal ones are taken apart, the fewest first, the longest first; beyond it the smallest are joined.
    """
    atoms: dict[Hashable, list[tuple[int, TensorSpec]]] = {}
    for i, tensor in enumerate(members):
        step = tensor.step(relaxed)
        atoms.setdefault((step > ALIGN and tensor.numel, step), []).append((i, tensor))
    found = sorted(atoms.values(), key=lambda atom: -sum(tensor.numel for _, tensor in atom))
    if len(found) > most:
        return [*found[: most - 1], [pair for atom in found[most - 1 :] for pair in atom]]
    for atom in sorted(found, key=len):
        if atom[0][1].step(relaxed) > ALIGN and len(found) + len(atom) - 1 <= most:
            at = found.index(atom)
            found[at : at + 1] = [[pair] for pair in atom]
    return found


def _union(atoms: Sequence[Sequence[tuple[int, TensorSpec]]], some: int) -> list[TensorSpec]:
    """The tensors of some atoms, in their order."""
    pairs = [pair for i, atom in enumerate(atoms) if some >> i & 1 for pair in atom]
    return [tensor for _, tensor in sorted(pairs, key=lambda pair: pair[0])]


def _partitions(size: int, count: int) -> Iterator[list[int]]:
    """All partitions of ``size`` things into ``count`` sets, which are bits of integers."""

    def extend(parts: list[int], i: int) -> Iterator[list[int]]:
        if count - len(parts) > size - i:
            return
        if i == size:
            yield parts
            return
        for j in range(len(parts)):
            yield from extend([*parts[:j], parts[j] | 1 << i, *parts[j + 1 :]], i + 1)
        if len(parts) < count:
            yield from extend([*parts, 1 << i], i + 1)

    return extend([], 0)


def _subsets(some: int) -> Iterator[int]:
    """All subsets of a set of bits but the empty one."""
    part = some
    while part:
        yield part
        part = (part - 1) & some


def _by_kind(tensors: Sequence[TensorSpec]) -> dict[Hashable, list[TensorSpec]]:
    """Tensors of each kind, kinds in order of appearance."""
    kinds: dict[Hashable, list[TensorSpec]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.kind, []).append(tensor)
    return kinds


def _renamed(
    plans: Sequence[SegmentPlan], planned: Sequence[TensorSpec], tensors: Sequence[TensorSpec]
) -> tuple[SegmentPlan, ...]:
    """The plans of one unit with the names of an equal one."""
    if planned is tensors:
        return tuple(plans)
    names = {old.name: new.name for old, new in zip(planned, tensors, strict=True)}
    return tuple(
        replace(plan, tensors=tuple(TensorSpec(names[tensor.name], *tensor[1:]) for tensor in plan.tensors))
        for plan in plans
    )
