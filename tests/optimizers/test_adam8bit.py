"""Adam8bit: torchao's numbers in its format; in ours, steps that stay Adam's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from optimizers import Adam8bit, AdamW
from optimizers.quantize import dequantize


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_torchaos_adamw8bit_agrees_in_its_format(
    over: Callable[..., Any], distance: Callable[[Tensor, Tensor], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchao.optim import AdamW8bit

    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    start = gaussian(64, 128) / 32
    theirs = torch.nn.Parameter(start.clone())
    oracle = AdamW8bit([theirs], lr=1e-3, weight_decay=0.01)
    ours = over(Adam8bit(lr=1e-3, weight_decay=0.01, compat="bnb"), start)
    for step in range(1, 51):
        grad = gaussian(64, 128, seed=step)
        theirs.grad = grad.clone()
        oracle.step()
        ours.step([grad])
        if step == 1:
            assert (ours.params[0] - theirs).abs().max() <= 1.5e-8
            codes = (ours.state()["exp_avg"].flatten(), ours.state()["exp_avg_sq"].flatten())
            for own, other in zip(
                codes, (oracle.state[theirs][n].codes.flatten() for n in ("exp_avg", "exp_avg_sq")), strict=True
            ):
                assert (own == other).float().mean() >= 0.999
                assert (own.int() - other.int()).abs().max() <= 1
        if step == 10:
            assert distance(ours.params[0].detach(), theirs.detach()) <= 5e-5
    assert distance(ours.params[0].detach(), theirs.detach()) <= 2e-4


@pytest.mark.parametrize(("compat", "after_10", "after_50"), [("none", 2.5e-3, 1.8e-2), ("bnb", 2.5e-3, 1.8e-2)])
def test_the_path_is_near_adamws(
    compat: str, after_10: float, after_50: float, over: Callable[..., Any], distance: Callable[..., float]
) -> None:
    start = gaussian(64, 128)
    ours, adam = over(Adam8bit(compat=compat), start), over(AdamW(), start)
    for step in range(1, 51):
        for one in (ours, adam):
            one.step([gaussian(64, 128, seed=step)])
        if step == 10:
            assert distance(ours.params[0].detach(), adam.params[0].detach()) <= after_10
    assert distance(ours.params[0].detach(), adam.params[0].detach()) <= after_50


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_second_moments_are_right_in_the_mean_also_once_gradients_shrink(
    beta2: float, over: Callable[..., Any]
) -> None:
    """A code moves by less than its width a step; that the block's scale moves keeps it from standing still."""
    size = gaussian(32, 256, seed=99).exp()
    ours, exact = over(Adam8bit(betas=(0.9, beta2)), torch.zeros(32, 256)), torch.zeros(32, 256)
    for step in range(200):
        grad = gaussian(32, 256, seed=step) * size * (1.0 if step < 100 else 0.3)
        ours.step([grad])
        exact.lerp_(grad.square(), 1 - beta2)
    state = ours.state()
    root = dequantize(state["exp_avg_sq_root"].view(-1), state["exp_avg_sq_root_scale"], signed=False)
    assert 0.99 <= (root / exact.sqrt().view(-1)).log().mean().exp() <= 1.01


def _largest_step(over: Callable[..., Any], rule: Any) -> float:
    """Steps in units of lr where the gradients of a block span four decades."""
    size = 10.0 ** (-4 * torch.rand(32, 256, generator=torch.Generator().manual_seed(1)))
    ours, largest = over(rule, torch.zeros(32, 256)), 0.0
    for step in range(60):
        before = ours.params[0].detach().clone()
        ours.step([gaussian(32, 256, seed=step) * size])
        largest = max(largest, float((ours.params[0].detach() - before).abs().max()))
    return largest


def test_steps_stay_adams_where_the_published_format_explodes(over: Callable[..., Any]) -> None:
    options: dict[str, Any] = dict(lr=1.0, weight_decay=0.0)
    assert _largest_step(over, Adam8bit(**options)) <= 3
    assert _largest_step(over, Adam8bit(**options, compat="bnb")) > 10


