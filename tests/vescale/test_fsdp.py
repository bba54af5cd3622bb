"""fully_shard trains as one process does: same losses, gradients and weights, on any number of ranks.

Reported cases among them: frozen first, middle, last and all units (T-D3, pytorch#186998); tied parameters of several
units (T-F4, accelerate#4171); experts that only some ranks use (T-H1, pytorch#158719); plans compared over the ranks
(T-H3, Megatron-LM#2218).
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding tied to the head, odd sizes, a parameter nobody uses, a frozen one."""

    def __init__(self, vocab: int = 37, width: int = 20, depth: int = 3, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.frozen.sum()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x)


def _net(**options: int) -> Net:
    torch.manual_seed(7)
    return Net(**options)


def _batch(step: int, micro: int = 0) -> torch.Tensor:
    """Twelve sequences: divisible by 1, 2, 3 and 4 ranks."""
    return torch.randint(0, 37, (12, 9), generator=torch.Generator().manual_seed(100 * step + micro))


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def _one_process(steps: int, micros: int = 1, **options: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, losses = _net(**options), []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(steps):
        for micro in range(micros):
            loss = _loss(model, _batch(step, micro))
            (loss / micros).backward()
            losses.append(loss.item())
        model.unused.grad = torch.zeros_like(
            model.unused
        )  # a unit that took part has gradients: zero where nothing made one
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def _sharded(world: int, steps: int, micros: int = 1, sync: str = "each", shard: str = "layers", **options: int):
    from vescale import fully_shard

    model = _net(**options)
    mesh = init_device_mesh("cpu", (world,))
    if shard == "layers":
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
    elif shard == "embed and head":
        fully_shard(model.embed, mesh=mesh)
        fully_shard(model.head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(steps):
        for micro in range(micros):
            model.set_requires_gradient_sync(sync == "each" or micro == micros - 1)
            loss = _loss(model, _batch(step, micro).chunk(world)[dist.get_rank()])
            (loss / micros).backward()
            dist.all_reduce(loss.detach())
            losses.append(loss.item() / world)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def _compare(result, expected) -> None:
    for losses, params in result:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[0]), rtol=1e-5, atol=0)
        assert params.keys() == expected[1].keys()
        for name, param in params.items():
            torch.testing.assert_close(
                param, expected[1][name], rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_training_equals_one_process(pool, world: int) -> None:
    _compare(pool(world).run(_sharded, world, 3), _one_process(3))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_gradient_accumulation_equals_one_process(pool, world: int) -> None:
    expected = _one_process(2, micros=2)
    for sync in ("each", "last"):
        _compare(pool(world).run(_sharded, world, 2, micros=2, sync=sync), expected)


def test_activation_checkpointing_equals_one_process(pool) -> None:
    _compare(pool(2).run(_sharded, 2, 2, recompute=True), _one_process(2))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_tied_parameters_of_two_units_move_to_the_unit_above_both(pool, world: int) -> None:
    _compare(pool(world).run(_sharded, world, 2, shard="embed and head"), _one_process(2))


def test_one_unit_for_all_equals_one_process(pool) -> None:
    _compare(pool(2).run(_sharded, 2, 2, shard="root only"), _one_process(2))


def _meta_init(world: int) -> dict[str, torch.Tensor]:
    from vescale import fully_shard

    def init(model: nn.Module) -> None:
        torch.manual_seed(11)
        for param in model.parameters():
            if param.requires_grad:
                param.data.normal_(std=0.3)
            else:
                param.data.fill_(0.5)

    with torch.device("meta"):
        model = Net()
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    held = dict(model.named_parameters())
    model.to_empty(device="cpu")
    assert all(p is held[name] for name, p in model.named_parameters()), "to_empty must keep the Parameter objects"
    init(model)
    whole = Net()
    init(whole)
    ours = {name: p.full_tensor() for name, p in model.named_parameters()}
    assert all(torch.equal(ours[name], p) for name, p in whole.named_parameters())
    loss = _loss(model, _batch(0))
    torch.testing.assert_close(loss, _loss(whole, _batch(0)))
    return ours


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_meta_device_init_has_the_bits_of_one_process(pool, world: int) -> None:
    results = pool(world).run(_meta_init, world)
    assert all(torch.equal(results[0][name], other[name]) for other in results for name in other)


def _peer(world: int, param_dtype: torch.dtype | None, optimizer: str) -> tuple[list[float], list[float]]:
    from torch.distributed.fsdp import fully_shard as fsdp2

    from vescale import fully_shard

    def train(shard) -> list[float]:
        model = Net()
        torch.manual_seed(5)
        for p in model.parameters():
            p.data.normal_(std=0.1)
        mesh = init_device_mesh("cpu", (world,))
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
        model.frozen.requires_grad_(True)
        for layer in model.layers:
            shard(layer, mesh=mesh, mp_policy=policy)
        shard(model, mesh=mesh, mp_policy=policy)
        params = [p for name, p in model.named_parameters() if name != "unused"]
        opt = (
            torch.optim.SGD(params, lr=0.5) if optimizer == "sgd" else torch.optim.AdamW(params, lr=1e-3, foreach=True)
        )
        losses = []
        for _ in range(10):
            loss = _loss(model, _batch(0).chunk(world)[dist.get_rank()])
            loss.backward()
            opt.step()
            opt.zero_grad()
            total = loss.detach().float()
            dist.all_reduce(total)
            losses.append(total.item() / world)
        return losses

    return train(fully_shard), train(fsdp2)


@pytest.mark.parametrize(
    ("dtype", "optimizer", "bound"),
    [(None, "sgd", 1e-6), (None, "adamw", 1e-5), (torch.bfloat16, "sgd", 1e-3), (torch.bfloat16, "adamw", 1e-3)],
)
def test_losses_equal_fsdp2s(pool, dtype, optimizer: str, bound: float) -> None:
    ours, peers = pool(2).run(_peer, 2, dtype, optimizer)[0]
    assert ours[-1] < ours[0]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(peers), rtol=bound, atol=0)


