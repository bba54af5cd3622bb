"""Newton-Schulz of unequal matrices in one launch: against float64, and each as if it were alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optimizers.kernels.gram import gram_triton, polynomial_triton
from optimizers.kernels.grouped_newton_schulz import (
    Matrix,
    grouped_newton_schulz,
    grouped_newton_schulz_torch,
    grouped_newton_schulz_triton,
)
from optimizers.kernels.shifted_product import shifted_product_triton
from optimizers.newton_schulz import COEFFICIENTS

MATRICES = (
    Matrix(3, 20, 33, 0.5),
    Matrix(700, 70, 9),
    Matrix(1400, 1, 1),
    Matrix(1500, 130, 40, 2.0),
    Matrix(6800, 0, 5),
)
N = 7000


def _exact(x: Tensor, gain: float) -> Tensor:
    """The polynomial on the singular values, in float64."""
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / torch.linalg.vector_norm(s)
    for a, b, c in COEFFICIENTS["quintic"]:
        s = a * s + b * s**3 + c * s**5
    return gain * u @ torch.diag(s) @ v


def _views(flat: Tensor) -> list[Tensor]:
    return [flat[m.offset : m.offset + m.rows * m.cols].view(m.rows, m.cols) for m in MATRICES if m.rows]


def _numbers() -> None:
    torch.manual_seed(0)
    flat = torch.randn(N) * 1e-12  # of no matter, down to 1e-30
    gains = [m.gain for m in MATRICES if m.rows]
    # 5e-6 for float32 and 3 % for bfloat16, of the largest direction: OPTIMIZERS' "quintic" row has 1.5 % in norm.
    for dtype, bound in ((torch.float32, 5e-6), (torch.bfloat16, 0.03)):
        for run in (grouped_newton_schulz_triton, grouped_newton_schulz_torch):
            out = torch.full((N,), 7.0)
            run(flat, out, MATRICES, coefficients="quintic", dtype=dtype, eps=1e-30)
            for x, y, gain in zip(_views(flat), _views(out), gains, strict=True):
                error = torch.linalg.matrix_norm(y.double() - _exact(x, gain))
                assert error <= bound * gain * min(x.shape) ** 0.5, (run, dtype, x.shape, error)
            _views(out)[0].fill_(7.0), [view.fill_(7.0) for view in _views(out)]
            assert (out == 7.0).all()  # nothing between the matrices was written


def test_against_the_polynomial_in_float64(interpreter) -> None:
    interpreter.run(_numbers)


def _alone() -> None:
    torch.manual_seed(0)
    flat, rows = torch.randn(N), COEFFICIENTS["quintic"][:2]
    out, one = torch.zeros(N, dtype=torch.bfloat16), torch.zeros(N, dtype=torch.bfloat16)
    options = {"coefficients": rows, "dtype": torch.bfloat16, "eps": 1e-30}
    grouped_newton_schulz_triton(flat, out, MATRICES, **options)
    for matrix in MATRICES:
        grouped_newton_schulz_triton(flat, one, (matrix,), **options)
    assert torch.equal(out, one)
    # The products are those of the kernels for one matrix: of a wide one whose norm is a power of two and known.
    x = torch.eye(32, 48).bfloat16() + 0.0
    x[0, 40:] = 0.25
    y = (x.float() / torch.linalg.vector_norm(x.float()).clamp(min=1)).bfloat16()
    for a, b, c in rows:
        y = shifted_product_triton(polynomial_triton(gram_triton(y), linear=b, square=c), y, shift=a)
    got = torch.empty(32 * 48, dtype=torch.bfloat16)
    grouped_newton_schulz_triton(x.view(-1), got, (Matrix(0, 32, 48),), **options)
    assert torch.equal(got.view(32, 48), y)


def test_a_matrix_does_not_notice_its_group(interpreter) -> None:
    interpreter.run(_alone)


def _poisoned() -> None:
    for run in (grouped_newton_schulz_triton, grouped_newton_schulz_torch):
        for bad in (torch.nan, torch.inf):
            flat, out = torch.randn(N), torch.zeros(N)
            flat[MATRICES[1].offset + 5] = bad
            _views(flat)[0].zero_()
            run(flat, out, MATRICES, coefficients="simple", dtype=torch.float32, eps=1e-30)
            zero, poisoned, *rest = _views(out)
            assert not zero.any() and poisoned.isnan().all() and all(y.isfinite().all() for y in rest)


def test_zero_stays_zero_and_nan_stays_inside_its_matrix(interpreter) -> None:
    interpreter.run(_poisoned)


def test_what_does_not_fit_is_refused() -> None:
    flat = torch.randn(100)
    with pytest.raises(ValueError, match="expected matrices apart from each other, got Matrix"):
        grouped_newton_schulz(flat, flat.clone(), (Matrix(0, 5, 5), Matrix(20, 5, 5)))
    with pytest.raises(ValueError, match="expected matrices within 100 elements, got one that ends at 101"):
        grouped_newton_schulz(flat, flat.clone(), (Matrix(1, 10, 10),))
    with pytest.raises(ValueError, match=r"out: expected contiguous \(100,\)"):
        grouped_newton_schulz(flat, flat[:99], (Matrix(0, 5, 5),))
    with pytest.raises(ValueError, match="expected coefficients from .* got 'cubic'"):
        grouped_newton_schulz(flat, flat.clone(), (Matrix(0, 5, 5),), coefficients="cubic")
    out = torch.zeros(100)
    grouped_newton_schulz(flat, out, (Matrix(0, 5, 5),))
    assert out[:25].all() and not out[25:].any()