def test_a_second_moment_above_zero_is_never_coded_zero(over: Callable[..., Any]) -> None:
    """Over nine decades in a block, of which the map's codes reach six and a half."""
    size = 10.0 ** (-9 * torch.rand(32, 256, generator=torch.Generator().manual_seed(1)))
    ours = over(Adam8bit(), torch.zeros(32, 256))
    ours.step([gaussian(32, 256, seed=2).sign() * size])
    assert bool((ours.state()["exp_avg_sq_root"] > 0).all())


def test_what_is_small_or_no_matrix_keeps_float32_moments_by_its_global_shape(over: Callable[..., Any]) -> None:
    shapes = [(64, 64), (63, 65), (8192,), (64, 63)]
    ours = over(Adam8bit(), *(gaussian(*shape) for shape in shapes))
    ours.step([gaussian(*shape, seed=1) for shape in shapes])
    dtypes = [ours.state(i)["exp_avg"].dtype for i in range(4)]
    assert dtypes == [torch.uint8, torch.float32, torch.float32, torch.float32]
    adam = over(AdamW(), gaussian(8192))
    adam.step([gaussian(8192, seed=1)])
    assert torch.equal(ours.params[2], adam.params[0])


def test_state_is_two_bytes_and_two_scales(over: Callable[..., Any]) -> None:
    ours = over(Adam8bit(), gaussian(100, 130))  # 13,000 elements: 51 blocks, the last of 200
    held = {name: (tuple(value.shape), value.dtype) for name, value in ours.state().items() if name != "step"}
    assert held == {
        "exp_avg": ((100, 130), torch.uint8),
        "exp_avg_sq_root": ((100, 130), torch.uint8),
        "exp_avg_scale": ((51,), torch.float32),
        "exp_avg_sq_root_scale": ((51,), torch.float32),
    }
    assert sum(value.nbytes for value in ours.state().values()) <= 2.04 * 13_000


def test_state_of_one_format_is_not_taken_for_the_other() -> None:
    from vescale import Optimizer, Rules

    ours, theirs = (
        Optimizer([("weight", torch.nn.Parameter(gaussian(64, 64)))], Rules(all=("*", Adam8bit(compat=compat))))
        for compat in ("none", "bnb")
    )
    with pytest.raises(ValueError, match="expected names of state .*exp_avg_sq_root.*, got .*'exp_avg_sq', "):
        ours.load_state_dict(theirs.state_dict())


def test_a_short_last_block_is_the_beginning_of_a_whole_one(over: Callable[..., Any]) -> None:
    grad = gaussian(32, 256, seed=5)
    longer = gaussian(32, 256)
    shorter, cut = longer.flatten()[: 31 * 256 + 100].view(1, -1), over(Adam8bit(), longer)
    short = over(Adam8bit(), shorter)
    padded = grad.flatten().clone()
    padded[31 * 256 + 100 :] = 0
    for _ in range(3):
        cut.step([padded.view(32, 256)])
        short.step([padded[: 31 * 256 + 100].view(1, -1)])
    assert torch.equal(cut.params[0].detach().flatten()[: 31 * 256 + 100], short.params[0].detach().flatten())


def test_a_skipped_step_changes_no_bit(over: Callable[..., Any]) -> None:
    ours = over(Adam8bit(lr=torch.tensor(0.1)), gaussian(100, 130))
    ours.step([gaussian(100, 130, seed=1)])
    before = [ours.params[0].detach().clone(), *(value.clone() for value in ours.state().values())]
    ours.step([torch.full((100, 130), torch.nan)], skip=torch.tensor(1.0))
    after = [ours.params[0].detach(), *ours.state().values()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    ours.step([gaussian(100, 130, seed=2)], skip=torch.tensor(0.0))
    assert not torch.equal(ours.params[0], before[0])


def test_a_zero_gradient_decays_and_does_nothing_else(over: Callable[..., Any]) -> None:
    ours = over(Adam8bit(lr=0.5, weight_decay=0.25), gaussian(64, 64))
    ours.step([torch.zeros(64, 64)])
    assert torch.equal(ours.params[0], gaussian(64, 64) * 0.875)


def test_all_bad_fields_are_named_at_once() -> None:
    bad: dict[str, Any] = dict(lr=-1.0, betas=(0.9, 1.0), eps=-1.0, weight_decay=True, min_numel=1.5, compat="ao")
    with pytest.raises(ValueError) as error:
        Adam8bit(**bad)
    assert all(f"{name}: expected " in str(error.value) for name in bad)
