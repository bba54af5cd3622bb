"""Momentum and what is orthogonalised, packed for the wire, in one pass: 12 bytes read and written become the send
buffer's 2 without a pass of its own.

::

    M <- decay M + (1 - decay) G
    U  = decay M + (1 - decay) G     with nesterov, else U = M
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimizers.fields import exact, weight
from optimizers.in_cache import in_cache
from optimizers.kernels.language import jit, runs_kernels, tl
from optimizers.kernels.operand import FLOAT32, FLOATS, RATES, expect

# Elements of a program: eight for each of four warps' threads, two 16-byte loads of float32.
BLOCK = 1024


def momentum_(
    momentum: Tensor, grad: Tensor, out: Tensor, *, decay: float | Tensor, nesterov: bool, skip: Tensor | None = None
) -> None:
    """Updates ``momentum`` and writes what is to be orthogonalised to ``out``, both in place.

    Args:
        momentum: (n,) float32.
        grad: (n,) float32, left as it is.
        out: (n,) bfloat16, float16 or float32: any flat stretch of memory, also a part of a send buffer. Rounded once.
        decay: Of the momentum per step, in [0, 1); a number, or () float32 or float64 on the momentum's device.
        nesterov: Whether the gradient counts once more.
        skip: None, or () float32: 1.0 leaves ``momentum`` as it is; ``out`` then means nothing.

    Raises:
        ValueError: If a tensor does not fit.
    """
    expect(
        "momentum_",
        momentum=(momentum, (momentum.numel(),), FLOAT32),
        grad=(grad, momentum.shape, FLOAT32),
        out=(out, momentum.shape, FLOATS),
        decay=(decay if isinstance(decay, Tensor) else None, (), RATES),
        skip=(skip, (), FLOAT32),
    )
    run = momentum_triton if runs_kernels(momentum) else momentum_torch
    run(momentum, grad, out, decay=decay, nesterov=nesterov, skip=skip)


def momentum_torch(
    momentum: Tensor, grad: Tensor, out: Tensor, *, decay: float | Tensor, nesterov: bool, skip: Tensor | None = None
) -> None:
    """The twin. ``lerp`` has the same bits at any cut of a run, on CPU too."""
    decay = exact(decay)
    gain, kept = weight(1 - decay, grad), weight(decay, grad)
    for average, new, into in in_cache(momentum, grad, out):
        if skip is None:
            average.lerp_(new, gain)
        else:
            # Selected, not multiplied: NaN * 0 is NaN.
            torch.where(skip > 0, average, average.lerp(new, gain), out=average)
        into.copy_(new.lerp(average, kept) if nesterov else average)


def momentum_triton(
    momentum: Tensor, grad: Tensor, out: Tensor, *, decay: float | Tensor, nesterov: bool, skip: Tensor | None = None
) -> None:
    """The kernel."""
    n, numbers, given = momentum.numel(), (0.0, 0.0), None
    if isinstance(decay, Tensor):
        given = torch.stack([1.0 - decay.double(), decay.double()]).float()
    else:
        numbers = 1.0 - decay, float(decay)
    if n:
        _momentum[(-(-n // BLOCK),)](
            momentum, grad, out, skip, n, *numbers, given, nesterov, BLOCK=BLOCK, enable_fp_fusion=False
        )


@jit
def _momentum(
    momentum,
    grad,
    out,
    skip,
    n,
    gain,
    decay,
    given,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if given is not None:
        gain, decay = tl.load(given), tl.load(given + 1)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if skip is not None:
        n = tl.where(tl.load(skip) > 0, 0, n)
    inside = at < n
    old = tl.load(momentum + at, inside)
    gradient = tl.load(grad + at, inside)
    new = lerp(old, gradient, gain)
    tl.store(momentum + at, new, inside)
    if NESTEROV:
        new = lerp(gradient, new, decay)
    tl.store(out + at, new.to(out.dtype.element_ty), inside)


@jit
def lerp(start, end, weight):
    """From ``start`` to ``end``, by the nearer of the two, as ``torch.lerp`` (ATen/native/Lerp.h)."""
    return tl.where(weight < 0.5, start + weight * (end - start), end - (end - start) * (1.0 - weight))
