"""What a sharded model is between steps: its state in and out, copies of it, and what may not be done to it.

Reported cases:

======  ===================================================================================================
T-D1    several stored dtypes in one unit: pytorch#156784
T-I1    buffers that no checkpoint has, after to_empty: transformers#34234
T-I3    rank 0 reads and scatters, one tensor at a time: transformers#45649
T-N5    the class keeps its name and signature; pickling says what to do: transformers#34928
T-S3    the full state is streamed: accelerate#4099
T-S5    plain names, assign=True: Megatron-LM#7452
T-E1    deepcopy: pytorch#82070
T-E2    inference_mode: pytorch#197327
T-E3    an EMA of shards: NCAR/miles-credit#414
======  ===================================================================================================
"""

from __future__ import annotations

import copy
import inspect
import pickle
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn import functional as F


class Part(nn.Module):
    """Odd sizes, a scalar, an empty parameter, two stored dtypes, a frozen one, buffers of both kinds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.gate = nn.Parameter(torch.ones(width, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("angle", torch.arange(3.0), persistent=False)

    def reset_parameters(self) -> None:
        self.scale.fill_(1.5)
        self.gate.fill_(1.0)
        self.frozen.fill_(0.5)
        self.count.zero_()
        self.angle.copy_(torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.scale * self.gate.float() + self.frozen.sum() + self.nothing.sum()
        return x + torch.tanh(y) + self.angle.sum()


class Net(nn.Module):
    def __init__(self, width: int = 7, vocab: int = 13, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.parts = nn.ModuleList(Part(width) for _ in range(depth))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for part in self.parts:
            x = part(x)
        return self.head(x)


def _net(seed: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net()


def _shard(model: Net, **options: Any) -> Net:
    from vescale import fully_shard

    options.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    for part in model.parts:
        fully_shard(part, **options)
    fully_shard(model, **options)
    return model


def _tokens(step: int = 0) -> torch.Tensor:
    return torch.randint(0, 13, (2, 5), generator=torch.Generator().manual_seed(step))


def _loss(model: nn.Module, step: int = 0) -> torch.Tensor:
    return F.cross_entropy(model(_tokens(step)).flatten(0, 1), _tokens(step + 1).flatten())


def _train(model: nn.Module, steps: int = 2, start: int = 0) -> list[float]:
    """The same batch on every rank: the mean of equal gradients is what one process has."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, foreach=False)
    losses = []
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss = _loss(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _same(ours: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor], bound: float = 0.0) -> None:
    assert list(ours) == list(whole)
    for name, value in whole.items():
        mine, value = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in (ours[name], value))
        torch.testing.assert_close(mine, value, rtol=bound, atol=bound, msg=lambda m, n=name: f"{n}: {m}")


