"""Python's collector runs at the same steps on all ranks, and at no other time."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from vescale import train
from vescale.garbage import Garbage

ARGV = [
    *("model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=1", "data.seq_len=16"),
    *("trainer.log_every=100", "trainer.eval_every=8", "trainer.eval_sequences=2", "trainer.save_every=100"),
    *("trainer.steps=11", "trainer.gc_every=3", "trainer.device=cpu", "tracking.mode=disabled"),
]


def test_the_collector_is_held_back_and_let_go() -> None:
    was = gc.isenabled()
    with Garbage() as garbage:
        assert not gc.isenabled()
        garbage.collect()
    assert gc.isenabled() == was


def _collections(argv: list[str]) -> list[tuple[int, int]]:
    """Step and generation of each collection while steps are taken, on a rank that leaves more garbage than others."""
    import torch.distributed as dist

    from vescale.trainer import Trainer

    seen: list[tuple[int, int]] = []
    step, here = Trainer.train_step, [0]

    def wasteful(trainer: Trainer) -> Any:
        here[0] = trainer.step + 1
        for _ in range(5000 * dist.get_rank()):  # alone, they would wake the collector
            ring: list[Any] = []
            ring.append(ring)
        return step(trainer)

    def note(phase: str, facts: dict[str, int]) -> None:
        if phase == "start" and 0 < here[0] < 11:
            seen.append((here[0], facts["generation"]))

    Trainer.train_step = wasteful  # type: ignore[method-assign]
    gc.callbacks.append(note)
    try:
        assert train.main(argv) == 0
    finally:
        gc.callbacks.remove(note)
        Trainer.train_step = step  # type: ignore[method-assign]
    return seen


def test_every_rank_collects_at_the_same_steps(pool: Any, tmp_path: Path) -> None:
    for found in pool(2).run(_collections, [*ARGV, f"run_dir={tmp_path}"]):
        assert found == [(3, 1), (6, 1), (8, 2), (9, 1)]  # while nothing is stepped, what is old too
