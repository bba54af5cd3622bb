"""Steps to AdamW's final validation loss: every rule on one Llama of a million parameters and the shipped text.

The same grid of learning rates, a factor of two apart, for every rule, extended where the best is at its edge; one seed
for the grid, three for the result. Rules that should end where AdamW does run at its learning rate from seven seeds,
beside an AdamW whose beta2 is 0.950001: what rounding alone does to a run. One process, one thread; each run is written
to the file when it ends, and a file that exists is continued::

    python tests/bench/convergence.py --json tests/bench/convergence.json [--rules adamw,muon] [--close]
        [--plot FILE.png]
    python tests/bench/convergence.py --verify tests/bench/convergence.json      runs two drawn cells again
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from report import machine
from rich.console import Console
from rich.table import Table

import optimizers
from models import LlamaConfig
from optimizers import WarmupCosine
from vescale import Optimizer, Rules
from vescale.data import TextData

STEPS, BATCH, SEQ_LEN, EVERY, VALIDATION = 600, 4, 64, 20, 32
MODEL = dict(
    vocab_size=320, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=SEQ_LEN
)  # fmt: skip
LRS = (0.00125, 0.0025, 0.005, 0.01, 0.02)
SEEDS, MORE_SEEDS = (0, 1, 2), (3, 4, 5, 6)
MAX_GRAD_NORM = 1.0
REST: dict[str, Any] = dict(betas=(0.9, 0.95), weight_decay=0.1)
# What steps the matrices of the layers; AdamW steps the rest with the same learning rate.
MATRICES: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", REST),
    "muon": ("Muon", dict(weight_decay=0.1)),
    "soap": ("SOAP", dict(weight_decay=0.1, block_size=128)),
    "adam8bit": ("Adam8bit", dict(**REST, min_numel=2048)),
    # Defaults are DASH's (arXiv 2602.02016) but for the block; roots as in recipes/optimizer/shampoo.yaml at this size.
    "shampoo": ("Shampoo", dict(weight_decay=0.1, block_size=128, root="eigen")),
    "normuon": ("NorMuon", dict(weight_decay=0.1)),
    # AdamW but for rounding: how far apart two runs end that should be the same.
    "nudged": ("AdamW", REST | dict(betas=(0.9, 0.950001))),
    "bnb": ("Adam8bit", dict(**REST, min_numel=2048, compat="bnb")),
}
# Rules that should end where AdamW does, at its learning rate and from more seeds.
CLOSE = ("nudged", "adam8bit", "bnb")


def rules_of(name: str, lr: float) -> Rules:
    """Returns the rules of one run."""
    kind, options = MATRICES[name]
    rest = ("*", optimizers.AdamW(lr=lr, **REST))
    return Rules(matrices=("*_proj.weight", getattr(optimizers, kind)(lr=lr, **options)), rest=rest)


def settings(name: str, lr: float, seed: int) -> dict[str, Any]:
    """Returns everything that a run's numbers follow from, as plain values."""
    return {
        "rule": name, "matrices": MATRICES[name], "rest": REST, "lr": lr, "seed": seed, "model": MODEL, "steps": STEPS,
        "batch": BATCH, "seq_len": SEQ_LEN, "max_grad_norm": MAX_GRAD_NORM, "validation": VALIDATION, "every": EVERY,
    }  # fmt: skip


