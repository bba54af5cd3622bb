"""Where tensors lie in one flat buffer, so that its equal shards cut granules as seldom as they can.

Four ranks hold a norm of 40 elements, a matrix ``up`` of 12 x 32 in granules of 2 rows (64 elements) and ``down`` of
6 x 48 in granules of 2 rows (96). The numbers are ``plan_segment``'s, a test asserts them::

    element   0     40     64          192          384    448    480      576          768
              | norm | gap  | up 0  up 1 | up 2 .. up 4 | up 5 | gap | down 0 | down 1  down 2 |
    rank      <----------- 0 -----------><----- 1 -----><--------- 2 --------><------ 3 ------>

Shards are 192 elements; 712 of 768 are useful, the padding is 7.87 %. ``up`` contains a whole shard, which works only
because 64 divides 192. ``down`` starts a whole granule before the edge at 576 rather than where ``up`` ends. So no
edge cuts a granule, and an optimizer that is closed over granules needs no communication in its step.

Granularity is a demand here; ``vescale.segments`` makes it a preference under a budget of padding. Everything is
plain integers in elements, and nothing loops over ranks: 10,240 of them cost as much as two. The words are
veScale-FSDP's (arXiv 2602.22437); the search is described at ``_smallest`` and ``_place``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from vescale.shards import Boundary, Ranks

# Elements, for every dtype. Tensors and shards begin at multiples of ALIGN, so that vector loops have no tail: with
# starts at 16 bytes fused AdamW gives other bits than uncut, at 16 elements it never did (tried on torch 2.13, CPU).
ALIGN = 32
# Shard sizes are multiples of this many elements: 128 bytes in 2-byte dtypes, a whole line for every collective.
COLLECTIVE = 64
# Most different capacities of which classes of shard sizes are tried.
MOST_CAPACITIES = 4
# Of a plan's table; those that say nothing about any tensor are left out.
COLUMNS = ("tensor", "block", "offset", "elements", "granularity", "ranks", "kept bytes", "cut", "cut bytes", "owners")


class TensorSpec(NamedTuple):
    """One tensor as the planner sees it.

    Args:
        name: Unique in its unit.
        numel: Elements.
        granularity: Elements of a granule, which would like to stay inside one rank.
        finest: No edge may ever fall off a multiple of this many elements; granularity relaxes to it and no further.
        kind: Whatever may not share a buffer: dtype and trainability.
        itemsize: Bytes of an element.
        shape: Sizes of its dims, to print what other rules would pad; None where it is not known.
        block: Shape of a block as the optimizer stated it, to be printed; None where it is not known.
    """

    name: str
    numel: int
    granularity: int = 1
    finest: int = 1
    kind: Hashable = None
    itemsize: int = 4
    shape: tuple[int, ...] | None = None
    block: tuple[int, ...] | None = None

    def planned(self, relaxed: Container[int] = ()) -> int:
        """Returns the granularity that no edge is off when those in ``relaxed`` are not kept."""
        return self.finest if self.granularity in relaxed else math.lcm(self.granularity, self.finest)

    def step(self, relaxed: Container[int] = (), align: int = ALIGN) -> int:
        """Returns what edges inside are multiples of, starts and edges being multiples of ``align``."""
        return math.lcm(self.planned(relaxed), align)


@dataclass(frozen=True)
class SegmentPlan:
    """One buffer of a shard for each rank and where its tensors lie; plain integers, the same on every rank.

    ``str`` is a table of it.
    """

    tensors: tuple[TensorSpec, ...]  # in buffer order, as they were asked for
    offsets: tuple[int, ...]  # of the tensors, in elements; ascending multiples of ALIGN, tensors do not overlap
    shard_size: int  # elements of each rank's shard, for each unit of its capacity; a multiple of COLLECTIVE
    num_ranks: int
    kind: Hashable
    planned: tuple[int, ...]  # granularity of each that no edge is off: kept or relaxed
    capacity: tuple[int, ...] = ()  # of each rank, in whole numbers without a common divisor; empty where all are equal

    @cached_property
    def ranks(self) -> Ranks:
        """Who shares the buffer."""
        return Ranks(self.num_ranks, self.capacity)

    @property
    def numel(self) -> int:
        """Elements of the buffer, padding included."""
        return self.ranks.total * self.shard_size

    @cached_property
    def useful(self) -> int:
        """Elements of the buffer that belong to a tensor."""
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def padding(self) -> float:
        """Elements that belong to nobody, as a fraction of the useful ones; infinite if there is none of those."""
        useful = self.useful
        return self.numel / useful - 1 if useful else math.inf

    @cached_property
    def cut_bytes(self) -> int:
        """Bytes of the granules that edges cut, which an optimizer's step would have to move."""
        relaxed = (i for i, tensor in enumerate(self.tensors) if self.planned[i] % tensor.granularity)
        return sum(self.boundary(i).elements * self.tensors[i].itemsize for i in relaxed)

    def shard(self, rank: int) -> tuple[int, int]:
        """Returns ``[start, stop)`` of what ``rank`` holds, in elements of the buffer.

        Raises:
            ValueError: If there is no such rank.
        """
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"expected a rank in [0, {self.num_ranks}), got {rank}")
        starts = self.ranks.starts
        return starts[rank] * self.shard_size, starts[rank + 1] * self.shard_size

    def interval(self, i: int) -> tuple[int, int]:
        """Returns ``[start, stop)`` of tensor ``i`` in elements of the buffer."""
        return self.offsets[i], self.offsets[i] + self.tensors[i].numel

    def gaps(self) -> list[tuple[int, int]]:
        """Returns the runs ``[start, stop)`` of the buffer that belong to no tensor, ascending."""
        starts = (*self.offsets, self.numel)
        stops = (0, *(self.interval(i)[1] for i in range(len(self.tensors))))
        return [(stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start]

    def local(self, i: int, rank: int) -> tuple[int, int]:
        """Returns ``[start, stop)`` of what ``rank`` holds of tensor ``i``, in elements of that tensor.

        Where it holds nothing, start equals stop.

        Raises:
            ValueError: If there is no such rank.
        """
        numel, offset = self.tensors[i].numel, self.offsets[i]
        first, last = self.shard(rank)
        return min(max(first - offset, 0), numel), min(max(last - offset, 0), numel)

    def holders(self, i: int) -> range:
        """Returns the ranks that hold an element of tensor ``i``."""
        start, stop = self.interval(i)
        first = self.ranks.at(self.shard_size, start)
        return range(first, self.ranks.at(self.shard_size, stop - 1) + 1 if stop > start else first)

    def boundary(self, i: int) -> Boundary:
        """Returns the granules of tensor ``i``, of the granularity it asked for, that edges cut."""
        ranks = self.ranks if self.capacity else None
        return Boundary(self.offsets[i], self.tensors[i].numel, self.tensors[i].granularity, self.shard_size, ranks)

    def digest(self) -> str:
        """Returns a hash of every integer and name (64 hex digits), for ranks to compare; kinds count by their repr."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def __str__(self) -> str:
        return self.table()

    def table(self, owners: Mapping[tuple[str, int], int] | None = None) -> str:
        """Returns the plan as text: what it pads beside other rules, then a line for each tensor.

        Args:
            owners: Rank that computes each cut granule (tensor's name, index), as ``Optimizer.owners``; a kept one is
                computed where it lies.
        """
        kind = "" if self.kind is None else f" of {self.kind}"
        each = f" of capacity {min(self.capacity)} to {max(self.capacity)}" if self.capacity else ""
        title = (
            f"segment{kind}: {self.num_ranks:,} ranks{each} x {self.shard_size:,} = {self.numel:,} elements,"
            f" {self.useful:,} useful, padding {self.padding:.2%}{self._others()}, {self.cut_bytes:,} bytes cut"
        )
        rows = [COLUMNS, *(self._row(i, owners) for i in range(len(self.tensors)))]
        columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
        widths = [max(map(len, column)) for column in columns]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in zip(*columns, strict=True))
        return "\n".join([title, *lines])

    def _others(self) -> str:
        shapes = [tensor.shape for tensor in self.tensors if tensor.shape is not None]
        if len(shapes) < len(self.tensors) or not self.useful:
            return ""
        even, lcm = (rule(shapes, num_ranks=self.num_ranks) / self.useful for rule in (even_padding, lcm_padding))
        return f" (FSDP2's Shard(0) {even:.2%}, row-LCM {lcm:.2%})"

    def _row(self, i: int, owners: Mapping[tuple[str, int], int] | None) -> tuple[str, ...]:
        tensor, grain, ranks, boundary = self.tensors[i], self.planned[i], self.holders(i), self.boundary(i)
        planned = f"{tensor.granularity:,}" + (f" -> {grain:,}" if grain != tensor.granularity else "")
        block = " x ".join(map(str, tensor.block)) if tensor.block is not None else ""
        cut = boundary.elements
        places = (f"{self.offsets[i]:,}", f"{tensor.numel:,}", planned, _span(ranks))
        moved = (str(len(boundary)), f"{cut * tensor.itemsize:,}") if cut else ("", "")
        whom = _span(sorted({owners[tensor.name, granule] for granule in boundary})) if owners is not None else ""
        return (tensor.name, block, *places, f"{(tensor.numel - cut) * tensor.itemsize:,}", *moved, whom)


def _span(ranks: Sequence[int]) -> str:
    """Ranks in words: one, or the first and the last; a star where there are others between that are not meant."""
    if len(ranks) < 2:
        return str(ranks[0]) if ranks else "-"
    return f"{ranks[0]}-{ranks[-1]}" + ("*" if len(ranks) <= ranks[-1] - ranks[0] else "")


# --- other rules ---


def even_padding(shapes: Sequence[Sequence[int]], *, num_ranks: int) -> int:
    """Returns elements that FSDP2's ``Shard(0)`` pads: every rank has as many of each tensor's rows as the fullest."""
    padding = 0
    for shape in shapes:
        rows, row = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
        padding += (-(-rows // num_ranks) * num_ranks - rows) * row
    return padding


def lcm_padding(shapes: Sequence[Sequence[int]], *, num_ranks: int) -> int:
    """Returns elements padded by the rule that every row of dim 0 divides the shard, all tensors in one buffer."""
    lcm = math.lcm(*(math.prod(shape[1:]) or 1 for shape in shapes))
    numel = sum(map(math.prod, shapes))
    return -(-numel // (num_ranks * lcm)) * num_ranks * lcm - numel


def plan_segment(
    tensors: Sequence[TensorSpec],
    *,
    num_ranks: int,
    capacity: Sequence[int | Fraction] | None = None,
    align: int = ALIGN,
    collective: int = COLLECTIVE,
) -> SegmentPlan:
    """Returns the plan of one buffer in the order given that cuts no granule, with the smallest shards found.

    Finding the smallest is NP-hard; this finds it nearly always, and never equal shards of more than twice its size.

    Args:
        tensors: Of one kind. Granularity is a demand here.
        num_ranks: Ranks that share the buffer.
        capacity: What each rank can hold, in any unit; shards are in this ratio. None: equal ones.
        align: Tensors and shards begin at multiples of this many elements.
        collective: Shard sizes are multiples of this many elements, times the capacity.

    Raises:
        ValueError: If there is no tensor, kinds differ, names repeat, or a number is out of its range.
    """
    check(tensors, num_ranks=num_ranks, align=align, collective=collective)
    kinds = dict.fromkeys(tensor.kind for tensor in tensors)
    if len(kinds) != 1:
        raise ValueError(f"a segment has tensors of exactly one kind, got {list(kinds)}")
    plan = plan_within(tensors, Ranks.of(num_ranks, capacity), align=align, collective=collective)
    assert plan is not None  # without a limit everything fits on one rank
    return plan


# --- one segment ---


class _Piece(NamedTuple):
    """A tensor with its alignment rounded in: with it, every start and every edge is a multiple of the alignment."""

    numel: int
    step: int  # edges inside lie at multiples of this, from its start


def plan_within(
    members: Sequence[TensorSpec],
    ranks: Ranks,
    *,
    relaxed: frozenset[int] = frozenset(),
    limit: int | None = None,
    align: int = ALIGN,
    collective: int = COLLECTIVE,
) -> SegmentPlan | None:
    """Plans one segment, granularities in ``relaxed`` at their finest; None if shards would exceed ``limit``."""
    alike = {(t.granularity, t.finest): t for t in members}
    grains = {key: (t.planned(relaxed), t.step(relaxed, align)) for key, t in alike.items()}
    pieces = [_Piece(-(-t.numel // align) * align, grains[t.granularity, t.finest][1]) for t in members]
    size = _smallest(pieces, ranks, math.lcm(align, collective), limit)
    if size is None:
        return None
    offsets = _place(pieces, size, ranks, size)
    assert offsets is not None  # a search with less permission found a place
    planned = tuple(grains[t.granularity, t.finest][0] for t in members)
    return SegmentPlan(tuple(members), tuple(offsets), size, ranks.count, members[0].kind, planned, ranks.capacity)


def _smallest(pieces: Sequence[_Piece], ranks: Ranks, collective: int, limit: int | None) -> int | None:
    """The smallest shard size found for this order, or None if it is beyond ``limit``.

    A tensor that contains a whole shard forces its step to divide the shard size. So the size is sought among the
    multiples of ``collective``, of its lcm with the step of the largest tensor, of the two largest, and so on; exact in
    nearly all cases, never more than twice the optimum. For each the size is sought twice: with whole shards only in
    tensors whose step divides the class, where sizes that fit still fit when they grow, which makes the bound; and
    wherever the step divides the size, which is nearly always the smaller.

    Where a rank has the capacity c, a step divides c sizes, so it is its part prime to c that classes are made of: once
    for each capacity, after the classes of whole steps.
    """
    total = sum(piece.numel for piece in pieces)
    best = max(-(-total // (ranks.largest * collective)), 1) * collective  # everything on one rank
    best = best if limit is None else min(best, limit + 1)
    # All ranks together hold everything, and a tensor has its first edge after a whole step at the earliest.
    least = max(-(-total // ranks.total), *(-(-min(piece) // ranks.largest) for piece in pieces), 1)
    steps = [piece.step for piece in sorted(pieces, key=lambda piece: -piece.numel)]
    done = set()
    for capacity in (1, *sorted(set(ranks.kinds) - {1})[:MOST_CAPACITIES]):
        parts = (step // math.gcd(step, capacity) for step in steps)
        for modulus in accumulate((collective, *parts), math.lcm):
            if modulus >= best:
                break
            if modulus in done:
                continue
            done.add(modulus)
            for whole in (modulus, None):
                multiples = range(-(-least // modulus), (best - 1) // modulus + 1)
                multiple = _lowest(pieces, ranks, modulus, whole, multiples)
                best = best if multiple is None else multiple * modulus
    return best if limit is None or best <= limit else None


def _lowest(pieces: Sequence[_Piece], ranks: Ranks, modulus: int, whole: int | None, multiples: range) -> int | None:
    """The lowest of ``multiples`` of ``modulus`` that fits, if all above it fit too; None if the highest does not.

    Steps double from the lowest, near which it usually lies, and the last of them is bisected. ``whole`` is as for
    ``_place``; None stands for the size itself.
    """

    def fits(multiple: int) -> bool:
        size = multiple * modulus
        return _place(pieces, size, ranks, whole or size) is not None

    if not multiples:
        return None
    failed, stride, multiple = multiples[0] - 1, 1, multiples[0]
    while not fits(multiple):
        if multiple == multiples[-1]:
            return None
        failed, stride, multiple = multiple, 2 * stride, min(multiple + stride, multiples[-1])
    while multiple - failed > 1:
        middle = (multiple + failed) // 2
        if fits(middle):
            multiple = middle
        else:
            failed = middle
    return multiple


def _place(pieces: Sequence[_Piece], size: int, ranks: Ranks, whole: int) -> list[int] | None:
    """Offsets of the pieces, each at its earliest legal start, or None if they do not fit; exact for order and size.

    A piece that would cross the next edge starts as many whole steps before that edge as the cursor allows, perhaps
    none. It may, if it reaches into one further shard at most, or if its step divides ``whole`` (the size, or a divisor
    of it: then every edge lies at whole steps). Else it waits for the edge, with a fresh shard before the next one.
    """
    if ranks.capacity:
        return _place_unequal(pieces, size, ranks, whole)
    offsets, cursor, end = [], 0, ranks.count * size
    for numel, step in pieces:
        edge = (cursor // size + 1) * size
        while cursor + numel > edge:
            start = edge - (edge - cursor) // step * step
            if start + numel <= edge + size or whole % step == 0:
                cursor = start
                break
            if edge - cursor == size:
                return None  # even a shard of its own is too short
            cursor, edge = edge, edge + size
        offsets.append(cursor)
        cursor += numel
        if cursor > end:
            return None
    return offsets


def _place_unequal(pieces: Sequence[_Piece], size: int, ranks: Ranks, whole: int) -> list[int] | None:
    """As ``_place``; a piece may contain whole shards whose own lengths its step divides, if ``whole`` is the size."""
    starts, capacity, last = ranks.starts, ranks.capacity, ranks.count
    offsets, cursor, at = [], 0, 1  # `at` is the first rank that begins beyond the cursor, or the end
    for numel, step in pieces:
        while cursor + numel > (edge := starts[at] * size):
            start = edge - (edge - cursor) // step * step
            if start + numel > starts[last] * size:
                return None
            if whole % step == 0 or start + numel <= starts[at + 1] * size:
                break
            runs = ranks.edges(size, edge, start + numel) if whole == size else ()
            if runs and all((run[0] - edge) % step == 0 and (run.step % step == 0 or not run[1:]) for run in runs):
                break
            # From one whole shard into the next of its capacity: what failed there fails up to where the run ends.
            steady = cursor == starts[at - 1] * size and capacity[at - 1] == capacity[at]
            at = max(at + 1, ranks.run_end(at) if steady else 0)
            cursor = starts[at - 1] * size
        else:
            start = cursor
        offsets.append(start)
        cursor = start + numel
        at = min(ranks.at(size, cursor) + 1, last)
    return offsets


# --- arguments ---


def check(tensors: Sequence[TensorSpec], *, max_padding: float = 0.0, **counts: int) -> None:
    """Raises one ValueError with everything that is wrong with the arguments of a plan."""
    wrong = [
        f"{name}: expected a whole number of at least 1, got {count!r}"
        for name, count in counts.items()
        if not isinstance(count, int) or count < 1
    ]
    if not 0 <= max_padding < math.inf:
        wrong.append(f"max_padding: expected a finite fraction of at least 0, got {max_padding}")
    names: set[str] = set()
    for tensor in tensors:
        if tensor.name in names:
            wrong.append(f"{tensor.name}: two tensors of this name")
        names.add(tensor.name)
        sizes = (tensor.numel, tensor.granularity, tensor.finest, tensor.itemsize, *(tensor.shape or ()))
        if not all(isinstance(size, int) for size in sizes):
            wrong.append(f"{tensor.name}: expected whole numbers, got {tensor}")
            continue
        if tensor.shape is not None and math.prod(tensor.shape) != tensor.numel:
            wrong.append(
                f"{tensor.name}: expected numel {math.prod(tensor.shape)} of shape {tensor.shape}, got {tensor.numel}"
            )
        if tensor.numel < 0 or min(tensor.granularity, tensor.finest, tensor.itemsize) < 1:
            wrong.append(f"{tensor.name}: expected numel >= 0 and granularity, finest, itemsize >= 1, got {tensor}")
    if wrong:
        raise ValueError("; ".join(wrong))
