"""Cases that users of sharded training reported, as tests; each is named by its row and the report.

======  ================================================================================================================
T-M3    sharded bytes per rank fall as 1 / ranks, within the padding: pytorch#82001
T-M6    the bytes of buffers are known before anything is allocated: ISEEKYAN/Megatron-LM#150
T-M9    gradient buffers hold what is trainable, whatever shares its unit: accelerate#3474, litgpt#1417
T-M10   the reduction's input is the gradients' own buffer, of the unit's size: NVIDIA-NeMo/Automodel#3540
T-U1    tied and uneven: every row of a tied embedding moves: pytorch#176076
T-U2    operators on empty shards: torchtitan#764
T-U4    whole states round trip for dim 0 in {1, W - 1, W, W + 1, prime}: pytorch#136228
T-U6    stacked experts on more ranks than experts: torchtitan#1561
T-U10   Muon where ranks hold nothing steps as one process does, and nothing reads the device: microsoft/dion#74
T-U11   parameter groups and state keys are equal on every rank, also where a rank holds nothing: Megatron-LM#6215
T-U12   shapes with zeros, ones and primes: DeepSpeed#8280, #8158
T-U14   updates on padded buffers are single-process AdamW's: Megatron-LM#5974
T-C4    padding and replicas are counted once in the norm
T-F1    whole frozen weights are freed: pytorch#91167
T-N2    another method than forward, not registered, is a clear error: pytorch#156535
T-S3    the optimizer's whole state is streamed too: accelerate#4099
T-S2    a state dict, and its checkpoint plan, need no collective: Megatron-LM#6573
======  ================================================================================================================
"""

from __future__ import annotations

import inspect
import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode


class Shapes(nn.Module):
    """Parameters of any shapes; the loss is a sum of squares of what they make of a number."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(((weight * x).sin() + weight * (i + 1)).square().sum() for i, weight in enumerate(self.weights))


@contextmanager
def _no_collective() -> Iterator[None]:
    from vescale import collectives

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a collective")

    functions = {name: f for name, f in vars(collectives).items() if inspect.isfunction(f)}
    real = {name: f for name, f in functions.items() if f.__module__ == collectives.__name__}
    assert {"all_gather", "all_reduce", "broadcast_object"} <= real.keys()
    for name in real:
        setattr(collectives, name, refuse)
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(collectives, name, function)


def _train(model: nn.Module, *args: torch.Tensor, steps: int = 2) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        loss = model(*args)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _odd_shapes() -> None:
    """T-U4, T-U12, T-U14, T-M3: random shapes train as one process does, and their states go out and in."""
    from vescale import full_state_dict, fully_shard, load_full

    world, choose = dist.get_world_size(), random.Random(dist.get_world_size())
    firsts = [0, 1, max(world - 1, 2), world, world + 1, 7, 13]
    for trial in range(4):
        shapes = [(first, *choose.choice([(), (1,), (3,), (5, 2), (0,)])) for first in choose.sample(firsts, 5)] + [()]
        torch.manual_seed(trial)
        whole = Shapes(shapes)
        model = Shapes(shapes)
        model.load_state_dict(whole.state_dict())
        fully_shard(model)
        x = torch.tensor(0.7)
        torch.testing.assert_close(_train(model, x), _train(whole, x), rtol=1e-6, atol=1e-6)
        for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q, rtol=2e-6, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
        state = full_state_dict(model, on_every_rank=True)
        other = fully_shard(Shapes(shapes))
        load_full(other, state if dist.get_rank() == 0 else None)
        assert all(torch.equal(p.full_tensor(), state[name]) for name, p in other.named_parameters())
        elements = sum(p.numel() for p in whole.parameters())
        held = sum(segment.master.local.numel() for unit in model.units() for segment in unit.segments)
        assert held <= elements / world + 64 * len(shapes)  # each tensor starts at a multiple of 32, a shard of 64


class Lora(nn.Module):
    """A large frozen matrix and two small trainable ones in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def _buffers() -> None:
    """T-M6, T-M9, T-M10, T-F1: what is gathered and reduced is planned, of the trainable size, and freed."""
    from vescale import fully_shard
    from vescale.commit import preview

    world = dist.get_world_size()
    with torch.device("meta"):
        planned = fully_shard(nn.Sequential(Lora(), Lora()))
    plans = [segment for _, segments in preview(planned, world) for segment in segments]
    model = nn.Sequential(fully_shard(Lora()), fully_shard(Lora()))
    fully_shard(model)
    segments = [segment for unit in model.units() for segment in unit.segments]
    assert sum(plan.numel for plan in plans) <= sum(segment.plan.numel for segment in segments)
    seen: list[tuple[bool, int]] = []
    model[1].register_full_backward_hook(
        lambda *_: seen.extend((s.trainable, s.grad_full.local.numel()) for s in segments if s.grad_full is not None)
    )
    model(torch.randn(3, 64)).square().sum().backward()
    trainable = sum(s.plan.numel for s in segments if s.trainable)
    everything = sum(s.plan.numel for s in segments)
    assert all(flag for flag, _ in seen) and sum(n for _, n in seen) <= trainable < everything / 8
    for segment in segments:
        assert (segment.grad is not None) == segment.trainable and segment.grad_full is None
        if world > 1:
            assert segment.full.local.untyped_storage().size() == 0  # the frozen ones too


