"""``shift x + p x``: the last product of a Newton-Schulz step, with its sum rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from optimizers.kernels.gram import TILES, rounded
from optimizers.kernels.language import jit, runs_kernels, tl
from optimizers.kernels.operand import FLOATS, expect

# Rows of tiles that share a column of tiles in cache; the usual number of Triton's matrix multiplication tutorial.
GROUP = 8


def shifted_product(p: Tensor, x: Tensor, *, shift: float, dtype: torch.dtype | None = None) -> Tensor:
    """Returns ``shift x + p x``, summed in float32 and rounded once.

    Args:
        p: (m, m) or (B, m, m) bfloat16, float16 or float32, contiguous; float64 has no kernel.
        x: (m, n) or (B, m, n) of the same dtype, contiguous.
        shift: Factor of ``x``.
        dtype: The result is rounded to its numbers; it keeps the dtype of ``x``. None for that of ``x``.

    Raises:
        ValueError: If ``p`` and ``x`` do not fit.
    """
    if x.ndim not in (2, 3):
        raise ValueError(f"shifted_product: expected x of shape (m, n) or (B, m, n), got {tuple(x.shape)}")
    expect("shifted_product", x=(x, x.shape, (*FLOATS, torch.float64)), p=(p, (*x.shape[:-1], x.size(-2)), (x.dtype,)))
    if runs_kernels(x) and x.dtype in TILES:
        return shifted_product_triton(p, x, shift=shift)
    return shifted_product_torch(p, x, shift=shift, dtype=dtype)


def shifted_product_torch(p: Tensor, x: Tensor, *, shift: float, dtype: torch.dtype | None = None) -> Tensor:
    """The twin."""
    addmm = torch.addmm if x.ndim == 2 else torch.baddbmm
    return rounded(addmm(x, p, x, beta=shift), dtype)


def shifted_product_triton(p: Tensor, x: Tensor, *, shift: float) -> Tensor:
    """The kernel: one program per tile of the result, of the size that ``gram`` has for this dtype."""
    rows, cols = x.shape[-2:]
    out = torch.empty_like(x)
    if out.numel() == 0:
        return out
    block, block_k, warps, stages = TILES[x.dtype]
    down, across = -(-rows // block), -(-cols // block)
    _shifted_product[(down * across, x.numel() // (rows * cols))](
        p,
        x,
        out,
        rows,
        cols,
        down,
        across,
        float(shift),
        BLOCK=block,
        BLOCK_K=block_k,
        GROUP=GROUP,
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=False,
    )
    return out


@jit
def _shifted_product(
    p,
    x,
    out,
    rows,
    cols,
    down,
    across,
    shift,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    number, at = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = number // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    inner = number % (GROUP * across)
    i, j = first + inner % height, inner // height
    m, n = tl.cast(rows, tl.int64), tl.cast(cols, tl.int64)
    x += at * m * n
    total = shifted_tile(p + at * m * m, x, i, j, m, n, m, n, shift, BLOCK, BLOCK_K)
    r = i.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = j.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (r[:, None] < m) & (c[None, :] < n)
    tl.store(out + at * m * n + r[:, None] * n + c[None, :], total.to(out.dtype.element_ty), inside)


@jit
def shifted_tile(p, x, i, j, rows, cols, stride_p, stride_x, shift, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Tile (i, j) of ``shift x + p x`` in float32; strides from row to row in elements, all sizes are int64.

    Columns of ``p`` from ``rows`` to ``stride_p`` are zero.
    """
    r = i.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = j.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, rows, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K).to(tl.int64)
        left = tl.load(p + r[:, None] * stride_p + k[None, :], (r[:, None] < rows) & (k[None, :] < stride_p), 0.0)
        right = tl.load(x + k[:, None] * stride_x + c[None, :], (k[:, None] < rows) & (c[None, :] < cols), 0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    inside = (r[:, None] < rows) & (c[None, :] < cols)
    return total + shift * tl.load(x + r[:, None] * stride_x + c[None, :], inside, 0.0).to(tl.float32)