def _memory(world: int) -> None:
    from vescale import fully_shard

    model = _net()
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        _loss(model, _batch(0)).backward()
    for unit in model.units():
        for segment in unit.segments:
            assert segment.full.local.untyped_storage().size() == 0, "gathered parameters are freed after backward"
            assert segment.grad_full is None, "unreduced gradients are freed after the reduce"
            assert not segment.trainable or all(p.grad is not None for p in segment.sharded)
            assert segment.trainable or segment.grad is None, "a frozen segment has no gradient buffers"
    with torch.no_grad():
        model(_batch(0))
    assert all(not unit.unsharded for unit in model.units()), "a forward without gradients leaves nothing gathered"
    padding = [segment.master for unit in model.units() for segment in unit.segments]
    held = sum(buffer.local.sum().item() for buffer in padding)
    owned = sum(p.to_local().sum().item() for p in model.parameters())
    assert held == pytest.approx(owned, rel=1e-5)


def test_nothing_whole_is_left_after_a_step(pool) -> None:
    pool(3).run(_memory, 3)


def _exception(world: int) -> None:
    from vescale import fully_shard

    model, reference = _net(), _net()
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.raises(IndexError):
        model(torch.full((2, 4), 99))
    with pytest.raises(ZeroDivisionError):
        handle = model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        model(_batch(0))
    handle.remove()
    handle = model.layers[0].norm.register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _loss(model, _batch(1)).backward()
    handle.remove()
    model.zero_grad()
    _loss(model, _batch(0)).backward()
    _loss(reference, _batch(0)).backward()
    torch.testing.assert_close(model.layers[1].up.weight.grad.full_tensor(), reference.layers[1].up.weight.grad)


def test_an_exception_leaves_the_next_step_clean(pool) -> None:
    pool(2).run(_exception, 2)


def _aliases(world: int) -> None:
    from vescale import distribute, fully_shard

    model = _net()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    weight = dict(model.named_parameters())["layers.0.up.weight"]
    given = torch.arange(weight.numel(), dtype=torch.float32).view(weight.shape)
    weight.grad = distribute(given, weight.device_mesh, weight.placements)
    for unit in model.units():
        unit.realias()
    segment = next(seg for unit in model.units() for seg in unit.segments if seg.trainable)
    index = [m.name for m in segment.members].index("layers.0.up.weight")
    assert torch.equal(segment.grad.run(index), weight.grad.to_local()) and torch.equal(
        weight.grad.full_tensor(), given
    )
    model.load_state_dict({**model.state_dict(), "layers.0.up.weight": given}, assign=True)
    assert model.layers[0].up.weight is weight and torch.equal(weight.full_tensor(), given)
    assert weight.to_local().data_ptr() == segment.master.run(index).data_ptr()


