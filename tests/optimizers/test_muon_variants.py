"""Muon over heads, fused matrices and tiles; NorMuon; a momentum of bytes; cautious decay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from optimizers import Muon, Muon8bit, NorMuon, newton_schulz

WIDE: dict[str, Any] = {"ns_dtype": torch.float32, "wire_dtype": torch.float32}


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("options", "cuts"),
    [
        ({"rows": 8}, [(slice(i, i + 8), slice(None)) for i in range(0, 32, 8)]),
        (
            {"split": (16, 8, 8)},
            [(slice(0, 16), slice(None)), (slice(16, 24), slice(None)), (slice(24, 32), slice(None))],
        ),
        ({"tile": 12}, [(slice(i, i + 12), slice(j, j + 12)) for i in (0, 12, 24) for j in (0, 12)]),
    ],
    ids=["heads", "fused", "tiles"],
)
def test_each_matrix_in_a_parameter_is_a_parameter_of_its_own(
    options: dict[str, Any], cuts: list[tuple[slice, slice]], over: Callable[..., Any]
) -> None:
    """With a step size of its own: 0.2 sqrt of its longer side, not the parameter's."""
    whole, rule = gaussian(32, 20), Muon(lr=0.1, **WIDE, **options)
    together, apart = over(rule, whole), over(Muon(lr=0.1, **WIDE), *(whole[cut] for cut in cuts))
    for step in range(2):
        grad = gaussian(32, 20, seed=step + 1)
        together.step([grad])
        apart.step([grad[cut] for cut in cuts])
    for cut, piece in zip(cuts, apart.params, strict=True):
        torch.testing.assert_close(together.params[0][cut], piece, rtol=0, atol=0)


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows=5 does not divide the 32 rows of shape \(32, 20\)"):
        Muon(rows=5).block_shape((32, 20))
    with pytest.raises(ValueError, match=r"split=\(16, 8\) is not the 32 rows of shape \(2, 32, 20\)"):
        Muon(split=(16, 8)).block_shape((2, 32, 20))
    with pytest.raises(ValueError, match="split: expected None.*tile: expected None"):
        Muon(rows=4, split=(4, 4), tile=4)
    with pytest.raises(ValueError, match="NorMuon: .*split: expected None"):
        NorMuon(split=(4, 4))


def test_normuon_makes_rows_even_and_keeps_the_size(over: Callable[..., Any]) -> None:
    grad = gaussian(24, 40) * torch.logspace(0, -3, 24)[:, None]
    even, plain = (over(kind(lr=1.0, weight_decay=0.0, **WIDE), torch.zeros(24, 40)) for kind in (NorMuon, Muon))
    for one in (even, plain):
        one.step([grad])
    steps = [one.params[0].detach() for one in (even, plain)]
    sizes = [step.norm(dim=1) for step in steps]
    assert sizes[0].std() / sizes[0].mean() < 0.1 * sizes[1].std() / sizes[1].mean()
    assert float(steps[0].norm() / steps[1].norm()) == pytest.approx(1, rel=1e-5)


def test_normuon_is_its_formula(over: Callable[..., Any]) -> None:
    ours, square = over(NorMuon(lr=1.0, weight_decay=0.0, momentum=0.0, **WIDE), torch.zeros(12, 20)), torch.zeros(12)
    for step in range(3):
        grad, before = gaussian(12, 20, seed=step), ours.params[0].detach().clone()
        ours.step([grad])
        factor = newton_schulz(grad, dtype=torch.float32, gain=0.2 * math.sqrt(20))
        square = 0.95 * square + 0.05 * factor.square().mean(1)
        even = factor / (square.sqrt() + 1e-8)[:, None]
        expected = even * factor.norm() / even.norm()
        torch.testing.assert_close(before - ours.params[0].detach(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "rule", [NorMuon(lr=0.5, weight_decay=0.25), Muon8bit(lr=0.5, weight_decay=0.25)], ids=["nor", "8bit"]
)
def test_a_zero_gradient_decays_and_does_nothing_else(rule: Any, over: Callable[..., Any]) -> None:
    ours = over(rule, gaussian(24, 20))
    expected = gaussian(24, 20)
    for _ in range(2):
        ours.step([torch.zeros(24, 20)])
        expected = expected * 0.875
        assert torch.equal(ours.params[0], expected)


@pytest.mark.parametrize("kind", [Muon, NorMuon, Muon8bit])
def test_a_gradient_of_low_rank_gives_a_finite_step(kind: Any, over: Callable[..., Any]) -> None:
    for shape in ((24, 20), (1, 20), (20, 1), (1, 1)):
        ours = over(kind(lr=0.1), gaussian(*shape))
        for _ in range(3):
            ours.step([gaussian(shape[0], 1) @ gaussian(1, shape[1])])
        assert torch.isfinite(ours.params[0]).all()


def test_a_momentum_of_bytes_steers_alike(over: Callable[..., Any], distance: Callable[..., float]) -> None:
    ours, wide = (over(kind(lr=0.02, **WIDE), gaussian(40, 30) / 6) for kind in (Muon8bit, Muon))
    for step in range(20):
        for one in (ours, wide):
            one.step([gaussian(40, 30, seed=step)])
        if step == 0:
            assert torch.equal(ours.params[0], wide.params[0]), "the first step is before any rounding"
    assert distance(ours.params[0].detach(), wide.params[0].detach()) < 3e-2
    held = sum(value.nbytes for name, value in ours.state().items() if name.startswith("momentum"))
    assert held == 1200 + 4 * 5


def test_a_cautious_decay_leaves_what_the_step_makes_larger(over: Callable[..., Any]) -> None:
    param, grad = gaussian(16, 16), gaussian(16, 16, seed=1)
    options: dict[str, Any] = dict(lr=0.1, **WIDE)
    free, decayed, cautious = (
        over(Muon(**options, **more), param)
        for more in ({"weight_decay": 0.0}, {"weight_decay": 0.5}, {"weight_decay": 0.5, "cautious": True})
    )
    for one in (free, decayed, cautious):
        one.step([grad])
    shrinks = (param - free.params[0].detach()) * param > 0
    expected = torch.where(shrinks, decayed.params[0], free.params[0])
    torch.testing.assert_close(cautious.params[0], expected)