class Lazy(Mapping[str, torch.Tensor]):
    """A state that is read name by name, as from a file; remembers how many tensors were alive at once (T-I3)."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.state, self.reads, self.most = state, [], 0
        self.alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.reads.append(name)
        value = self.state[name].clone()
        self.alive.add(value)
        self.most = max(self.most, len(self.alive))
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


def _states() -> None:
    from vescale import RaggedTensor, full_state_dict, iter_full_state, load_full

    whole, model = _net(), _shard(_net())
    held = list(model.parameters())
    state = model.state_dict()
    assert list(state) == list(whole.state_dict()) and isinstance(state["embed.weight"], RaggedTensor)
    _same(state, whole.state_dict())
    assert all(p is q for p, q in zip(model.parameters(), held, strict=True))
    full = full_state_dict(model, on_every_rank=True)
    _same(full, whole.state_dict())
    assert full["embed.weight"] is full["head.weight"] and type(full["embed.weight"]) is torch.Tensor
    only = full_state_dict(model)
    assert (list(only) == list(full)) == (dist.get_rank() == 0) and (bool(only) or dist.get_rank() > 0)
    seen = {name: tensor.clone() for name, tensor in iter_full_state(model)}
    _same({name: seen[name] for name in full}, full)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    theirs = get_model_state_dict(model, options=options)
    assert theirs.keys() == (full.keys() if dist.get_rank() == 0 else set())
    assert all(torch.equal(theirs[name], full[name]) for name in theirs)
    # In again: whole on every rank, sharded, and from rank 0 alone.
    other = _net(5).state_dict()
    for assign in (False, True):
        model.load_state_dict(other, assign=assign)
        _same(model.state_dict(), other)
        model.load_state_dict({name: value.clone() for name, value in state.items()}, assign=assign)
        model.load_state_dict(other)
    assert all(p is q for p, q in zip(model.parameters(), held, strict=True))
    fresh, rank0 = _shard(_net(9)), dist.get_rank() == 0
    fresh.unshard()
    source = Lazy({name: value for name, value in other.items() if name != "head.weight"})
    load_full(fresh, source if rank0 else None)
    assert len(source.reads) == (len(source) if rank0 else 0), "each tensor is read once, by rank 0"
    assert source.most <= 2, "and copied into its segment before the one after the next is read"
    _same(fresh.state_dict(), other)
    load_full(fresh, full_state_dict(model))  # {} on other ranks
    _same(fresh.state_dict(), other)
    load_full(fresh, whole.state_dict() if rank0 else None)
    _same(fresh.state_dict(), whole.state_dict())
    _bad_states(fresh, whole.state_dict(), rank0)
    _same(fresh.state_dict(), whole.state_dict())
    for from_rank0 in (False, True):  # torch cuts by Shard only, and says so
        with pytest.raises(RuntimeError):
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank0)
            set_model_state_dict(fresh, dict(other), options=options)


def _torchs_states() -> None:
    """Model and optimizer through torch.distributed.checkpoint.state_dict: the copy goes on as the original does."""
    one, two = _shard(_net()), _shard(_net(5))
    optimizers = [
        torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.02, foreach=False)
        for net in (one, two)
    ]
    for net, optimizer in zip((one, two), optimizers, strict=True):
        _loss(net).backward()
        optimizer.step()
        optimizer.zero_grad()
    model, state = get_state_dict(one, optimizers[0])
    # What is set is taken as it is, not copied, as with any module; a checkpoint would lie between.
    set_state_dict(two, optimizers[1], model_state_dict=model, optim_state_dict=copy.deepcopy(state))
    for net, optimizer in zip((one, two), optimizers, strict=True):
        _loss(net, 1).backward()
        optimizer.step()
    _same(two.state_dict(), one.state_dict())
    full = get_optimizer_state_dict(one, optimizers[0], options=StateDictOptions(full_state_dict=True))
    assert full["state"] and not any(hasattr(v, "placements") for v in full["state"]["embed.weight"].values())


def _bad_states(model: nn.Module, state: dict[str, torch.Tensor], rank0: bool) -> None:
    from vescale import load_full

    bad = dict(state, extra=torch.zeros(1))
    bad["parts.0.linear.weight"] = torch.zeros(2, 2)
    del bad["parts.1.gate"]
    with pytest.raises(ValueError, match=r"missing parts.1.gate.*unexpected extra.*parts.0.linear.weight: expected"):
        load_full(model, bad if rank0 else None)
    with pytest.raises(ValueError, match="linear.weight: expected shape"):
        load_full(model, Lazy(bad) if rank0 else None, strict=False)
    with pytest.raises(ValueError, match="rank 0 must have the state"):
        load_full(model, None)
    with pytest.raises(RuntimeError, match="Missing key.*parts.1.gate"):
        model.load_state_dict({k: v for k, v in state.items() if k != "parts.1.gate"})


def _copies() -> None:
    whole, model = _net(), _shard(_net())
    expected = _train(whole)
    torch.testing.assert_close(torch.tensor(_train(model)), torch.tensor(expected), rtol=1e-6, atol=0)
    twin, twin_whole = copy.deepcopy(model), copy.deepcopy(whole)
    assert type(twin) is type(model) and isinstance(twin, Net) and twin.head.weight is twin.embed.weight
    assert all(p is not q for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    _same(twin.state_dict(), model.state_dict())
    frozen = {name: value.full_tensor().clone() for name, value in twin.state_dict().items() if "count" not in name}
    more = [_train(net, 2, start=2) for net in (model, whole)]
    torch.testing.assert_close(*map(torch.tensor, more), rtol=1e-6, atol=0)
    _same({n: v for n, v in twin.state_dict().items() if n in frozen}, frozen)
    both = [_train(net, 2, start=4) for net in (twin, twin_whole)]  # the copy trains, and alone
    torch.testing.assert_close(*map(torch.tensor, both), rtol=1e-6, atol=0)
    _same(model.state_dict(), whole.state_dict(), 1e-4)
    # EMA by hand and by torch, on the shards.
    averages = [torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
                for net in (model, whole)]  # fmt: skip
    for net, average in zip((model, whole), averages, strict=True):
        _train(net, 1, start=6)
        average.update_parameters(net)
        for p, q in zip(twin.parameters() if net is model else twin_whole.parameters(), net.parameters(), strict=True):
            with torch.no_grad():
                p.lerp_(q.detach(), 0.1)
    _same(averages[0].module.state_dict(), averages[1].module.state_dict(), 1e-4)
    _same(twin.state_dict(), twin_whole.state_dict(), 1e-4)
    for net in (averages[0], twin):
        with torch.inference_mode():
            _loss(net)
    with pytest.raises(NotImplementedError, match="copy the outermost one"):
        copy.deepcopy(model.parts[0])
    with pytest.raises(NotImplementedError, match="cannot be pickled.*state_dict"):
        pickle.dumps(model)
    with pytest.raises(NotImplementedError, match="cannot be pickled.*full_tensor"):
        pickle.dumps(model.embed.weight)
    assert str(inspect.signature(model.forward)) == str(inspect.signature(whole.forward))
    assert type(model).__name__ == "FSDPNet" and isinstance(model.parts[0], Part)


def _meta() -> None:
    from vescale import load_full, materialize

    with torch.device("meta"):
        model, bare = _shard(Net()), Net()
    torch.manual_seed(4)
    assert materialize(model, "cpu") == []
    torch.manual_seed(4)
    assert materialize(bare, "cpu") == []
    bare.embed.weight = bare.head.weight  # the later of the two that were one
    _same(model.state_dict(), bare.state_dict())
    assert torch.equal(model.parts[0].angle, torch.arange(3.0))
    losses = [_train(net) for net in (model, bare)]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-6, atol=0)
    with torch.device("meta"):
        lost = nn.Sequential(nn.Linear(2, 2), nn.Module())
        lost[1].register_buffer("inv_freq", torch.ones(2), persistent=False)
        unready = _shard(Net())
    with pytest.raises(ValueError, match="1.inv_freq.*in no checkpoint"):
        materialize(lost, "cpu")
    with pytest.raises(ValueError, match="meta device"):
        load_full(unready, bare.state_dict() if dist.get_rank() == 0 else None)


def _modes() -> None:
    """States and copies of every ZeRO stage, of replicas and of offloaded masters."""
    from vescale import full_state_dict, load_full

    choices: list[dict[str, Any]] = [{"zero": 0}, {"zero": 1}, {"zero": 2}, {"offload_policy": CPUOffloadPolicy()}]
    if dist.get_world_size() == 4:
        choices.append({"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))})
    for options in choices:
        whole, model = _net(), _shard(_net(5), **options)
        _train(model, 1)
        load_full(model, whole.state_dict() if dist.get_rank() == 0 else None)
        _same(full_state_dict(model, on_every_rank=True), whole.state_dict())
        losses = [_train(net) for net in (copy.deepcopy(model), whole)]
        torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-6, atol=0, msg=lambda m, o=options: f"{o}: {m}")
        _same(model.state_dict(), _net().state_dict())


@pytest.mark.parametrize("world", [2, 4])
def test_states_and_copies_of_every_mode(pool, world: int) -> None:
    pool(world).run(_modes)


@pytest.mark.parametrize("world", [2, 3])  # equal shards and unequal ones
def test_state_goes_out_and_in(pool, world: int) -> None:
    pool(world).run(_states)
    pool(world).run(_torchs_states)


@pytest.mark.parametrize("world", [2, 3])
def test_a_copy_is_a_model_of_its_own(pool, world: int) -> None:
    pool(world).run(_copies)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_materialize_fills_or_says_what_it_cannot(pool, world: int) -> None:
    pool(world).run(_meta)
