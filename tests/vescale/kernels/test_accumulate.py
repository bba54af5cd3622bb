"""Accumulate, scale and measure: against its twin and float64."""

from __future__ import annotations

import pytest
import torch
from closeness import worst

from vescale.kernels.accumulate import accumulate_, accumulate_torch, accumulate_triton, num_sums, total


def _numbers() -> None:
    torch.manual_seed(0)
    for n in (0, 1, 2048, 5001):
        for dtype in (torch.float32, torch.bfloat16):
            for scale in (0.125, torch.tensor(0.3)):
                for fresh in (True, False):
                    old, reduced = torch.randn(n), torch.randn(n).to(dtype)
                    exact = reduced.double() * float(scale) + (0 if fresh else old.double())
                    for run in (accumulate_triton, accumulate_torch):
                        grad, sums = torch.full((n,), torch.nan) if fresh else old.clone(), torch.empty(num_sums(n))
                        run(grad, reduced, scale=scale, fresh=fresh, sums=sums)
                        assert worst(grad, exact) <= 2e-7, (run, n, dtype)
                        assert abs(float(total(sums)) - float(exact.square().sum())) <= 1e-6 * n
                        again, no_sums = torch.zeros(n) if fresh else old.clone(), None
                        run(again, reduced, scale=scale, fresh=fresh, sums=no_sums)
                        assert torch.equal(again, grad)


def test_against_float64(interpreter) -> None:
    interpreter.run(_numbers)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1 / 3, torch.tensor(1 / 3)])
def test_a_narrower_gradient_is_rounded_once_after_scaling(dtype: torch.dtype, scale: float | torch.Tensor) -> None:
    torch.manual_seed(0)
    reduced = torch.cat([torch.randn(1000), torch.tensor([1e5, -1.2e5])])  # the last are too large for float16
    old = torch.randn(1002).to(dtype)
    for fresh, before in ((True, 0), (False, old.float())):
        grad = old.clone()
        accumulate_(grad, reduced, scale=scale, fresh=fresh)
        assert torch.equal(grad, (before + reduced * scale).to(dtype)) and grad.isfinite().all()


def test_what_does_not_fit_is_refused() -> None:
    grad = torch.zeros(8)
    with pytest.raises(
        ValueError, match=r"reduced: expected contiguous \(8,\).*\(7,\).*; sums: expected contiguous \(1,\)"
    ):
        accumulate_(grad, torch.zeros(7), scale=1.0, fresh=True, sums=torch.zeros(2))
    with pytest.raises(ValueError, match="grad: expected contiguous .* strides"):
        accumulate_(torch.zeros(16)[::2], grad, scale=1.0, fresh=True)
    accumulate_(grad, torch.ones(8), scale=2.0, fresh=False)
    assert torch.equal(grad, torch.full((8,), 2.0))
