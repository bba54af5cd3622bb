"""Blocks and granules of one tensor: what an optimizer's update is closed over, and the runs of memory that hold it.

A *block* is the smallest piece that a rule's update is closed over; a *granule* is the shortest run of consecutive
elements (row-major) that holds whole blocks. Blocks of 2 x 3 in a tensor of 5 x 7: a row of blocks is a granule,
2 * 7 = 14 elements and 3 blocks, and the last one is short::

            columns 0..2   3..5   6             granule(0) = [ 0, 14)
    row 0, 1     |  0   |   1  |  2 |           granule(1) = [14, 28)
    row 2, 3     |  3   |   4  |  5 |           granule(2) = [28, 35)
    row 4        |  6   |   7  |  8 |           cut(10, 28) = Cut(whole=range(1, 2), parts=(0,))

Everything here is integers of one tensor: ranks and buffers are not known.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Block(NamedTuple):
    """What a rule says of one parameter.

    Args:
        shape: As long as the tensor has dims: a box. One number for a tensor of another number of dims: that many
            consecutive elements in row-major order. Empty: single elements.
        finest: No edge may ever fall off a multiple of this many elements, counted from the tensor's first.
        group: Parameters of one group lie next to each other in the buffer.
    """

    shape: tuple[int, ...]
    finest: int = 1
    group: str = ""


class Cut(NamedTuple):
    """The granules of a slice.

    Args:
        whole: Granules that lie inside the slice.
        parts: Granules that the slice's ends cut, ascending; at most two.
    """

    whole: range
    parts: tuple[int, ...]


@dataclass(frozen=True)
class Lattice:
    """The blocks of one tensor and the granules that hold them.

    Args:
        shape: Shape of the tensor; dims of zero and no dims at all are fine.
        block_shape: As ``Block.shape``. A block longer than the tensor along a dim ends with the tensor.

    Raises:
        ValueError: If the block's length fits neither way, it has an empty dim, or its granules would straddle a
            leading dim of the tensor.
    """

    shape: tuple[int, ...]
    block_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        got = f"got block {tuple(self.block_shape)} of a tensor of shape {tuple(self.shape)}"
        if len(self.block_shape) not in (0, 1, len(self.shape)):
            raise ValueError(f"a block has one size per dim, or one number of consecutive elements, or is empty; {got}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"sizes are not negative; {got}")
        dims = self._dims
        if any(want < 1 and (want < 0 or size > 0) for size, want in zip(dims, self.block_shape, strict=False)):
            raise ValueError(f"a block has at least one element along every dim; {got}")
        axis = self._axis
        if math.prod(dims[:axis]) > 1 and self.numel and dims[axis] % self.block[axis]:
            divisor = next(size for size in range(self.block[axis], 0, -1) if dims[axis] % size == 0)
            straddle = f"{self.block[axis]} does not divide dim {axis}: granules would straddle the dims before it"
            raise ValueError(f"{straddle}; take {divisor}; {got}")

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @cached_property
    def block(self) -> tuple[int, ...]:
        """Shape of a full block: ``block_shape``, no longer than the tensor along any dim."""
        return tuple(min(want, max(size, 1)) for size, want in zip(self._dims, self.block_shape, strict=False))

    @cached_property
    def granularity(self) -> int:
        """Elements of a granule, at least 1 even where the tensor is empty."""
        if not self.block:
            return 1
        return max(self.block[self._axis] * math.prod(self._dims[self._axis + 1 :]), 1)

    @cached_property
    def num_granules(self) -> int:
        """Granules of the tensor, the short one at its end counted in."""
        return -(-self.numel // self.granularity)

    @property
    def blocks_per_granule(self) -> int:
        """Blocks of a granule, those that end with the tensor counted in."""
        pairs = list(zip(self._dims, self.block, strict=False))[self._axis + 1 :]
        return math.prod(-(-size // want) if want else 0 for size, want in pairs)

    @property
    def num_blocks(self) -> int:
        """Blocks of the tensor."""
        return self.num_granules * self.blocks_per_granule

    def granule(self, i: int) -> tuple[int, int]:
        """Returns ``[start, stop)`` of granule ``i`` in elements of the flattened tensor; the last may be short.

        Raises:
            ValueError: If there is no such granule.
        """
        if not 0 <= i < self.num_granules:
            raise ValueError(f"expected a granule in [0, {self.num_granules}) of {self}, got {i}")
        start = i * self.granularity
        return start, min(start + self.granularity, self.numel)

    def box(self, i: int) -> tuple[int, ...]:
        """Returns the shape of granule ``i`` without the dims before the first that its blocks are longer along."""
        start, stop = self.granule(i)
        inner = self._dims[self._axis + 1 :]
        return ((stop - start) // max(math.prod(inner), 1), *inner)

    def windows(self, i: int) -> list[tuple[slice, ...]]:
        """Returns the blocks of granule ``i``, in order, as slices of its ``box``; the last of a dim may be short."""
        cuts = [
            [slice(start, min(start + want, size)) for start in range(0, size, want)]
            for size, want in zip(self.box(i), self.block[self._axis :], strict=True)
        ]
        return list(itertools.product(*cuts))

    def block_at(self, i: int) -> tuple[int, ...]:
        """Returns the shape of block ``i``: ``block``, or shorter where it ends with the tensor."""
        granule, i = divmod(i, self.blocks_per_granule)
        sizes: list[int] = []
        for size, want in zip(reversed(self.box(granule)), reversed(self.block), strict=False):
            i, place = divmod(i, -(-size // want))
            sizes.insert(0, min(want, size - place * want))
        return (*self.block[: self._axis], *sizes)

    def cut(self, start: int, stop: int) -> Cut:
        """Returns the granules inside ``[start, stop)`` of the flattened tensor, and those that its ends cut.

        Raises:
            ValueError: If the slice is not inside the tensor.
        """
        if not 0 <= start <= stop <= self.numel:
            raise ValueError(f"expected a slice of [0, {self.numel}) of {self}, got [{start}, {stop})")
        if start == stop:
            return Cut(range(0), ())
        size = self.granularity
        first, last = start // size, (stop - 1) // size
        low = first + (start > first * size)
        high = last + (stop == self.granule(last)[1])
        return Cut(range(low, max(low, high)), tuple(sorted({*range(first, low), *range(high, last + 1)})))

    @cached_property
    def _dims(self) -> tuple[int, ...]:
        """The tensor's dims as the block counts them: its own for a box, else one dim of all elements."""
        box = len(self.block_shape) == len(self.shape) > 0
        return tuple(self.shape) if box else (self.numel,)

    @cached_property
    def _axis(self) -> int:
        """The first dim along which a block is longer than 1; dims before it only count granules."""
        longer = (axis for axis, want in enumerate(self.block) if want != 1)
        return next(longer, len(self._dims) - 1)
