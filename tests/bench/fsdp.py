"""Step time and peak memory of fully_shard against FSDP2: the same model, data, dtypes and process group, alternating
in one run.

python tests/bench/fsdp.py [--ranks 2] [--pairs 9] [--json FILE]
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import Row, arguments, publish, row
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

from models import LlamaConfig
from vescale import fully_shard
from vescale.live import LiveBytes

MODEL = dict(
    vocab_size=512, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=4
)  # fmt: skip
TOKENS = 16  # per rank: little compute, so that what the two systems do differently shows


def build(shard: Callable[..., Any], policy: MixedPrecisionPolicy) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns the sharded model and torch's fused AdamW over its parameters."""
    torch.manual_seed(0)
    model = LlamaConfig(**MODEL).build()
    model.init_weights()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in (*model.units(), model):
        shard(unit, mesh=mesh, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    """Takes one step; returns its wall time in milliseconds, all ranks together."""
    dist.barrier()
    start = time.perf_counter()
    (model(tokens[:, :-1], tokens[:, 1:]) / TOKENS).backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()
    return 1e3 * (time.perf_counter() - start)


def compare(name: str, policy: MixedPrecisionPolicy, pairs: int) -> list[Row]:
    """Alternates the two systems; returns a row of step times and a row of peaks."""
    tokens = torch.randint(
        0, MODEL["vocab_size"], (1, TOKENS + 1), generator=torch.Generator().manual_seed(dist.get_rank())
    )
    systems = {"ours": build(fully_shard, policy), "peer": build(fsdp2, policy)}
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    for pair in range(pairs + 2):
        for key in ("ours", "peer") if pair % 2 else ("peer", "ours"):
            elapsed = step(*systems[key], tokens)
            if pair >= 2:  # the first two plan, allocate and fill caches
                times[key].append(elapsed)
    peaks: dict[str, list[float]] = {}
    for key, system in systems.items():
        with LiveBytes() as live:
            step(*system, tokens)
        peaks[key] = [live.peak / 2**20]
    return [
        row(f"step, {name}", "ms", times["ours"], times["peer"]),
        row(f"peak live tensors, {name}", "MiB", peaks["ours"], peaks["peer"]),
    ]


def work(rank: int, ranks: int, pairs: int, file: Path | None) -> None:
    """Runs on every rank; rank 0 publishes."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29571", RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for name, param, reduce in (
        ("fp32", None, None),
        ("bf16, fp32 reduce", torch.bfloat16, torch.float32),
        ("bf16", torch.bfloat16, torch.bfloat16),
    ):
        rows += compare(f"{name}, {ranks} ranks", MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce), pairs)
    if rank == 0:
        publish("fully_shard against FSDP2", rows, file)
    dist.destroy_process_group()


def main() -> None:
    """Reads the arguments and starts the ranks."""
    parser = arguments("Step time and peak memory of fully_shard against FSDP2.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=9, help="alternating pairs that count")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    mp.spawn(work, args=(options.ranks, options.pairs, options.json), nprocs=options.ranks)


if __name__ == "__main__":
    main()
