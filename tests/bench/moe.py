"""Step time and peak memory of a mixture of experts against FSDP2 at its better configuration.

The same layers, data, dtypes and process group, alternating in one run. Ours deals the experts over ep ranks and shards
each part over the rest; the peer shards everything over all ranks, by rows of dim 0 or, for the experts, Shard(1). Ours
is also run as the peer is, with no expert dealt. Tokens are dealt evenly (force_balance); torch's fused AdamW steps
all. A peak is of a whole step with the optimizer's state there, the most of any rank.

    python tests/bench/moe.py [--ranks 4] [--pairs 5] [--json FILE]
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import Row, arguments, publish, row
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import Shard

from models import CausalLM, Qwen3MoeConfig
from vescale import fully_shard
from vescale.live import LiveBytes
from vescale.mesh import make_expert_mesh

SIZES: dict[str, Any] = dict(
    vocab_size=512, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    num_experts=16, num_experts_per_tok=2, norm_topk_prob=True, router_aux_loss_coef=0.0, force_balance=True,
)  # fmt: skip
SHAPES = {"experts 256 x 256": 256, "experts 250 x 256, which 4 ranks do not divide": 250}
TOKENS = 64  # per rank: little compute, so that what the systems do differently shows
System = tuple[nn.Module, torch.optim.Optimizer]


def model(intermediate: int) -> CausalLM:
    """Returns the whole model, the same on every rank."""
    torch.manual_seed(0)
    built = Qwen3MoeConfig(**SIZES, moe_intermediate_size=intermediate).build()
    built.init_weights()
    return built


def ours(intermediate: int, ep: int) -> System:
    """Experts dealt over ``ep`` ranks, each part sharded over the rest, the other layers over all."""
    built, mesh = model(intermediate), init_device_mesh("cpu", (dist.get_world_size(),))
    if ep > 1:
        experts = make_expert_mesh(torch.device("cpu"), ep)
        built.deal_experts(experts["ep"].get_group())
        for unit in built.expert_units():
            fully_shard(unit, mesh=experts["efsdp"])
    for unit in (*built.units(), built):
        fully_shard(unit, mesh=mesh)
    built.set_gradient_divide_factor(1.0, recurse=True)
    return built, torch.optim.AdamW(built.parameters(), lr=1e-3, fused=True)


def peer(intermediate: int, placement: Callable[[nn.Parameter], Shard | None]) -> System:
    """FSDP2 on every layer."""
    built, mesh = model(intermediate), init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in (*built.units(), built):
        fsdp2(unit, mesh=mesh, shard_placement_fn=placement)
    return built, torch.optim.AdamW(built.parameters(), lr=1e-3, fused=True)


def by_rows(param: nn.Parameter) -> Shard | None:
    """Returns FSDP2's default."""
    return None


def inside_experts(param: nn.Parameter) -> Shard | None:
    """Returns Shard(1) for stacks of experts."""
    return Shard(1) if param.ndim == 3 else None


def step(system: System, tokens: torch.Tensor) -> float:
    """Takes one step; returns its wall time in milliseconds, all ranks together."""
    built, optimizer = system
    dist.barrier()
    start = time.perf_counter()
    (built(tokens[:, :-1], tokens[:, 1:]) / TOKENS).backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()
    return 1e3 * (time.perf_counter() - start)


def compare(name: str, intermediate: int, pairs: int) -> list[Row]:
    """Alternates the systems; returns rows of step times and of peaks, ours beside each of the others."""
    tokens = torch.randint(0, 512, (1, TOKENS + 1), generator=torch.Generator().manual_seed(dist.get_rank()))
    makers = {
        "ours": partial(ours, intermediate, dist.get_world_size()),
        "ours, not dealt": partial(ours, intermediate, 1),
        "FSDP2": partial(peer, intermediate, by_rows),
        "FSDP2, Shard(1)": partial(peer, intermediate, inside_experts),
    }
    systems, lines = {}, []
    for key, make in makers.items():
        try:
            systems[key] = make()
        except (NotImplementedError, ValueError, RuntimeError) as refusal:
            lines.append(f"{name}: {key} refuses: {str(refusal).splitlines()[0]}")
    times: dict[str, list[float]] = {key: [] for key in systems}
    for pair in range(pairs + 2):
        for key in list(systems) if pair % 2 else reversed(systems):
            elapsed = step(systems[key], tokens)
            if pair >= 2:  # the first two plan, allocate and fill caches
                times[key].append(elapsed)
    peaks: dict[str, list[float]] = {}
    for key, system in systems.items():
        with LiveBytes() as live:
            step(system, tokens)  # after which parameters, gradients and state have all been seen
            live.restart()
            step(system, tokens)
        highest = torch.tensor(float(live.peak))
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        peaks[key] = [highest.item() / 2**20]
    if dist.get_rank() == 0:
        print("\n".join(lines), flush=True)
    rows = []
    for key in systems.keys() - {"ours"}:
        rows.append(row(f"step, {name}, peer {key}", "ms", times["ours"], times[key]))
        rows.append(row(f"peak live tensors, {name}, peer {key}", "MiB", peaks["ours"], peaks[key]))
    return sorted(rows, key=lambda line: line.name)


def work(rank: int, ranks: int, pairs: int, file: Path | None) -> None:
    """Runs on every rank; rank 0 publishes."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29573", RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [line for name, size in SHAPES.items() for line in compare(name, size, pairs)]
    if rank == 0:
        publish("A mixture of experts against FSDP2", rows, file)
    dist.destroy_process_group()


def main() -> None:
    """Reads the arguments and starts the ranks."""
    parser = arguments("Step time and peak memory of a mixture of experts against FSDP2.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=5, help="alternating rounds that count")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    mp.spawn(work, args=(options.ranks, options.pairs, options.json), nprocs=options.ranks)


if __name__ == "__main__":
    main()
