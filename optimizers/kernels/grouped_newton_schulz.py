"""Newton-Schulz of many matrices of any shapes at once: a launch has the tiles of all of them.

Layers have a handful of shapes, and what is left on a rank after the matrices were dealt out has few of each: a launch
per shape would leave most of a GPU idle, and so would one small matrix after the other::

    tiles of a launch     (matrix, row, column)   0 0 0   0 0 1   0 1 1   1 0 0   2 0 0   2 0 1 ...
    matrix 0, (200, 300)  rows x columns padded to (200, 304), where 16-byte loads begin; the padding is zero
    matrix 1, (128, 64)   tall, so it is kept transposed: (64, 128)

Five launches normalise, three make a step, whatever the number of matrices. Tiles and order of summation are those of
``gram`` and ``shifted_product``, so the products have the bits of one matrix alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from optimizers.kernels.gram import TILES, store_symmetric, symmetric_tile
from optimizers.kernels.language import jit, runs_kernels, tl
from optimizers.kernels.operand import FLOATS, expect
from optimizers.kernels.shifted_product import shifted_tile
from optimizers.newton_schulz import COEFFICIENTS, Row, newton_schulz

EDGE = 64  # rows and columns of an element-wise tile
PAD = 16  # elements: rows begin at 32 bytes of a 16-bit dtype
LANES = 1024  # partial results that are read at a time
COLUMNS = 8  # of the table of matrices


class Matrix(NamedTuple):
    """One matrix of a flat tensor: where it begins, its shape, and the factor of its result."""

    offset: int
    rows: int
    cols: int
    gain: float = 1.0


def grouped_newton_schulz(
    flat: Tensor,
    out: Tensor,
    matrices: tuple[Matrix, ...],
    *,
    coefficients: str | Sequence[Row] = "quintic",
    dtype: torch.dtype = torch.bfloat16,
    eps: float = 1e-30,
) -> None:
    """Writes every matrix of ``flat``, its singular values moved to about one, times its gain, to its place in ``out``.

    Args:
        flat: (n,) bfloat16, float16 or float32, contiguous, never written. One NaN or infinity makes its matrix NaN.
        out: (n,) bfloat16, float16 or float32, contiguous; other memory than ``flat``.
        matrices: Where they lie, disjoint; a tuple, since its tables on the device are made once.
        coefficients: A key of ``newton_schulz.COEFFICIENTS``, or rows (a, b, c), one per step.
        dtype: Every product is rounded to it.
        eps: A matrix whose largest element is below this counts as noise and fades to zero, in units of ``flat``.

    Raises:
        ValueError: If a tensor, a matrix or the coefficients do not fit.
    """
    expect("grouped_newton_schulz", flat=(flat, (flat.numel(),), FLOATS), out=(out, flat.shape, FLOATS))
    if isinstance(coefficients, str) and coefficients not in COEFFICIENTS:
        raise ValueError(
            f"grouped_newton_schulz: expected coefficients from {sorted(COEFFICIENTS)}, got {coefficients!r}"
        )
    if dtype not in TILES:
        raise ValueError(f"grouped_newton_schulz: expected dtype from {sorted(map(str, TILES))}, got {dtype}")
    _check_matrices(matrices, flat.numel())
    run = grouped_newton_schulz_triton if runs_kernels(flat) else grouped_newton_schulz_torch
    run(flat, out, matrices, coefficients=coefficients, dtype=dtype, eps=eps)


def _check_matrices(matrices: tuple[Matrix, ...], n: int) -> None:
    edge = 0
    for matrix in sorted(matrices):
        if matrix.offset < edge or min(matrix.rows, matrix.cols) < 0:
            raise ValueError(f"grouped_newton_schulz: expected matrices apart from each other, got {matrix}")
        edge = matrix.offset + matrix.rows * matrix.cols
    if edge > n:
        raise ValueError(f"grouped_newton_schulz: expected matrices within {n} elements, got one that ends at {edge}")


def grouped_newton_schulz_torch(
    flat: Tensor,
    out: Tensor,
    matrices: tuple[Matrix, ...],
    *,
    coefficients: str | Sequence[Row],
    dtype: torch.dtype,
    eps: float,
) -> None:
    """The twin: one matrix after the other."""
    for offset, rows, cols, gain in matrices:
        where = slice(offset, offset + rows * cols)
        x = flat[where].view(rows, cols)
        out[where].view(rows, cols).copy_(newton_schulz(x, coefficients, dtype=dtype, eps=eps, gain=gain))


def grouped_newton_schulz_triton(
    flat: Tensor,
    out: Tensor,
    matrices: tuple[Matrix, ...],
    *,
    coefficients: str | Sequence[Row],
    dtype: torch.dtype,
    eps: float,
) -> None:
    """The kernels."""
    tables = _tables(matrices, TILES[dtype][0], flat.device)
    if not len(tables.wide):
        return
    x, y = (torch.empty(tables.elements, dtype=dtype, device=flat.device) for _ in range(2))
    gram, poly = (torch.empty(tables.square_elements, dtype=dtype, device=flat.device) for _ in range(2))
    _normalize(flat, x, tables, eps)
    block, block_k, warps, stages = TILES[dtype]
    tile = {"BLOCK": block, "BLOCK_K": block_k, "num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    steps = COEFFICIENTS[coefficients] if isinstance(coefficients, str) else coefficients
    for index, (a, b, c) in enumerate(steps):
        gains = tables.gains if index == len(steps) - 1 else None
        upper, whole = (len(tables.upper),), (len(tables.whole),)
        _symmetric[upper](tables.table, tables.upper, x, gram, None, 0.0, 1.0, SQUARE=False, **tile)
        _symmetric[upper](tables.table, tables.upper, gram, poly, gains, float(b), float(c), SQUARE=True, **tile)
        to = y if gains is None else out
        _product[whole](tables.table, tables.whole, poly, x, to, gains, float(a), LAST=gains is not None, **tile)
        x, y = y, x


class _Tables(NamedTuple):
    table: Tensor  # (matrices, COLUMNS) int64: offset, rows, cols; s, offset and stride in x; offset and stride in gram
    gains: Tensor  # (matrices,) float32
    upper: Tensor  # (tiles, 3) int64: matrix, row, column, of the upper triangle of a gram matrix
    whole: Tensor  # of x
    wide: Tensor  # element-wise tiles of the matrices as they lie in flat
    firsts: Tensor  # (matrices + 1,) int64: where a matrix's element-wise tiles begin
    elements: int  # of x
    square_elements: int  # of a gram matrix


@functools.lru_cache(maxsize=256)
def _tables(matrices: tuple[Matrix, ...], block: int, device: torch.device) -> _Tables:
    """Where everything lies. Matrices whose tiles take longest come first, so that a launch ends evenly."""
    ordered = sorted(matrices, key=lambda m: (-max(m.rows, m.cols), -min(m.rows, m.cols), m.offset))
    ordered = [matrix for matrix in ordered if matrix.rows * matrix.cols]
    table, upper, whole, wide, firsts, elements, square_elements = [], [], [], [], [0], 0, 0
    for index, (offset, rows, cols, _) in enumerate(ordered):
        short, long = sorted((rows, cols))
        stride, square = -(-long // PAD) * PAD, -(-short // PAD) * PAD
        table.append((offset, rows, cols, short, elements, stride, square_elements, square))
        elements, square_elements = elements + short * stride, square_elements + short * square
        down, across = -(-short // block), -(-stride // block)
        upper += [(index, i, j) for i in range(down) for j in range(i, down)]
        whole += [(index, i, j) for i in range(down) for j in range(across)]
        wide += [(index, i, j) for i in range(-(-rows // EDGE)) for j in range(-(-cols // EDGE))]
        firsts.append(len(wide))

    def tensor(numbers: Sequence[object], width: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=device).view(-1, width)

    gains = torch.tensor([matrix.gain for matrix in ordered], dtype=torch.float32, device=device)
    return _Tables(
        tensor(table, COLUMNS),
        gains,
        tensor(upper, 3),
        tensor(whole, 3),
        tensor(wide, 3),
        tensor(firsts, 1).view(-1),
        elements,
        square_elements,
    )


def _normalize(flat: Tensor, x: Tensor, tables: _Tables, eps: float) -> None:
    """Divides by the largest element, then by the norm, as ``newton_schulz`` does; tall matrices are transposed."""
    tiles, matrices, device = len(tables.wide), len(tables.table), flat.device
    partial = torch.empty(tiles, dtype=torch.float32, device=device)
    largest, norm = (torch.empty(matrices, dtype=torch.float32, device=device) for _ in range(2))
    options = {"EDGE": EDGE, "num_warps": 8, "enable_fp_fusion": False}
    finish = {"LANES": LANES, "enable_fp_fusion": False}
    _largest[(tiles,)](tables.table, tables.wide, flat, partial, **options)
    _finish[(matrices,)](tables.firsts, partial, largest, float(eps), ROOT=False, **finish)
    _squares[(tiles,)](tables.table, tables.wide, flat, largest, partial, **options)
    _finish[(matrices,)](tables.firsts, partial, norm, 1.0, ROOT=True, **finish)
    _scaled[(tiles,)](tables.table, tables.wide, flat, largest, norm, x, **options)


@jit
def _tile_of(table, tiles):
    """Of a program: its matrix, that matrix's row of the table, and the tile's row and column."""
    row = tiles + tl.program_id(0).to(tl.int64) * 3
    matrix = tl.load(row)
    return matrix, table + matrix * 8, tl.load(row + 1), tl.load(row + 2)


@jit
def _elements(entry, i, j, flat, EDGE: tl.constexpr):
    """A tile of a matrix as it lies in ``flat``, float32, zero outside; its rows and its columns."""
    r, c = i * EDGE + tl.arange(0, EDGE), j * EDGE + tl.arange(0, EDGE)
    rows, cols = tl.load(entry + 1), tl.load(entry + 2)
    at = tl.load(entry) + r[:, None] * cols + c[None, :]
    return tl.load(flat + at, (r[:, None] < rows) & (c[None, :] < cols), 0.0).to(tl.float32), r, c


@jit
def _largest(table, tiles, flat, partial, EDGE: tl.constexpr):
    matrix, entry, i, j = _tile_of(table, tiles)
    x, r, c = _elements(entry, i, j, flat, EDGE)
    tl.store(partial + tl.program_id(0).to(tl.int64), tl.max(tl.max(tl.abs(x), axis=1), axis=0))


@jit
def _squares(table, tiles, flat, largest, partial, EDGE: tl.constexpr):
    matrix, entry, i, j = _tile_of(table, tiles)
    x, r, c = _elements(entry, i, j, flat, EDGE)
    x = tl.div_rn(x, tl.load(largest + matrix))
    tl.store(partial + tl.program_id(0).to(tl.int64), tl.sum(tl.sum(x * x, axis=1), axis=0))


@jit
def _finish(firsts, partial, result, least, ROOT: tl.constexpr, LANES: tl.constexpr):
    """The largest, or the root of the sum, of a matrix's partial results, in order; at least ``least``."""
    matrix = tl.program_id(0).to(tl.int64)
    start, stop = tl.load(firsts + matrix), tl.load(firsts + matrix + 1)
    lanes = tl.zeros((LANES,), tl.float32)
    for at in range(start, stop, LANES):
        k = at + tl.arange(0, LANES).to(tl.int64)
        found = tl.load(partial + k, k < stop, 0.0)
        if ROOT:
            lanes += found
        else:
            lanes = tl.maximum(lanes, found)
    if ROOT:
        value = tl.sqrt_rn(tl.sum(lanes, axis=0))
        value = tl.where(value < least, least, value)  # so that a NaN stays one
    else:
        value = tl.maximum(tl.max(lanes, axis=0), least)
    tl.store(result + matrix, value)


