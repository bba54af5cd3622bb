"""Stepping in backward is the same training, with the gradients of one or two units alive at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from optimizers import AdamW, Muon


def _net(mesh: Any, **options: Any) -> nn.Module:
    from vescale import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)))
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh, **options)
    return model


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, foreach=False)


def _equal(world: int, dtype: torch.dtype | None) -> None:
    """In bf16 the sum lies in the gradient buffer until it is widened: at once here, after backward there."""
    from vescale import step_in_backward

    mesh, policy = init_device_mesh("cpu", (world,)), MixedPrecisionPolicy(reduce_dtype=dtype)
    ours, plain = _net(mesh, mp_policy=policy), _net(mesh, mp_policy=policy)
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
        assert step == 1 or all(p.grad is None for p in ours.parameters())
        assert step == 1 or all(s.grad is None for unit in ours.units() for s in unit.segments)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local())


@pytest.mark.parametrize("world", [2, 3, 4])
def test_it_equals_a_step_after_backward(pool, world: int) -> None:
    for dtype in (None, torch.bfloat16):
        pool(world).run(_equal, world, dtype)


def _narrow(world: int) -> None:
    """Of masters that are narrower than the sum, a gradient is scaled, then rounded, once: FSDP2's bits."""
    from torch.distributed.fsdp import fully_shard as theirs

    from vescale import fully_shard

    mesh, policy = init_device_mesh("cpu", (world,)), MixedPrecisionPolicy(reduce_dtype=torch.float32)
    torch.manual_seed(dist.get_rank())
    x = (0.8 + 0.2 * torch.rand(64, 5)).half()
    for hooked in (False, True):
        found = []
        for shard in (fully_shard, theirs):
            model = nn.Linear(5, 7, bias=False, dtype=torch.float16)
            shard(model, mesh=mesh, mp_policy=policy)
            if hooked and shard is fully_shard:
                model.weight.register_hook(lambda grad: None)
            (850 * model(x).float()).sum().backward()  # some 50,000 on a rank: two are too many for float16
            found.append(model.weight.grad.full_tensor())
        assert found[0].isfinite().all() and torch.equal(*found)


def test_narrow_masters_have_fsdp2s_gradients(pool) -> None:
    pool(2).run(_narrow, 2)


def _rules() -> Any:
    from vescale import Rules

    return Rules(matrices=("*.weight", Muon(lr=0.02)), rest=("*", AdamW(lr=0.01)))


def _equal_optimizer(world: int, zero: int) -> None:
    """One Optimizer of the whole model, whose units are stepped in backward: the same bits, exchanges and all."""
    from vescale import Optimizer, counters, step_in_backward

    mesh = init_device_mesh("cpu", (world,))
    ours, plain = _net(mesh, zero=zero, max_padding=0.0), _net(mesh, zero=zero, max_padding=0.0)
    first, second = (Optimizer(model.named_parameters(), _rules()) for model in (ours, plain))
    assert step_in_backward(ours, first) == [first]
    for step in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        for model in (ours, plain):
            model.set_requires_gradient_sync(step != 1)
            model(x).square().mean().backward()
        if step != 1:
            first.step()  # finds nothing left to do
            second.step()
            second.zero_grad()
        assert step == 1 or all(p.grad is None for p in ours.parameters())
        assert step == 1 or all(s.grad is None for unit in ours.units() for s in unit.segments)
    states = first.named_state(), second.named_state()
    for a, b in ((dict(ours.named_parameters()), dict(plain.named_parameters())), states):
        assert a.keys() == b.keys()
        assert [n for n in a if not torch.equal(_local(a[n]), _local(b[n]))] == []
    assert first.owners and counters(first).exchange_bytes == counters(second).exchange_bytes
    with pytest.raises(ValueError, match="units are stepped in backward"):
        first.clip_grad_norm_(1.0)
    with pytest.raises(
        ValueError, match="expected an Optimizer of the model's 12 trainable parameters, got one of 12, 0"
    ):
        step_in_backward(plain, first)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "device_mesh") else tensor


@pytest.mark.parametrize("zero", [2, 3])
def test_one_optimizer_steps_unit_by_unit_to_the_same_bits(pool, zero: int) -> None:
    pool(3).run(_equal_optimizer, 3, zero)


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
