"""fully_shard against FSDP2: step time and what it is made of, memory, copies, and the overhead of a unit.

    python tests/bench/fsdp.py [--row dense-1024-64] [--reduce bf16|fp32] [--pairs 7] [--json FILE]

All rows take about half an hour of a machine that does nothing else. The same model, data, dtypes, process group and
optimizer (torch's fused AdamW), alternating in one run. ``rest`` is the step less the compute and the collectives
alone: copies and bookkeeping. Systems:

    fsdp2             FSDP2; whichever of its own settings is fastest here (gathers asynchronous or not; experts cut by
                      Shard(0) or Shard(1))
    fsdp2, our calls  the same with the collective calls that ours makes, by its set_custom_* methods
    ours              the same loop
    ours, in backward step_in_backward: each unit is stepped when its gradients are there
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from copies import Copies
from report import Row, arguments, publish, row, write
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import Shard

from models import LlamaConfig
from vescale import collectives, fully_shard, step_in_backward
from vescale.live import LiveBytes

TITLE = "fully_shard against FSDP2"
VOCAB = 512


class Shape(NamedTuple):
    """One configuration."""

    ranks: int
    tokens: int  # per rank and step
    width: int
    experts: int = 0  # stacked, in place of the feed-forward layer


SHAPES = {
    "dense-1024-64": Shape(2, 64, 1024),
    "dense-1024-1024": Shape(2, 1024, 1024),
    "dense-512": Shape(4, 64, 512),
    "experts-512": Shape(4, 64, 512, experts=2),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Experts(nn.Module):
    """Two products per expert over stacked weights, each token to every expert's half of the batch."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(count, width, 2816))
        self.down = nn.Parameter(torch.empty(count, 2816, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(self.up.shape[0], -1, x.shape[-1])
        return torch.bmm(torch.nn.functional.silu(torch.bmm(tokens, self.up)), self.down).view(x.shape)


def build(shape: Shape) -> nn.Module:
    """Returns the model, initialised alike on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=shape.width, intermediate_size=shape.width * 11 // 4, num_hidden_layers=8,
        num_attention_heads=shape.width // 64, num_key_value_heads=shape.width // 128
    )  # fmt: skip
    model = config.build()
    if shape.experts:
        for layer in model.model.layers:
            layer.mlp = Experts(shape.experts, shape.width)
    for param in model.parameters():
        nn.init.normal_(param, std=0.02) if param.ndim > 1 else nn.init.ones_(param)
    return model


class System(NamedTuple):
    """One way to train the model."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None  # None: stepped in backward


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


class _Allocates:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class OurGather(_Allocates, AllGather):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        return collectives.all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class OurReduce(_Allocates, ReduceScatter):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        return collectives.reduce_scatter(output_tensor, input_tensor, group=group, async_op=async_op)


def peer(shape: Shape, policy: MixedPrecisionPolicy, *, calls: bool, async_op: bool, experts_dim: int) -> System:
    """FSDP2, with its own collective calls or with ours."""
    model, mesh = build(shape), init_device_mesh("cpu", (shape.ranks,))
    options: dict[str, Any] = dict(mesh=mesh, mp_policy=policy)
    if shape.experts and experts_dim:
        options["shard_placement_fn"] = lambda param: Shard(experts_dim if param.ndim == 3 else 0)
    units = [fsdp2(unit, **options) for unit in (*model.units(), model)]
    for unit in units:
        if calls:
            unit.set_custom_all_gather(OurGather())
            unit.set_custom_reduce_scatter(OurReduce())
            unit.set_force_sum_reduction_for_comms(True)
        unit._set_unshard_async_op(async_op)
    return System(model, adamw(model.parameters()))


def ours(shape: Shape, policy: MixedPrecisionPolicy, *, in_backward: bool) -> System:
    model, mesh = build(shape), init_device_mesh("cpu", (shape.ranks,))
    for unit in (*model.units(), model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    if in_backward:
        step_in_backward(model, adamw)
        return System(model, None)
    return System(model, adamw(model.parameters()))


def batch(shape: Shape) -> torch.Tensor:
    seed = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(0, VOCAB, (2, shape.tokens // 2 + 1), generator=seed)


def step(system: System, tokens: torch.Tensor) -> None:
    (system.model(tokens[:, :-1], tokens[:, 1:]) / tokens.numel()).backward()
    if system.optimizer is not None:
        system.optimizer.step()
        system.optimizer.zero_grad()


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of a call, all ranks together."""
    dist.barrier()
    start = time.perf_counter()
    call()
    dist.barrier()
    return 1e3 * (time.perf_counter() - start)


def candidates(shape: Shape, policy: MixedPrecisionPolicy) -> dict[str, Callable[[], System]]:
    """FSDP2's settings to choose among."""
    dims = (0, 1) if shape.experts else (0,)
    return {
        f"async={async_op}, experts=Shard({dim})": lambda a=async_op, d=dim: peer(
            shape, policy, calls=False, async_op=a, experts_dim=d
        )
        for async_op in (False, True)
        for dim in dims
    }


def choose(shape: Shape, policy: MixedPrecisionPolicy) -> tuple[str, dict[str, float]]:
    """The fastest of FSDP2's settings, by the median of three steps each."""
    tokens, medians = batch(shape), {}
    for name, make in candidates(shape, policy).items():
        system = make()
        medians[name] = statistics.median([timed(lambda s=system: step(s, tokens)) for _ in range(5)][2:])
        del system
    best = [min(medians, key=medians.__getitem__)]
    dist.broadcast_object_list(best, src=0)
    return best[0], medians


def parse(name: str) -> dict[str, Any]:
    return dict(async_op="async=True" in name, experts_dim=int("Shard(1)" in name))


def systems(shape: Shape, policy: MixedPrecisionPolicy, best: str) -> dict[str, Callable[[], System]]:
    """The makers of everything that is compared; the default placement of experts beside the best one."""
    made = {
        "fsdp2": lambda: peer(shape, policy, calls=False, **parse(best)),
        "fsdp2, our calls": lambda: peer(shape, policy, calls=True, **parse(best)),
        "ours": lambda: ours(shape, policy, in_backward=False),
        "ours, in backward": lambda: ours(shape, policy, in_backward=True),
    }
    if shape.experts:
        made["fsdp2, Shard(0)"] = lambda: peer(shape, policy, calls=False, async_op="async=True" in best, experts_dim=0)
    return made


class Alone:
    """Compute alone, and the collectives alone on tensors of the sizes that travel."""

    def __init__(self, shape: Shape, policy: MixedPrecisionPolicy) -> None:
        self.shape, self.tokens = shape, batch(shape)
        model = ours(shape, policy, in_backward=False).model
        list(model.parameters())
        plans = [segment.plan for unit in model.units() for segment in unit.segments]  # type: ignore[operator]
        del model
        self.model = build(shape).to(policy.param_dtype)
        self.optimizer = adamw([torch.zeros(plan.shard_size) for plan in plans])
        rank = dist.get_rank()
        self.buffers = []
        for plan in plans:
            low = torch.zeros(plan.numel, dtype=policy.param_dtype)
            high = torch.zeros(plan.numel, dtype=policy.reduce_dtype)
            own = slice(rank * plan.shard_size, (rank + 1) * plan.shard_size)
            self.buffers.append((low, low[own], high, torch.zeros(plan.shard_size, dtype=policy.reduce_dtype)))

    def compute(self) -> None:
        (self.model(self.tokens[:, :-1], self.tokens[:, 1:]) / self.tokens.numel()).backward()
        self.model.zero_grad()
        for param in self.optimizer.param_groups[0]["params"]:
            param.grad = param.detach() if param.grad is None else param.grad
        self.optimizer.step()

    def calls(self) -> None:
        for at, (low, slot, high, out) in enumerate(self.buffers):
            for _ in range(2 if at + 1 < len(self.buffers) else 1):  # the root's parameters are kept
                collectives.all_gather(low, slot, group=dist.group.WORLD)
            collectives.reduce_scatter(out, high, group=dist.group.WORLD)


def times(name: str, shape: Shape, policy: MixedPrecisionPolicy, best: str, pairs: int) -> list[Row]:
    """Alternates everything; rows of steps and of rests."""
    tokens, alone = batch(shape), Alone(shape, policy)
    calls: dict[str, Callable[[], object]] = {}
    for key, make in systems(shape, policy, best).items():
        system = make()
        calls[key] = lambda s=system: step(s, tokens)
    calls |= {
        "compute alone": alone.compute,
        "collectives alone": alone.calls,
    }
    samples: dict[str, list[float]] = {key: [] for key in calls}
    order = list(calls)
    for pair in range(pairs + 2):
        for key in order if pair % 2 else reversed(order):
            elapsed = timed(calls[key])
            if pair >= 2:  # the first two plan, allocate and fill caches
                samples[key].append(elapsed)
    rows = [row(f"{name}: step, ours / {key}", "ms", samples["ours"], samples[key]) for key in order if key != "ours"]
    floor = [a + b for a, b in zip(samples["compute alone"], samples["collectives alone"], strict=True)]

    def rest(key: str) -> list[float]:
        return [a - b for a, b in zip(samples[key], floor, strict=True)]

    rows += [
        row(f"{name}: rest, {mine} / {theirs}", "ms", rest(mine), rest(theirs))
        for mine in ("ours", "ours, in backward")
        for theirs in ("fsdp2", "fsdp2, our calls")
    ]
    return rows


def resident() -> float:
    """MiB of this process's memory at its largest since the start or the last ``forget_peak``."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def memory(rank: int, shape: Shape, policy: MixedPrecisionPolicy, best: str, key: str, port: int, pipe: Any) -> None:
    """One system alone in its processes: peak of live tensors, of the resident set, and its copies."""
    _start(rank, shape.ranks, port)
    forget_peak()
    before = resident()
    system, tokens = systems(shape, policy, best)[key](), batch(shape)
    for _ in range(2):
        step(system, tokens)
    forget_peak()
    step(system, tokens)
    grown = resident() - before
    with LiveBytes() as live:
        step(system, tokens)  # what lived before, optimizer state above all, is counted once it has been touched
        live.restart()
        step(system, tokens)
    with Copies() as copies:
        step(system, tokens)
    if rank == 0:
        pipe.put((key, live.peak / 2**20, grown, copies.nbytes / 2**20, len(copies.seen)))
    dist.barrier()
    dist.destroy_process_group()


def _start(rank: int, ranks: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def work(rank: int, name: str, shape: Shape, policy: MixedPrecisionPolicy, pairs: int, port: int, pipe: Any) -> None:
    """The timing, on every rank; rank 0 sends the rows."""
    _start(rank, shape.ranks, port)
    best, medians = choose(shape, policy)
    rows = [row(f"{name}: fsdp2 {key}", "ms", [value]) for key, value in medians.items()]
    rows += times(name, shape, policy, best, pairs)
    if rank == 0:
        pipe.put((best, rows))
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str, reduce: str, pairs: int, what: str) -> list[Row]:
    """All rows of one configuration."""
    shape = SHAPES[name]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=DTYPES[reduce])
    label, pipe = f"{name}, reduce {reduce}", mp.get_context("spawn").SimpleQueue()
    rows: list[Row] = []
    best = "async=False, experts=Shard(1)" if shape.experts else "async=False"
    if what != "memory":
        mp.spawn(work, args=(label, shape, policy, pairs, 29571, pipe), nprocs=shape.ranks)
        best, rows = pipe.get()
    if what != "time":
        found = []
        for at, key in enumerate(systems(shape, policy, best)):
            mp.spawn(memory, args=(shape, policy, best, key, 29572 + at, pipe), nprocs=shape.ranks)
            found.append(pipe.get())
        _, live, grown, copied, _ = next(line for line in found if line[0] == "fsdp2")
        for key, *values in found:
            rows.append(row(f"{label}: peak live tensors, {key} / fsdp2", "MiB", [values[0]], [live]))
            rows.append(row(f"{label}: resident set grown by, {key} / fsdp2", "MiB", [values[1]], [grown]))
            rows.append(row(f"{label}: copied in {values[3]} copies, {key} / fsdp2", "MiB", [values[2]], [copied]))
    return rows


def overhead(pairs: int) -> list[Row]:
    """Microseconds per unit and step beyond the module alone, on a process group of 8 that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    layers, tokens = 16, torch.zeros(1, 5, dtype=torch.long)

    def model() -> nn.Module:
        config = LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=2
        )
        made = config.build()
        made.init_weights()
        return made

    def sharded(shard: Callable[..., Any]) -> nn.Module:
        made, mesh = model(), init_device_mesh("cpu", (8,))
        for unit in (*made.units(), made):
            shard(unit, mesh=mesh)
        return made

    def run(made: nn.Module) -> float:
        start = time.perf_counter()
        made(tokens[:, :-1], tokens[:, 1:]).backward()
        made.zero_grad()
        return 1e6 * (time.perf_counter() - start) / (layers + 1)

    made = {"alone": model(), "ours": sharded(fully_shard), "fsdp2": sharded(fsdp2)}
    samples: dict[str, list[float]] = {key: [] for key in made}
    for pair in range(10 * pairs):
        for key in made if pair % 2 else reversed(made):
            samples[key].append(run(made[key]))
    dist.destroy_process_group()
    kept = {key: values[2 * pairs :] for key, values in samples.items()}

    def beyond(key: str) -> list[float]:
        return [a - b for a, b in zip(kept[key], kept["alone"], strict=True)]

    return [row("overhead of a unit and step, ours / fsdp2", "us", beyond("ours"), beyond("fsdp2"))]


def main() -> None:
    """Reads the arguments and starts the ranks."""
    parser = arguments("fully_shard against FSDP2.")
    parser.add_argument("--row", choices=("all", *SHAPES, "overhead"), default="all")
    parser.add_argument("--reduce", choices=("both", *DTYPES), default="both", help="dtype of the reduction")
    parser.add_argument("--pairs", type=int, default=7, help="alternating rounds that count")
    parser.add_argument("--what", choices=("all", "time", "memory"), default="all")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    names = [*SHAPES, "overhead"] if options.row == "all" else [options.row]
    reduces = list(DTYPES) if options.reduce == "both" else [options.reduce]
    calls = [lambda n=n, r=r: measure(n, r, options.pairs, options.what) for n in names if n in SHAPES for r in reduces]
    if "overhead" in names:
        calls.append(lambda: overhead(options.pairs))
    rows: list[Row] = []
    for call in calls:
        found = call()
        publish(TITLE, found, None)
        rows += found
        if options.json:
            write(TITLE, rows, options.json)  # what is there, should the rest be stopped


if __name__ == "__main__":
    main()