def _gradient_hooks(world: int) -> None:
    from vescale import fully_shard

    model, reference = _net(), _net()
    fully_shard(model)
    weight = dict(model.named_parameters())["layers.0.up.weight"]
    for net, p in ((model, weight), (reference, reference.layers[0].up.weight)):
        first, second = _loss(net, _batch(0)), _loss(net, _batch(1))
        first.backward()
        p.grad = p.grad * 2
        second.backward()
    torch.testing.assert_close(weight.grad.full_tensor(), reference.layers[0].up.weight.grad, rtol=1e-5, atol=1e-6)


def test_a_gradient_replaced_between_two_backwards_is_added_to(pool) -> None:
    pool(2).run(_gradient_hooks, 2)


def test_assigned_gradients_and_weights_are_read_and_lie_in_the_shard(pool) -> None:
    pool(2).run(_aliases, 2)


def _bad_input() -> None:
    from vescale import fully_shard

    with pytest.raises(ValueError, match=r"max_padding.*-1.*zero must be"):
        fully_shard(nn.Linear(2, 2), max_padding=-1, zero=7)
    with pytest.raises(ValueError, match="nn.Module or a list of them, got int"):
        fully_shard(3)
    with pytest.raises(ValueError, match="sharded already"):
        fully_shard(fully_shard(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="has no forward"):
        fully_shard(nn.ModuleList([nn.Linear(2, 2)]))


def test_bad_arguments_are_named(pool) -> None:
    pool(1).run(_bad_input)


def _divergent(world: int) -> None:
    from vescale import fully_shard

    width = 8 + dist.get_rank()
    model = fully_shard(nn.Linear(width, 4), mesh=init_device_mesh("cpu", (world,)))
    with pytest.raises(RuntimeError, match="differs between ranks.*rank 0.*rank 1"):
        list(model.parameters())


def test_plans_that_differ_are_an_error_on_every_rank(pool) -> None:
    pool(2).run(_divergent, 2)


class Experts(nn.Module):
    """Two experts in one unit; each rank uses its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](x)


def _experts(world: int) -> None:
    from vescale import fully_shard

    torch.manual_seed(4)
    model, reference = nn.ModuleList([nn.Linear(6, 6), Experts()]), None
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = model

        def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
            return self.second(self.first(x), expert)

    root, rank = Root(), dist.get_rank()
    fully_shard(root.second)
    fully_shard(root)
    x = torch.randn(world, 3, 6, generator=torch.Generator().manual_seed(1))
    root(x[rank], rank % 2).square().sum().backward()
    reference = {name: value.requires_grad_() for name, value in whole.items()}
    for r in range(world):
        h = F.linear(x[r], reference["0.weight"], reference["0.bias"])
        e = f"1.experts.{r % 2}"
        (F.linear(h, reference[f"{e}.weight"], reference[f"{e}.bias"]).square().sum() / world).backward()
    for name, p in zip(whole, root.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), reference[name].grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_parameters_that_some_ranks_do_not_use_are_reduced_as_zeros(pool, world: int) -> None:
    pool(world).run(_experts, world)


def _two_forwards(world: int) -> None:
    from vescale import fully_shard

    model, reference = _net(), _net()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for net in (model, reference):
        (_loss(net, _batch(0)) + 2 * _loss(net, _batch(1))).backward()
    for name, p in model.named_parameters():
        expected = dict(reference.named_parameters())[name].grad
        if expected is not None:
            torch.testing.assert_close(p.grad.full_tensor(), expected, rtol=1e-5, atol=1e-6)


def test_two_forwards_before_a_backward_equal_one_process(pool) -> None:
    pool(2).run(_two_forwards, 2)


def _attributes_and_hooks(dtype: torch.dtype | None) -> None:
    from vescale import fully_shard

    model = nn.Linear(5, 5)
    model.weight.note = "mine"
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
    params, fired = dict(model.named_parameters()), []
    assert params["weight"].note == "mine"
    params["weight"].register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.full_tensor().clone()))
    model.unshard()
    assert model.weight.note == "mine" and model.weight is not params["weight"] and model.weight.shape == (5, 5)
    model.reshard()
    assert model.weight is params["weight"]
    model(torch.ones(2, 5)).sum().backward()
    assert len(fired) == 1 and torch.equal(fired[0], torch.full((5, 5), 2.0))


def test_attributes_are_on_both_sides_and_hooks_fire_on_the_sharded_one(pool) -> None:
    for dtype in (None, torch.bfloat16):
        pool(2).run(_attributes_and_hooks, dtype)


def _inference_first(world: int) -> None:
    from vescale import fully_shard

    model, reference = _net(), _net()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    with torch.inference_mode():
        torch.testing.assert_close(_loss(model, _batch(0)), _loss(reference, _batch(0)))
    with torch.no_grad():
        torch.testing.assert_close(_loss(model, _batch(0)), _loss(reference, _batch(0)))
    _loss(model, _batch(0)).backward()
    _loss(reference, _batch(0)).backward()
    grad = dict(model.named_parameters())["layers.1.up.weight"].grad
    torch.testing.assert_close(grad.full_tensor(), reference.layers[1].up.weight.grad)


def test_a_model_trains_after_inference(pool) -> None:
    pool(2).run(_inference_first, 2)


@dataclasses.dataclass
class Output:
    tensor: torch.Tensor
    note: str = "kept"


class Returns(nn.Module):
    """A layer that returns its tensor inside something, and takes a keyword."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(6, 6), kind

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor | None = None) -> object:
        y = self.linear(x) if scale is None else self.linear(x) * scale
        return {"dict": {"x": y, "nothing": None}, "dataclass": Output(y), "tuple": (y, 3), "tensor": y}[self.kind]


