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
from collections.abc import Container, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

# Elements, for every dtype. Tensors and shards begin at multiples of ALIGN, so that vector loops have no tail: with
# starts at 16 bytes fused AdamW gives other bits than uncut, at 16 elements it never did (tried on torch 2.13, CPU).
ALIGN = 32
# Shard sizes are multiples of this many elements: 128 bytes in 2-byte dtypes, a whole line for every collective.
COLLECTIVE = 64


class TensorSpec(NamedTuple):
    """One tensor as the planner sees it.

    Args:
        name: Unique in its unit.
        numel: Elements.
        granularity: Elements of a granule, which would like to stay inside one rank.
        finest: No edge may ever fall off a multiple of this many elements; granularity relaxes to it and no further.
        kind: Whatever may not share a buffer: dtype and trainability.
        itemsize: Bytes of an element.
    """

    name: str
    numel: int
    granularity: int = 1
    finest: int = 1
    kind: Hashable = None
    itemsize: int = 4

    def planned(self, relaxed: Container[int] = ()) -> int:
        """Returns the granularity that no edge is off when those in ``relaxed`` are not kept."""
        return self.finest if self.granularity in relaxed else math.lcm(self.granularity, self.finest)

    def step(self, relaxed: Container[int] = (), align: int = ALIGN) -> int:
        """Returns what edges inside are multiples of, starts and edges being multiples of ``align``."""
        return math.lcm(self.planned(relaxed), align)


@dataclass(frozen=True)
class Boundary:
    """The granules of one tensor that rank edges cut: ``len`` counts them, iteration yields their indices, ascending.

    Counts and elements are closed forms: a tensor may span thousands of ranks.
    """

    offset: int  # of the tensor, in elements of the buffer
    numel: int
    granularity: int
    shard_size: int

    @property
    def edges(self) -> range:
        """Elements of the tensor, without its first, where a rank begins."""
        return range(self.shard_size - self.offset % self.shard_size, self.numel, self.shard_size)

    def __len__(self) -> int:
        edges, granularity = self.edges, self.granularity
        if not edges:
            return 0
        if self.shard_size >= granularity:  # every edge has a granule of its own
            return len(edges) - _multiples(edges, granularity)
        # Edges are closer than granules are long: all granules up to the last edge are cut, and the last one's unless
        # the edge is where it begins.
        return edges[-1] // granularity + (edges[-1] % granularity > 0)

    def __iter__(self) -> Iterator[int]:
        previous = -1
        for edge in self.edges:
            granule, inside = divmod(edge, self.granularity)
            if inside and granule != previous:
                yield granule
                previous = granule

    @property
    def elements(self) -> int:
        """Elements of all cut granules together; the tensor's last granule may be short."""
        edges, last = self.edges, (self.numel - 1) // self.granularity
        missing = (last + 1) * self.granularity - self.numel if edges and edges[-1] > last * self.granularity else 0
        return len(self) * self.granularity - missing


