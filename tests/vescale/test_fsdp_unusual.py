"""What a sharded model is not asked every day: unusual modules, parameters, outputs, graphs and ways to its state.

One process is the reference. Reported cases among them:

======  ========================================================================================================
T-D2    accumulated fp32 and fresh bf16 gradients, late and unused parameters: pytorch#196996, #160279
T-D3    whole units frozen, first, last, in between and all: pytorch#186998
T-F4    modules that several units share: transformers ties more than embeddings: accelerate#4171
T-N2    loading and saving through modules that were not sharded themselves
======  ========================================================================================================
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

WIDTH = 6


def _x(seed: int = 0, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (4, WIDTH)), generator=torch.Generator().manual_seed(seed))


def _pair(make: Callable[[], nn.Module], *units: str, **options: Any) -> tuple[Any, Any]:
    """A model sharded at ``units`` and as a whole, and the same in one process."""
    from vescale import fully_shard

    torch.manual_seed(3)
    whole = make()
    model = copy.deepcopy(whole)
    for name in units:
        fully_shard(model.get_submodule(name), **options)
    return fully_shard(model, **options), whole


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))


def _same_grads(model: nn.Module, whole: nn.Module, bound: float = 1e-5) -> None:
    expected = {name: p.grad for name, p in whole.named_parameters()}
    for name, p in model.named_parameters():
        if expected[name] is None:
            assert p.grad is None or not p.grad.full_tensor().any(), name
        else:
            torch.testing.assert_close(
                p.grad.full_tensor(), expected[name], rtol=bound, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


def _backward(nets: tuple[Any, Any], *args: Any, **kwargs: Any) -> None:
    for net in nets:
        net(*args, **kwargs).square().mean().backward()


# --- modules and parameters ---


class Shares(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(WIDTH, WIDTH), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shared(self.own(x)).tanh()


def _shared_modules() -> None:
    def make() -> nn.Module:
        shared = nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(Shares(shared), nn.Linear(WIDTH, WIDTH), Shares(shared))

    for units in (("0", "2"), ("0.shared", "0", "2"), ("0.own", "1")):
        nets = _pair(make, *units)
        for step in range(2):
            _backward(nets, _x(step))
        _same_grads(*nets)


class Mirrors(nn.Linear):
    """Keeps a second name for its weight, as recurrent modules keep a list."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            self.__dict__["mirror"] = value
        super().__setattr__(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.mirror.t()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(5, 7, num_layers=2, batch_first=True), Mirrors(7, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(x)[0])


class Mixed(nn.Module):
    """Parameters without elements, dims or reals; whole numbers; strides that are not the usual ones."""

    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))
        self.codes = nn.Parameter(torch.randint(-5, 5, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(4, WIDTH).t())
        self.items = nn.ParameterDict({"none": nn.Parameter(torch.empty(0, 3)), "one": nn.Parameter(torch.tensor(2.0))})
        self.register_parameter("missing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x.to(self.wave.dtype) @ self.wave).abs().to(x.dtype) + 0.1 * (x @ self.codes.to(x.dtype))
        return (y @ self.turned) * self.items["one"] + self.items["none"].sum()


def _modules() -> None:
    nets = _pair(Recurrent, "rnn")
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.5) for net in nets]
    for step in range(3):
        _backward(nets, _x(step, 4, 3, 5))
        _same_grads(*nets)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for net in nets:
            net.double().float()  # the optimizer goes on with the same parameters
    _backward(copy.deepcopy(nets), _x(4, 4, 3, 5))
    encoder = lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))  # noqa: E731
    conv = lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(inplace=True), nn.Conv2d(5, 2, 3)).to(  # noqa: E731
        memory_format=torch.channels_last
    )
    normed = lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)), nn.Linear(4, 2))  # noqa: E731
    sparse = lambda: nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))  # noqa: E731
    for make, x in ((encoder, _x(0, 2, 5, 8)), (conv, _x(0, 2, 3, 9, 9)), (normed, _x(0, 3, 8)), (Mixed, _x())):
        nets = _pair(make, *("0",) * (make is not Mixed))
        _backward(nets, x)
        _same_grads(*nets, 1e-4)
    nets = _pair(sparse, "0")
    _backward(nets, torch.tensor([1, 2, 2]))
    torch.testing.assert_close(nets[0][0].weight.grad.full_tensor(), nets[1][0].weight.grad.to_dense())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    nets = _pair(Mixed, mp_policy=policy)  # complex and whole numbers are not cast
    _backward(nets, _x().bfloat16().float())
    torch.testing.assert_close(nets[0].wave.grad.full_tensor(), nets[1].wave.grad, rtol=0.05, atol=0.05)


