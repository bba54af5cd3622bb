"""Validation loss of moe_debug against a dense model of as many active parameters, after the same tokens; three seeds.

The dense model is the same recipe with every layer dense (``first_k_dense_replace``): a layer of 384 between its
projections instead of two of sixteen experts and a shared one of 128 each. The load is the tokens of the busiest expert
of a step over the mean, of the worst layer, at every step: the largest of the last half and of the last quarter of the
run, and the step after which it was never above 2. One run at a time; each is written to the file when it ends, and a
file that exists is continued::

    python tests/bench/experts.py --json FILE [--steps 250]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import arguments, machine
from rich.console import Console
from rich.table import Table

MODELS: dict[str, list[str]] = {"experts": [], "dense": ["model.first_k_dense_replace=5", "optimizer=muon"]}
SEEDS = (0, 1, 2)


def train(model: str, seed: int, steps: int) -> dict[str, Any]:
    """Runs one model on one rank by the command a user would type; returns its final loss and its loads by step."""
    with tempfile.TemporaryDirectory() as scratch:
        words = [f"trainer.seed={seed}", f"trainer.steps={steps}", f"run_dir={scratch}/run", "tracking.mode=disabled"]
        words += ["trainer.save_every=1000000", "trainer.eval_every=1000000", "trainer.log_every=1", *MODELS[model]]
        command = [sys.executable, "-m", "vescale.train", "recipe=moe_debug_muon", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, cwd=scratch)
        lines = [json.loads(line) for line in (Path(scratch) / "run" / "metrics.jsonl").read_text().splitlines()]
    (final,) = [line["validation_loss"] for line in lines if "validation_loss" in line]
    # Of the worst layer, by step; empty for the dense model.
    loads = [round(max(found), 3) for found in map(_loads, lines) if found]
    assert len(loads) == (steps if model == "experts" else 0)
    print(f"{model} seed {seed}: {final:.4f}", file=sys.stderr, flush=True)
    return {"model": model, "seed": seed, "steps": steps, "final": final, "loads": loads}


def _loads(line: dict[str, Any]) -> list[float]:
    return [value for key, value in line.items() if key.startswith("expert_load/")]


def runs(file: Path, steps: int) -> list[dict[str, Any]]:
    """Returns the six runs, from the file or by training."""
    found = json.loads(file.read_text())["runs"] if file.exists() else []
    known = {(run["model"], run["seed"], run["steps"]) for run in found}
    for model in MODELS:
        for seed in SEEDS:
            if (model, seed, steps) not in known:
                found.append(train(model, seed, steps))
                file.write_text(json.dumps({"machine": machine(), "runs": found}))
    return [run for run in found if run["steps"] == steps]


def show(found: list[dict[str, Any]], steps: int) -> None:
    """Prints the table."""
    table = Table(title=f"moe_debug_muon, {steps} steps: validation loss, nats per byte ({machine()})")
    for column in ("model", "seeds 0, 1, 2", "mean", "sd", "load, last half", "last quarter", "never above 2 after"):
        table.add_column(column)
    for model in MODELS:
        mine = sorted((run for run in found if run["model"] == model), key=lambda run: run["seed"])
        finals = [run["final"] for run in mine]
        halves, quarters = ([max(run["loads"][steps * i // 4 :], default=0) for run in mine] for i in (2, 3))
        settled = (max((i + 1 for i, load in enumerate(run["loads"]) if load > 2), default=0) for run in mine)
        cells = [" ".join(f"{value:.2f}" for value in values) for values in (halves, quarters)]
        cells.append(" ".join(map(str, settled)))
        numbers = (f"{statistics.mean(finals):.3f}", f"{statistics.stdev(finals):.3f}")
        table.add_row(model, " ".join(f"{value:.3f}" for value in finals), *numbers, *cells)
    Console(width=120).print(table)


def main() -> None:
    """Reads the arguments, runs, prints."""
    parser = arguments("A mixture of experts against a dense model of as many active parameters.")
    parser.add_argument("--steps", type=int, default=250)
    options = parser.parse_args()
    if options.json is None:
        parser.error("--json FILE: of the runs, continued if it exists")
    show(runs(options.json, options.steps), options.steps)


if __name__ == "__main__":
    main()