class Shapes(nn.Module):
    """Units that return a dict, a tuple, a dataclass and a tensor, the last called twice; a three-way tie."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Returns("dict"), Returns("tuple"), Returns("tensor")
        self.d = Returns("dataclass")
        self.a.linear.weight = self.b.linear.weight = self.c.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.d(self.b(self.a(x, scale=torch.tensor(2.0))["x"])[0]).tensor
        return self.c(x) + self.c(2 * x)


def _shapes(units: str, frozen: str) -> None:
    from vescale import fully_shard

    torch.manual_seed(0)
    model, reference = Shapes(), Shapes()
    reference.load_state_dict(model.state_dict())
    for net in (model, reference):
        for name in frozen:
            getattr(net, name).linear.bias.requires_grad_(False)
    for name in units:
        fully_shard(getattr(model, name))
    fully_shard(model)
    for step in range(2):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        for net in (model, reference):
            net(x).square().mean().backward()
    for (name, ours), (_, p) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert (ours.grad is None) == (p.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(ours.grad.full_tensor(), p.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("units", "frozen"), [("", "a"), ("abcd", ""), ("abd", "b"), ("abcd", "ac"), ("c", "abcd")])
def test_nested_outputs_three_way_ties_and_frozen_parameters_equal_one_process(pool, units: str, frozen: str) -> None:
    pool(3).run(_shapes, units, frozen)


def _toggled(world: int) -> None:
    from vescale import fully_shard

    torch.manual_seed(0)
    model, reference = Shapes(), Shapes()
    reference.load_state_dict(model.state_dict())
    for name in "abcd":
        fully_shard(getattr(model, name))
    fully_shard(model)
    for step, frozen in enumerate(("", "bd", "a", "")):
        for net in (model, reference):
            net.zero_grad()
            for name, p in net.named_parameters():
                p.requires_grad_(name.split(".")[0] not in frozen)
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            loss = net(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
        for (name, ours), (_, p) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            assert (ours.grad is None) == (p.grad is None), (step, name)
            if p.grad is not None:
                torch.testing.assert_close(ours.grad.full_tensor(), p.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_freezing_between_steps_and_two_backwards_of_one_graph_equal_one_process(pool, world: int) -> None:
    pool(world).run(_toggled, world)
