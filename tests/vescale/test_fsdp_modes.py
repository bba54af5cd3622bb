"""ZeRO stages, HSDP, int resharding and CPU offload: the numbers of one process, by the promised collectives."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.nn import functional as F

MICROS, STEPS = 2, 3


class Net(nn.Module):
    """Three layers of odd sizes, with a residual; a root parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(9, 21), nn.GELU(), nn.Linear(21, 9)) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x * self.scale


def _batch(step: int, micro: int) -> torch.Tensor:
    return torch.randn(12, 9, generator=torch.Generator().manual_seed(100 * step + micro))


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), x.roll(1, -1).tanh())


@functools.cache
def _one_process() -> dict[str, torch.Tensor]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for micro in range(MICROS):
            (_loss(model, _batch(step, micro)) / MICROS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Counts torch's collectives by name, from outside the library."""
    seen: Counter[str] = Counter()
    names = ("all_gather_single", "reduce_scatter_single", "all_reduce")
    originals = {name: getattr(dist, name) for name in names}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _sharded(shape: tuple[int, ...], *, hold: str | None = None, ahead: int = 0, **options: Any) -> Any:
    """Trains; ``hold`` names what is off until the last micro-batch: "sync" or "all_reduce"; prefetches ``ahead``."""
    from vescale import fully_shard

    model, mesh = Net(), _mesh(shape)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, **options)
    for index, layer in enumerate(model.layers if ahead else ()):
        layer.set_modules_to_forward_prefetch(list(model.layers)[index + 1 :][:ahead])
        layer.set_modules_to_backward_prefetch(list(model.layers)[:index][::-1][:ahead])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        with _counted() as seen:
            for micro in range(MICROS):
                last = micro == MICROS - 1
                model.set_requires_gradient_sync(last or hold != "sync")
                model.set_requires_all_reduce(last or hold != "all_reduce")
                x = _batch(step, micro).chunk(dist.get_world_size())[dist.get_rank()]
                (_loss(model, x) / MICROS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(seen), {name: p.full_tensor() for name, p in model.named_parameters()}


def _compare(results: Any, *, gathers: int, scatters: int, all_reduces: int = 0) -> None:
    expected = _one_process()
    for seen, params in results:
        counts = {"all_gather_single": gathers, "reduce_scatter_single": scatters, "all_reduce": all_reduces}
        assert seen == {name: count for name, count in counts.items() if count}
        for name, param in params.items():
            torch.testing.assert_close(param, expected[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


UNITS = 4  # three layers and the root, one segment each


@pytest.mark.parametrize("world", [2, 3, 4])
def test_stages_gather_and_reduce_as_often_as_they_promise(pool, world: int) -> None:
    # the root of stage 3 stays gathered from forward to backward
    _compare(pool(world).run(_sharded, (world,), zero=3), gathers=(2 * UNITS - 1) * MICROS, scatters=UNITS * MICROS)
    _compare(pool(world).run(_sharded, (world,), zero=2, hold="sync"), gathers=UNITS, scatters=UNITS * MICROS)
    _compare(pool(world).run(_sharded, (world,), zero=1, hold="sync"), gathers=UNITS, scatters=UNITS)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_stage_0_keeps_everything_and_all_reduces(pool, world: int) -> None:
    results = pool(world).run(_sharded, (world,), zero=0, hold="sync")
    _compare(results, gathers=0, scatters=UNITS, all_reduces=UNITS)  # the reduce-scatters are within one rank


@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (1, 3), (3, 1)])
def test_hsdp_equals_one_process(pool, shape: tuple[int, int]) -> None:
    world = shape[0] * shape[1]
    gathers = (2 * UNITS - 1) * MICROS if shape[1] > 1 else 0  # one rank's shard is the whole
    each = pool(world).run(_sharded, shape)
    _compare(each, gathers=gathers, scatters=UNITS * MICROS, all_reduces=UNITS * MICROS)
    held = pool(world).run(_sharded, shape, hold="all_reduce")
    _compare(held, gathers=gathers, scatters=UNITS * MICROS, all_reduces=UNITS)


def test_resharding_to_two_of_four_ranks_equals_one_process(pool) -> None:
    for shape in ((4,), (2, 2)):
        results = pool(4).run(_sharded, shape, reshard_after_forward=2)
        gathers = (2 * UNITS if shape == (4,) else 2 * UNITS) * MICROS  # asked for, so the root's too
        _compare(results, gathers=gathers, scatters=UNITS * MICROS, all_reduces=0 if shape == (4,) else UNITS * MICROS)
    for ranks in (2, 3):  # among all of them: each keeps its shard, as without a number
        results = pool(ranks).run(_sharded, (ranks,), reshard_after_forward=ranks)
        _compare(results, gathers=2 * UNITS * MICROS, scatters=UNITS * MICROS)
    results = pool(2).run(_sharded, (2,), reshard_after_forward=1)  # everything is kept
    _compare(results, gathers=UNITS * MICROS, scatters=UNITS * MICROS)


@pytest.mark.parametrize("world", [2, 3])  # equal shards and unequal ones
def test_offload_accumulation_and_prefetch_leave_the_numbers(pool, world: int) -> None:
    """T-A4: every pair of them (pytorch#73784, DeepSpeed#7981); T-A1 is ``hold="all_reduce"`` of the tests above."""
    for offload in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        for hold in (None, "sync"):
            for ahead in (0, 2):
                results = pool(world).run(_sharded, (world,), hold=hold, ahead=ahead, **offload)
                scatters = UNITS * (1 if hold else MICROS)
                _compare(results, gathers=(2 * UNITS - 1) * MICROS, scatters=scatters)


def _against_fsdp2(shape: tuple[int, ...], ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    from torch.distributed.fsdp import fully_shard as fsdp2

    from vescale import fully_shard

    policy, runs = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), []
    for shard, options in ((fully_shard, ours), (fsdp2, theirs)):
        model = Net()
        for module in (*model.layers, model):
            shard(module, mesh=_mesh(shape), mp_policy=policy, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(STEPS):
            loss = _loss(model, _batch(step, 0).chunk(dist.get_world_size())[dist.get_rank()])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        runs.append(torch.stack(losses))
    # bf16 compute of equal weights: the first loss is equal, later ones differ by the order of fp32 sums
    assert torch.equal(runs[0][0], runs[1][0])
    torch.testing.assert_close(runs[0], runs[1], rtol=2e-3, atol=0)


def test_modes_equal_fsdp2(pool) -> None:
    pool(4).run(_against_fsdp2, (2, 2), {}, {})
    pool(4).run(_against_fsdp2, (4,), {"reshard_after_forward": 2}, {"reshard_after_forward": 2})
    pool(2).run(_against_fsdp2, (2,), {"zero": 2}, {"reshard_after_forward": False})
    pool(2).run(_against_fsdp2, (2,), {"zero": 0}, {})


def _stale(zero: int, reshard: bool | int | None) -> None:
    from vescale import fully_shard

    model, reference = Net(), Net()
    for module in (*model.layers, model):
        fully_shard(module, mesh=_mesh((4,)), zero=zero, reshard_after_forward=reshard)
    x, held = _batch(0, 0), list(model.parameters())  # as an optimizer holds them

    def check(after: str) -> None:  # it leaves the root gathered
        torch.testing.assert_close(model(x), reference(x), rtol=1e-5, atol=1e-6, msg=lambda m: f"{after}: {m}")

    check("nothing")
    for write in ("operator", "load", "run", "data", "fused"):
        for p, q in zip(held, reference.parameters(), strict=True):
            with torch.no_grad():
                q.mul_(1.0 if write == "fused" else 1.5)
                if write == "operator":
                    p.mul_(1.5)
                elif write == "run":
                    p.to_local().mul_(1.5)
                elif write == "data":
                    p.data = p.data * 1.5
        if write == "fused":  # steps without raising a version counter
            for params in (held, list(reference.parameters())):
                for p in params:
                    p.grad = torch.ones_like(p)
                torch.optim.AdamW(params, fused=True).step()
        if write == "load":
            model.load_state_dict({name: q.detach() for name, q in reference.named_parameters()})
        check(write)


@pytest.mark.parametrize(("zero", "reshard"), [(0, None), (1, None), (2, None), (3, False), (3, 2)])
def test_what_is_kept_gathered_follows_every_write_to_the_masters(pool, zero: int, reshard: bool | int | None) -> None:
    pool(4).run(_stale, zero, reshard)


def _bad_modes() -> None:
    from vescale import fully_shard

    mesh = _mesh((3,))
    with pytest.raises(ValueError, match="reshard_after_forward=2 does not divide the 3 ranks"):
        list(fully_shard(nn.Linear(2, 2), mesh=mesh, reshard_after_forward=2).parameters())
    with pytest.raises(ValueError, match="number of ranks, got 0"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, reshard_after_forward=0)
    with pytest.raises(ValueError, match="zero=1 keeps the gathered parameters"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, reshard_after_forward=3, zero=1)
    with pytest.raises(ValueError, match="offload_policy must be an OffloadPolicy, got str"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, offload_policy="cpu")
    three = init_device_mesh("cpu", (3, 1, 1), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match="two for HSDP, got 3"):
        fully_shard(nn.Linear(2, 2), mesh=three)


def test_a_mode_that_does_not_fit_is_named(pool) -> None:
    pool(3).run(_bad_modes)
