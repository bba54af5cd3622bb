"""Flat buffers in eight bits: blocks of consecutive elements with a scale each, in one pass.

Two formats, both with ``scale = largest magnitude / largest code``, so that the extreme of a block is kept::

    int8            codes -127 .. 127, evenly spaced: error at most scale / 2
    float8_e4m3fn   1 sign, 4 exponent and 3 fraction bits, largest 448 (arXiv 2209.05433): error at most 2^-4 of the
                    element, or 2^-10 scale where the code is subnormal

Codes of float8 are made by integer arithmetic, so that a GPU without the format (sm_80) makes the same ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vescale.kernels.language import jit, runs_kernels, tl

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
TINY = 1e-36  # a scale below it counts as zero: dividing by it would leave the range of float32
ELEMENTS = 2048  # of a program
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def quantize(x: Tensor, *, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the codes, (n,) ``dtype``, and the scales, (ceil(n / block),) float32.

    Args:
        x: (n,) float32, bfloat16 or float16, contiguous. A NaN or infinity makes its block NaN.
        block: Elements that share a scale: a power of two from 16 to 2048. The last block may be short.
        dtype: ``torch.int8`` or ``torch.float8_e4m3fn``.

    Raises:
        ValueError: If an argument does not fit.
    """
    _check("quantize", block, dtype)
    if x.ndim != 1 or x.dtype not in FLOATS or not x.is_contiguous():
        raise ValueError(
            f"quantize: expected a contiguous flat float32, bfloat16 or float16, got {tuple(x.shape)} {x.dtype} with "
            f"strides {x.stride()}"
        )
    return (quantize_triton if runs_kernels(x) else quantize_torch)(x, block=block, dtype=dtype)