def _tied_rows() -> None:
    """T-U1: a vocabulary that no number of ranks here divides."""
    from vescale import fully_shard

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(13, 6), nn.Linear(6, 13, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(self.embed(tokens)), (tokens + 1) % 13)

    torch.manual_seed(0)
    whole, model = Tied(), Tied()
    model.load_state_dict(whole.state_dict())
    before = whole.embed.weight.detach().clone()
    fully_shard(model.embed), fully_shard(model.head), fully_shard(model)
    assert model.head.weight is model.embed.weight
    tokens = torch.arange(13)
    torch.testing.assert_close(_train(model, tokens), _train(whole, tokens), rtol=1e-6, atol=1e-6)
    after = dict(model.named_parameters())["embed.weight"].full_tensor()
    assert ((after - before).abs() > 0).all(), "every row moves"
    torch.testing.assert_close(after, whole.embed.weight.detach(), rtol=1e-5, atol=1e-6)


class Experts(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(experts, 6, 4)), nn.Parameter(torch.randn(experts, 4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("eti,eio->eto", torch.einsum("ti,eio->eto", x, self.up).tanh(), self.down).square().mean()


def _experts() -> None:
    """T-U6 and T-U11: more ranks than experts, whole experts kept or not; every rank has the same groups and keys."""
    from optimizers import AdamW, Muon
    from vescale import Optimizer, Rules, fully_shard

    for count in (1, 2, 3, 5):
        torch.manual_seed(count)
        whole, x = Experts(count), torch.randn(5, 6)
        steps = []
        for world in (dist.get_world_size(), 1):
            mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if world > 1 else None
            model = Experts(count)
            model.load_state_dict(whole.state_dict())
            rules = Rules(up=("up", Muon(lr=0.1)), rest=("*", AdamW(lr=0.1)))
            if mesh is not None:
                fully_shard(model, mesh=mesh, block_of=rules.block_of)
            optimizer = Optimizer(model.named_parameters(), rules)
            for _ in range(2):
                model(x).backward()
                optimizer.step()
                optimizer.zero_grad()
            steps.append([p.full_tensor() if mesh is not None else p for p in model.parameters()])
            keys = [sorted(optimizer.named_state()), [len(group["params"]) for group in optimizer.param_groups]]
            everywhere = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, keys)
            assert all(other == keys for other in everywhere)
        torch.testing.assert_close(*steps, rtol=1e-5, atol=1e-5)


class Reads(TorchDispatchMode):
    """Counts what an accelerator would make the host wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.seen.append(str([f"{f.filename}:{f.lineno}" for f in traceback.extract_stack()[-6:-1]]))
        return func(*args, **(kwargs or {}))


def _no_reads() -> None:
    """T-U10: a whole step of tiny matrices that most ranks hold nothing of, clipped."""
    from optimizers import Muon
    from vescale import Optimizer, Rules, clip_grad_norm_, fully_shard, iter_full_state
    from vescale.grad_norm import non_finite

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 2, bias=False))
    rules = Rules(matrices=("*", Muon(lr=0.1)))  # AdamW's twin on CPU reads its count of steps, which is there
    for layer in (*model, model):
        fully_shard(layer, block_of=rules.block_of)
    optimizer = Optimizer(model.named_parameters(), rules)
    empty = [p.to_local().numel() == 0 for p in model.parameters()]
    assert all(empty) or dist.get_rank() == 0
    for step in range(3):
        with Reads() as reads:
            model(torch.ones(2, 3)).square().sum().backward()
            non_finite(clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()  # with skip=, torch's foreach on CPU reads the flag, which on CUDA its kernel does
            optimizer.zero_grad()
        assert not reads.seen or step == 0, reads.seen  # what ranks compare once, they compare as pickles
    names, state = [], optimizer.named_state()
    for name, value in iter_full_state(optimizer):  # T-S3: one tensor at a time
        names.append(name)
        assert type(value) is torch.Tensor and value.shape == state[name].shape
    assert names == list(state) and len(names) >= 2


def _empty_runs() -> None:
    """T-U2: all elements on the last rank; what the others hold is empty, and every answer is the whole's."""
    from vescale import RaggedShard, distribute

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    units = [0] * (dist.get_world_size() - 1) + [3]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        whole = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
        ragged = distribute(whole, mesh, [RaggedShard((0,), units)])
        for reduce in (torch.max, torch.min, torch.sum, torch.mean, torch.amax, torch.linalg.vector_norm):
            torch.testing.assert_close(reduce(ragged), reduce(whole))
        for p in (0, 1, 2, float("inf"), -float("inf")):
            torch.testing.assert_close(torch.linalg.vector_norm(ragged, p), torch.linalg.vector_norm(whole, p))
        norms = torch._foreach_norm([ragged, ragged * 2])
        torch.testing.assert_close(torch.stack(norms), torch.stack(torch._foreach_norm([whole, whole * 2])))
        assert torch.equal(torch._foreach_mul([ragged], 2)[0].full_tensor(), whole * 2)
        assert torch.equal(ragged.clamp(min=0).full_tensor(), whole.clamp(min=0))
        with pytest.raises(NotImplementedError, match="full_tensor"):
            torch.topk(ragged, 1)


def _norm_counts_once(shape: tuple[int, ...]) -> None:
    """T-C4: on one axis and with replicas."""
    from vescale import clip_grad_norm_, fully_shard

    names = ("replicate", "shard")[-len(shape) :]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    whole = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    whole.load_state_dict(model.state_dict())
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    for net in (model, whole):
        net(torch.ones(2, 5)).square().sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        torch.testing.assert_close(clip(model.parameters(), float("inf")), expected)
    clip_grad_norm_(model.parameters(), 0.5)
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def _quiet_and_clear() -> None:
    """T-S2 and T-N2."""
    from vescale import fully_shard

    class Generates(nn.Linear):
        def generate(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight, self.bias)

    model = fully_shard(Generates(6, 5))
    list(model.parameters())
    with _no_collective():
        state = model.state_dict()
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, None, True)
        items = planner.create_local_plan().items
        model.load_state_dict(state)
    assert {item.index.fqn for item in items} <= {"weight", "bias"}
    with pytest.raises(NotImplementedError, match="register_fsdp_forward_method"):
        model.generate(torch.ones(2, 6))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_cases(pool, world: int) -> None:
    for check in (_odd_shapes, _buffers, _tied_rows, _experts, _no_reads, _empty_runs, _quiet_and_clear):
        pool(world).run(check)
    pool(world).run(_norm_counts_once, (world,))
    if world == 4:
        pool(world).run(_norm_counts_once, (2, 2))


@pytest.mark.parametrize("world", [1, 5, 8])
def test_odd_shapes_on_one_rank_and_on_many(pool, world: int) -> None:
    pool(world).run(_odd_shapes)
