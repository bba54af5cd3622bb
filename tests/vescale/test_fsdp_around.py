"""What users put around units: recomputation, torch.compile, hooks, several passes, exceptions; the numbers stay.

Cases (repository and number of the reports; one process or FSDP2 is the reference):

======  =======================================================================================================
T-N2    a method other than forward: pytorch#156535 (also test_fsdp_calls.py)
T-N3    activation checkpointing inside and around units, both kinds, no double gather: pytorch#164009
T-N5    reshard is not recursive, the class keeps its name and signature: torchtune#2483, transformers#34928
T-K1    each block compiled inside its unit, nothing recompiled after the second step: pytorch#161153, #138813
T-H1    parameters that only some ranks use: pytorch#158719
T-H2    modules called different numbers of times: DeepSpeed#7998
T-H4    parameters that nobody uses have zero gradients: ColossalAI#4984
T-A2    gradients accumulate sharded and unsharded alike: torchtune#1275
T-F1    frozen and trainable parameters mixed, toggled, frozen whole weights freed: pytorch#91167
T-E2    inference_mode and no_grad between steps: pytorch#197327
======  =======================================================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Skips:
    """The forward of a layer, or zeros in its place."""

    def __init__(self, layer: nn.Linear, skips: bool) -> None:
        self.layer, self.skips = layer, skips

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.layer.weight, self.layer.bias) if not self.skips else x[..., : self.layer.out_features]


class Recomputed(Block):
    """Recomputes itself, inside its unit."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Net(nn.Module):
    def __init__(self, block: Callable[[int], nn.Module] = Block, width: int = 10, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(depth))
        self.head = nn.Linear(width, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _net(block: Callable[[int], nn.Module] = Block, **sizes: int) -> Net:
    torch.manual_seed(2)
    return Net(block, **sizes)


def _x(step: int) -> torch.Tensor:
    return torch.randn(4, 3, 10, generator=torch.Generator().manual_seed(step))


def _shard(model: Net, shard: Any = None) -> Net:
    from vescale import fully_shard

    shard = shard or fully_shard
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        shard(block, mesh=mesh)
    shard(model, mesh=mesh)
    return model


@contextmanager
def _gathers() -> Iterator[Counter[str]]:
    """Counts the collectives that leave through the one door."""
    from vescale import collectives

    seen: Counter[str] = Counter()
    real = {name: getattr(collectives, name) for name in ("all_gather", "reduce_scatter")}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name] += 1
            return real[name](*args, **kwargs)

        return call

    for name in real:
        setattr(collectives, name, counted(name))
    try:
        yield seen
    finally:
        for name, function in real.items():
            setattr(collectives, name, function)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


