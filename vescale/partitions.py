"""Which tensors of one kind share a buffer: set partitions, and the bound below which none of them gets."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from vescale.planner import ALIGN, COLLECTIVE, SegmentPlan, TensorSpec, check, plan_within
from vescale.shards import Ranks

# Elements of padding that cost as much as one more collective: 10 microseconds of launch and latency, at 50 GB/s for
# each rank (a 400 Gbit/s adapter) and 2 bytes an element.
SEGMENT = 2**18
# Most groups of equal tensors that are distributed over segments one by one; the smallest share one beyond that.
MOST_ATOMS = 8
# The same for the bound over all set partitions, whose number of steps is 3 to the power of it.
MOST_BOUND = 9
# Orders tried beside the definition's, where nothing is cut and of so many tensors at most: longest or shortest first,
# longest or shortest granules first.
ORDERS: tuple[Callable[[TensorSpec], tuple[int, ...]], ...] = (
    lambda tensor: (-tensor.numel,),
    lambda tensor: (tensor.numel,),
    lambda tensor: (-tensor.granularity, -tensor.numel),
    lambda tensor: (tensor.granularity, tensor.numel),
)
MOST_ORDERED = 64
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


def splits(
    members: Sequence[TensorSpec],
    ranks: Ranks,
    *,
    most: int,
    relaxed: frozenset[int] = _NONE,
    within: int | None = None,
    gain: int = SEGMENT,
    tries: int | None = None,
) -> list[Choice]:
    """The least padding found with one segment, two, and so on up to ``most``, as far as each saves ``gain`` elements.

    Set partitions of the groups of equal tensors, those of the least proven padding first: what is found ends the
    search as soon as no partition left could be better. Tensors lie in the order of ``members``, which reads best in a
    trace, unless another one saves as much as a segment has to.

    Args:
        members: Of one kind.
        ranks: Who share each buffer.
        most: Most segments.
        relaxed: Granularities that are not kept.
        within: Most elements of padding; None for any.
        gain: Elements of padding that one more segment, or another order, has to save.
        tries: Most buffers planned; None for any number.
    """
    search = _Search(_atoms(members, relaxed, most=MOST_ATOMS if most > 1 else 1), ranks, relaxed, tries, max(gain, 1))
    found: list[Choice] = []
    for count in range(1, most + 1):
        limit = found[-1].waste - search.gain if found else within
        choice = search.best(count, limit)
        if choice is not None:
            found.append(choice)
    return found


class _Search:
    """Plans of sets of atoms, each made once. Sets are bits of an integer."""

    def __init__(
        self,
        atoms: Sequence[Sequence[tuple[int, TensorSpec]]],
        ranks: Ranks,
        relaxed: frozenset[int] = _NONE,
        tries: int | None = None,
        gain: int = SEGMENT,
    ) -> None:
        self.atoms, self.ranks, self.relaxed, self.tries, self.gain = atoms, ranks, relaxed, tries, gain
        self.numels = [sum(tensor.numel for _, tensor in atom) for atom in atoms]
        self.steps = [_known(atom, relaxed) for atom in atoms]
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
        size = None if within is None else (within + self.numel(part)) // self.ranks.total
        if self.tries == 0 or (size is not None and size <= self.misfits.get(part, -1)):
            return None
        self.tries = None if self.tries is None else self.tries - 1
        members = _union(self.atoms, part)
        plan = plan_within(members, self.ranks, relaxed=self.relaxed, limit=size)
        for order in ORDERS if len(members) <= MOST_ORDERED and not self.relaxed else ():
            limit = size if plan is None else (plan.numel - self.gain) // self.ranks.total
            if limit is None or limit * self.ranks.total < self.numel(part) + self.bound(part):
                break
            plan = plan_within(sorted(members, key=order), self.ranks, limit=limit) or plan
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
            self.bounds[part] = _bound(steps, self.numel(part), self.ranks)
        return self.bounds[part]


class _Step(NamedTuple):
    """Tensors of one step: what their bound depends on."""

    longest: int  # elements of the longest
    granules: int  # whole ones of all


def _known(atom: Sequence[tuple[int, TensorSpec]], relaxed: frozenset[int]) -> dict[int, _Step]:
    """What is known of an atom's tensors by their step; equal ones are looked at once."""
    counts = Counter((t.numel, t.granularity, t.finest) for _, t in atom)
    steps = {pair: TensorSpec("", 0, *pair).step(relaxed) for pair in {key[1:] for key in counts}}
    return _steps((steps[key[1:]], _Step(key[0], count * (key[0] // steps[key[1:]]))) for key, count in counts.items())


def _steps(parts: Iterable[tuple[int, _Step]]) -> dict[int, _Step]:
    """What is known of tensors by their step, of several sets together."""
    found: dict[int, _Step] = {}
    for step, (longest, granules) in parts:
        known = found.get(step, _Step(0, 0))
        found[step] = _Step(max(known.longest, longest), known.granules + granules)
    return found


def _bound(steps: Mapping[int, _Step], numel: int, ranks: Ranks) -> int:
    """Elements of padding that one segment of these tensors needs at least: see ``lower_bound``."""
    longest = sorted(((known.longest, step) for step, known in steps.items()), reverse=True)
    least, granules = max(-(-numel // ranks.total), *(-(-min(pair) // ranks.largest) for pair in longest), 1), 0
    for step in sorted(steps, reverse=True):
        granules += steps[step].granules
        least = max(least, ranks.least(granules, step))
    # Shards of at most half a tensor are multiples of its step. The tensors of which that holds are the longest ones,
    # fewer for larger shards: for each such number the least size, if it is short enough for the shortest of them.
    modulus, best = COLLECTIVE, math.inf
    for index in range(len(longest) + 1):
        longer = longest[index][0] // (2 * ranks.largest) + 1 if index < len(longest) else 0
        size = -(-max(least, longer) // modulus) * modulus
        if index == 0 or 2 * ranks.largest * size <= longest[index - 1][0]:
            best = min(best, size)
        if index == len(longest) or modulus >= best:
            break
        modulus = math.lcm(modulus, ranks.divisor(longest[index][1]))
    return int(best) * ranks.total - numel


def _atoms(
    members: Sequence[TensorSpec], relaxed: frozenset[int] = _NONE, *, most: int
) -> list[list[tuple[int, TensorSpec]]]:
    """Tensors that stay together, each with its place in the order: those that no edge can disturb, and equal ones.

    Up to ``most`` equal ones are taken apart, the fewest first, the longest first; beyond it the smallest are joined.
    """
    steps = {key: t.step(relaxed) for key, t in {(t.granularity, t.finest): t for t in members}.items()}
    atoms: dict[Hashable, list[tuple[int, TensorSpec]]] = {}
    for i, tensor in enumerate(members):
        step = steps[tensor.granularity, tensor.finest]
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


# --- what no plan gets below ---


def lower_bound(
    tensors: Sequence[TensorSpec], *, num_ranks: int, capacity: Sequence[int | Fraction] | None = None
) -> int:
    """Returns elements of padding below which no plan gets that cuts no granule.

    A buffer holds its elements; an edge lies a whole step inside a tensor or not at all, so ``S >= min(step, e)``; no
    rank holds more than ``S // g`` of the granules that are g or longer; and a tensor of two shards or more contains a
    whole one, so its step divides S. Over segments it is the least sum over all set partitions, however many segments
    that takes; of more than ``MOST_BOUND`` tensors, over those that keep equal tensors, and the smallest, together.
    """
    check(tensors, num_ranks=num_ranks)
    ranks, total = Ranks.of(num_ranks, capacity), 0
    for members in by_kind(tensors).values():
        search = _Search(_atoms(members, most=MOST_BOUND), ranks)
        everything = (1 << len(search.atoms)) - 1
        least = {0: 0}
        for some in range(1, everything + 1):
            first = some & -some  # is in one part of every partition
            parts = (part for part in _subsets(some) if part & first)
            least[some] = min(search.bound(part) + least[some ^ part] for part in parts)
        total += least[everything]
    return total


def by_kind(tensors: Sequence[TensorSpec]) -> dict[Hashable, list[TensorSpec]]:
    """Tensors of each kind, kinds in order of appearance."""
    kinds: dict[Hashable, list[TensorSpec]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.kind, []).append(tensor)
    return kinds
