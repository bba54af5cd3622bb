"""RaggedShard: a tensor cut into consecutive runs of whole units, one run per rank, of any lengths.

A tensor of shape (4, 6) lies at offset 8 of a buffer that 3 ranks share in shards of 12 elements::

    buffer    0        8        12                   24                   36
              |  ...   |  w[0]  w[0] w[1] w[1] w[2]  |  w[2] w[3] w[3] .. |
    rank      <------- 0 ------><-------- 1 --------><-------- 2 -------->
    w         elements [0, 4)    elements [4, 16)     elements [16, 24)

An edge falls inside row 0, so the unit of the placement is one element: ``RaggedShard(dims=(0, 1))`` with ``local_units
== (4, 12, 8)``. Had the edges fallen between rows it would be ``RaggedShard(dims=(0,))`` and count rows. A unit is one
index of the prefix ``dims``; it is never cut. Blocks of optimizers do not appear here: they decided where the edges
fall, and after that a placement is only a cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor.placement_types import Placement


class Box(NamedTuple):
    """A hyper-rectangle of a tensor: where it begins and how far it reaches, per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Slot(NamedTuple):
    """The cut that a buffer's equal shards make through one tensor; integers, so that 10,240 ranks cost as much as two.

    Args:
        offset: Where the tensor begins in the buffer, in elements.
        shard_size: Elements of each rank's shard of the buffer.
        unit: Elements of one unit of the placement.
        num_units: Units of the tensor.
    """

    offset: int
    shard_size: int
    unit: int
    num_units: int

    def bounds(self, rank: int) -> tuple[int, int]:
        """Returns the units ``[start, stop)`` that ``rank`` holds."""
        edges = (rank * self.shard_size, (rank + 1) * self.shard_size)
        start, stop = (min(max(edge - self.offset, 0) // self.unit, self.num_units) for edge in edges)
        return start, stop


class RaggedShard(Placement):
    """Consecutive whole units per rank along the prefix ``dims`` of a tensor, zero units allowed.

    Args:
        dims: A prefix of the tensor's dims, ``(0,)`` or ``(0, 1)`` and so on; a unit is one index of it.
        local_units: Units of each rank, in rank order; or a ``Slot``, which states the same for a tensor in a buffer of
            equal shards.
        num_ranks: Ranks of the mesh axis; needed only with a ``Slot``.

    Raises:
        ValueError: If ``dims`` is not a prefix, or a count is negative.
    """

    dims: tuple[int, ...]
    num_ranks: int
    cut: Slot | tuple[int, ...]  # a tuple holds num_ranks + 1 offsets in units

    def __init__(self, dims: Sequence[int], local_units: Sequence[int] | Slot, *, num_ranks: int | None = None) -> None:
        super().__init__()  # Placement lives in C++: without this call the process dies
        if tuple(dims) != tuple(range(len(dims))):
            raise ValueError(
                f"RaggedShard dims must be a prefix of the tensor's dims such as (0,) or (0, 1), got {tuple(dims)}"
            )
        self.dims = tuple(dims)
        if isinstance(local_units, Slot):
            if num_ranks is None:
                raise ValueError("RaggedShard of a Slot needs num_ranks, the size of its mesh axis")
            self.num_ranks, self.cut = num_ranks, local_units
            return
        if any(units < 0 for units in local_units):
            raise ValueError(f"RaggedShard local_units must be >= 0, got {tuple(local_units)}")
        self.num_ranks = len(local_units)
        self.cut = tuple(sum(local_units[:rank]) for rank in range(self.num_ranks + 1))

    @classmethod
    def of_slot(cls, shape: Sequence[int], *, offset: int, shard_size: int, num_ranks: int) -> RaggedShard:
        """Returns the placement of a tensor that lies at ``offset`` of a buffer cut into equal shards.

        The shortest prefix whose units no edge cuts is taken, so a reader sees rows where there are rows.

        Args:
            shape: Logical shape of the tensor.
            offset: Its start in the buffer, in elements.
            shard_size: Elements of one rank's shard.
            num_ranks: Ranks that share the buffer.
        """
        numel, depth = math.prod(shape), len(shape)
        units = [math.prod(shape[d:]) for d in range(1, depth)] if numel else []
        for prefix, unit in enumerate(units, start=1):
            if _whole(offset, shard_size, num_ranks, numel, unit):
                return cls(range(prefix), Slot(offset, shard_size, unit, numel // unit), num_ranks=num_ranks)
        return cls(range(depth), Slot(offset, shard_size, 1, numel), num_ranks=num_ranks)

    @property
    def local_units(self) -> tuple[int, ...]:
        """Units of each rank."""
        return tuple(stop - start for start, stop in map(self.bounds, range(self.num_ranks)))

    def bounds(self, rank: int) -> tuple[int, int]:
        """Returns the units ``[start, stop)`` that ``rank`` holds."""
        if isinstance(self.cut, Slot):
            return self.cut.bounds(rank)
        return self.cut[rank], self.cut[rank + 1]

    def run(self, shape: Sequence[int], rank: int) -> tuple[int, int]:
        """Returns the elements ``[start, stop)`` of the flattened tensor that ``rank`` holds.

        Args:
            shape: Logical shape of the tensor.
            rank: Position on the mesh axis.
        """
        unit = math.prod(shape[len(self.dims) :])
        start, stop = self.bounds(rank)
        return start * unit, stop * unit

    def part(self, shape: Sequence[int], start: int, part: Sequence[int]) -> RaggedShard:
        """Returns the placement of elements ``[start, start + prod(part))`` as a tensor of their own.

        Rows 1 and 2 of the drawn tensor are elements [6, 18), of which the ranks hold 0, 10 and 2.

        Args:
            shape: Logical shape of the tensor.
            start: First element of the part.
            part: Shape of the part.
        """
        stop = start + math.prod(part)
        runs = [self.run(shape, rank) for rank in range(self.num_ranks)]
        return RaggedShard(range(len(part)), [max(0, min(b, stop) - max(a, start)) for a, b in runs])

    def check(self, shape: Sequence[int], num_ranks: int) -> None:
        """Raises ValueError unless this placement cuts a tensor of ``shape`` over ``num_ranks`` ranks, all of it.

        Once.
        """
        units = math.prod(shape[: len(self.dims)])
        placed = self.bounds(self.num_ranks - 1)[1]
        if len(self.dims) > len(shape) or self.num_ranks != num_ranks or units != placed:
            raise ValueError(
                f"{self} places {placed} units over {self.num_ranks} ranks; "
                f"a tensor of shape {tuple(shape)} has {units} units and the mesh axis {num_ranks} ranks"
            )

    def is_shard(self, dim: int | None = None) -> bool:
        """False: ragged data is never a ``Shard(dim)``, and code that would treat it as one must not."""
        return False

    def is_replicate(self) -> bool:
        """False."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """False."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShard) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self._key()

    def __repr__(self) -> str:
        if isinstance(self.cut, Slot):
            return f"RaggedShard(dims={self.dims}, {self.cut})"
        return f"RaggedShard(dims={self.dims}, local_units={self.local_units})"

    __str__ = __repr__

    def _key(self) -> tuple[Any, ...]:
        return self.dims, self.num_ranks, self.cut


def _rebuild(dims: tuple[int, ...], num_ranks: int, cut: Slot | tuple[int, ...]) -> RaggedShard:
    if isinstance(cut, Slot):
        return RaggedShard(dims, cut, num_ranks=num_ranks)
    return RaggedShard(dims, tuple(cut[rank + 1] - cut[rank] for rank in range(num_ranks)))


def _whole(offset: int, shard_size: int, num_ranks: int, numel: int, unit: int) -> bool:
    """Whether every edge strictly inside the tensor falls between units."""
    if unit <= 1:
        return True
    first = offset // shard_size + 1
    last = min(-(-(offset + numel) // shard_size) - 1, num_ranks - 1)
    if last < first:
        return True
    return (first * shard_size - offset) % unit == 0 and (first == last or shard_size % unit == 0)


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Returns the hyper-rectangles, in row-major order, that the flat run ``[start, stop)`` of a tensor consists of.

    At most ``2 * (ndim - 1) + 1`` of them: towards the middle a run has whole rows, whole planes and so on. Elements
    [4, 16) of shape (4, 6) are three boxes: columns 4-5 of row 0, row 1 whole, columns 0-3 of row 2.

    Args:
        shape: Logical shape.
        start: First element of the run.
        stop: One past its last element.
    """
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [Box((start,), (stop - start,))] if shape else [Box((), ())]
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # inside one row
        return _inside(shape, start // inner, start % inner, stop - (first - 1) * inner)
    head = _inside(shape, first - 1, start % inner, inner) if start % inner else []
    whole = [Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))] if last > first else []
    tail = _inside(shape, last, 0, stop % inner) if stop % inner else []
    return head + whole + tail


def _inside(shape: Sequence[int], index: int, start: int, stop: int) -> list[Box]:
    return [Box((index, *box.offsets), (1, *box.sizes)) for box in boxes(shape[1:], start, stop)]


torch.serialization.add_safe_globals([RaggedShard, Slot, _rebuild])
