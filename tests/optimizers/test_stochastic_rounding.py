"""Stochastic rounding: right in the mean, to a neighbour, the same wherever a run is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from optimizers import AdamW, BF16AdamW, BF16Muon, Muon
from optimizers.stochastic_rounding import stochastic_round_


def rounded(wide: Tensor, *, step: int = 0, seed: int = 0, stream: int = 7, first: int = 0) -> Tensor:
    out = torch.empty_like(wide, dtype=torch.bfloat16)
    stochastic_round_(out, wide, seed=seed, step=torch.tensor(float(step)), stream=stream, first=first)
    return out


def test_the_mean_over_steps_and_over_elements_is_the_number() -> None:
    """Of 256 steps, and of 65536 elements, within four standard deviations, at most half of a gap each."""
    wide = torch.cat([torch.linspace(1, 2, 500), -torch.linspace(1, 2, 500)])  # neighbours are 2**-7 apart
    steps = torch.stack([rounded(wide, step=step).float() for step in range(256)])
    assert (steps.mean(0) - wide).abs().max() < 4 * 2**-8 / 256**0.5
    for number in (1.001, -1.0001, 3e-5, 1e30):
        elements, gap = rounded(torch.full((65536,), number)).double(), abs(number) * 2**-7
        assert abs(elements.mean() - number) < 4 * gap / 2 / 65536**0.5 and elements.unique().numel() == 2


def test_each_is_one_of_two_neighbours_and_what_bfloat16_has_stays() -> None:
    wide = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    assert bool(((rounded(wide).float() - wide).abs() < wide.abs() * 2**-7).all())
    exact = torch.cat([wide.bfloat16(), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan]).bfloat16()])
    assert torch.equal(rounded(exact.float()).view(torch.int16), exact.view(torch.int16))


def test_bits_depend_on_seed_step_name_and_index_and_not_on_where_a_run_is_cut() -> None:
    wide = torch.full((1000,), 1.003)
    whole = rounded(wide)
    assert torch.equal(whole, torch.cat([rounded(wide[:96]), rounded(wide[96:], first=96)]))
    others = (rounded(wide, step=1), rounded(wide, seed=1), rounded(wide, stream=8), rounded(wide, first=1))
    for other in others:  # the share of equal ones of two that are independent: 0.384^2 + 0.616^2 = 0.53
        assert 0.45 < float((whole == other).float().mean()) < 0.61
    torch.testing.assert_close(rounded(wide, first=2**33 + 5), rounded(wide, first=5), rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "float32"), [(BF16AdamW, AdamW), (BF16Muon, Muon)])
def test_steps_too_small_for_bfloat16_move_it_in_the_mean(kind: Any, float32: Any, over: Callable[..., Any]) -> None:
    """Steps of 1e-4 at 1.0, where neighbours are 0.0039 or 0.0078 apart: rounded to the nearest it would stay."""
    ours = over(kind(lr=1e-4, weight_decay=0.0), torch.ones(64, 64, dtype=torch.bfloat16))
    wide = over(float32(lr=1e-4, weight_decay=0.0), torch.ones(64, 64))
    grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    for _ in range(40):
        ours.step([grad.bfloat16()])
        wide.step([grad])
    moved, wanted = (one.params[0].detach().float() - 1 for one in (ours, wide))
    up = grad < 0
    for side in (up, ~up):
        assert float(moved[side].mean()) == pytest.approx(float(wanted[side].mean()), rel=0.1)
    before = ours.params[0].detach().clone()
    ours.step([grad.bfloat16()], skip=torch.ones(()))
    assert torch.equal(ours.params[0], before)


def test_another_dtype_is_refused(over: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"expected bfloat16 parameters, got p0 .torch.float32."):
        over(BF16AdamW(), torch.ones(4, 4))
    with pytest.raises(ValueError, match="seed: expected an integer >= 0, got -1"):
        BF16Muon(seed=-1)
