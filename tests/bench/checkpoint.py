"""How long an asynchronous save holds up a step, against a synchronous one, and how fast a checkpoint loads.

    python tests/bench/checkpoint.py [--mib 64 512] [--json FILE]

One rank; the state is a model and AdamW's two moments. The two kinds of save alternate; medians of five. Loading
verifies checksums, as a resume does; its peer is reading the same files, which are in the page cache for both.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import Row, arguments, publish, row
from torch import nn

from optimizers import AdamW
from vescale import Optimizer, Rules, checkpoint, fully_shard
from vescale.saver import Saver

PAIRS = 5


def timed(act: Callable[[], Any]) -> float:
    """Milliseconds of ``act``."""
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1e3


def measure(mib: int, root: Path) -> list[Row]:
    """Rows of a checkpoint of about ``mib`` MiB."""
    side = int((mib * 2**20 / 12 / 8) ** 0.5) // 64 * 64
    model = fully_shard(nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(8))))
    optimizer = Optimizer(model.named_parameters(), Rules(all=("*", AdamW())))
    saver, tensors = Saver(root, keep=1), checkpoint.tensors(model, optimizer)
    held, whole, loads, reads = list[float](), list[float](), list[float](), list[float]()
    for step, kind in enumerate(["warm-up"] + ["held", "whole"] * PAIRS):
        blocked = timed(lambda step=step: saver.save(step, tensors=tensors, extra={}))
        written = timed(saver.wait)
        if kind == "held":
            held.append(blocked)
        elif kind == "whole":
            whole.append(blocked + written)
    path = checkpoint.newest(root)
    assert path is not None
    files = sorted(path.iterdir())
    for _ in range(PAIRS):
        loads.append(timed(lambda: checkpoint.load(path, model=model, optimizer=optimizer)))
        reads.append(timed(lambda: [file.read_bytes() for file in files]))
    size = sum(file.stat().st_size for file in files) / 2**20
    return [
        row(f"a save of {size:.0f} MiB holds up a step; peer: until it is on the disk", "ms", held, whole),
        row(f"loading {size:.0f} MiB, checksums compared; peer: reading its files", "ms", loads, reads),
    ]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 512], help="sizes of a checkpoint")
    options = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="bench_checkpoint_"))
    rows = [line for mib in options.mib for line in measure(mib, root / str(mib))]
    publish("Checkpoints", rows, options.json)
    shutil.rmtree(root)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
