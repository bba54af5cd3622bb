"""Adam with both moments in eight bits, in one pass: 16 bytes per element where float32 moments take 28.

A block is 256 consecutive elements and has a scale per moment; ``optimizers.quantize`` has the map. Two formats::

    "none"   m    signed map, scale = the element of largest magnitude, with its sign
             v    the root of v in the unsigned map, scale = the largest; what is not zero is never coded zero
    "bnb"    m    signed map, scale = the largest magnitude, at least 1e-12
             v    unsigned map, scale = the largest, at least 1e-12 (bitsandbytes 0.50.2, torchao 0.18)

The parameter is stepped by the moments before they are coded: the error of a code enters the next step only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from optimizers.kernels.adamw import decays_of, rate_of, stepped
from optimizers.kernels.dynamic_map import ZERO, decoded, encoded, tables
from optimizers.kernels.language import jit, runs_kernels, tl
from optimizers.kernels.momentum import lerp
from optimizers.kernels.operand import FLOAT32, FLOATS, RATES, expect
from optimizers.quantize import BLOCK, TINY, dequantize, quantize

LEAST_SCALE = 1e-12  # of "bnb": torchao/optim/quant_utils.py, scale_tensor
ROWS = 4  # blocks of a program: eight elements for each of four warps' threads
CHUNK = 256  # blocks that the twin takes at a time: what it makes on the way stays in cache
COMPAT = ("none", "bnb")

Spans = tuple[tuple[int, int], ...]


class Moments(NamedTuple):
    """Both moments in eight bits: codes (n,) uint8, and a scale per block, (num_blocks,) float32."""

    exp_avg: Tensor
    exp_avg_scale: Tensor
    exp_avg_sq: Tensor
    exp_avg_sq_scale: Tensor


def num_blocks(spans: Sequence[tuple[int, int]]) -> int:
    """Returns how many blocks ``spans`` have: each begins a block, and its last may be short."""
    return sum(-(-(stop - start) // BLOCK) for start, stop in spans)


def adam8bit_(
    param: Tensor,
    grad: Tensor,
    moments: Moments,
    step: Tensor,
    *,
    lr: float | Tensor,
    betas: Sequence[float | Tensor],
    eps: float,
    weight_decay: float | Tensor,
    spans: Spans | None = None,
    compat: str = "none",
    skip: Tensor | None = None,
    low: Tensor | None = None,
) -> None:
    """Steps ``param`` and both moments in place.

    Args:
        param: (n,) float32.
        grad: (n,) float32, left as it is.
        moments: Codes of the same length; scales of the blocks of all spans, in order. Zeros are zero moments.
        step: () float32, the steps completed before this one; left as it is.
        lr: Learning rate, parameter units per step; a number, or () float32 or float64 on the parameter's device.
        betas: Decay of the two moments per step, each in [0, 1); numbers or 0-d tensors.
        eps: Added to the root of the second moment, in units of the gradient.
        weight_decay: Fraction of the parameter removed per step and per unit of ``lr``; a number or a 0-d tensor.
        spans: Stretches of elements, each a parameter's part that begins at a block, ascending; what lies between is
            not touched. None for one stretch, all of it. A tuple, since its table on the device is made once.
        compat: ``"none"``, or ``"bnb"`` for the format of bitsandbytes and torchao.
        skip: None, or () float32: 1.0 writes nothing.
        low: None, or (n,) bfloat16, float16 or float32: the parameter afterwards, rounded.

    Raises:
        ValueError: If a tensor, a span or compat does not fit.
    """
    n = param.numel()
    spans = ((0, n),) if spans is None else spans
    if compat not in COMPAT:
        raise ValueError(f"adam8bit_: expected compat from {COMPAT}, got {compat!r}")
    _check_spans(spans, n)
    scales = (num_blocks(spans),)
    expect(
        "adam8bit_",
        param=(param, (n,), FLOAT32),
        grad=(grad, (n,), FLOAT32),
        exp_avg=(moments.exp_avg, (n,), (torch.uint8,)),
        exp_avg_scale=(moments.exp_avg_scale, scales, FLOAT32),
        exp_avg_sq=(moments.exp_avg_sq, (n,), (torch.uint8,)),
        exp_avg_sq_scale=(moments.exp_avg_sq_scale, scales, FLOAT32),
        step=(step, (), FLOAT32),
        lr=(lr if isinstance(lr, Tensor) else None, (), RATES),
        skip=(skip, (), FLOAT32),
        low=(low, (n,), FLOATS),
    )
    run = adam8bit_triton if runs_kernels(param) else adam8bit_torch
    run(
        param,
        grad,
        moments,
        step,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        spans=spans,
        compat=compat,
        skip=skip,
        low=low,
    )


def _check_spans(spans: Spans, n: int) -> None:
    edge = 0
    for start, stop in spans:
        if not edge <= start <= stop <= n:
            raise ValueError(f"adam8bit_: expected ascending spans within {n} elements, got [{start}, {stop})")
        edge = stop


def adam8bit_torch(
    param: Tensor,
    grad: Tensor,
    moments: Moments,
    step: Tensor,
    *,
    lr: float | Tensor,
    betas: Sequence[float | Tensor],
    eps: float,
    weight_decay: float | Tensor,
    spans: Spans,
    compat: str,
    skip: Tensor | None = None,
    low: Tensor | None = None,
) -> None:
    """The twin. It works on whole blocks, the last one padded, so that no operator has a tail of another rounding."""
    if skip is not None and skip > 0:  # on CPU, where reading costs nothing
        return
    rate, t, (beta1, beta2) = float(lr), float(step) + 1, map(float, betas)
    numbers = _Numbers(
        beta1=beta1,
        beta2=beta2,
        decay=1 - rate * float(weight_decay),
        rate=rate / (1 - beta1**t),
        unbias=math.sqrt(1 - beta2**t),
        eps=eps,
        q8=compat == "none",
    )
    block = 0
    for start, stop in spans:
        for at in range(start, stop, CHUNK * BLOCK):
            end = min(at + CHUNK * BLOCK, stop)
            scales = slice(block, block - (at - end) // BLOCK)
            flat = (param, moments.exp_avg, moments.exp_avg_sq)
            p, m, v = (_blocks(tensor[at:end], zero) for tensor, zero in zip(flat, (0, ZERO, 0), strict=True))
            gradient = _blocks(grad[at:end], 0)
            _step_blocks(p, gradient, m, v, moments.exp_avg_scale[scales], moments.exp_avg_sq_scale[scales], numbers)
            if (end - at) % BLOCK:
                for tensor, blocks in zip(flat, (p, m, v), strict=True):
                    tensor[at:end] = blocks.view(-1)[: end - at]
            block = scales.stop
    if low is not None:
        for start, stop in spans:
            low[start:stop] = param[start:stop]


class _Numbers(NamedTuple):
    beta1: float
    beta2: float
    decay: float
    rate: float
    unbias: float
    eps: float
    q8: bool


def _blocks(flat: Tensor, zero: int) -> Tensor:
    """(rows, BLOCK), a view of whole blocks; a copy padded by ``zero`` where the last is short."""
    missing = -flat.numel() % BLOCK
    return (torch.nn.functional.pad(flat, (0, missing), value=zero) if missing else flat).view(-1, BLOCK)


def _step_blocks(
    param: Tensor, grad: Tensor, avg: Tensor, avg_sq: Tensor, avg_scale: Tensor, avg_sq_scale: Tensor, by: _Numbers
) -> None:
    shape, flat = param.shape, grad.reshape(-1)
    m = dequantize(avg.view(-1), avg_scale, signed=True).lerp_(flat, 1 - by.beta1)
    v = dequantize(avg_sq.view(-1), avg_sq_scale, signed=False)
    v = (v.square_() if by.q8 else v).lerp_(flat.square(), 1 - by.beta2)
    root = v.sqrt()
    param.mul_(by.decay).addcdiv_(m.view(shape), (root / by.unbias).add_(by.eps).view(shape), value=-by.rate)
    least = 0.0 if by.q8 else LEAST_SCALE
    coded = quantize(m, signed=True, signed_scale=by.q8, least=least)
    coded_sq = quantize(root if by.q8 else v, signed=False, floor=by.q8, least=least)
    for target, value in zip((avg, avg_scale, avg_sq, avg_sq_scale), (*coded, *coded_sq), strict=True):
        target.copy_(value.view(target.shape))


def adam8bit_triton(
    param: Tensor,
    grad: Tensor,
    moments: Moments,
    step: Tensor,
    *,
    lr: float | Tensor,
    betas: Sequence[float | Tensor],
    eps: float,
    weight_decay: float | Tensor,
    spans: Spans,
    compat: str,
    skip: Tensor | None = None,
    low: Tensor | None = None,
) -> None:
    """The kernel."""
    blocks = num_blocks(spans)
    if blocks:
        _adam8bit[(-(-blocks // ROWS),)](
            param,
            grad,
            *moments,
            tables(param.device),
            _edges(spans, param.device),
            step,
            skip,
            low,
            blocks,
            *rate_of(lr),
            float(eps),
            *decays_of(betas, weight_decay),
            Q8=compat == "none",
            ALIGN=math.gcd(16, *(edge for span in spans for edge in span)),
            ZERO=ZERO,
            TINY=TINY,
            LEAST=LEAST_SCALE if compat == "bnb" else 0.0,
            ROWS=ROWS,
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )


@functools.lru_cache(maxsize=4096)
def _edges(spans: Spans, device: torch.device) -> Tensor:
    """First and last element of every block, (2, num_blocks) int64."""
    starts = [at for start, stop in spans for at in range(start, stop, BLOCK)]
    stops = [min(at + BLOCK, stop) for start, stop in spans for at in range(start, stop, BLOCK)]
    return torch.tensor([starts, stops], dtype=torch.int64, device=device)


@jit
def _adam8bit(
    param,
    grad,
    avg,
    avg_scale,
    avg_sq,
    avg_sq_scale,
    table,
    edges,
    step,
    skip,
    low,
    blocks,
    lr,
    lr_at,
    eps,
    gain1,
    beta2,
    gain2,
    log_beta1,
    log_beta2,
    weight_decay,
    given,
    Q8: tl.constexpr,
    ALIGN: tl.constexpr,
    ZERO: tl.constexpr,
    TINY: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if given is not None:
        gain1, gain2 = tl.load(given), tl.load(given + 2)
        log_beta1, log_beta2, weight_decay = tl.load(given + 3), tl.load(given + 4), tl.load(given + 5)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < blocks if skip is None else row < tl.where(tl.load(skip) > 0, 0, blocks)
    start = tl.multiple_of(tl.load(edges + row, exists, 0), [ALIGN])
    stop = tl.multiple_of(tl.load(edges + (blocks + row), exists, 0), [ALIGN])
    at = start[:, None] + tl.arange(0, BLOCK)[None, :]
    inside = at < stop[:, None]
    p, g = tl.load(param + at, inside, 0.0), tl.load(grad + at, inside, 0.0)
    m = decoded(tl.load(avg + at, inside, ZERO), table) * tl.load(avg_scale + row, exists, 0.0)[:, None]
    v = decoded(tl.load(avg_sq + at, inside, 0), table + 2 * 256) * tl.load(avg_sq_scale + row, exists, 0.0)[:, None]
    m = lerp(m, g, gain1)
    if Q8:
        v = v * v
    v = lerp(v, g * g, gain2)
    p = stepped(p, m, v, step, lr, lr_at, log_beta1, log_beta2, eps, weight_decay)
    tl.store(param + at, p, inside)
    if low is not None:
        tl.store(low + at, p.to(low.dtype.element_ty), inside)
    high, lowest = tl.max(m, axis=1), tl.min(m, axis=1)
    if Q8:
        scale = tl.where(high >= -lowest, high, lowest)
        v = tl.sqrt_rn(v)
    else:
        scale = tl.maximum(high, -lowest)
    # Maxima pass over a NaN; the sum does not, so that it shows in the scale, as in the twin.
    scale = settled(scale, LEAST, TINY) + tl.sum(m * 0.0, axis=1)
    codes = encoded(tl.div_rn(m, tl.where(scale == 0.0, 1.0, scale)[:, None]), table + 256, True)
    tl.store(avg + at, codes.to(tl.uint8), inside)
    tl.store(avg_scale + row, scale, exists)
    scale = settled(tl.max(v, axis=1), LEAST, TINY)
    codes = encoded(tl.div_rn(v, tl.where(scale == 0.0, 1.0, scale)[:, None]), table + 3 * 256, False)
    if Q8:
        codes = tl.maximum(codes, (v > 0).to(tl.int32))
    tl.store(avg_sq + at, codes.to(tl.uint8), inside)
    tl.store(avg_sq_scale + row, scale, exists)


@jit
def settled(scale, LEAST: tl.constexpr, TINY: tl.constexpr):
    """A scale that is at least ``LEAST``; without one, zero where it is below ``TINY``."""
    if LEAST > 0.0:
        return tl.maximum(scale, LEAST)
    else:
        return tl.where(tl.abs(scale) < TINY, 0.0, scale)
