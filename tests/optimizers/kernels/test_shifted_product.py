"""``shift x + p x``: against float64, the same alone and in a batch."""

from __future__ import annotations

import pytest
import torch
from closeness import worst

from optimizers.kernels.shifted_product import shifted_product, shifted_product_torch, shifted_product_triton

SHAPES = ((1, 1), (65, 129), (2, 130, 70), (130, 0), (0, 4, 5))
BOUNDS = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def _numbers() -> None:
    torch.manual_seed(0)
    for dtype, bound in BOUNDS.items():
        for shape in SHAPES:
            x = torch.randn(shape).to(dtype)
            p = torch.randn(*shape[:-1], shape[-2]).to(dtype)
            exact = 2.5 * x.double() + p.double() @ x.double()
            for run in (shifted_product_triton, shifted_product_torch):
                y = run(p, x, shift=2.5)
                assert y.dtype == dtype and worst(y, exact) <= bound, (run, shape, dtype)


def test_against_float64(interpreter) -> None:
    interpreter.run(_numbers)


def _batch() -> None:
    x, p = torch.randn(3, 70, 150), torch.randn(3, 70, 70)
    alone = [shifted_product_triton(a, b, shift=2.5) for a, b in zip(p, x, strict=True)]
    assert torch.equal(shifted_product_triton(p, x, shift=2.5), torch.stack(alone))


def test_a_matrix_does_not_notice_its_batch(interpreter) -> None:
    interpreter.run(_batch)


def test_what_does_not_fit_is_refused() -> None:
    x = torch.zeros(4, 3)
    with pytest.raises(ValueError, match=r"p: expected contiguous \(4, 4\) float32"):
        shifted_product(torch.zeros(3, 3), x, shift=1.0)
    with pytest.raises(ValueError, match="p: expected .* float32 .* got .* bfloat16"):
        shifted_product(torch.zeros(4, 4, dtype=torch.bfloat16), x, shift=1.0)
    with pytest.raises(ValueError, match=r"expected x of shape"):
        shifted_product(torch.zeros(4, 4), torch.zeros(4), shift=1.0)
