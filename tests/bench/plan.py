"""How long a plan takes: every shipped recipe at every size, and the simulation of one rank of a thousand.

    python tests/bench/plan.py                          all recipes at 8, 64, 1024 ranks, above 1 B parameters 10,240
    python tests/bench/plan.py llama70b_soap            some of them
    python tests/bench/plan.py llama70b_muon --simulate one rank of 1024, at full depth

Seconds of this process on one core, imports left out.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(sys.path.pop(0))  # last: tests/bench/optimizers.py is not the package

import recipes
from vescale.plan import figures
from vescale.train import points

RECIPES = sorted(path.stem for path in (Path(recipes.__file__).parent / "recipe").glob("*.yaml"))
SIZES = (8, 64, 1024, 10_240)


def plan(*argv: str) -> tuple[dict[str, Any], float]:
    """Returns the figures and the CPU seconds they took."""
    config = points(list(argv), command="plan")[0].config
    before = time.process_time()
    return figures(config), time.process_time() - before


def main() -> None:
    """Prints one line for each recipe and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", default=RECIPES, help="all when left out")
    parser.add_argument("--simulate", action="store_true", help="run rank 777 of 1024 too, and compare")
    asked = parser.parse_args()
    plan("recipe=llama_debug_adamw", "world_size=2")  # imports
    if asked.simulate:
        for recipe in asked.recipes:
            begun = time.perf_counter()
            known, seconds = plan(f"recipe={recipe}", "world_size=1024", "simulate=true", "rank=777")
            found = known["simulation"]
            agree = all(found[what]["agrees"] for what in ("parameters", "optimizer_state", "collectives", "peak"))
            wall, word = time.perf_counter() - begun, "agrees" if agree else "DIFFERS"
            print(f"{recipe:24s} simulated at 1,024  {seconds:6.1f} s CPU  {wall:6.1f} s  {word}", flush=True)
        return
    for recipe in asked.recipes:
        for size in SIZES:
            known, seconds = plan(f"recipe={recipe}", f"world_size={size}")
            if size == SIZES[-1] and known["model"]["parameters"] < 1e9:
                continue
            peak = known["memory"]["stages"]["3"]["peak"] / 1e9
            step = known["communication"]["step_seconds"]
            print(
                f"{recipe:24s} {size:6,} ranks  {seconds:6.2f} s  ZeRO 3 {peak:8.2f} GB  step {step:8.3f} s", flush=True
            )


if __name__ == "__main__":
    main()
