"""Many stretches of one flat buffer zeroed in one launch: the gaps between tensors.

Three ranges, and the rows of at most CHUNK = 4096 elements that programs work on::

    ranges  [0, 5000)                [7000, 7100)     [9000, 9200)
    rows    (0, 4096) (4096, 904)    (7000, 100)      (9000, 200)

The table of rows goes to the device once, when the ranges are first used there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vescale.kernels.language import jit, runs_kernels, tl

CHUNK = 4096  # elements of a program: sixteen for each of eight warps' threads


class Pieces:
    """A fixed list of ranges of a flat tensor.

    Args:
        ranges: (start, stop) of each, apart from each other.

    Raises:
        ValueError: If one is negative, or two of them share an element.
    """

    ranges: tuple[tuple[int, int], ...]  # without empty ones, ascending
    end: int  # elements that a tensor must have
    align: int  # of all edges, in elements: how wide stores may be

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self.ranges, edge = tuple(sorted((start, stop) for start, stop in ranges if start != stop)), 0
        for start, stop in self.ranges:
            if not edge <= start < stop:
                raise ValueError(f"Pieces: expected ranges apart from each other, got {(start, stop)} after {edge}")
            edge = stop
        self.end = edge
        self.align = math.gcd(16, *(edge for each in self.ranges for edge in each))

    @property
    def num_elements(self) -> int:
        """Elements of all ranges."""
        return sum(stop - start for start, stop in self.ranges)

    def zero_(self, x: Tensor) -> None:
        """Zeroes the ranges.

        Args:
            x: (n,) of any dtype, contiguous.

        Raises:
            ValueError: If ``x`` does not fit.
        """
        if x.ndim != 1 or not x.is_contiguous() or x.numel() < self.end:
            raise ValueError(
                f"Pieces.zero_: expected a contiguous flat tensor of at least {self.end} elements, got "
                f"{tuple(x.shape)} with strides {x.stride()}"
            )
        (self.zero_triton if runs_kernels(x) else self.zero_torch)(x)

    def zero_torch(self, x: Tensor) -> None:
        """The twin of ``zero_``."""
        for start, stop in self.ranges:
            x[start:stop].zero_()

    def zero_triton(self, x: Tensor) -> None:
        """The kernel of ``zero_``."""
        rows = self._rows(x.device)
        if len(rows):
            _zero[(len(rows),)](rows, x, ALIGN=self.align, CHUNK=CHUNK, num_warps=8, enable_fp_fusion=False)

    @functools.cache  # noqa: B019  ranges live as long as the plan that they are made of
    def _rows(self, device: torch.device) -> Tensor:
        rows = [(at, min(CHUNK, stop - at)) for start, stop in self.ranges for at in range(start, stop, CHUNK)]
        return torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 2)


@jit
def _zero(rows, x, ALIGN: tl.constexpr, CHUNK: tl.constexpr):
    row = rows + tl.program_id(0).to(tl.int64) * 2
    at = tl.multiple_of(tl.load(row), ALIGN)
    k = tl.arange(0, CHUNK).to(tl.int64)
    tl.store(x + at + k, tl.zeros((CHUNK,), x.dtype.element_ty), k < tl.multiple_of(tl.load(row + 1), ALIGN))
