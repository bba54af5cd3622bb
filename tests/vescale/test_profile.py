"""A trace holds the steps that were asked for, under the units' names; what cannot be written stops no run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vescale import train
from vescale.profile import Profile

ARGV = [
    *("model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=2", "data.seq_len=16"),
    *("trainer.log_every=100", "trainer.eval_every=100", "trainer.eval_sequences=2", "trainer.save_every=100"),
    *("trainer.steps=3", "trainer.profile=[2,2]", "trainer.device=cpu", "tracking.mode=disabled"),
]


def _run(argv: list[str]) -> str:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert train.main(argv) == 0
    return out.getvalue()


def test_every_rank_traces_the_steps_under_the_units_names(pool: Any, tmp_path: Path) -> None:
    said = pool(2).run(_run, [*ARGV, f"run_dir={tmp_path}"])
    assert f"trace up to step 2: {tmp_path / 'trace'} (https://ui.perfetto.dev)" in said[0].splitlines()
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == ["rank_0.json.gz", "rank_1.json.gz"]
    for path in (tmp_path / "trace").iterdir():
        with gzip.open(path, "rt") as file:
            names = [event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
        for unit in ("model.layers.0", "model.layers.1"):
            counts = [names.count(f"vescale.{what} {unit}") for what in ("gather", "reduce")]
            assert counts == [2, 1], (unit, counts)  # in forward and in backward; in backward


def test_what_cannot_be_written_costs_the_recording_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: None)
    said: list[str] = []
    (tmp_path / "memory").touch()  # no folder can be made there
    Profile(tmp_path, rank=0, steps=None, memory_step=1, device=torch.device("cpu"), say=said.append).end(1)
    assert len(said) == 1 and said[0].startswith("warning: memory after step 1 was not written: ")
    assert said[0].endswith("; training goes on")


def test_memory_is_written_after_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(path))
    profile = Profile(tmp_path, rank=3, steps=None, memory_step=2, device=torch.device("cpu"), say=calls.append)
    for step in (1, 2, 3):
        profile.begin(step)
        profile.end(step)
    said = f"memory after step 2: {tmp_path / 'memory'} (https://pytorch.org/memory_viz)"
    assert calls == [{}, str(tmp_path / "memory" / "rank_3.pickle"), said, {"enabled": None}]