def _steps(
    model: nn.Module, count: int = 3, start: int = 0, optimizer: torch.optim.Optimizer | None = None
) -> torch.Tensor:
    """Every rank has the same batch, so the mean of the gradients is what one process has."""
    optimizer = optimizer or _sgd(model)
    losses = []
    for step in range(start, start + count):
        loss = model(_x(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def _same_grads(model: nn.Module, whole: nn.Module) -> None:
    grads = {name: p.grad for name, p in whole.named_parameters()}
    for name, p in model.named_parameters():
        plain = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
        assert (p.grad is None) == (grads[plain] is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), grads[plain], rtol=1e-5, atol=1e-6)


def _recompute() -> None:
    expected = _steps(_net())
    wrap = {
        "reentrant": CheckpointImpl.REENTRANT,
        "not reentrant": CheckpointImpl.NO_REENTRANT,
    }
    for kind, impl in wrap.items():
        for order in ("inside", "wrapper inside", "around"):  # FSDP(AC), FSDP(AC) again, AC(FSDP)
            model = _net(Recomputed if order == "inside" else Block)
            for i, block in enumerate(model.blocks):
                if order == "inside":
                    block.reentrant = kind == "reentrant"
                elif order == "wrapper inside":
                    model.blocks[i] = checkpoint_wrapper(block, checkpoint_impl=impl)
            _shard(model)
            if order == "around":
                for i, block in enumerate(model.blocks):
                    model.blocks[i] = checkpoint_wrapper(block, checkpoint_impl=impl)
            assert {n.split(".")[-1] for n, _ in model.named_parameters()} == {"weight", "bias"}
            torch.testing.assert_close(_steps(model), expected, rtol=2e-6, atol=0, msg=f"{kind} {order}")
            with _gathers() as seen:
                model(_x(9)).square().mean().backward()
            assert seen["all_gather"] == 1 + 2 * 3, (kind, order, seen)  # the root once, blocks in each direction
            assert seen["reduce_scatter"] == 4, (kind, order, seen)


def _compiled() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    expected = _steps(_net(depth=2), 4)
    ways = (("forward", "eager"), ("module", "eager"), ("wrapped", "aot_eager"))
    for how, backend in ways if dist.get_world_size() == 2 else ways[1:2]:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        model = _net(depth=2)
        for i, block in enumerate(model.blocks):
            if how == "forward":
                block.forward = torch.compile(block.forward, backend=counter)
            elif how == "wrapped":
                model.blocks[i] = torch.compile(block, backend=counter)
        _shard(model)
        if how == "module":
            for block in model.blocks:
                block.compile(backend=counter)
        first = _steps(model, 2)
        compiled = counter.frame_count
        assert compiled > 0, how
        rest = _steps(model, 2, start=2)
        assert counter.frame_count == compiled, f"{how}: recompiled after the second step"
        torch.testing.assert_close(torch.cat([first, rest]), expected, rtol=2e-6, atol=0, msg=how)


def _passes() -> None:
    """Several forwards before a backward, a module called twice, one called on some ranks only, evaluation between."""
    model, whole, rank = _shard(_net()), _net(), dist.get_rank()
    for net in (model, whole):
        (net(_x(0)).square().mean() + net(_x(1)).square().mean()).backward()
    _same_grads(model, whole)
    for net in (model, whole):
        net(_x(2)).square().mean().backward()  # accumulates on what was reduced
    _same_grads(model, whole)
    for net in (model, whole):
        net.zero_grad()
        net.blocks[0](net.blocks[0](_x(3))).square().mean().backward()  # a part on its own, twice
    _same_grads(model.blocks[0], whole.blocks[0])
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            torch.testing.assert_close(model(_x(4)), whole(_x(4)))
    model.eval(), model.train()
    for net in (model, whole):
        net.zero_grad()
        net(_x(5)).square().mean().backward()
    _same_grads(model, whole)
    model.unshard()
    model.blocks[0].unshard()
    model.reshard()  # is not recursive
    assert type(model.blocks[0].up.weight) is nn.Parameter and hasattr(model.head.weight, "full_tensor")
    model.blocks[0].reshard()
    # One rank leaves out a layer of a unit: its gradients count as zeros, nothing hangs (T-H1, T-H2).
    both = []
    for skips in (False, True):
        whole.zero_grad()
        whole.blocks[1].down.forward = Skips(whole.blocks[1].down, skips)
        whole(_x(6)).square().mean().backward()
        both.append({name: p.grad for name, p in whole.named_parameters()})
    share = 1 / dist.get_world_size()
    model.zero_grad()
    model.blocks[1].down.forward = Skips(model.blocks[1].down, rank == 0)
    model(_x(6)).square().mean().backward()
    for name, p in model.named_parameters():
        used, skipped = both[0][name], both[1][name]
        expected = used * (1 - share) + (0 if skipped is None else skipped * share)
        torch.testing.assert_close(p.grad.full_tensor(), expected, rtol=1e-5, atol=1e-6)


def _hooks() -> None:
    """A tensor hook sees each fresh gradient once, and what it returns counts; post-accumulate hooks come after."""
    model, whole = _shard(_net()), _net()
    for net in (model, whole):
        net.seen = []
        params = dict(net.named_parameters())
        params["blocks.0.up.weight"].register_hook(lambda g: g * 2)
        params["head.weight"].register_hook(lambda g, net=net: net.seen.append(g.sum()))
        handle = params["blocks.1.down.bias"].register_hook(lambda g: g * float("nan"))
        handle.remove()
        for step in range(2):
            net(_x(step)).square().mean().backward()
    _same_grads(model, whole)
    assert len(model.seen) == 2
    torch.testing.assert_close(torch.stack(model.seen), torch.stack(whole.seen), rtol=1e-5, atol=1e-6)


class Interrupt(Exception):
    pass


def _raise(*_: Any) -> None:
    raise Interrupt


def _interrupted() -> None:
    """An exception anywhere in a step; the next step is the one that an untouched model takes."""
    for by_hand in (False, True):
        for where in ("forward of a block", "forward of the root", "backward of a block", "backward of the head"):
            model, whole = _shard(_net()), _net()
            optimizer = _sgd(model)
            hooked = model.blocks[1].up if "block" in where else model.head
            register = hooked.register_forward_pre_hook if "forward" in where else hooked.register_full_backward_hook
            handle = register(_raise)
            with pytest.raises(Interrupt):
                model(_x(0)).square().mean().backward()
            handle.remove()
            if by_hand:
                model.reset_iter_state()
            model.zero_grad()
            ours, expected = _steps(model, 2, optimizer=optimizer), _steps(whole, 2)
            torch.testing.assert_close(ours, expected, rtol=2e-6, atol=0, msg=lambda m, w=where: f"{w}: {m}")


def _strangers() -> None:
    """A module or parameter put in, replaced or tied after the plan is refused by its name, and nothing is changed."""
    changes: dict[str, Callable[[Net], Any]] = {
        r"blocks.1.up.weight \(20, 10\) was replaced": lambda m: setattr(
            m.blocks[1].up, "weight", nn.Parameter(torch.zeros(20, 10))
        ),
        r"head.weight .* tied to blocks.0.up.weight": lambda m: setattr(m.head, "weight", m.blocks[0].up.weight),
        r"blocks.2.up.weight was replaced or removed.*blocks.2.up.weight was put in": lambda m: setattr(
            m.blocks[2], "up", nn.Linear(10, 20, bias=False)
        ),
        r"adapter.weight was put in": lambda m: setattr(m, "adapter", nn.Linear(2, 2, bias=False)),
        r"blocks.0.up.scale was put in": lambda m: setattr(m.blocks[0].up, "scale", nn.Parameter(torch.ones(1))),
        r"head.weight was replaced or removed": lambda m: delattr(m, "head"),
        r"blocks.0.down.weight is torch.float64.*convert the whole": lambda m: m.blocks[0].down.double(),
    }  # fmt: skip
    for message, change in changes.items():
        model = _shard(_net())
        held = dict(model.named_parameters())
        change(model)
        with pytest.raises(ValueError, match=message):
            model(_x(0))
        assert all(torch.isfinite(p.full_tensor()).all() for p in held.values())
    model = _shard(_net())
    list(model.parameters())
    model.head.extra = nn.Identity()  # holds no parameter
    model(_x(0))


def _conversions() -> None:
    """``.double()`` and ``.to()`` of the whole model: the same Parameter objects, the optimizer goes on."""
    model, whole = _shard(_net()), _net()
    for net in (model, whole):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
        net(_x(0)).square().mean().backward()
        optimizer.step()
        net.double()
        net(_x(1).double()).square().mean().backward()
        held = list(net.parameters())
        optimizer.zero_grad()
        net.to(torch.float32).to("cpu")
        assert net is whole or all(p is q for p, q in zip(net.parameters(), held, strict=True))
        assert all(p.dtype is torch.float32 for p in net.parameters())
        net(_x(2)).square().mean().backward()
        optimizer.step()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [2, 3])  # equal shards and unequal ones
def test_recomputation_inside_and_around_units_gathers_once(pool, world: int) -> None:
    pool(world).run(_recompute)


@pytest.mark.parametrize("world", [2, 3])
def test_compiled_blocks_are_not_recompiled(pool, world: int) -> None:
    pool(world).run(_compiled)


@pytest.mark.parametrize("world", [2, 3])
def test_passes_hooks_and_conversions_equal_one_process(pool, world: int) -> None:
    for check in (_passes, _hooks, _conversions):
        pool(world).run(check)


@pytest.mark.parametrize("world", [2, 3])
def test_after_an_exception_the_next_step_is_clean(pool, world: int) -> None:
    pool(world).run(_interrupted)


def test_what_is_put_in_after_the_plan_is_refused_by_name(pool) -> None:
    pool(2).run(_strangers)