def digest(config: Mapping[str, Any]) -> str:
    """Returns the hash that names a run."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]


def train(name: str, lr: float, seed: int) -> dict[str, Any]:
    """Runs one cell; returns its curve of (step, validation loss in nats per byte) and its configuration."""
    torch.manual_seed(seed)
    model = LlamaConfig(**MODEL).build()
    model.init_weights()
    optimizer = Optimizer(model.named_parameters(), rules_of(name, lr))
    schedule = WarmupCosine(total_steps=STEPS, warmup_steps=STEPS // 25, final=0.1)
    data = TextData(seq_len=SEQ_LEN, val_fraction=0.05, seed=seed).open()
    held = data.validation.read(0, VALIDATION)
    curve, began = [], time.process_time()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = lr * schedule.scale(step)
        batch = data.train.batch(step, rank=0, world=1, global_batch=BATCH)
        loss = model(batch.input_ids, batch.labels) / (BATCH * SEQ_LEN)
        loss.backward()
        optimizer.clip_grad_norm_(MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                value = model(held.input_ids, held.labels).item() / (VALIDATION * SEQ_LEN)
            curve.append([step + 1, round(value, 5)])
            if not math.isfinite(value):
                break
    config = settings(name, lr, seed)
    seconds = round(time.process_time() - began, 1)
    return {"rule": name, "lr": lr, "seed": seed, "final": curve[-1][1], "cpu_seconds": seconds, "curve": curve,
            "hash": digest(config), "config": config}  # fmt: skip


class Runs:
    """The runs of a file; a run that is there is not run again.

    Args:
        file: JSON, made where it does not exist.
        most: Runs to train before the process ends with code 3; 0: all.
    """

    def __init__(self, file: Path, most: int = 0) -> None:
        self.file, self.most = file, most
        self.found = {run["hash"]: run for run in json.loads(file.read_text())["runs"]} if file.exists() else {}

    def get(self, name: str, lr: float, seed: int) -> dict[str, Any]:
        """Returns a run, from the file or by training."""
        key = digest(settings(name, lr, seed))
        if key not in self.found:
            self.found[key] = train(name, lr, seed)
            fresh = self.file.with_suffix(".new")
            fresh.write_text(json.dumps({"machine": machine(), "runs": list(self.found.values())}))
            fresh.replace(self.file)
            run = self.found[key]
            line = f"{name} lr {lr} seed {seed}: {run['final']:.4f}, {run['cpu_seconds']} s"
            print(line, file=sys.stderr, flush=True)
            self.most -= 1
            if self.most == 0:
                raise SystemExit(3)  # the next call goes on from here
        return self.found[key]

    def grid(self, name: str) -> dict[float, dict[str, Any]]:
        """Returns the runs of the grid, with as many more learning rates as bring the best inside."""
        runs = {lr: self.get(name, lr, SEEDS[0]) for lr in LRS}
        while (best := min(runs, key=lambda lr: _loss(runs[lr]))) in (min(runs), max(runs)):
            lr = best / 2 if best == min(runs) else best * 2
            runs[lr] = self.get(name, lr, SEEDS[0])
        return dict(sorted(runs.items()))


def _loss(run: Mapping[str, Any]) -> float:
    return run["final"] if math.isfinite(run["final"]) else math.inf


def steps_to(curve: list[list[float]], loss: float) -> float:
    """Returns the step at which a curve first reaches ``loss``, between two looks by a straight line; inf if never."""
    before = None
    for step, value in curve:
        if value <= loss:
            if before is None or before[1] == value:
                return step
            return before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - value)
        before = (step, value)
    return math.inf


def results(runs: Runs, names: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Returns the three seeds at the best learning rate of each rule."""
    found = {}
    for name in names:
        grid = runs.grid(name)
        best = min(grid, key=lambda lr: _loss(grid[lr]))  # noqa: B023 (called at once)
        found[name] = [runs.get(name, best, seed) for seed in SEEDS]
    return found


def close(runs: Runs, lr: float) -> dict[str, list[float]]:
    """Returns how far above AdamW's each of ``CLOSE`` ends, as a fraction, seed by seed."""
    found: dict[str, list[float]] = {name: [] for name in CLOSE}
    for seed in (*SEEDS, *MORE_SEEDS):
        target = runs.get("adamw", lr, seed)["final"]
        for name in CLOSE:
            found[name].append(runs.get(name, lr, seed)["final"] / target - 1)
    return found


