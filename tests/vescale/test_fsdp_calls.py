"""FSDP2's calls do here what they do there: one scenario under both gives the same numbers on 2 and on 3 ranks.

Reported cases among them:

======  ===============================================================================================
T-A2    gradients accumulate before they are reduced, after, and across units that differ: torchtune#1275
T-D2    fp32 accumulated and bf16 fresh gradients in one group, summed in reduce_dtype: pytorch#196996
T-D5    dataclasses, named tuples and nested dicts are cast: pytorch#153077
T-N2    methods other than forward: pytorch#156535
======  ===============================================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.nn import functional as F

Numbers = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, blocks, a norm and a head; ``encode`` is a second way in."""

    def __init__(self, depth: int = 3, width: int = 12, vocab: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(tokens))


class System(NamedTuple):
    """``fully_shard`` and its companion, of FSDP2 or of vescale; or nothing, and gradients are averaged afterwards."""

    shard: Callable[..., Any]
    register: Callable[..., None]
    mesh: Any


def _ours() -> System:
    import vescale

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return System(vescale.fully_shard, vescale.register_fsdp_forward_method, mesh)


def _fsdp2() -> System:
    from torch.distributed import fsdp

    return System(
        fsdp.fully_shard, fsdp.register_fsdp_forward_method, init_device_mesh("cpu", (dist.get_world_size(),))
    )


def _nobody() -> System:
    return System(lambda module, **options: module, lambda module, name: None, None)


def _net(system: System, *, root: bool = True, **options: Any) -> Net:
    torch.manual_seed(3)
    model = Net()
    for block in model.blocks:
        system.shard(block, mesh=system.mesh, **options)
    if root:
        system.shard(model, mesh=system.mesh, **options)
    return model


def _batch(step: int) -> torch.Tensor:
    seed = 100 * step + dist.get_rank()
    return torch.randint(0, 24, (3, 8), generator=torch.Generator().manual_seed(seed))


def _loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def _backward(model: nn.Module, step: int = 0) -> torch.Tensor:
    tokens = _batch(step)
    loss = _loss(model(tokens), tokens)
    loss.backward()
    return loss.detach()


def _grads(model: nn.Module) -> Numbers:
    return {name: _whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def _whole(grad: torch.Tensor) -> torch.Tensor:
    if hasattr(grad, "full_tensor"):
        return grad.full_tensor().clone()
    mean = grad / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


def _compare(
    scenario: Callable[..., Numbers], bound: float = 1e-6, *, peer: Callable[[], System] = _fsdp2, **options: Any
) -> None:
    ours, theirs = (scenario(system(), **options) for system in (_ours, peer))
    what = (scenario.__name__, options)
    assert ours.keys() == theirs.keys() and ours, what
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=bound, atol=bound, msg=lambda m, n=name: f"{what} {n}: {m}")


# --- modules as one unit, methods as forward ---


def _list_as_one_unit(system: System, outer: bool) -> Numbers:
    torch.manual_seed(3)
    model = Net()
    system.shard([model.norm, model.head], mesh=system.mesh)
    system.shard([model.blocks[0], model.blocks[1]], mesh=system.mesh)
    if outer:
        system.shard(model, mesh=system.mesh)
    for step in range(2):
        _backward(model, step)
    return _grads(model)


def _head_called_by_chunks(system: System) -> Numbers:
    """The model's forward runs only the norm of ``[norm, head]``; the head comes later, chunk by chunk."""
    torch.manual_seed(3)
    model = Net()
    for block in model.blocks:
        system.shard(block, mesh=system.mesh)
    system.shard([model.norm, model.head], mesh=system.mesh)
    body = nn.Sequential()
    body.net = model
    body.forward = lambda tokens: model.encode(tokens)
    system.shard(body, mesh=system.mesh)
    for step in range(2):
        tokens = _batch(step)
        hidden = body(tokens)
        leaf = hidden.detach().requires_grad_()
        for chunk, wanted in zip(leaf[:, :-1].chunk(2, dim=1), tokens[:, 1:].split(4, dim=1), strict=True):
            F.cross_entropy(model.head(chunk).flatten(0, 1), wanted.flatten()).backward()
        hidden.backward(leaf.grad)
    return _grads(body)


def _method_as_forward(system: System) -> Numbers:
    model = _net(system)
    system.register(model, "encode")
    model.encode(_batch(0)).square().mean().backward()
    inner = _grads(model)
    inner.pop("head.weight", None)  # unused: None in FSDP2, zero here
    _backward(model, 1)  # encode inside forward is the plain method
    return {**_grads(model), **{f"first {name}": grad for name, grad in inner.items()}}


# --- when to gather and to reduce ---


def _unshard_by_hand(system: System, async_op: bool) -> Numbers:
    model = _net(system)
    handle = model.blocks[1].unshard(async_op=async_op)
    assert (handle is not None) == async_op
    if handle is not None:
        handle.wait()
    assert model.blocks[1].up.weight.shape == (24, 12) and not hasattr(model.blocks[1].up.weight, "to_local")
    whole = model.blocks[1].up.weight.detach().clone()
    model.blocks[1].reshard()
    model.blocks[2].unshard(async_op=True)  # the forward waits for it
    return {"whole": whole, "loss": _backward(model), **_grads(model)}


