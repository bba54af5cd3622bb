"""What a run looks at, and what it does then: steps for the watchdog, spikes, memory that has run out, a bar."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vescale import health, train
from vescale.journal import Journal
from vescale.stop import Stopped
from vescale.tracking import read_metrics
from vescale.trainer import Trainer
from vescale.watchdog import RECORDED, Watchdog

ARGV = [
    *("model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=1", "data.seq_len=16"),
    *("trainer.log_every=1", "trainer.eval_every=100", "trainer.eval_sequences=2", "trainer.save_every=100"),
    *("trainer.steps=6", "trainer.device=cpu", "tracking.mode=disabled"),
]


def test_the_watchdog_is_told_of_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[Any] = []
    monkeypatch.setattr(Watchdog, "beat", lambda watchdog: beats.append((watchdog.timeout_s, watchdog.folder.parent)))
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    assert train.main([*ARGV, "trainer.hang_timeout_s=77", f"run_dir={tmp_path}"]) == 0
    assert beats == [(77.0, tmp_path)] * 6
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == str(RECORDED)  # the flight recorder is on


def test_a_spike_is_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gradient, step, same = Trainer._gradient, Trainer.train_step, []

    def spiking(trainer: Trainer, at: int, **options: Any) -> Any:
        loss, norm, *more = gradient(trainer, at, **options)
        return loss, norm * (100.0 if at == 4 else 1.0), *more

    def watched(trainer: Trainer) -> Any:
        before = [param.detach().clone() for param in trainer.model.parameters()]
        found = step(trainer)
        same.append(all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True)))
        return found

    monkeypatch.setattr(Trainer, "_gradient", spiking)
    monkeypatch.setattr(Trainer, "train_step", watched)
    monkeypatch.setattr(health, "ENOUGH", 3)
    assert train.main([*ARGV, "trainer.spike=20", f"run_dir={tmp_path}"]) == 0
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "loss" in row]
    assert [row["skipped"] for row in rows] == [0, 0, 0, 0, 1, 1]
    assert same == [False, False, False, False, True, False]


def test_memory_that_has_run_out_is_the_plans_table_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(Trainer, "train_step", lambda trainer: torch.empty(2**60, dtype=torch.uint8))
    assert train.main([*ARGV, f"run_dir={tmp_path}"]) == 1
    title, *rows, line = capsys.readouterr().err.splitlines()
    assert title.startswith("the plan's worst moment, ")
    table = {row[:34].strip(): row[34:].strip() for row in rows}
    assert {"parameters", "optimizer state", "together"} <= table.keys() and len(table) >= 5
    assert all(re.fullmatch(r"\d+\.\d\d GiB", size) for size in table.values())
    said = (
        r"vescale.train: out of memory \(.*can't allocate memory.*\); between steps the plan holds 0.0 GiB a rank, the "
    )
    assert re.match(said, line), line


def test_a_rank_that_is_short_alone_speaks_for_itself(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def run() -> None:
        raise Stopped("out of memory (all of it)") from MemoryError()

    monkeypatch.setenv("RANK", "1")
    assert train._train(SimpleNamespace(run=run, settings={})) == 1  # type: ignore[arg-type]
    assert capsys.readouterr().err == "vescale.train: rank 1: out of memory (all of it)\n"


class Terminal(io.StringIO):
    """Takes lines as a terminal does."""

    def isatty(self) -> bool:
        return True


def test_a_bar_shows_the_steps_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    numbers: dict[str, Any] = {"steps": 5, "flops_per_token": 1.0, "peak_flops": None, "ranks": 1, "step": 3}
    journal = Journal(SimpleNamespace(), tokens=0, **numbers)  # type: ignore[arg-type]
    for screen, drawn in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stdout", screen)
        with journal.progress(3) as advance:
            advance()
            advance()
        shown = re.sub(r"\x1b\[[0-9;?]*\w", "", screen.getvalue())  # without colours and movements
        assert bool(re.search(r"training \S+ 5/5 0:00:00", shown)) == drawn, shown