def show_close(found: dict[str, list[float]]) -> None:
    """Prints how far above AdamW's the rules end that should end there, and how well that is known."""
    table = Table(title="over AdamW's of the same seed, at its learning rate")
    for column in ("rule", "mean", "standard error", "sd of a seed", "seed by seed"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    for name, over in found.items():
        spread = statistics.stdev(over)
        numbers = (f"{statistics.mean(over):+.2%}", f"{spread / math.sqrt(len(over)):.2%}", f"{spread:.2%}")
        table.add_row(name, *numbers, " ".join(f"{100 * value:+.1f}" for value in over))
    Console(width=120).print(table)


def show(found: dict[str, list[dict[str, Any]]]) -> None:
    """Prints the table; a run is compared with AdamW's of the same seed, which has the same batches."""
    targets = {run["seed"]: run["final"] for run in found["adamw"]}
    table = Table(title=f"validation loss, nats per byte, of {len(SEEDS)} seeds ({machine()})")
    for column in ("rule", "lr", "final, mean", "sd", "over AdamW's", "steps to AdamW's", "sd ", "of AdamW's steps"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    for name, seeds in found.items():
        finals = [run["final"] for run in seeds]
        over = statistics.mean(run["final"] / targets[run["seed"]] - 1 for run in seeds)
        steps = [steps_to(run["curve"], targets[run["seed"]]) for run in seeds]
        mean, spread = statistics.mean(steps), statistics.stdev(steps) if all(map(math.isfinite, steps)) else math.nan
        row = (f"{statistics.mean(finals):.3f}", f"{statistics.stdev(finals):.3f}", f"{over:+.2%}")
        table.add_row(name, f"{seeds[0]['lr']:g}", *row, f"{mean:.0f}", f"{spread:.0f}", f"{mean / STEPS:.2f}")
    Console(width=120).print(table)


def plot(found: dict[str, list[dict[str, Any]]], file: Path) -> None:
    """Draws the curves of the three seeds of each rule."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=110)
    for number, (name, seeds) in enumerate(found.items()):
        for run in seeds:
            label = f"{name}, lr {run['lr']:g}" if run is seeds[0] else None
            axes.plot(*zip(*run["curve"], strict=True), color=f"C{number}", linewidth=1.0, label=label)
    axes.set(xlabel="step", ylabel="validation loss, nats per byte", xlim=(0, STEPS))
    low = min(run["final"] for seeds in found.values() for run in seeds)
    axes.set_ylim(low - 0.05, low + 1.0)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file)


def verify(file: Path) -> None:
    """Runs two drawn cells of a file again.

    Raises:
        SystemExit: If a cell is of another configuration, or its final loss differs by more than 1 %.
    """
    for old in random.sample(json.loads(file.read_text())["runs"], 2):
        if old["hash"] != digest(settings(old["rule"], old["lr"], old["seed"])):
            raise SystemExit(f"{file}: {old['rule']} lr {old['lr']} seed {old['seed']} is of another configuration")
        new = train(old["rule"], old["lr"], old["seed"])
        print(f"{old['rule']} lr {old['lr']} seed {old['seed']}: {old['final']:.4f} then, {new['final']:.4f} now")
        if not abs(new["final"] / old["final"] - 1) <= 0.01:
            raise SystemExit("differs by more than 1 %")


def main() -> None:
    """Reads the arguments and runs."""
    parser = argparse.ArgumentParser(description="Steps to AdamW's final validation loss, for every rule.")
    parser.add_argument("--json", type=Path, help="file of the runs, continued if it exists")
    parser.add_argument("--rules", default="adamw,muon,soap,adam8bit,shampoo,normuon", help="rules, adamw among them")
    parser.add_argument("--close", action="store_true", help="also the rules that should end where AdamW does")
    parser.add_argument("--most", type=int, default=0, help="end with code 3 after so many runs; 0: run all")
    parser.add_argument("--plot", type=Path, help="also draw the curves there, PNG")
    parser.add_argument("--verify", type=Path, help="run two cells of this file again and compare")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.verify:
        verify(options.verify)
        return
    if options.json is None:
        parser.error("--json FILE or --verify FILE")
    runs = Runs(options.json, options.most)
    found = results(runs, options.rules.split(","))
    show(found)
    if options.close:
        show_close(close(runs, found["adamw"][0]["lr"]))
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
