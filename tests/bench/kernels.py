"""Kernels: machine code for four GPUs, and on a GPU the time, beside what the memory and the matrix units can do.

    python tests/bench/kernels.py [--json FILE] [--repeats N]

The ceilings are measured in the same run: memory by a copy of 1 GiB, products by ``torch.mm`` of the same dtype.
Without a GPU only the first table is printed, and nothing is timed.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The tests' folder first, this one last: it has an optimizers.py of its own.
sys.path.append(sys.path.pop(0))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
from codegen import TARGETS, launches, resources
from kernel_calls import Call, calls
from report import arguments, machine
from rich.console import Console
from rich.table import Table


def code() -> list[dict[str, Any]]:
    """Returns what each launch of each call takes on each target, or why it has no code there."""
    rows: list[dict[str, Any]] = []
    for name, make in calls("meta").items():
        for launch in launches(make().run):
            if any(row["call"] == name and row["source"] == launch.source.hash() for row in rows):
                continue  # the same code again
            row: dict[str, Any] = {"call": name, "kernel": launch.kernel.__name__, "source": launch.source.hash()}
            for target in TARGETS:
                try:
                    row[target] = resources(launch.compile(target))._asdict()
                except Exception as error:  # a compiler's own, of any kind; the table is what this bench is for
                    row[target] = f"{type(error).__name__}: {error}".splitlines()[0]
            rows.append(row)
    return rows


def print_code(rows: list[dict[str, Any]]) -> None:
    """Prints ``code``: registers per thread, spilled bytes where there are any, shared memory in KiB."""
    table = Table(title=f"machine code: registers / shared KiB (triton {triton.__version__})")
    table.add_column("call")
    table.add_column("kernel")
    for target in TARGETS:
        table.add_column(target, justify="right")
    for row in rows:
        table.add_row(row["call"], row["kernel"], *(_cell(row[target]) for target in TARGETS))
    Console(width=120).print(table)


def _cell(found: Any) -> str:
    if isinstance(found, str):
        return found
    spilled = f", {found['spilled']} spilled" if found["spilled"] else ""
    return f"{found['registers']} / {found['shared'] / 1024:.3g}{spilled}"


def seconds(run: Callable[[], object], repeats: int) -> list[float]:
    """Returns the time of each call on the GPU, after three to warm up, with its cache flushed in between."""
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    samples = []
    for index in range(repeats + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        run()
        stop.record()
        stop.synchronize()
        if index >= 3:
            samples.append(start.elapsed_time(stop) / 1e3)
    return samples


def ceilings(repeats: int) -> dict[Any, float]:
    """Returns bytes per second of a copy and FLOPs per second of ``torch.mm`` by dtype."""
    x = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    found: dict[Any, float] = {"bytes": 2 * x.numel() / statistics.median(seconds(lambda: y.copy_(x), repeats))}
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.randn(8192, 8192, device="cuda").to(dtype)
        found[dtype] = 2 * 8192**3 / statistics.median(seconds(lambda a=a: torch.mm(a, a), repeats))
    return found


def timed(repeats: int) -> list[dict[str, Any]]:
    """Returns bytes, FLOPs, time and share of the nearer ceiling of each call."""
    limit, rows = ceilings(repeats), []
    for name, make in calls("cuda").items():
        call: Call = make()
        samples = seconds(call.run, repeats)
        least = max(call.bytes / limit["bytes"], call.flops / limit[call.dtype])
        rows.append(
            {
                "call": name,
                "bytes": call.bytes,
                "flops": call.flops,
                "seconds": statistics.median(samples),
                "share": least / statistics.median(samples),
                "samples": samples,
            }
        )
        del call
        torch.cuda.empty_cache()
    rows.append({"call": "ceilings", **{str(key): value for key, value in limit.items()}})
    return rows


def print_timed(rows: list[dict[str, Any]]) -> None:
    """Prints ``timed``. A share above one is a symmetric product, which does half the work that is counted."""
    table = Table(title=f"time on {torch.cuda.get_device_name()} ({machine()}, triton {triton.__version__})")
    for column in ("call", "MB", "GFLOP", "ms", "share of the ceiling"):
        table.add_column(column, justify="left" if column == "call" else "right")
    *calls_, limit = rows
    for row in calls_:
        figures = (row["bytes"] / 1e6, row["flops"] / 1e9, row["seconds"] * 1e3, row["share"])
        table.add_row(row["call"], *(f"{figure:.4g}" for figure in figures))
    Console(width=120).print(table)
    print("ceilings: " + ", ".join(f"{key} {value:.4g}/s" for key, value in limit.items() if key != "call"))


def main() -> None:
    """Prints both tables."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each kernel")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("TRITON_CACHE_DIR", cache)
        rows = {"machine": machine(), "triton": triton.__version__, "code": code()}
        print_code(rows["code"])
        if torch.cuda.is_available():
            rows["timed"] = timed(options.repeats)
            print_timed(rows["timed"])
        else:
            print("No GPU here: nothing was run or timed; the numbers above are the compiler's.")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