@dataclass(frozen=True)
class SegmentPlan:
    """One buffer of ``num_ranks`` equal shards and where its tensors lie; plain integers, the same on every rank.

    ``str`` is a table of it.
    """

    tensors: tuple[TensorSpec, ...]  # in buffer order; `granularity` as it was planned, so that no edge is off it
    offsets: tuple[int, ...]  # of the tensors, in elements; ascending multiples of ALIGN, tensors do not overlap
    shard_size: int  # elements of each rank's shard; a multiple of COLLECTIVE
    num_ranks: int
    kind: Hashable
    wanted: tuple[int, ...]  # granularity that each tensor asked for

    @property
    def numel(self) -> int:
        """Elements of the buffer, padding included."""
        return self.num_ranks * self.shard_size

    @property
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
        relaxed = (i for i, wanted in enumerate(self.wanted) if self.tensors[i].granularity % wanted)
        return sum(self.boundary(i).elements * self.tensors[i].itemsize for i in relaxed)

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
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"expected a rank in [0, {self.num_ranks}), got {rank}")
        numel = self.tensors[i].numel
        first = rank * self.shard_size - self.offsets[i]
        return min(max(first, 0), numel), min(max(first + self.shard_size, 0), numel)

    def holders(self, i: int) -> range:
        """Returns the ranks that hold an element of tensor ``i``."""
        start, stop = self.interval(i)
        return range(
            start // self.shard_size, -(-stop // self.shard_size) if stop > start else start // self.shard_size
        )

    def boundary(self, i: int) -> Boundary:
        """Returns the granules of tensor ``i``, of the granularity it asked for, that edges cut."""
        return Boundary(self.offsets[i], self.tensors[i].numel, self.wanted[i], self.shard_size)

    def digest(self) -> str:
        """Returns a hash of every integer and name (64 hex digits), for ranks to compare; kinds count by their repr."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def __str__(self) -> str:
        kind = "" if self.kind is None else f" of {self.kind}"
        title = (
            f"segment{kind}: {self.num_ranks:,} ranks x {self.shard_size:,} = {self.numel:,} elements,"
            f" {self.useful:,} useful, padding {self.padding:.2%}, {self.cut_bytes:,} bytes cut"
        )
        rows = [
            ("tensor", "offset", "elements", "granularity", "ranks", "granules"),
            *map(self._row, range(len(self.tensors))),
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        cells = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
        return "\n".join([title, *("  ".join(row).rstrip() for row in cells)])

    def _row(self, i: int) -> tuple[str, ...]:
        tensor, wanted, ranks, boundary = self.tensors[i], self.wanted[i], self.holders(i), self.boundary(i)
        planned = "" if tensor.granularity == wanted else f" -> {tensor.granularity:,}"
        held = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"{ranks[0]}" if ranks else "-"
        cut = f"{len(boundary):,} cut, {boundary.elements * tensor.itemsize:,} bytes" if len(boundary) else "kept"
        return tensor.name, f"{self.offsets[i]:,}", f"{tensor.numel:,}", f"{wanted:,}{planned}", held, cut


def plan_segment(
    tensors: Sequence[TensorSpec], *, num_ranks: int, align: int = ALIGN, collective: int = COLLECTIVE
) -> SegmentPlan:
    """Returns the plan of one buffer in the order given that cuts no granule, with the smallest shards found.

    Finding the smallest is NP-hard; this finds it nearly always, and never shards of more than twice its size.

    Args:
        tensors: Of one kind. Granularity is a demand here.
        num_ranks: Ranks that share the buffer.
        align: Tensors and shards begin at multiples of this many elements.
        collective: Shard sizes are multiples of this many elements.

    Raises:
        ValueError: If there is no tensor, kinds differ, names repeat, or a number is out of its range.
    """
    check(tensors, num_ranks=num_ranks, align=align, collective=collective)
    kinds = dict.fromkeys(tensor.kind for tensor in tensors)
    if len(kinds) != 1:
        raise ValueError(f"a segment has tensors of exactly one kind, got {list(kinds)}")
    plan = plan_within(tensors, num_ranks, align=align, collective=collective)
    assert plan is not None  # without a limit everything fits on one rank
    return plan


# --- one segment ---


class _Piece(NamedTuple):
    """A tensor with its alignment rounded in: with it, every start and every edge is a multiple of the alignment."""

    numel: int
    step: int  # edges inside lie at multiples of this, from its start


def plan_within(
    members: Sequence[TensorSpec],
    num_ranks: int,
    *,
    relaxed: frozenset[int] = frozenset(),
    limit: int | None = None,
    align: int = ALIGN,
    collective: int = COLLECTIVE,
) -> SegmentPlan | None:
    """Plans one segment, granularities in ``relaxed`` at their finest; None if shards would exceed ``limit``."""
    pieces = [_Piece(-(-t.numel // align) * align, t.step(relaxed, align)) for t in members]
    size = _smallest(pieces, num_ranks, math.lcm(align, collective), limit)
    if size is None:
        return None
    offsets = _place(pieces, size, num_ranks, size)
    assert offsets is not None  # a search with less permission found a place
    planned = tuple(TensorSpec(t.name, t.numel, t.planned(relaxed), *t[3:]) for t in members)
    wanted = tuple(t.granularity for t in members)
    return SegmentPlan(planned, tuple(offsets), size, num_ranks, members[0].kind, wanted)


def _smallest(pieces: Sequence[_Piece], num_ranks: int, collective: int, limit: int | None) -> int | None:
    """The smallest shard size found for this order, or None if it is beyond ``limit``.

    A tensor that contains a whole shard forces its step to divide the shard size. So the size is sought among the
    multiples of ``collective``, of its lcm with the step of the largest tensor, of the two largest, and so on; exact in
    nearly all cases, never more than twice the optimum. For each the size is sought twice: with whole shards only in
    tensors whose step divides the class, where sizes that fit still fit when they grow, which makes the bound; and
    wherever the step divides the size, which is nearly always the smaller.
    """
    total = sum(piece.numel for piece in pieces)
    best = max(-(-total // collective), 1) * collective  # everything on one rank
    best = best if limit is None else min(best, limit + 1)
    # All ranks together hold everything, and a tensor has its first edge after a whole step at the earliest.
    least = max(-(-total // num_ranks), *(min(piece) for piece in pieces), 1)
    steps = (piece.step for piece in sorted(pieces, key=lambda piece: -piece.numel))
    last = 0
    for modulus in accumulate((collective, *steps), math.lcm):
        if modulus >= best:
            break
        if modulus == last:
            continue
        last = modulus
        for whole in (modulus, None):
            multiple = _lowest(
                pieces, num_ranks, modulus, whole, range(-(-least // modulus), (best - 1) // modulus + 1)
            )
            best = best if multiple is None else multiple * modulus
    return best if limit is None or best <= limit else None


def _lowest(pieces: Sequence[_Piece], num_ranks: int, modulus: int, whole: int | None, multiples: range) -> int | None:
    """The lowest of ``multiples`` of ``modulus`` that fits, if all above it fit too; None if the highest does not.

    Steps double from the lowest, near which it usually lies, and the last of them is bisected. ``whole`` is as for
    ``_place``; None stands for the size itself.
    """

    def fits(multiple: int) -> bool:
        size = multiple * modulus
        return _place(pieces, size, num_ranks, whole or size) is not None

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


def _place(pieces: Sequence[_Piece], size: int, num_ranks: int, whole: int) -> list[int] | None:
    """Offsets of the pieces, each at its earliest legal start, or None if they do not fit; exact for order and size.

    A piece that would cross the next edge starts as many whole steps before that edge as the cursor allows, perhaps
    none. It may, if it reaches into one further shard at most, or if its step divides ``whole`` (the size, or a divisor
    of it: then every edge lies at whole steps). Else it waits for the edge, with a fresh shard before the next one.
    """
    offsets, cursor, end = [], 0, num_ranks * size
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


# --- counting ---


def _multiples(edges: range, granularity: int) -> int:
    """How many of ``edges`` are multiples of ``granularity``: solves ``first + k * stride = 0`` modulo it."""
    divisor = math.gcd(edges.step, granularity)
    if edges[0] % divisor:
        return 0
    period = granularity // divisor
    first = -(edges[0] // divisor) * pow(edges.step // divisor, -1, period) % period
    return len(range(first, len(edges), period))


def check(tensors: Sequence[TensorSpec], *, max_padding: float = 0.0, **counts: int) -> None:
    """Raises one ValueError with everything that is wrong with the arguments of a plan."""
    wrong = [f"{name}: expected at least 1, got {count}" for name, count in counts.items() if count < 1]
    if not 0 <= max_padding < math.inf:
        wrong.append(f"max_padding: expected a finite fraction of at least 0, got {max_padding}")
    names: set[str] = set()
    for tensor in tensors:
        if tensor.name in names:
            wrong.append(f"{tensor.name}: two tensors of this name")
        names.add(tensor.name)
        if tensor.numel < 0 or min(tensor.granularity, tensor.finest, tensor.itemsize) < 1:
            wrong.append(f"{tensor.name}: expected numel >= 0 and granularity, finest, itemsize >= 1, got {tensor}")
    if wrong:
        raise ValueError("; ".join(wrong))
