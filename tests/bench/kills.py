"""Kills a run of two ranks at twenty random moments, and checks that it comes to the end of an uninterrupted one.

    python tests/bench/kills.py [--kills 20] [--seed 0] [--json FILE]

Checkpoints are frequent, so that many kills fall into one being written. Each time one rank dies by SIGKILL: most
within 40 steps of going on, a quarter anywhere from the start of its process, while it loads, say. Whichever step
the run had come to, it must go on from a good checkpoint, and its losses must be those of the whole run.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import arguments, publish, row

from vescale import checkpoint
from vescale.tracking import read_metrics

ROOT = Path(__file__).parents[2]
ARGV = [
    *("model.hidden_size=64", "model.intermediate_size=128", "model.num_hidden_layers=2", "data.seq_len=32"),
    *("trainer.log_every=1", "trainer.eval_every=100000", "trainer.eval_sequences=2", "trainer.save_every=3"),
    *("trainer.steps=1000", "trainer.device=cpu", "tracking.mode=disabled"),
]


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Starts the run, or goes on with it."""
    command = [sys.executable, "-m", "vescale.torchrun", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [*command, "-m", "vescale.train", *ARGV, f"run_dir={folder}"]
    return subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def losses(folder: Path) -> dict[int, float]:
    """The loss of every step so far."""
    path = folder / "metrics.jsonl"
    return {row["step"]: row["loss"] for row in read_metrics(path) if "loss" in row} if path.is_file() else {}


def newest(folder: Path) -> int:
    """The step of the newest checkpoint."""
    path = checkpoint.newest(folder / "checkpoints")
    return checkpoint.step_of(path) if path else 0


def ranks_of(run: subprocess.Popen[bytes]) -> list[int]:
    """The processes of a run that are alive."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(run.pid)], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def kill(folder: Path, moment: random.Random) -> tuple[int, int]:
    """Starts or goes on, and kills a rank at a random moment; returns the steps done and the steps lost.

    Raises:
        RuntimeError: If the run has ended by itself.
    """
    before, early, run = newest(folder), moment.random() < 0.25, start(folder)
    goal = before + moment.randint(1, 40)
    while not ranks_of(run) if early else max(losses(folder), default=0) < goal:
        if run.poll() is not None:
            raise RuntimeError(f"the run has ended by itself, with code {run.returncode}, at step {newest(folder)}")
        time.sleep(0.01)
    time.sleep(moment.uniform(0, 10 if early else 0.1))
    os.kill(moment.choice(ranks_of(run)), signal.SIGKILL)
    run.wait()
    done = max(losses(folder), default=0)
    return done, done - newest(folder)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    root, moment, lost = Path(tempfile.mkdtemp(prefix="bench_kills_")), random.Random(options.seed), []
    assert start(root / "whole").wait() == 0
    for number in range(options.kills):
        done, steps = kill(root / "killed", moment)
        print(f"kill {number + 1}: at step {done}, {steps} lost", flush=True)
        lost.append(float(steps))
    assert start(root / "killed").wait() == 0
    same = losses(root / "killed") == losses(root / "whole")
    rows = [row("steps that a kill lost, checkpoints every 3", "steps", lost)]
    publish(f"{options.kills} kills; losses {'equal bit for bit' if same else 'DIFFER'}", rows, options.json)
    shutil.rmtree(root)
    raise SystemExit(not same)


if __name__ == "__main__":
    main()