def _accumulate(system: System, call: str) -> Numbers:
    model = _net(system)
    for step in range(3):
        last = step == 2
        if call == "no sync":
            model.set_requires_gradient_sync(last)
        elif call == "no sync, kept":
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
        elif call == "blocks without sync":
            for block in model.blocks:
                block.set_requires_gradient_sync(last, recurse=False)
        elif call == "all reduce":
            model.set_requires_all_reduce(last)
        elif call == "last":
            model.set_is_last_backward(last)
        _backward(model, step)
    return _grads(model)


def _kept_after_forward(system: System) -> Numbers:
    model, out = _net(system), {}
    for step, keep in enumerate((True, False, True)):
        model.set_reshard_after_forward(not keep)
        out[f"loss {step}"] = _backward(model, step)
        model.set_reshard_after_forward(not keep, recurse=False)
    return {**out, **_grads(model)}


def _prefetch(system: System) -> Numbers:
    model, out = _net(system), {}
    blocks = list(model.blocks)
    model.set_modules_to_forward_prefetch(blocks[:2])
    blocks[0].set_modules_to_forward_prefetch(blocks[1:])
    blocks[2].set_modules_to_backward_prefetch([blocks[1], blocks[0]])
    for step in range(3):
        out[f"loss {step}"] = _backward(model, step)
    return {**out, **_grads(model)}


def _embedding_not_gathered_in_backward(system: System) -> Numbers:
    torch.manual_seed(3)
    model = Net()
    system.shard(model.embed, mesh=system.mesh)
    system.shard(model, mesh=system.mesh)
    model.embed.set_unshard_in_backward(False)
    for step in range(2):
        _backward(model, step)
    return _grads(model)


def _post_optim_event(system: System) -> Numbers:
    model, out = _net(system), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        out[f"loss {step}"] = _backward(model, step)
        optimizer.step()
        model.set_post_optim_event(torch.Event())
    return out


class Gather(AllGather):
    """Counts calls; torch's collective on the buffers that it is given."""

    def __init__(self) -> None:
        self.calls = self.allocated = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.allocated += 1
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self.calls += 1
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class Reduce(ReduceScatter):
    """As Gather; waits, so that there is no handle."""

    def __init__(self) -> None:
        self.calls, self.groups = 0, set[Any]()

    allocate = Gather.allocate
    allocated = 0

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        self.calls += 1
        self.groups.add(group)
        return dist.reduce_scatter_single(output_tensor, input_tensor, group=group, op=op)


def _custom_collectives(system: System, apart: bool) -> Numbers:
    model, gather, reduce = _net(system), Gather(), Reduce()
    for block in model.blocks:
        block.set_custom_all_gather(gather)
        block.set_custom_reduce_scatter(reduce)
    model.set_force_sum_reduction_for_comms(True)
    model.set_separate_reduce_scatter_group(apart)
    for step in range(2):
        _backward(model, step)
    model.set_separate_reduce_scatter_group(False)
    if hasattr(model, "units"):  # ours: the parameters' own buffers
        assert gather.calls == 2 * 2 * 3 and reduce.calls == 2 * 3 and not gather.allocated and not reduce.allocated
        assert (system.mesh.get_group() in reduce.groups) != apart
    return _grads(model)


# --- what is done to gradients ---


def _divide(system: System, factor: float) -> Numbers:
    model = _net(system)
    for module in (model, *model.blocks):
        module.set_gradient_divide_factor(factor)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other with a factor
    _backward(model)
    return _grads(model)


def _all_reduce_hook(system: System) -> Numbers:
    model, seen = _net(system), []

    def hook(shard: torch.Tensor) -> None:
        seen.append(shard.double().square().sum())
        shard.mul_(3)

    for module in (model, *model.blocks):
        module.set_all_reduce_hook(hook)
    _backward(model)
    total = torch.stack(seen).sum()
    dist.all_reduce(total)
    return {**_grads(model), "squares": total.float()}


def _sums(system: System) -> Numbers:
    model = _net(system)
    model.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_unused_params(True)
    _backward(model)
    return _grads(model)


