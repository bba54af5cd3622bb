"""What the ranks read together is the same for any number of them, of one data set and of a mixture."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from vescale import train
from vescale.data import IGNORED, Mixture, Part, Samples, TextData
from vescale.feed import Feed
from vescale.tracking import read_metrics

BATCH = 12
SHARES = {1: (3, 4), 2: (2, 3), 3: (1, 4), 4: (3, 1), 6: (1, 2), 12: (1, 1)}  # ranks: micro-batches and their size


def _text(folder: Path, name: str, letter: str, count: int) -> TextData:
    (folder / f"{name}.txt").write_text("".join(chr(ord(letter) + i % 7) for i in range(count)))
    return TextData(path=str(folder / f"{name}.txt"), seq_len=8)


def _sources(folder: Path) -> list[Any]:
    parts = {
        "a": Part(weight=3, data=_text(folder, "a", "a", 900)),
        "b": Part(weight=1, data=_text(folder, "b", "n", 200)),
    }
    numbers = Samples(tokens=np.arange(301, dtype=np.uint16), seq_len=5, seed=4)
    return [numbers, Mixture(parts=parts, seed=3).open().train]


def _feed(source: Any, world: int, rank: int, monkeypatch: pytest.MonkeyPatch, *, interleaved: bool = False) -> Feed:
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    count, size = (BATCH // world, 1) if interleaved else SHARES[world]
    return Feed(source, global_batch=BATCH, micro_batches=count, micro_size=size, interleaved=interleaved)


@pytest.mark.parametrize("world", SHARES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_samples_of_a_step_are_the_same_on_any_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int, interleaved: bool
) -> None:
    for source in _sources(tmp_path):
        for step in (0, 7, 100):  # the last is in a later epoch
            whole = source.read(step * BATCH, BATCH)
            read = [_feed(source, world, r, monkeypatch, interleaved=interleaved).step(step) for r in range(world)]
            rows = [torch.cat([batch.input_ids for batch in batches]) for batches in read]
            together = torch.stack(rows, 1).flatten(0, 1) if interleaved else torch.cat(rows)
            assert torch.equal(together, whole.input_ids), (source, step)


@pytest.mark.parametrize("world", SHARES)
def test_the_labels_of_a_validation_are_the_same_on_any_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    source = Samples(tokens=np.arange(301, dtype=np.uint16), seq_len=5, seed=4)
    feeds = [_feed(source, world, rank, monkeypatch) for rank in range(world)]
    found = [list(feed.validation(source, 25)) for feed in feeds]
    assert len({len(batches) for batches in found}) == 1  # each forward is a collective
    counted = Counter(torch.cat([batch.labels.flatten() for batches in found for batch in batches]).tolist())
    del counted[IGNORED]
    assert counted == Counter(source.read(0, 25).labels.flatten().tolist())


MIX = """
_target_: vescale.data.Mixture
parts:
  a: {{_target_: vescale.data.Part, weight: 3, data: {{_target_: vescale.data.TextData, path: {0}/a.txt, seq_len: 8}}}}
  b: {{_target_: vescale.data.Part, weight: 1, data: {{_target_: vescale.data.TextData, path: {0}/b.txt, seq_len: 8}}}}
seed: 3
"""


def test_a_run_on_a_mixture_goes_on_with_it_and_refuses_other_weights(tmp_path: Path, capsys: Any) -> None:
    _sources(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mix.yaml").write_text(MIX.format(tmp_path))
    argv = [f"--config-dir={tmp_path}", "data=mix", "model.hidden_size=32", "model.intermediate_size=64"]
    argv += ["model.num_hidden_layers=1", "trainer.eval_sequences=2", "trainer.save_every=2", "trainer.log_every=1"]
    argv += ["trainer.device=cpu", "tracking.mode=disabled", "trainer.schedule.total_steps=4"]
    argv += ["trainer.schedule.warmup_steps=0"]
    assert train.main([*argv, "trainer.steps=4", f"run_dir={tmp_path / 'whole'}"]) == 0
    for steps in (2, 4):
        assert train.main([*argv, f"trainer.steps={steps}", f"run_dir={tmp_path / 'run'}"]) == 0
    whole, run = (list(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("whole", "run"))
    assert [row["loss"] for row in run if "loss" in row] == [row["loss"] for row in whole if "loss" in row]
    assert {"validation_loss", "validation_loss/a", "validation_loss/b"} <= whole[-1].keys()
    capsys.readouterr()
    other = [*argv, "trainer.steps=5", "data.parts.b.weight=2", f"run_dir={tmp_path / 'run'}"]
    assert train.main(other) == 2 and "data.parts.b.weight was 1, now 2" in capsys.readouterr().err
