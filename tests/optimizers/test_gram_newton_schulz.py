from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optimizers import Muon, newton_schulz
from optimizers.gram_newton_schulz import SAFE, gram_newton_schulz


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("coefficients", SAFE)
@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (3, 40, 100)], ids=str)
def test_it_is_the_standard_iteration(shape: tuple[int, ...], coefficients: str) -> None:
    x = gaussian(*shape)
    ours, standard = gram_newton_schulz(x, coefficients), newton_schulz(x, coefficients, dtype=torch.float32)
    assert ours.dtype == torch.float16 and ours.is_contiguous()
    assert float((ours.float() - standard).norm() / standard.norm()) < 1e-2


@pytest.mark.parametrize("coefficients", SAFE)
def test_singular_values_stay_where_they_belong_also_of_ill_conditioned_matrices(coefficients: str) -> None:
    q = torch.linalg.qr(gaussian(48, 48))[0]
    x = q * torch.logspace(0, -5, 48) @ torch.linalg.qr(gaussian(160, 48, seed=1))[0].mT
    assert torch.linalg.svdvals(gram_newton_schulz(x, coefficients).float()).max() < 1.25
    assert torch.equal(gram_newton_schulz(torch.zeros(8, 40)), torch.zeros(8, 40, dtype=torch.float16))


def test_where_it_is_not_safe_or_does_not_pay_it_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one side > 2.0 of the other, got \(20, 40\)"):
        gram_newton_schulz(gaussian(20, 40))
    with pytest.raises(ValueError, match="expected coefficients from"):
        gram_newton_schulz(gaussian(10, 40), "polar_express")
    with pytest.raises(ValueError, match="iteration: expected standard, or gram with coefficients of"):
        Muon(iteration="gram", coefficients="polar_express")


def test_muon_takes_it_where_it_pays() -> None:
    rule = Muon(iteration="gram", wire_dtype=torch.float32)
    long, square = gaussian(1, 16, 64), gaussian(1, 16, 16)
    assert torch.equal(rule.block((long,), {})[0], gram_newton_schulz(long[0], gain=1.6).float())
    assert torch.equal(rule.block((square,), {}), Muon(wire_dtype=torch.float32).block((square,), {}))