# --- outputs and graphs ---


class Box:
    """Nothing that torch knows."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Boxed(nn.Module):
    """Its result is in an object of its own, or only in a list that it was given."""

    def __init__(self, aside: bool) -> None:
        super().__init__()
        self.first, self.second, self.aside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), aside

    def forward(self, x: torch.Tensor, out: list[torch.Tensor]) -> Box | None:
        out.append(self.second(self.first(x).tanh()))
        return None if self.aside else Box(out[-1])


class Opens(nn.Module):
    def __init__(self, aside: bool) -> None:
        super().__init__()
        self.boxed, self.head = Boxed(aside), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: list[torch.Tensor] = []
        self.boxed(x, out)
        return self.head(out[0])


class Twofold(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), self.b(x)


def _graphs() -> None:
    for aside in (False, True):
        nets = _pair(lambda aside=aside: Opens(aside), "boxed")
        for step in range(2):
            _backward(nets, _x(step))
        _same_grads(*nets)
        assert not any(unit.unsharded for unit in nets[0].units())
    nets = _pair(lambda: Boxed(False))  # the outermost one: what ends its backward is the gradients' coming
    for net in nets:
        net(_x(), []).value.square().mean().backward()
    _same_grads(*nets)
    nets = _pair(_layers, "0", "2", "3")
    for net in nets:  # a gradient of the gradient, which reads the weights once more
        x = _x().requires_grad_()
        y = net(x).sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        (y + grad.square().sum()).backward()
    _same_grads(*nets)
    assert not any(unit.unsharded for unit in nets[0].units())
    nets = _pair(Twofold, "a", "b")
    for net in nets:  # a part of the graph at a time, and one output that nobody uses
        a, b = net(_x())
        a.sum().backward()
        b.square().sum().backward()
        net(_x(1))[0].square().sum().backward()
    _same_grads(*nets)
    nets = _pair(_layers, "0", "2", "3")
    for step in range(2):
        nets[0](_x(9))  # a forward without a backward
        _backward(nets, _x(step))
    _same_grads(*nets)


def _frozen_units() -> None:
    nets = _pair(_layers, "0", "2", "3")
    for step, frozen in enumerate(("0", "23", "3", "", "02", "023")):
        inputs = []
        for net in nets:
            net.zero_grad()
            for name, p in net.named_parameters():
                p.requires_grad_(name[0] not in frozen)
            inputs.append(_x(step).requires_grad_())
            net(inputs[-1]).square().mean().backward()
        _same_grads(*nets)
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
        assert not any(unit.unsharded for unit in nets[0].units())
    nets[0].requires_grad_(True)
    nets[0].set_requires_gradient_sync(False)
    nets[0](_x()).sum().backward()
    nets[0][2].requires_grad_(False)
    with pytest.raises(ValueError, match="2.weight was frozen with gradients that are not reduced"):
        nets[0](_x())


class Late(nn.Module):
    """Uses two of its three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, *used: int) -> torch.Tensor:
        for index in used:
            x = self.layers[index](x)
        return x


