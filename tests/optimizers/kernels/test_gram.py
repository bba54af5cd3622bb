"""Symmetric products: against float64, symmetric to the bit, the same alone and in a batch."""

from __future__ import annotations

import pytest
import torch
from closeness import worst

from optimizers.kernels.gram import gram, gram_torch, gram_triton, polynomial, polynomial_torch, polynomial_triton

SHAPES = ((1, 1), (65, 129), (2, 130, 70), (130, 0), (0, 4, 5))
# Rounding of the result, relative to its largest element, and of a float32 sum of 130 terms.
BOUNDS = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def _numbers() -> None:
    torch.manual_seed(0)
    for dtype, bound in BOUNDS.items():
        for shape in SHAPES:
            x = (torch.randn(shape) / 8).to(dtype)
            for run in (gram_triton, gram_torch):
                a = run(x)
                assert a.dtype == dtype and a.is_contiguous()
                assert worst(a, x.double() @ x.double().mT) <= bound, (run, shape, dtype)
            a = gram_triton(x)
            assert torch.equal(a, a.mT), (shape, dtype)
            exact = -1.5 * a.double() + 0.25 * a.double() @ a.double()
            for run in (polynomial_triton, polynomial_torch):
                assert worst(run(a, linear=-1.5, square=0.25), exact) <= bound, (run, shape, dtype)
            b = polynomial_triton(a, linear=-1.5, square=0.25)
            assert torch.equal(b, b.mT), (shape, dtype)


def test_against_float64(interpreter) -> None:
    interpreter.run(_numbers)


def _batch() -> None:
    x = torch.randn(3, 70, 40)
    assert torch.equal(gram_triton(x), torch.stack([gram_triton(matrix) for matrix in x]))
    x[1, 7, 7] = torch.nan
    alone = gram_triton(x[2].contiguous())
    assert gram_triton(x)[1].isnan().any() and torch.equal(gram_triton(x)[2], alone)


def test_a_matrix_does_not_notice_its_batch(interpreter) -> None:
    interpreter.run(_batch)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gram: expected shape \(m, n\)"):
        gram(torch.zeros(3))
    with pytest.raises(ValueError, match="gram: x: expected contiguous .* got .* with strides"):
        gram(torch.zeros(4, 3).mT)
    with pytest.raises(ValueError, match="gram: x: expected .* bfloat16 or float16 .* int32"):
        gram(torch.zeros(4, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="polynomial: expected square"):
        polynomial(torch.zeros(4, 3), linear=1.0, square=1.0)