def dequantize(codes: Tensor, scales: Tensor, *, block: int, out: Tensor) -> None:
    """Writes ``codes`` times their scales to ``out``.

    Args:
        codes: (n,) int8 or float8_e4m3fn, contiguous.
        scales: (ceil(n / block),) float32, contiguous.
        block: As in ``quantize``.
        out: (n,) float32, bfloat16 or float16, contiguous.

    Raises:
        ValueError: If an argument does not fit.
    """
    _check("dequantize", block, codes.dtype)
    n = codes.numel()
    fits = codes.shape == out.shape == (n,) and scales.shape == (-(-n // block),) and scales.dtype is torch.float32
    if not fits or out.dtype not in FLOATS or not all(t.is_contiguous() for t in (codes, scales, out)):
        raise ValueError(
            f"dequantize: expected contiguous codes (n,), scales (ceil(n / {block}),) float32 and out (n,) float32, "
            f"bfloat16 or float16, got {tuple(codes.shape)}, {tuple(scales.shape)} {scales.dtype} and "
            f"{tuple(out.shape)} {out.dtype}"
        )
    (dequantize_triton if runs_kernels(codes) else dequantize_torch)(codes, scales, block=block, out=out)


def quantize_torch(x: Tensor, *, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The twin of ``quantize``."""
    blocks = torch.nn.functional.pad(x.float(), (0, -x.numel() % block)).view(-1, block)
    scales = blocks.abs().amax(dim=1) / LARGEST[dtype] if blocks.numel() else blocks.new_empty(0)
    scales = torch.where(scales < TINY, 0, scales)
    relative = blocks / torch.where(scales == 0, 1, scales)[:, None]
    codes = relative.nan_to_num().round().to(dtype) if dtype is torch.int8 else relative.to(dtype)
    return codes.view(-1)[: x.numel()].contiguous(), scales


def dequantize_torch(codes: Tensor, scales: Tensor, *, block: int, out: Tensor) -> None:
    """The twin of ``dequantize``."""
    out.copy_(codes.float() * scales.repeat_interleave(block)[: codes.numel()])


def quantize_triton(x: Tensor, *, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The kernel of ``quantize``."""
    n = x.numel()
    codes = torch.empty(n, dtype=torch.uint8, device=x.device)
    scales = torch.empty(-(-n // block), dtype=torch.float32, device=x.device)
    if n:
        _quantize[(-(-n // ELEMENTS),)](
            x,
            codes,
            scales,
            n,
            LARGEST=LARGEST[dtype],
            INTEGER=dtype is torch.int8,
            TINY=TINY,
            ROWS=ELEMENTS // block,
            BLOCK=block,
            enable_fp_fusion=False,
        )
    return codes.view(dtype), scales


def dequantize_triton(codes: Tensor, scales: Tensor, *, block: int, out: Tensor) -> None:
    """The kernel of ``dequantize``."""
    n = codes.numel()
    if n:
        _dequantize[(-(-n // ELEMENTS),)](
            codes.view(torch.uint8),
            scales,
            out,
            n,
            INTEGER=codes.dtype is torch.int8,
            BLOCK=block,
            ELEMENTS=ELEMENTS,
            enable_fp_fusion=False,
        )


def _check(name: str, block: int, dtype: torch.dtype) -> None:
    if dtype not in LARGEST:
        raise ValueError(f"{name}: expected codes of {' or '.join(map(str, LARGEST))}, got {dtype}")
    if block not in (16, 32, 64, 128, 256, 512, 1024, 2048):
        raise ValueError(f"{name}: expected block, a power of two from 16 to 2048, got {block}")


@jit
def _quantize(
    x,
    codes,
    scales,
    n,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    TINY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < n
    values = tl.load(x + at, inside, 0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(values), axis=1), LARGEST)
    # The maximum passes over a NaN, the sum does not.
    scale = tl.where(scale < TINY, 0.0, scale) + tl.sum(values * 0.0, axis=1)
    tl.store(scales + row, scale, row * BLOCK < n)
    relative = tl.div_rn(values, tl.where(scale == 0.0, 1.0, scale)[:, None])
    code = integer_code(relative) if INTEGER else float8_code(relative)
    tl.store(codes + at, code.to(tl.uint8), inside)


@jit
def integer_code(x):
    """Eight bits of the nearest integer, half-way to the even one: 1.5 * 2^23 leaves no room for a fraction."""
    x = tl.where(x == x, x, 0.0)
    return ((x + 12582912.0) - 12582912.0).to(tl.int32) & 255


@jit
def float8_code(x):
    """Eight bits of the nearest float8_e4m3fn, half-way to the even one, of |x| <= 448; NaN stays NaN.

    Subnormals are multiples of 2^-9, which is the last place of a float32 between 2^14 and 2^15. For the others the
    exponent's bias falls from 127 to 7, and 20 of the fraction's 23 bits are rounded away.
    """
    bits = x.to(tl.int32, bitcast=True)
    sign, magnitude = (bits >> 24) & 128, bits & 0x7FFFFFFF
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    large = (magnitude - (120 << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    code = tl.where(magnitude < (121 << 23), small, large)
    return sign | tl.where(magnitude > 0x43E80000, 127, code)


@jit
def _dequantize(codes, scales, out, n, INTEGER: tl.constexpr, BLOCK: tl.constexpr, ELEMENTS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < n
    code = tl.load(codes + at, inside, 0).to(tl.int32)
    value = (code << 24 >> 24).to(tl.float32) if INTEGER else float8_value(code)
    tl.store(out + at, (value * tl.load(scales + at // BLOCK, inside, 0.0)).to(out.dtype.element_ty), inside)


@jit
def float8_value(code):
    """The number of a float8_e4m3fn: moved up by 20 bits it is a float32 whose exponent is 120 short."""
    moved = ((code & 127) << 20) + (120 << 23)
    value = tl.where((code & 120) == 0, (code & 7).to(tl.float32) * 0.001953125, moved.to(tl.float32, bitcast=True))
    value = tl.where((code & 127) == 127, float("nan"), value)
    return tl.where(code >= 128, -value, value)
