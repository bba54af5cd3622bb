"""Symmetric products: ``x x^T``, and ``linear A + square A^2`` of a symmetric ``A``; one triangle is computed.

A matrix of 5 x 5 tiles: 15 are computed, by the programs numbered here, and stored twice::

     0  1  2  3  4         programs 5 to 9 have row 1 and, behind its end, row 4; 10 to 14 rows 2 and 3:
        5  6  7  8         three rows of five programs, none of them idle
          10 11 12
             13 14         tile (i, j) is stored at (i, j) and, transposed, at (j, i)
                 9

Result and mirror are the same bits. One tile size per dtype, whatever the shape and the batch, and one order of
summation, so a matrix has the same result alone and in a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimizers.kernels.language import jit, runs_kernels, tl
from optimizers.kernels.operand import FLOATS, expect

# Rows and columns of a tile, elements of a sum's stage, warps, stages in flight. 16-bit: the tile that fills the matrix
# units of sm_80 to sm_100 within 96 KiB of shared memory. float32 is summed without tensor cores ("ieee": TF32 drops
# thirteen bits, microsoft/dion pull request 30), where a larger tile spills.
TILES = {torch.bfloat16: (128, 64, 8, 3), torch.float16: (128, 64, 8, 3), torch.float32: (64, 32, 8, 2)}


def gram(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Returns ``x x^T`` of a matrix or of each of a batch.

    Args:
        x: (m, n) or (B, m, n) bfloat16, float16 or float32, contiguous; float64 has no kernel.
        dtype: The result is rounded to its numbers, once; it keeps the dtype of ``x``. None for that of ``x``.

    Returns:
        (m, m) or (B, m, m); sums are float32.

    Raises:
        ValueError: If ``x`` does not fit.
    """
    _check("gram", x)
    return gram_triton(x) if runs_kernels(x) and x.dtype in TILES else gram_torch(x, dtype=dtype)


def gram_torch(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """The twin of ``gram``."""
    return rounded(x @ x.mT, dtype)


def gram_triton(x: Tensor) -> Tensor:
    """The kernel of ``gram``."""
    return _launch(x, 0.0, 1.0)


def polynomial(a: Tensor, *, linear: float, square: float, dtype: torch.dtype | None = None) -> Tensor:
    """Returns ``linear a + square a^2``, summed in float32 and rounded once.

    Args:
        a: (m, m) or (B, m, m) bfloat16, float16 or float32, contiguous and symmetric, which is not checked.
        linear: Factor of ``a``.
        square: Factor of its square.
        dtype: The result is rounded to its numbers; it keeps the dtype of ``a``. None for that of ``a``.

    Raises:
        ValueError: If ``a`` does not fit.
    """
    _check("polynomial", a)
    if a.size(-1) != a.size(-2):
        raise ValueError(f"polynomial: expected square matrices, got shape {tuple(a.shape)}")
    if runs_kernels(a) and a.dtype in TILES:
        return polynomial_triton(a, linear=linear, square=square)
    return polynomial_torch(a, linear=linear, square=square, dtype=dtype)


def polynomial_torch(a: Tensor, *, linear: float, square: float, dtype: torch.dtype | None = None) -> Tensor:
    """The twin of ``polynomial``."""
    addmm = torch.addmm if a.ndim == 2 else torch.baddbmm
    return rounded(addmm(a, a, a, beta=linear, alpha=square), dtype)


def polynomial_triton(a: Tensor, *, linear: float, square: float) -> Tensor:
    """The kernel of ``polynomial``."""
    return _launch(a, linear, square)


def rounded(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Returns ``x`` rounded to the numbers of ``dtype``, its own dtype kept; ``x`` itself where they are the same."""
    return x if dtype is None else x.to(dtype).to(x.dtype)


def _check(kernel: str, x: Tensor) -> None:
    if x.ndim not in (2, 3):
        raise ValueError(f"{kernel}: expected shape (m, n) or (B, m, n), got {tuple(x.shape)}")
    expect(kernel, x=(x, x.shape, (*FLOATS, torch.float64)))


def _launch(x: Tensor, linear: float, square: float) -> Tensor:
    rows, cols = x.shape[-2:]
    out = torch.empty((*x.shape[:-1], rows), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    block, block_k, warps, stages = TILES[x.dtype]
    tiles = -(-rows // block)
    _symmetric[(tiles * (tiles + 1) // 2, out.numel() // rows**2)](
        x,
        out,
        rows,
        cols,
        tiles,
        float(linear),
        float(square),
        BLOCK=block,
        BLOCK_K=block_k,
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=False,
    )
    return out


@jit
def _symmetric(
    x,
    out,
    rows,
    cols,
    tiles,
    linear,
    square,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    i, j = upper_tile(tl.program_id(0), tiles)
    at = tl.program_id(1).to(tl.int64)
    m, n = tl.cast(rows, tl.int64), tl.cast(cols, tl.int64)
    x += at * m * n
    total = symmetric_tile(x, i, j, m, n, n, BLOCK, BLOCK_K)
    store_symmetric(x, out + at * m * m, total, i, j, m, m, linear, square, BLOCK)


@jit
def upper_tile(number, tiles):
    """Row and column of the tile of a program, in the folded triangle drawn at the top of this file."""
    width = tiles + 1 - tiles % 2
    row, col = number // width, number % width
    folded = tiles - row - 1 + tiles % 2
    upper = col < tiles - row
    return tl.where(upper, row, folded), tl.where(upper, row + col, folded + col - (tiles - row))


@jit
def symmetric_tile(x, i, j, rows, cols, stride, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Tile (i, j) of ``x x^T`` in float32; ``x`` has ``stride`` elements from row to row, all sizes are int64."""
    r = i.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = j.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, cols, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K).to(tl.int64)
        left = tl.load(x + r[:, None] * stride + k[None, :], (r[:, None] < rows) & (k[None, :] < cols), 0.0)
        right = tl.load(x + c[None, :] * stride + k[:, None], (c[None, :] < rows) & (k[:, None] < cols), 0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    return total


@jit
def store_symmetric(x, out, total, i, j, rows, stride, linear, square, BLOCK: tl.constexpr):
    """Stores ``square total + linear x`` at tile (i, j) of ``out`` and, transposed, at (j, i).

    ``x`` and ``out`` have ``stride`` >= ``rows`` elements from row to row, and columns as many.
    """
    r = i.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = j.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (r[:, None] < rows) & (c[None, :] < stride)
    if linear != 0.0:
        total = square * total + linear * tl.load(x + r[:, None] * stride + c[None, :], inside, 0.0).to(tl.float32)
    total = total.to(out.dtype.element_ty)
    mirror = tl.trans(total)
    if i == j:  # its lower half is the mirror of its upper one: the result is symmetric to the bit
        total = tl.where(r[:, None] <= c[None, :], total, mirror)
    tl.store(out + r[:, None] * stride + c[None, :], total, inside)
    below = tl.where(i == j, 0, rows)
    tl.store(out + c[:, None] * stride + r[None, :], mirror, (c[:, None] < below) & (r[None, :] < stride))
