"""Gram Newton-Schulz: the same polynomial with small products, for matrices much longer than wide.

A step of ``newton_schulz`` is three products, two of them with the long side. Here the steps act on the s x s matrix
``R = X X^T`` alone, and what they multiply up to, Q, meets X twice (Dao-AILab/gram-newton-schulz)::

    X <- X / |X|     R = X X^T
    each step        Z = b R + c R^2      P = a I + Z      Q <- Q P      R <- P R P
    before step 2    X <- Q X    R = X X^T    Q = I        the "reset": without it rounding errors grow to 12-96
    in the end       X <- Q X

At l = 4 s that is 58 % fewer FLOPs. The price is range: in bfloat16 singular values end at 9 to 14 instead of 1, and
polar_express overshoots to 1.9 where X is ill-conditioned. So: float16, five rows, one reset, no polar_express.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimizers.kernels.gram import gram, polynomial, rounded
from optimizers.kernels.shifted_product import shifted_product
from optimizers.newton_schulz import COEFFICIENTS, normalized

DTYPE = torch.float16
STEPS, RESET = 5, 2  # Dao-AILab/gram-newton-schulz; with more steps after one reset the result is NaN
RATIO = 2.0  # of the sides; below it the standard iteration is about as fast (xtuner falls back there)
SAFE = ("simple", "quintic")


def pays(shape: tuple[int, ...]) -> bool:
    """Returns whether a matrix of m rows and n columns, the last two of ``shape``, is long enough."""
    return max(shape[-2:]) > RATIO * min(shape[-2:])


def gram_newton_schulz(x: Tensor, coefficients: str = "quintic", *, eps: float = 1e-30, gain: float = 1.0) -> Tensor:
    """Returns ``gain`` times ``x`` with its singular values moved to about one, contiguous, in float16.

    Args:
        x: (m, n) or (B, m, n) of any float dtype, one side more than twice the other; never written.
        coefficients: One of ``SAFE``.
        eps: A matrix whose largest element is below this counts as noise and fades to zero, in units of ``x``.
        gain: Factor of the result.

    Raises:
        ValueError: If the matrix is not long enough, or the coefficients are not known to be safe here.
    """
    if x.ndim not in (2, 3) or not pays(tuple(x.shape)):
        raise ValueError(
            f"gram_newton_schulz: expected (.., m, n), one side > {RATIO} of the other, got {tuple(x.shape)}"
        )
    if coefficients not in SAFE:
        raise ValueError(f"gram_newton_schulz: expected coefficients from {SAFE}, got {coefficients!r}")
    wide = torch.float32 if x.device.type == "cpu" else DTYPE  # as newton_schulz
    tall = x.size(-2) > x.size(-1)
    y = normalized(x.mT if tall else x, eps).to(DTYPE).to(wide)
    small = gram(y, dtype=DTYPE)
    product = identity = torch.eye(y.size(-2), dtype=wide, device=x.device).expand_as(small)
    for step, (a, b, c) in enumerate(COEFFICIENTS[coefficients]):
        if step == RESET:
            y = shifted_product(product, y, shift=0.0, dtype=DTYPE)
            small = gram(y, dtype=DTYPE)
        if step == STEPS - 1:
            a, b, c = gain * a, gain * b, gain * c
        z = polynomial(small, linear=b, square=c, dtype=DTYPE)
        if step in (0, RESET):
            product = rounded(z + a * identity, DTYPE)
        else:
            product = shifted_product(z, product, shift=a, dtype=DTYPE)
        if step not in (RESET - 1, STEPS - 1):
            small = shifted_product(z, shifted_product(z, small, shift=a, dtype=DTYPE), shift=a, dtype=DTYPE)
    y = shifted_product(product, y, shift=0.0, dtype=DTYPE)
    return (y.mT if tall else y).to(DTYPE).contiguous()
