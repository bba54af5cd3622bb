"""Validation loss of moe_debug against a dense model of as many active parameters, after the same tokens; three seeds.

    python tests/bench/experts.py [--steps 250] [--json FILE]

The dense model is the same recipe with every layer dense (``first_k_dense_replace``): a layer of 384 between its
projections instead of two of sixteen experts and a shared one of 128 each. Also prints the load of the busiest expert
over the mean, the largest of the last quarter of the run's log lines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from report import arguments, machine, publish, row

MODELS = {"ours": [], "peer": ["model.first_k_dense_replace=5"]}
SEEDS = (0, 1, 2)


def train(system: str, seed: int, steps: int) -> dict[str, Any]:
    """Runs one model on one rank by the command a user would type; returns its rows of metrics."""
    with tempfile.TemporaryDirectory() as scratch:
        words = [f"trainer.seed={seed}", f"trainer.steps={steps}", f"run_dir={scratch}/run", "tracking.mode=disabled"]
        words += ["trainer.save_every=1000000", "trainer.eval_every=1000000", *MODELS[system]]
        command = [sys.executable, "-m", "vescale.train", "recipe=moe_debug_muon", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, capture_output=True, cwd=scratch)
        lines = [json.loads(line) for line in (Path(scratch) / "run" / "metrics.jsonl").read_text().splitlines()]
    final = [line["validation_loss"] for line in lines if "validation_loss" in line][-1]
    late = [line for line in lines if line.get("step", 0) > 0.75 * steps]
    loads = [value for line in late for key, value in line.items() if key.startswith("expert_load/")]
    print(f"{system} seed {seed}: {final:.4f}, load {max(loads, default=0):.2f}", file=sys.stderr, flush=True)
    return {"system": system, "seed": seed, "final": final, "load": max(loads, default=0.0), "rows": lines}


def main() -> None:
    """Reads the arguments, runs two models at a time, publishes."""
    parser = arguments("A mixture of experts against a dense model of as many active parameters.")
    parser.add_argument("--steps", type=int, default=250)
    options = parser.parse_args()
    cells = [(system, seed, options.steps) for seed in SEEDS for system in MODELS]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = list(pool.map(lambda cell: train(*cell), cells))
    finals = {system: [run["final"] for run in runs if run["system"] == system] for system in MODELS}
    loads = [run["load"] for run in runs if run["system"] == "ours"]
    title = f"moe_debug (ours) against dense (peer), {options.steps} steps"
    rows = [
        row("validation loss, median of three seeds", "nats/byte", finals["ours"], finals["peer"]),
        row("busiest expert over the mean", "", loads),
    ]
    publish(title, rows, None)
    print({system: [round(value, 4) for value in values] for system, values in finals.items()}, loads)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "rows": [r._asdict() for r in rows], "runs": runs}))


if __name__ == "__main__":
    main()
