"""Stepping in backward is the same training, with the gradients of one or two units alive at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def _net(mesh: Any) -> nn.Module:
    from vescale import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)))
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh)
    return model


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, foreach=False)


def _equal(world: int) -> None:
    from vescale import step_in_backward

    mesh = init_device_mesh("cpu", (world,))
    ours, plain = _net(mesh), _net(mesh)
    assert len(step_in_backward(ours, _adamw)) == 3, "the root has no parameters"
    optimizer = _adamw(plain.parameters())
    for step in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        for model in (ours, plain):
            model.set_requires_gradient_sync(step != 1)  # one micro-batch is added to the next
            model(x).square().mean().backward()
        if step != 1:
            optimizer.step()
            optimizer.zero_grad()
        assert all(p.grad is None for p in ours.parameters())
        assert all(segment.grad is None for unit in ours.units() for segment in unit.segments)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local())


@pytest.mark.parametrize("world", [2, 3, 4])
def test_it_equals_a_step_after_backward(pool, world: int) -> None:
    pool(world).run(_equal, world)


def _refused() -> None:
    from vescale import fully_shard, step_in_backward

    model = _net(init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match=r"max_norm=None and non_finite='raise', got 1.0"):
        step_in_backward(model, _adamw, max_norm=1.0)
    with pytest.raises(ValueError, match="got None and 'skip'"):
        step_in_backward(model, _adamw, non_finite="skip")
    with pytest.raises(ValueError, match="expected a module that fully_shard was called on"):
        step_in_backward(nn.Linear(2, 2), _adamw)
    step_in_backward(model, _adamw)
    with pytest.raises(ValueError, match="steps in backward already"):
        step_in_backward(model, _adamw)
    partly = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(partly, ignored_params={partly[0].weight})
    with pytest.raises(ValueError, match="0.weight is in no unit"):
        step_in_backward(partly, _adamw)


def test_what_needs_every_gradient_first_is_refused(pool) -> None:
    pool(1).run(_refused)
