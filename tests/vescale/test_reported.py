"""What was reported of other libraries' optimizers, where no test of a rule or of the engine shows it.

The paths that are taken, the order of launches, what a step costs the host, the types of state: microsoft/dion,
NVIDIA/Megatron-LM and others, by their numbers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from optimizers import Adam8bit, AdamW, BF16Muon, Muon, Muon8bit, Shampoo
from vescale import collectives
from vescale.optimizer import warm_up

GROUPS: dict[str, Any] = {"matrices": ("*.weight", Muon(lr=0.02)), "rest": ("*", AdamW(lr=0.01))}


def _gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _layers(count: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(count))
    )


def _sharded(
    shape: tuple[int, ...], groups: dict[str, Any], *, size: tuple[int, int] = (3, 12), **options: Any
) -> tuple[nn.Module, Any]:
    from vescale import Optimizer, Rules, fully_shard

    model, rules, mesh = _layers(*size), Rules(**groups), init_device_mesh("cpu", shape)
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh, block_of=rules.block_of, max_padding=0.0)
    return model, Optimizer(model.named_parameters(), rules, **options)


def _launches(share: bool) -> list[tuple[int, ...]]:
    """The groups of a step's exchanges, in the order in which this rank begins them."""
    model, optimizer = _sharded((2, 2), GROUPS, share_replicas=share)
    model(_gaussian(4, 12)).square().sum().backward()
    order: list[tuple[int, ...]] = []
    original = collectives.all_to_all

    def noted(*args: Any, group: dist.ProcessGroup, **options: Any) -> Any:
        order.append(tuple(dist.get_process_group_ranks(group)))
        return original(*args, group=group, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "all_to_all", noted)
        warm_up(optimizer.runs, share_replicas=share)
        warmed = set(order)
        optimizer.step()
    assert warmed == {*order}, "every communicator of the step was there before its first step"
    return order


def test_ranks_begin_exchanges_in_one_order_over_communicators_that_are_warm(pool: Any) -> None:
    """PrimeIntellect-ai/prime-rl #3490: a first all-to-all that ranks entered in different order never came back."""
    for share in (False, True):
        ranks = pool(4).run(_launches, share)
        assert len({group for order in ranks for group in order}) == (4 if share else 2)
        for a, first in enumerate(ranks):
            for b, second in enumerate(ranks):
                both = [[group for group in order if {a, b} <= {*group}] for order in (first, second)]
                assert both[0] == both[1]


class Operators(TorchDispatchMode):
    """Counts what the host launches."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _costs(theirs: bool) -> tuple[int, int]:
    """Operators of a training step with AdamW, and the peak of live bytes in it."""
    from torch.distributed.fsdp import fully_shard

    from vescale.live import LiveBytes

    if theirs:
        model, mesh = _layers(6, 32), init_device_mesh("cpu", (dist.get_world_size(),))
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh)
        optimizer: Any = torch.optim.AdamW(model.parameters(), foreach=True)
    else:
        model, optimizer = _sharded((dist.get_world_size(),), {"all": ("*", AdamW())}, size=(6, 32))
    x = _gaussian(2, 32)
    for measure in (None, Operators(), LiveBytes()):
        for _ in range(2 if measure is None else 1):
            with measure or torch.enable_grad():
                model(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        if isinstance(measure, Operators):
            count = measure.count
    assert isinstance(measure, LiveBytes)
    return count, measure.peak


def test_a_step_launches_less_than_fsdp2s_and_holds_no_more(pool: Any) -> None:
    """NVIDIA/Megatron-LM #7264: 33 % less memory for 18 % more time of the CPU; both are looked at.

    Time itself is measured by ``tests/bench/fsdp.py``.
    """
    for attempt in range(5):  # gloo's threads may let go of a tensor late: then more is alive than need be
        (ours, our_peak), (theirs, their_peak) = (pool(2).run(_costs, kind)[0] for kind in (False, True))
        print(ours, our_peak, theirs, their_peak)
        assert ours < theirs
        if attempt == 4 or our_peak <= their_peak:
            break
    assert our_peak <= their_peak


def _types(rule: Any) -> None:
    _, optimizer = _sharded((dist.get_world_size(),), {"matrices": ("*.weight", rule), "rest": ("*", AdamW())})
    for name, value in optimizer.named_state().items():
        local = value.to_local() if hasattr(value, "to_local") else value
        assert type(local) is torch.Tensor, (name, type(local))
        assert hash(value) == hash(value) and str(tuple(value.shape)) and repr(value)


def test_state_is_plain_tensors_under_one_placement(pool: Any) -> None:
    """PrimeIntellect-ai/prime-rl #1075: quantised state was a subclass that could not be hashed or shown."""
    for rule in (Adam8bit(min_numel=64), Muon8bit(), Shampoo(block_size=8)):
        pool(2).run(_types, rule)


def test_parameters_of_bfloat16_are_orthogonalised_as_masters_are() -> None:
    """deepspeedai/DeepSpeed #8461: the optimizer of bf16 parameters flattened them, and took another way."""
    ours, wide = BF16Muon(lr=0.1), Muon(lr=0.1)
    for shape in ((24, 16), (3, 24, 16)):
        assert ours.block_shape(shape) == wide.block_shape(shape)
    param, grad = _gaussian(24 * 16).bfloat16(), _gaussian(24 * 16, seed=1).bfloat16()
    found = []
    for rule, copy in ((ours, param.clone()), (wide, param.float())):
        state = {"momentum": torch.zeros(24 * 16), "step": torch.zeros(()), "stream": 1, "first": 0}
        (payload,) = rule.prepare(copy, grad.to(copy.dtype), state, skip=None)
        direction = rule.block((payload.view(1, 24, 16),), {})
        rule.apply(copy, direction.view(-1), state, skip=None)
        found.append((direction, copy.float()))
    assert torch.equal(found[0][0], found[1][0])
    assert bool(((found[0][1] - found[1][1]).abs() <= found[1][1].abs() * 2**-7).all()), "rounded, nothing else"


@pytest.mark.parametrize(("kind", "name"), [(Muon, "momentum"), (Muon8bit, "momentum_scale")])
def test_a_momentum_that_was_a_sum_goes_on_as_an_average(kind: Any, name: str) -> None:
    """MoonshotAI/Moonlight and microsoft/dion keep the sum, 20 times the average of torch.optim.Muon."""
    from vescale import Optimizer, Rules

    params = [nn.Parameter(_gaussian(32, 16)) for _ in range(2)]
    plain, loaded = (Optimizer([("w", param)], Rules(all=("*", kind(lr=0.02)))) for param in params)
    for step in range(6):
        for param, optimizer in zip(params, (plain, loaded), strict=True):
            param.grad = _gaussian(32, 16, seed=step)
            optimizer.step()
        if step == 2:
            state = loaded.state[params[1]]
            state[name].mul_(20.0)
            state["settles_at"].fill_(20.0)
            loaded.state_was_loaded()
            assert state["settles_at"] == 1
    torch.testing.assert_close(params[1], params[0], rtol=0, atol=2e-4)