def _optimizer_in_backward(system: System) -> Numbers:
    model, out = _net(system), {}
    for p in model.parameters():
        optimizer = torch.optim.AdamW([p], lr=0.02, eps=1e-3)

        def hook(p: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(hook)
    for step in range(3):
        out[f"loss {step}"] = _backward(model, step)
    assert all(p.grad is None for p in model.parameters())
    return out


def _scaled(system: System) -> Numbers:
    """fp16 with a GradScaler; in the second step one rank's loss is infinite, and nobody steps."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    model, out = _net(system, mp_policy=policy), {}
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        tokens = _batch(step)
        loss = _loss(model(tokens), tokens)
        overflow = float("inf") if step == 1 and dist.get_rank() == dist.get_world_size() - 1 else 1.0
        scaler.scale(loss * overflow).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        out[f"norm {step}"] = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        out[f"scale {step}"], out[f"loss {step}"] = torch.tensor(scaler.get_scale()), loss.detach()
    return {k: v.nan_to_num(posinf=0.0) for k, v in out.items()}


# --- dtypes ---


@dataclasses.dataclass
class Both:
    a: torch.Tensor
    b: torch.Tensor


class Pair(NamedTuple):
    a: torch.Tensor
    rest: dict[str, Any]


class Takes(nn.Module):
    """Takes and returns tensors inside containers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.seen: list[torch.dtype] = []

    def forward(self, both: Both, pair: Pair, *, nested: dict[str, Any]) -> dict[str, Any]:
        self.seen = [t.dtype for t in (both.a, both.b, pair.a, pair.rest["x"][0], nested["y"]["z"], nested["index"])]
        y = self.linear(both.a + both.b + pair.a + pair.rest["x"][0] + nested["y"]["z"])
        return {"both": Both(y, y * 2), "pair": Pair(y * 3, {"index": nested["index"]})}


def _casts(system: System, cast: bool, output: torch.dtype | None) -> Numbers:
    torch.manual_seed(3)
    model = Takes()
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if cast else None,
        reduce_dtype=torch.float32,
        output_dtype=output,
        cast_forward_inputs=cast,
    )
    system.shard(model, mesh=system.mesh, mp_policy=policy)
    xs = [torch.randn(4, 6, requires_grad=i == 0) for i in range(5)]
    out = model(Both(xs[0], xs[1]), Pair(xs[2], {"x": [xs[3]]}), nested={"y": {"z": xs[4]}, "index": torch.arange(3)})
    wanted = torch.bfloat16 if cast else torch.float32
    assert model.seen == [wanted] * 5 + [torch.int64], model.seen
    tensors = {"a": out["both"].a, "b": out["both"].b, "c": out["pair"].a, "index": out["pair"].rest["index"]}
    assert {t.dtype for name, t in tensors.items() if name != "index"} == {output or wanted}
    (tensors["a"].float() + tensors["b"].float() * tensors["c"].float()).sum().backward()
    return {**{name: t.detach() for name, t in tensors.items()}, **_grads(model), "input": xs[0].grad}


def _policies(system: System, param: torch.dtype | None, reduce: torch.dtype | None) -> Numbers:
    model = _net(system, mp_policy=MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce))
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)
        _backward(model, step)
    return _grads(model)


def _ignored(system: System) -> Numbers:
    torch.manual_seed(3)
    model = Net()
    ignored = {model.norm.weight, model.blocks[0].norm.bias}
    for block in model.blocks:
        system.shard(block, mesh=system.mesh, ignored_params=ignored)
    system.shard(model, mesh=system.mesh, ignored_params=ignored)
    assert {id(p) for p in ignored} <= {id(p) for p in model.parameters()}
    _backward(model)
    whole = {f"own {name}": p.grad for name, p in model.named_parameters() if any(p is q for q in ignored)}
    assert len(whole) == 2
    return {**whole, **{n: p.grad.full_tensor() for n, p in model.named_parameters() if f"own {n}" not in whole}}


def _calls() -> None:
    _compare(_list_as_one_unit, outer=True)
    _compare(_list_as_one_unit, outer=False, peer=_nobody)  # FSDP2 has no list as its root
    _compare(_head_called_by_chunks)
    _compare(_method_as_forward)
    for async_op in (True, False):
        _compare(_unshard_by_hand, async_op=async_op)
    for call in ("", "no sync", "no sync, kept", "blocks without sync", "all reduce", "last"):
        _compare(_accumulate, call=call)
    for apart in (False, True):
        _compare(_custom_collectives, apart=apart)
    for scenario in (_kept_after_forward, _prefetch, _embedding_not_gathered_in_backward, _post_optim_event, _ignored):
        _compare(scenario)


def _gradients() -> None:
    for factor in (1.0, 5.0):
        _compare(_divide, factor=factor)
    for scenario in (_all_reduce_hook, _sums, _optimizer_in_backward):
        _compare(scenario, 2e-6)
    _compare(_scaled, 2e-3)
    for cast, output in ((True, torch.float32), (True, None), (False, torch.float64)):
        _compare(_casts, cast=cast, output=output)
    # Where the sum is in bf16 its order shows; where it is in fp32, casts of equal values are all there is.
    for param, reduce, bound in (
        (torch.bfloat16, torch.float32, 1e-6),
        (None, torch.bfloat16, 1e-2),
        (torch.bfloat16, None, 2e-2),
    ):
        _compare(_policies, bound, param=param, reduce=reduce)


@pytest.mark.parametrize("world", [2, 3])  # equal shards and unequal ones
def test_the_calls_of_a_module_equal_fsdp2s(pool, world: int) -> None:
    pool(world).run(_calls)


@pytest.mark.parametrize("world", [2, 3])
def test_what_is_done_to_gradients_and_dtypes_equals_fsdp2(pool, world: int) -> None:
    pool(world).run(_gradients)
