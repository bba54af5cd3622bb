"""Many stretches of flat buffers in one launch: packed, unpacked, cast, scaled, zeroed, measured.

A move is (first element in the source, first element in the destination, elements). Three of them, and the rows of at
most CHUNK = 4096 elements that programs work on::

    moves   (0, 10000, 5000)          (7000, 0, 100)     (9000, 200, 1)
    rows    (0, 10000, 4096)          (7000, 0, 100)     (9000, 200, 1)
            (4096, 14096, 904)

The table of rows goes to the device once, when the moves are first used there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vescale.kernels.language import jit, runs_kernels, tl

CHUNK = 4096  # elements of a program: sixteen for each of eight warps' threads
Move = tuple[int, int, int]


class Pieces:
    """A fixed list of moves between two flat tensors, or within one.

    Args:
        moves: (source, destination, elements) of each; sources may overlap, destinations may not.

    Raises:
        ValueError: If a move is negative, or two of them write the same element.
    """

    moves: tuple[Move, ...]  # without empty ones
    source_end: int  # elements that a source must have
    end: int  # elements that a destination must have
    align: int  # of all offsets and lengths, in elements: how wide loads may be

    def __init__(self, moves: Sequence[Move]) -> None:
        self.moves = tuple((source, to, size) for source, to, size in moves if size)
        edge = 0
        for source, to, size in sorted(self.moves, key=lambda move: move[1]):
            if min(source, size) < 0 or to < edge:
                raise ValueError(
                    f"Pieces: expected moves that write no element twice, got {(source, to, size)} with [0, {edge}) "
                    "written already"
                )
            edge = to + size
        self.end = edge
        self.source_end = max((source + size for source, _, size in self.moves), default=0)
        self.align = math.gcd(16, *(number for move in self.moves for number in move))

    @classmethod
    def within(cls, ranges: Sequence[tuple[int, int]]) -> Pieces:
        """Returns the pieces of one tensor: ``ranges`` are its (start, stop)."""
        return cls([(start, start, stop - start) for start, stop in ranges])

    @property
    def num_elements(self) -> int:
        """Elements of all moves."""
        return sum(size for _, _, size in self.moves)

    def copy(self, source: Tensor, to: Tensor, *, scale: float | Tensor | None = None) -> None:
        """Copies every piece, cast to the dtype of ``to``.

        Args:
            source: (n,) of any dtype, contiguous.
            to: (k,), contiguous, another stretch of memory; the same dtype, or both of them floats.
            scale: None, or a number or () float32: the factor of what is copied, multiplied in float32.

        Raises:
            ValueError: If a tensor does not fit.
        """
        self._check("copy", source, to, scaled=scale is not None)
        (self.copy_triton if runs_kernels(to) else self.copy_torch)(source, to, scale=scale)

    def copy_torch(self, source: Tensor, to: Tensor, *, scale: float | Tensor | None = None) -> None:
        """The twin of ``copy``."""
        for first, at, size in self.moves:
            piece = source[first : first + size]
            to[at : at + size] = piece if scale is None else piece.float() * scale

    def copy_triton(self, source: Tensor, to: Tensor, *, scale: float | Tensor | None = None) -> None:
        """The kernel of ``copy``."""
        rows = self._rows(to.device)
        number, where = (0.0, scale) if isinstance(scale, Tensor) else (None if scale is None else float(scale), None)
        if len(rows):
            _copy[(len(rows),)](
                rows, source, to, number, where, ALIGN=self.align, CHUNK=CHUNK, num_warps=8, enable_fp_fusion=False
            )

    def scale_(self, x: Tensor, scale: float | Tensor) -> None:
        """Multiplies the pieces of ``x``, made by ``within``, in place."""
        self._check("scale_", x, x, scaled=True)
        (self.copy_triton if runs_kernels(x) else self.copy_torch)(x, x, scale=scale)

    def zero_(self, x: Tensor) -> None:
        """Zeroes what the moves write.

        Args:
            x: (k,) of any dtype, contiguous.

        Raises:
            ValueError: If ``x`` does not fit.
        """
        self._check("zero_", None, x, scaled=False)
        (self.zero_triton if runs_kernels(x) else self.zero_torch)(x)

    def zero_torch(self, x: Tensor) -> None:
        """The twin of ``zero_``."""
        for _, at, size in self.moves:
            x[at : at + size].zero_()

    def zero_triton(self, x: Tensor) -> None:
        """The kernel of ``zero_``."""
        rows = self._rows(x.device)
        if len(rows):
            _zero[(len(rows),)](rows, x, ALIGN=self.align, CHUNK=CHUNK, num_warps=8, enable_fp_fusion=False)

    def square_sums(self, x: Tensor) -> Tensor:
        """Returns the sum of squares of each piece of ``x`` as a source, (len(moves),) float32, in a fixed order.

        Args:
            x: (n,) float32, bfloat16 or float16, contiguous.

        Raises:
            ValueError: If ``x`` does not fit.
        """
        self._check("square_sums", x, None, scaled=True)
        return self.square_sums_triton(x) if runs_kernels(x) else self.square_sums_torch(x)

    def square_sums_torch(self, x: Tensor) -> Tensor:
        """The twin of ``square_sums``."""
        sums = [x[first : first + size].float().square().sum() for first, _, size in self.moves]
        return torch.stack(sums) if sums else torch.empty(0, device=x.device)

    def square_sums_triton(self, x: Tensor) -> Tensor:
        """The kernels of ``square_sums``: one for the rows, one that adds them up."""
        rows, sums = self._rows(x.device), torch.empty(len(self.moves), dtype=torch.float32, device=x.device)
        partial = torch.empty(len(rows), dtype=torch.float32, device=x.device)
        if len(rows):
            options = {"num_warps": 8, "enable_fp_fusion": False}
            _square[(len(rows),)](rows, x, partial, ALIGN=self.align, CHUNK=CHUNK, **options)
            _add_up[(len(sums),)](self._first_rows(x.device), partial, sums, CHUNK=CHUNK, **options)
        return sums

    def _check(self, name: str, source: Tensor | None, to: Tensor | None, *, scaled: bool) -> None:
        given = [(tensor, end) for tensor, end in ((source, self.source_end), (to, self.end)) if tensor is not None]
        for tensor, end in given:
            if tensor.ndim != 1 or not tensor.is_contiguous() or tensor.numel() < end:
                raise ValueError(
                    f"Pieces.{name}: expected a contiguous flat tensor of at least {end} elements, got "
                    f"{tuple(tensor.shape)} with strides {tensor.stride()}"
                )
        kinds = {tensor.dtype for tensor, _ in given}
        if (scaled or len(kinds) > 1) and not all(kind in (torch.float32, *_SHORT) for kind in kinds):
            raise ValueError(f"Pieces.{name}: expected float32, bfloat16 or float16, got {sorted(map(str, kinds))}")
        if len({tensor.device for tensor, _ in given}) > 1:
            raise ValueError(f"Pieces.{name}: expected tensors on one device, got {[t.device for t, _ in given]}")

    @functools.cached_property
    def _chunks(self) -> list[tuple[int, int, int]]:
        return [
            (first + k, at + k, min(CHUNK, size - k)) for first, at, size in self.moves for k in range(0, size, CHUNK)
        ]

    @functools.cache  # noqa: B019  moves live as long as the plan that they are made of
    def _rows(self, device: torch.device) -> Tensor:
        return torch.tensor(self._chunks, dtype=torch.int64, device=device).view(-1, 3)

    @functools.cache  # noqa: B019
    def _first_rows(self, device: torch.device) -> Tensor:
        """Where the rows of each move begin, and where the last ends."""
        counts = torch.tensor([0] + [-(-size // CHUNK) for _, _, size in self.moves], dtype=torch.int64)
        return counts.cumsum(0).to(device)


_SHORT = (torch.bfloat16, torch.float16)


@jit
def _copy(rows, source, to, scale, scale_at, ALIGN: tl.constexpr, CHUNK: tl.constexpr):
    row = rows + tl.program_id(0).to(tl.int64) * 3
    first, at = tl.multiple_of(tl.load(row), ALIGN), tl.multiple_of(tl.load(row + 1), ALIGN)
    k = tl.arange(0, CHUNK).to(tl.int64)
    inside = k < tl.multiple_of(tl.load(row + 2), ALIGN)
    x = tl.load(source + first + k, inside)
    if scale_at is not None:
        x = x.to(tl.float32) * tl.load(scale_at)
    elif scale is not None:
        x = x.to(tl.float32) * scale
    tl.store(to + at + k, x.to(to.dtype.element_ty), inside)


@jit
def _zero(rows, x, ALIGN: tl.constexpr, CHUNK: tl.constexpr):
    row = rows + tl.program_id(0).to(tl.int64) * 3
    at = tl.multiple_of(tl.load(row + 1), ALIGN)
    k = tl.arange(0, CHUNK).to(tl.int64)
    tl.store(x + at + k, tl.zeros((CHUNK,), x.dtype.element_ty), k < tl.multiple_of(tl.load(row + 2), ALIGN))


@jit
def _square(rows, x, partial, ALIGN: tl.constexpr, CHUNK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    first = tl.multiple_of(tl.load(rows + number * 3), ALIGN)
    k = tl.arange(0, CHUNK).to(tl.int64)
    values = tl.load(x + first + k, k < tl.multiple_of(tl.load(rows + number * 3 + 2), ALIGN), 0.0).to(tl.float32)
    tl.store(partial + number, tl.sum(values * values, axis=0))


@jit
def _add_up(first_rows, partial, sums, CHUNK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    start, stop = tl.load(first_rows + number), tl.load(first_rows + number + 1)
    lanes = tl.zeros((CHUNK,), tl.float32)
    for at in range(start, stop, CHUNK):
        k = at + tl.arange(0, CHUNK).to(tl.int64)
        lanes += tl.load(partial + k, k < stop, 0.0)
    tl.store(sums + number, tl.sum(lanes, axis=0))
