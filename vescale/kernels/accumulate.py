"""The end of a reduction in one pass: scaled, added to what was there, and measured.

::

    gradient <- scale reduced                    or      gradient + scale reduced
    sums[i]  =  sum of gradient^2 over elements [BLOCK i, BLOCK (i + 1))

Bytes per element with a bfloat16 reduction: 10 (2 + 4 read, 4 written), where cast, scale, add and norm take 30. The
squares are summed per stretch and the stretches by ``total``, in a fixed order: no atomics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vescale.kernels.language import jit, runs_kernels, tl

BLOCK = 2048  # elements of a stretch and of a program
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ALL = (*FLOATS, torch.float64)


def accumulate_(
    grad: Tensor, reduced: Tensor, *, scale: float | Tensor, fresh: bool, sums: Tensor | None = None
) -> None:
    """Adds ``scale`` times ``reduced`` to ``grad``, in place.

    Args:
        grad: (n,) float32; the twin takes every float.
        reduced: (n,) float32, bfloat16 or float16, left as it is; the twin takes every float.
        scale: A number, or () float32 on the same device.
        fresh: Whether ``grad`` holds nothing yet and is overwritten.
        sums: None, or (num_sums(n),) float32, overwritten by the sums of squares of the result.

    Raises:
        ValueError: If a tensor does not fit; nothing is written then.
    """
    _check(grad, reduced, scale, sums)
    kernel = runs_kernels(grad) and grad.dtype is torch.float32 and reduced.dtype in FLOATS
    run = accumulate_triton if kernel else accumulate_torch
    run(grad, reduced, scale=scale, fresh=fresh, sums=sums)


def num_sums(n: int) -> int:
    """Returns the number of stretches of ``n`` elements."""
    return -(-n // BLOCK)


def total(sums: Tensor) -> Tensor:
    """Returns the sum of squares, () float64, summed in order."""
    return sums.double().sum()


def accumulate_torch(
    grad: Tensor, reduced: Tensor, *, scale: float | Tensor, fresh: bool, sums: Tensor | None = None
) -> None:
    """The twin."""
    wide = torch.promote_types(grad.dtype, reduced.dtype)  # nothing is rounded, or too large, before it is scaled
    if fresh and wide is grad.dtype:
        grad.copy_(reduced).mul_(scale)  # widened where it is to lie, no wide copy beside it
    elif fresh:
        torch.mul(reduced, scale, out=grad)
    elif isinstance(scale, Tensor):
        grad.copy_(grad.to(wide).addcmul_(reduced.to(wide), scale.to(wide)))
    else:
        grad.add_(reduced, alpha=scale)
    if sums is not None:
        padded = torch.nn.functional.pad(grad, (0, -grad.numel() % BLOCK)).view(-1, BLOCK)
        torch.sum(padded.square(), dim=1, out=sums)


def accumulate_triton(
    grad: Tensor, reduced: Tensor, *, scale: float | Tensor, fresh: bool, sums: Tensor | None = None
) -> None:
    """The kernel."""
    n = grad.numel()
    number, at = (0.0, scale) if isinstance(scale, Tensor) else (float(scale), None)
    if n:
        _accumulate[(num_sums(n),)](
            grad, reduced, sums, n, number, at, FRESH=fresh, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False
        )


def _check(grad: Tensor, reduced: Tensor, scale: float | Tensor, sums: Tensor | None) -> None:
    n = grad.numel()
    wanted = {
        "grad": (grad, (n,), ALL),
        "reduced": (reduced, (n,), ALL),
        "sums": (sums, (num_sums(n),), (torch.float32,)),
        "scale": (scale if isinstance(scale, Tensor) else None, (), (torch.float32,)),
    }
    problems = [
        f"{name}: expected contiguous {shape} {' or '.join(map(str, dtypes))} on {grad.device}, got "
        f"{tuple(tensor.shape)} {tensor.dtype} with strides {tensor.stride()} on {tensor.device}"
        for name, (tensor, shape, dtypes) in wanted.items()
        if tensor is not None
        and not (
            tuple(tensor.shape) == shape
            and tensor.dtype in dtypes
            and tensor.is_contiguous()
            and tensor.device == grad.device
        )
    ]
    if problems:
        raise ValueError("accumulate_: " + "; ".join(problems))


@jit
def _accumulate(grad, reduced, sums, n, scale, scale_at, FRESH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    factor = scale if scale_at is None else tl.load(scale_at)
    new = tl.load(reduced + at, inside, 0.0).to(tl.float32) * factor
    if not FRESH:
        new = tl.load(grad + at, inside, 0.0) + new
    tl.store(grad + at, new, inside)
    if sums is not None:
        tl.store(sums + tl.program_id(0).to(tl.int64), tl.sum(new * new, axis=0))
