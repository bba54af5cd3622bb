from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from optimizers import AdamW


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether the bytes agree; NaN equals itself and 0.0 differs from -0.0."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def torchs(params: list[Tensor], grads: list[list[Tensor]], **options: Any) -> list[Tensor]:
    """Returns the parameters after torch.optim.AdamW has stepped through ``grads``."""
    copies = [param.clone().requires_grad_() for param in params]
    optimizer = torch.optim.AdamW(copies, foreach=False, fused=False, **options)
    for step in grads:
        for param, grad in zip(copies, step, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return [param.detach() for param in copies]


def test_fifty_steps_agree_with_torch(drive: Callable[..., Any], distance: Callable[[Tensor, Tensor], float]) -> None:
    params = [gaussian(32, 48), gaussian(100, seed=1)]
    grads = [[gaussian(*param.shape, seed=step) for param in params] for step in range(50)]
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    driver = drive(AdamW(**options), *params)
    for step in grads:
        driver.step(step)
    for ours, theirs in zip(driver.params, torchs(params, grads, **options), strict=True):
        assert distance(ours, theirs) <= 5.5e-7


def test_defaults_are_torchs() -> None:
    defaults = torch.optim.AdamW([torch.zeros(1)]).defaults
    rule = AdamW()
    assert {name: getattr(rule, name) for name in ("lr", "betas", "eps", "weight_decay")} == {
        name: defaults[name] for name in ("lr", "betas", "eps", "weight_decay")
    }


def test_a_tensor_as_learning_rate_is_the_float(drive: Callable[..., Any]) -> None:
    results = []
    for lr in (0.0625, torch.tensor(0.0625)):
        driver = drive(AdamW(lr=lr), gaussian(64))
        for step in range(3):
            driver.step([gaussian(64, seed=step)])
        results.append(driver.params[0])
    assert same_bits(*results)


def test_gradient_and_step_counter_are_left_alone() -> None:
    rule = AdamW()
    param, grad, step = gaussian(64), gaussian(64, seed=1), torch.tensor(3.0)
    state = {"step": step, "exp_avg": torch.zeros(64), "exp_avg_sq": torch.zeros(64)}
    assert rule.prepare(param, grad, state, skip=None) == ()
    assert torch.equal(grad, gaussian(64, seed=1)) and step == 3.0


def test_a_skipped_step_changes_no_bit_even_with_nan_gradients(drive: Callable[..., Any]) -> None:
    driver = drive(AdamW(lr=0.1), gaussian(64))
    driver.step([gaussian(64, seed=1)])
    before = [driver.params[0].clone(), *(value.clone() for value in driver.states[0].values())]
    driver.step([torch.full((64,), torch.nan)], skip=torch.tensor(1.0))
    after = [driver.params[0], *driver.states[0].values()]
    assert all(same_bits(a, b) for a, b in zip(after, before, strict=True))


def test_a_flag_that_is_down_is_no_flag(drive: Callable[..., Any]) -> None:
    results = []
    for skip in (None, torch.tensor(0.0)):
        driver = drive(AdamW(lr=0.1), gaussian(64))
        for step in range(3):
            driver.step([gaussian(64, seed=step)], skip=skip)
        results.append((driver.params[0], *driver.states[0].values()))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("pieces", range(2, 9))
def test_where_a_run_is_cut_does_not_show(pieces: int, drive: Callable[..., Any]) -> None:
    units = 61
    edges = sorted(32 * edge for edge in random.Random(pieces).sample(range(1, units), pieces - 1))
    drivers = [drive(AdamW(lr=1e-2), gaussian(32 * units), edges=cut) for cut in ((), edges)]
    for step in range(5):
        for driver in drivers:
            driver.step([gaussian(32 * units, seed=step)])
    whole, cut = drivers
    assert same_bits(cut.params[0], whole.params[0])
    assert all(same_bits(cut.states[0][name], whole.states[0][name]) for name in whole.rule.element_state())


def test_padding_stays_zero_and_an_empty_run_is_nothing(drive: Callable[..., Any]) -> None:
    driver = drive(AdamW(lr=0.1), torch.zeros(32), torch.zeros(0))
    driver.step([torch.zeros(32), torch.zeros(0)])
    assert same_bits(driver.params[0], torch.zeros(32)) and driver.params[1].numel() == 0


def test_no_block_and_nothing_on_a_wire() -> None:
    assert AdamW().block_shape((3, 4)) == ()
    assert not any(hasattr(AdamW, name) for name in ("block", "apply", "wire_dtype"))


def test_all_bad_fields_are_named_at_once() -> None:
    with pytest.raises(ValueError) as error:
        AdamW(lr=-1.0, betas=(0.9, 1.0), eps=float("nan"), weight_decay="0.1")  # type: ignore[arg-type]
    message = str(error.value)
    assert message.startswith("AdamW: ")
    for wrong in ("lr: ", "got -1.0", "betas: ", "got (0.9, 1.0)", "eps: ", "got nan", "weight_decay: ", "got '0.1'"):
        assert wrong in message


@pytest.mark.parametrize("betas", [(0.9,), (0.9, 0.95, 0.99), (-0.1, 0.9)], ids=str)
def test_betas_are_two_numbers_below_one(betas: Any) -> None:
    with pytest.raises(ValueError, match=r"betas: expected two numbers in \[0, 1\)"):
        AdamW(betas=betas)