@jit
def _scaled(table, tiles, flat, largest, norm, x, EDGE: tl.constexpr):
    matrix, entry, i, j = _tile_of(table, tiles)
    values, r, c = _elements(entry, i, j, flat, EDGE)
    values = tl.div_rn(tl.div_rn(values, tl.load(largest + matrix)), tl.load(norm + matrix)).to(x.dtype.element_ty)
    rows, cols = tl.load(entry + 1), tl.load(entry + 2)
    x += tl.multiple_of(tl.load(entry + 4), 16)
    stride = tl.multiple_of(tl.load(entry + 5), 16)
    if rows > cols:
        at = c[:, None] * stride + r[None, :]
        tl.store(x + at, tl.trans(values), (c[:, None] < cols) & (r[None, :] < stride))
    else:
        at = r[:, None] * stride + c[None, :]
        tl.store(x + at, values, (r[:, None] < rows) & (c[None, :] < stride))


@jit
def _symmetric(
    table, tiles, x, out, gains, linear, square, SQUARE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr
):
    """``square x x^T + linear x`` of every matrix; ``x`` is a gram matrix itself with SQUARE."""
    matrix, entry, i, j = _tile_of(table, tiles)
    rows = tl.load(entry + 3)
    out += tl.multiple_of(tl.load(entry + 6), 16)
    stride = tl.multiple_of(tl.load(entry + 7), 16)
    if SQUARE:
        x += tl.multiple_of(tl.load(entry + 6), 16)
        width = stride
    else:
        x += tl.multiple_of(tl.load(entry + 4), 16)
        width = tl.multiple_of(tl.load(entry + 5), 16)
    if gains is not None:
        linear, square = linear * tl.load(gains + matrix), square * tl.load(gains + matrix)
    total = symmetric_tile(x, i, j, rows, width, width, BLOCK, BLOCK_K)
    store_symmetric(x, out, total, i, j, rows, stride, linear, square, BLOCK)


