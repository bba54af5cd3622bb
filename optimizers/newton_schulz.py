"""Newton-Schulz: a matrix with its singular values moved to about one, by matrix products only.

A step is an odd polynomial of the matrix, which acts on the singular values alone: ``s <- a s + b s^3 + c s^5``.
Divided by its Frobenius norm a matrix has them all in [0, 1]; a few steps lift all but the very smallest to about one::

    singular values of x         100       30       10        1      0.1     0.01
    over the Frobenius norm    0.953    0.286    0.095    0.010    0.001    0.000
    simple, 5 steps            0.752    0.926    0.685    0.684    0.450    0.046
    quintic, 5 steps           0.978    0.980    0.985    1.007    0.454    0.047
    polar_express, 5 steps     0.959    1.072    1.015    0.928    0.817    0.092
    deepseek_v4, 10 steps      1.000    1.000    1.000    1.000    1.000    1.002
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from optimizers.kernels.gram import gram, polynomial
from optimizers.kernels.shifted_product import shifted_product

Row = tuple[float, float, float]

_SIMPLE: Row = (3.4445, -4.7750, 2.0315)

# Rows (a, b, c), one per step.
COEFFICIENTS: dict[str, tuple[Row, ...]] = {
    # Steepest at zero, at the price of a wide band: kellerjordan.github.io/posts/muon, torch.optim.Muon.
    "simple": (_SIMPLE,) * 5,
    # A row of its own for every step. Method: leloykun.github.io/ponder/muon-opt-coeffs; numbers by Jiacheng You in
    # KellerJordan/modded-nanogpt train_gpt_medium.py (2025), also NVIDIA-NeMo/Emerging-Optimizers muon_utils.py.
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Polar Express, arXiv 2505.16932, made for 5 steps with safety factor 2e-2 and cushion 2: microsoft/dion and
    # KellerJordan/modded-nanogpt train_gpt.py. Both divide by 1.02 times the norm. Here that factor is in the first
    # row, since p(s / 1.02) has the coefficients a / 1.02, b / 1.02^3 and c / 1.02^5.
    "polar_express": (
        (8.156554524902461 / 1.02, -22.48329292557795 / 1.02**3, 15.878769915207462 / 1.02**5),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    # Eight steep steps and two that converge (p(1) = 1, p'(1) = 0): DeepSeek-V4 report, section 2.4.
    "deepseek_v4": (_SIMPLE,) * 8 + ((2.0, -1.5, 0.5),) * 2,
}


def newton_schulz(
    x: Tensor,
    coefficients: str | Sequence[Row] = "quintic",
    *,
    dtype: torch.dtype = torch.bfloat16,
    eps: float = 1e-30,
    gain: float = 1.0,
) -> Tensor:
    """Returns ``gain`` times ``x`` with its singular values moved to about one, contiguous, in ``dtype``.

    The scale of ``x`` does not matter, and for powers of two not even the bits change. Zeros give zeros; one NaN or
    infinity makes all of its matrix NaN.

    Args:
        x: (m, n) or (B, m, n) of any float dtype, never written. The matrices of a batch do not mix, but the product
            kernel, hence the last bits, may depend on B.
        coefficients: A key of ``COEFFICIENTS``, or the rows (a, b, c) themselves, one per step.
        dtype: Every product is rounded to it. float32 products of a CPU follow
            ``torch.get_float32_matmul_precision()``; those of a GPU are never TF32.
        eps: A matrix whose largest element is below this counts as noise and fades to zero, in units of ``x``.
        gain: Factor of the result. It is folded into the last row: no further pass, no further rounding.

    Raises:
        ValueError: If ``x`` is neither a matrix nor a batch of them, or ``coefficients`` is not a name.
    """
    if x.ndim not in (2, 3):
        raise ValueError(f"newton_schulz: expected shape (m, n) or (B, m, n), got {tuple(x.shape)}")
    *rows, (a, b, c) = _rows(coefficients)
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=dtype, device=x.device)
    wide = _computed_in(dtype, x.device)
    tall = x.size(-2) > x.size(-1)
    y = normalized(x.mT if tall else x, eps).to(dtype).to(wide)
    for row in (*rows, (gain * a, gain * b, gain * c)):
        y = _step(y, row, dtype)
    return (y.mT if tall else y).to(dtype).contiguous()


def _computed_in(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Returns the dtype whose products are computed; they are rounded to ``dtype``.

    A processor without instructions for 16-bit products has torch compute them element by element: the float32 product
    of the same numbers, rounded, is what matrix units give, and 25 times faster (512 x 1408, AVX2). With them it is
    four times slower than torch's (AMX).
    """
    if device.type != "cpu" or (dtype == torch.bfloat16 and multiplies_bf16()):
        return dtype
    return torch.promote_types(dtype, torch.float32)


@cache
def multiplies_bf16() -> bool:
    """Returns whether this processor has instructions for products of bfloat16: AMX, or AVX-512's dot products."""
    able = torch.cpu.get_capabilities()
    return bool(able.get("amx_bf16") or able.get("avx512_bf16"))


def _rows(coefficients: str | Sequence[Row]) -> Sequence[Row]:
    """Returns the rows of a name, or the rows given."""
    if not isinstance(coefficients, str):
        return coefficients
    if coefficients not in COEFFICIENTS:
        raise ValueError(f"newton_schulz: expected coefficients from {sorted(COEFFICIENTS)}, got {coefficients!r}")
    return COEFFICIENTS[coefficients]


def normalized(x: Tensor, eps: float) -> Tensor:
    """Returns a contiguous copy of ``x`` with Frobenius norm one, in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide, memory_format=torch.contiguous_format, copy=True)
    # By the largest element first: the squares of gradients of 1e-20 or 1e20 are not float32 numbers.
    # (amax, since vector_norm's infinity is not vectorised on CPU: a tenth of all the time of a 512 x 512.)
    y /= y.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=eps)
    # Now the norm is at least one, unless the whole matrix lies below eps.
    y /= torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True).clamp(min=1.0)
    return y


def _step(x: Tensor, row: Row, dtype: torch.dtype) -> Tensor:
    """Returns ``a x + (b A + c A^2) x`` with ``A = x x^T``: three products, each with its sum rounded once."""
    a, b, c = row
    inner = polynomial(gram(x, dtype=dtype), linear=b, square=c, dtype=dtype)
    return shifted_product(inner, x, shift=a, dtype=dtype)
