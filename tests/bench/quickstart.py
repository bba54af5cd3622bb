"""Validation loss of the quickstart's model after the quickstart's steps: Muon against AdamW.

The same grid of five learning rates, a factor of two apart, for both; the best of each must lie strictly inside the
grid. Three seeds at the best; Muon is better when the difference of the means exceeds two standard errors.

    python tests/bench/quickstart.py [--json FILE] [--verify FILE]

``--verify`` runs two cells of a committed file again and compares.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from report import Row, arguments, machine, publish

LRS = (0.00125, 0.0025, 0.005, 0.01, 0.02)
SEEDS = (0, 1, 2)
GROUPS = {"muon": ("matrices", "rest"), "adamw": ("rest",)}  # the groups whose rule holds a learning rate of its own


class Cell(NamedTuple):
    """One run of the grid."""

    optimizer: str
    lr: float
    seed: int


def command(cell: Cell, folder: Path) -> list[str]:
    """Returns the command that a user would type for this cell."""
    rates = [f"optimizer.{group}.rule.lr={cell.lr}" for group in GROUPS[cell.optimizer]]
    run = [f"run_dir={folder}", f"trainer.seed={cell.seed}", "trainer.save_every=1000000", "tracking.mode=disabled"]
    return [
        sys.executable,
        "-m",
        "vescale.train",
        "recipe=llama_debug_muon",
        f"optimizer={cell.optimizer}",
        *rates,
        *run,
    ]


def train(cell: Cell) -> dict[str, Any]:
    """Runs one cell on one rank; returns its curves and final validation loss in nats per token."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            command(cell, Path(scratch)), check=True, env=environment, stdout=subprocess.DEVNULL, cwd=scratch
        )
        lines = [json.loads(line) for line in (Path(scratch) / "metrics.jsonl").read_text().splitlines()]
        settings = json.loads((Path(scratch) / "config.json").read_text())
    settings.pop("run_dir")
    curve = {key: [[line["step"], line[key]] for line in lines if key in line] for key in ("loss", "validation_loss")}
    print(
        f"{cell.optimizer} lr {cell.lr} seed {cell.seed}: {curve['validation_loss'][-1][1]:.4f}",
        file=sys.stderr,
        flush=True,
    )
    return {**cell._asdict(), "final": curve["validation_loss"][-1][1], "curves": curve, "config": settings}


def train_all(cells: list[Cell]) -> list[dict[str, Any]]:
    """Runs cells, one per core at a time."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(train, cells))


def best(runs: list[dict[str, Any]], optimizer: str) -> float:
    """Returns the learning rate of the lowest final loss.

    Raises:
        ValueError: If it is the grid's first or last.
    """
    lr = min((run for run in runs if run["optimizer"] == optimizer), key=lambda run: run["final"])["lr"]
    if lr in (LRS[0], LRS[-1]):
        raise ValueError(f"{optimizer}: the best learning rate {lr} is at the edge of the grid {LRS}")
    return lr


def standard_error(a: list[float], b: list[float]) -> float:
    """Returns the standard error of the difference of two means."""
    return math.sqrt(statistics.variance(a) / len(a) + statistics.variance(b) / len(b))


def sweep() -> tuple[list[Row], list[dict[str, Any]]]:
    """Runs the grid and the seeds; returns the rows and every run."""
    runs = train_all([Cell(optimizer, lr, SEEDS[0]) for optimizer in GROUPS for lr in LRS])
    chosen = {optimizer: best(runs, optimizer) for optimizer in GROUPS}
    runs += train_all([Cell(optimizer, lr, seed) for optimizer, lr in chosen.items() for seed in SEEDS[1:]])
    finals = {o: [run["final"] for run in runs if run["optimizer"] == o and run["lr"] == chosen[o]] for o in GROUPS}
    ours, peer = finals["muon"], finals["adamw"]
    title = f"validation loss, Muon lr {chosen['muon']} against AdamW lr {chosen['adamw']}"
    margin = (statistics.mean(peer) - statistics.mean(ours)) / standard_error(ours, peer)
    rows = [
        Row(title, statistics.mean(ours), statistics.mean(peer), "nats/byte", {"ours": ours, "peer": peer}),
        Row("difference of the means", margin, None, "standard errors", {"ours": [margin]}),
    ]
    for lr in LRS:
        cell = {o: [run["final"] for run in runs if run["optimizer"] == o and run["lr"] == lr][:1] for o in GROUPS}
        rows.append(
            Row(
                f"lr {lr}, seed 0",
                cell["muon"][0],
                cell["adamw"][0],
                "nats/byte",
                {"ours": cell["muon"], "peer": cell["adamw"]},
            )
        )
    return rows, runs


def verify(file: Path) -> None:
    """Runs two drawn cells of a file again.

    Raises:
        SystemExit: If a final loss differs by more than 1 %.
    """
    drawn = random.sample(json.loads(file.read_text())["runs"], 2)
    for old, new in zip(
        drawn, train_all([Cell(run["optimizer"], run["lr"], run["seed"]) for run in drawn]), strict=True
    ):
        difference = abs(new["final"] / old["final"] - 1)
        print(f"{old['optimizer']} lr {old['lr']} seed {old['seed']}: {old['final']:.4f} then, {new['final']:.4f} now")
        if difference > 0.01:
            raise SystemExit(f"differs by {difference:.2%}, more than 1 %")


def main() -> None:
    """Reads the arguments and runs."""
    parser = arguments("Muon against AdamW on the quickstart's model.")
    parser.add_argument("--verify", type=Path, help="run two cells of this file again and compare")
    options = parser.parse_args()
    if options.verify:
        verify(options.verify)
        return
    rows, runs = sweep()
    publish("quickstart: Muon (ours) against AdamW (peer)", rows, None)
    if options.json:
        content = {"machine": machine(), "rows": [row._asdict() for row in rows], "runs": runs}
        options.json.write_text(json.dumps(content))


if __name__ == "__main__":
    main()