@jit
def _product(table, tiles, p, x, out, gains, shift, LAST: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """``shift x + p x`` of every matrix; with LAST, transposed back where it was tall, in its place in ``out``."""
    matrix, entry, i, j = _tile_of(table, tiles)
    rows, cols = tl.load(entry + 3), tl.load(entry + 2)
    at = tl.multiple_of(tl.load(entry + 4), 16)
    stride = tl.multiple_of(tl.load(entry + 5), 16)
    p += tl.multiple_of(tl.load(entry + 6), 16)
    if gains is not None:
        shift *= tl.load(gains + matrix)
    total = shifted_tile(
        p, x + at, i, j, rows, stride, tl.multiple_of(tl.load(entry + 7), 16), stride, shift, BLOCK, BLOCK_K
    )
    r, c = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    if LAST:
        out += tl.load(entry)
        result = total.to(p.dtype.element_ty).to(out.dtype.element_ty)
        if tl.load(entry + 1) > cols:
            inside = (c[:, None] < tl.load(entry + 1)) & (r[None, :] < cols)
            tl.store(out + c[:, None] * cols + r[None, :], tl.trans(result), inside)
        else:
            tl.store(out + r[:, None] * cols + c[None, :], result, (r[:, None] < rows) & (c[None, :] < cols))
    else:
        inside = (r[:, None] < rows) & (c[None, :] < stride)
        tl.store(out + at + r[:, None] * stride + c[None, :], total.to(out.dtype.element_ty), inside)
