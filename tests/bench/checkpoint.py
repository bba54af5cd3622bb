"""How long an asynchronous save holds up a step, against a synchronous one, and how fast a checkpoint loads.

    python tests/bench/checkpoint.py [--mib 256] [--json FILE]

One rank; the state is a model and AdamW's two moments. The two kinds of save alternate; medians of five.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from report import arguments, publish, row
from torch import nn

from optimizers import AdamW
from vescale import Optimizer, Rules, checkpoint, fully_shard
from vescale.saver import Saver

PAIRS = 5


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--mib", type=int, default=256, help="size of a checkpoint")
    options = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    side = int((options.mib * 2**20 / 12 / 8) ** 0.5) // 64 * 64
    model = fully_shard(nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(8))))
    optimizer = Optimizer(model.named_parameters(), Rules(all=("*", AdamW())))
    root = Path(tempfile.mkdtemp(prefix="bench_checkpoint_"))
    saver, held, whole = Saver(root / "c", keep=1), [], []
    tensors = checkpoint.tensors(model, optimizer)
    for step, kind in enumerate(["warm-up"] + ["held", "whole"] * PAIRS):
        began = time.perf_counter()
        saver.save(step, tensors=tensors, extra={})
        if kind == "held":
            held.append((time.perf_counter() - began) * 1e3)
        saver.wait()
        if kind == "whole":
            whole.append((time.perf_counter() - began) * 1e3)
    path = checkpoint.newest(root / "c")
    assert path is not None
    size = sum(file.stat().st_size for file in path.iterdir()) / 2**20
    loads = []
    for _ in range(PAIRS):
        began = time.perf_counter()
        checkpoint.load(path, model=model, optimizer=optimizer, verified=True)
        loads.append(size / (time.perf_counter() - began))
    rows = [
        row(f"a save of {size:.0f} MiB holds up a step; peer: until it is on the disk", "ms", held, whole),
        row("loading, files in the page cache", "MiB/s", loads),
    ]
    publish("Checkpoints", rows, options.json)
    shutil.rmtree(root)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