def _accumulated() -> None:
    """T-D2: bf16 gradients of four micro-batches, each parameter in some of them, are added and summed in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for syncs in ((0, 0, 0, 1), (1, 1, 1, 1), (0, 1, 0, 1)):
        model, whole = _pair(Late, mp_policy=policy)
        low = copy.deepcopy(whole).bfloat16()
        total = {name: torch.zeros(p.shape) for name, p in low.named_parameters()}
        for micro, (sync, used) in enumerate(zip(syncs, ((0, 1), (0, 2), (1, 0), (2,)), strict=True)):
            model.set_requires_gradient_sync(bool(sync))
            for rank in range(dist.get_world_size()):
                x = _x(10 * micro + rank).bfloat16()
                low.zero_grad()
                low(x, *used).float().square().mean().backward()
                if rank == dist.get_rank():
                    model(x, *used).float().square().mean().backward()
                for name, p in low.named_parameters():
                    total[name] += 0 if p.grad is None else p.grad.float() / dist.get_world_size()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad.full_tensor(), total[name], rtol=1e-5, atol=1e-6)


# --- states ---


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def _states() -> None:
    """Through a wrapper and through a plain layer inside; gathered or not, assigned or copied."""
    for kept in (False, True):
        for assign in (False, True):
            nets = _pair(_layers, "0")
            nets[0].set_reshard_after_backward(not kept)
            wrapped = [Wrapper(net) for net in nets]
            for step, path in enumerate(("", "inner.2", "inner.3")):
                _backward(nets, _x())
                targets = [net.get_submodule(path) for net in wrapped]
                assert all(hasattr(value, "full_tensor") for value in targets[0].state_dict().values())
                new = {name: _x(step, *value.shape) for name, value in targets[1].state_dict().items()}
                for target in targets:
                    target.load_state_dict(new, assign=assign)
                torch.testing.assert_close(*(net(_x(1)) for net in nets))
    _copied_by_a_wrapper(nets[0])
    alone = copy.deepcopy(nets[0][2])  # a plain layer: what it holds lies in no unit any more
    alone.load_state_dict(alone.state_dict())
    for net in nets:  # in the middle of an iteration
        loss = net(_x()).square().mean()
        net.state_dict()
        net.zero_grad()  # of the sharded parameters, although the modules hold whole ones
        loss.backward()
    nets[0].set_reshard_after_backward(True)
    _backward(nets, _x(2))
    _same_grads(*nets)


def _copied_by_a_wrapper(net: nn.Module) -> None:
    """A deepcopy meets a layer before the model that shards it: the copies belong together as the originals do."""
    wrapped = Wrapper(net)
    del wrapped.inner
    wrapped.first, wrapped.inner = net[2], net
    twin = copy.deepcopy(wrapped)
    held = net[2].weight.full_tensor().clone()
    for other in (twin, copy.deepcopy(twin)):
        assert other.first is other.inner[2]
        with torch.no_grad():
            other.first.weight.fill_(2.0)  # before the first gather
        for value, assign in ((1.0, False), (3.0, True)):
            other.inner.unshard()
            other.inner(_x())
            assert hasattr(other.first.state_dict()["weight"], "full_tensor")
            other.inner.unshard()
            new = {name: torch.full(p.shape, value) for name, p in other.first.named_parameters()}
            other.first.load_state_dict(new, assign=assign)
            other.inner.reshard()
            assert bool((other.inner[2].weight.full_tensor() == value).all())
    assert torch.equal(net[2].weight.full_tensor(), held)


def _moved() -> None:
    nets = _pair(_layers, "0")
    _backward(nets, _x())
    moves: list[Callable[[nn.Module], Any]] = [
        lambda net: net.to(torch.float64), lambda net: net.share_memory(), lambda net: net.float(),
        lambda net: net.to(memory_format=torch.channels_last), lambda net: net.cpu(),
    ]  # fmt: skip
    for move in moves:
        for net in nets:
            move(net)
        _same_grads(*nets)
    assert [name for name, _ in nets[0].named_parameters()] == [name for name, _ in nets[1].named_parameters()]
    _backward(nets, _x(1))
    _same_grads(*nets)
    nets[0].to("meta")
    with pytest.raises(ValueError, match=r"on the meta device; call vescale.materialize"):
        nets[0](_x())


def _freed() -> None:
    """A model that nobody holds any more is collected, buffers and all."""
    model, _ = _pair(_layers, "0", "2")
    optimizer = torch.optim.AdamW(model.parameters())
    model(_x()).sum().backward()
    optimizer.step()
    held = [weakref.ref(segment.full.local) for unit in model.units() for segment in unit.segments]
    del model, optimizer
    gc.collect()
    assert held and not any(ref() is not None for ref in held)


def _order() -> None:
    from vescale import fully_shard

    for planned in (False, True):
        model = fully_shard(_layers())
        if planned:
            list(model.parameters())
        with pytest.raises(ValueError, match="Linear is inside a module that was sharded before; inner modules come"):
            fully_shard(model[0])
    tied = _layers()
    tied[2].weight = tied[0].weight
    fully_shard(fully_shard(tied[0]) and fully_shard(tied[2]) and tied)(_x()).sum().backward()
    late = fully_shard(_layers())
    late(_x())
    late[0].register_parameter("nothing", None)
    late(_x())


@pytest.mark.parametrize("world", [2, 3])  # equal shards and unequal ones
def test_unusual_modules_graphs_and_states_equal_one_process(pool, world: int) -> None:
    for check in (_shared_modules, _modules, _graphs, _frozen_units, _accumulated, _states, _moved, _freed, _order):
        pool(world).run(check)
