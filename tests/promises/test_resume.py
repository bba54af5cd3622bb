"""A run that goes on is the same run: its data, its identity, its random numbers; other data are refused."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from optimizers import AdamW
from vescale import checkpoint, train
from vescale.data import TokenWriter
from vescale.saver import Saver
from vescale.tracking import read_metrics

ARGV = [
    *("model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=1", "data.seq_len=16"),
    *("trainer.log_every=1", "trainer.eval_every=100", "trainer.eval_sequences=2", "trainer.save_every=2"),
    *("trainer.steps=4", "trainer.device=cpu", "tracking.mode=disabled"),
]


def _run(argv: list[str]) -> tuple[int, str, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        return train.main(argv), out.getvalue(), err.getvalue()


def _write(folder: Path, *, first: int, tokenizer: str) -> Path:
    """A file of tokens as ``vescale.data prepare`` writes it, of which the very first is ``first``."""
    ids = np.random.default_rng(0).integers(1, 300, 5000)
    ids[0] = first
    with TokenWriter(folder / "t.bin", vocab_size=300) as writer:
        writer.add(ids)
    (folder / "t.json").write_text(json.dumps({"dtype": "uint16", "vocab_size": 300, "tokenizer": tokenizer}))
    return folder / "t.bin"


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after two of its four steps, and its data."""
    folder = tmp_path_factory.mktemp("begun")
    data = _write(folder, first=1, tokenizer="ours")
    assert _run([*ARGV, f"data.path={data}", f"run_dir={folder / 'run'}"])[0] == 0
    shutil.rmtree(folder / "run" / "checkpoints" / "step_00000004")
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"first": 2}, r"fingerprint: expected 'sha256:\w+' \(checkpoint\), got 'sha256:\w+'\. Open"),
        ({"tokenizer": "theirs"}, r"tokenizer: expected 'ours' \(checkpoint\), got 'theirs'\. Open"),
    ],
)
def test_other_data_in_the_same_place_are_refused(begun: Path, change: dict[str, Any], said: str) -> None:
    data = _write(begun, **{"first": 1, "tokenizer": "ours", **change})
    before = {path: path.read_bytes() for path in (begun / "run").rglob("*") if path.is_file()}
    code, out, err = _run([*ARGV, f"data.path={data}", f"run_dir={begun / 'run'}"])
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(f"^vescale.train: data: .*t.bin' is not what the checkpoint was trained on: {said}", err), err
    assert before == {path: path.read_bytes() for path in (begun / "run").rglob("*") if path.is_file()}


def test_a_run_keeps_its_identity_its_place_and_its_tokens(begun: Path, tmp_path: Path) -> None:
    _write(begun, first=1, tokenizer="ours")
    shutil.copytree(begun / "run", tmp_path / "run")
    identity = (tmp_path / "run" / "wandb-id").read_text()
    (tmp_path / "run" / "wandb-id").unlink()  # the checkpoint remembers it too
    whole = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    code, out, _ = _run([*ARGV, f"data.path={begun / 't.bin'}", f"run_dir={tmp_path / 'run'}"])
    assert code == 0 and f"continuing {tmp_path}/run/checkpoints/step_00000002\n" in out
    assert (tmp_path / "run" / "wandb-id").read_text() == identity
    again = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    kept = ("step", "tokens", "loss", "grad_norm", "lr/rest")
    assert [[row[key] for key in kept] for row in again] == [[row[key] for key in kept] for row in whole]
    extra = checkpoint.read_extra(tmp_path / "run" / "checkpoints" / "step_00000004")
    assert extra["tracking_id"] == identity and extra["tokens"] == 4 * 8 * 16 and "WarmupCosine" in extra["schedule"]


def _drawn(root: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Random numbers of this rank after a checkpoint: as they came, and as they come again after loading it."""
    from vescale import Optimizer, Rules, fully_shard

    model = fully_shard(nn.Sequential(nn.Linear(4, 4)))
    optimizer = Optimizer(model.named_parameters(), Rules(all=("*", AdamW())))
    torch.manual_seed(dist.get_rank())
    torch.rand(3)
    saver = Saver(root, keep=1)
    saver.save(1, tensors=checkpoint.tensors(model, optimizer) | checkpoint.random_state(), extra={})
    came = torch.rand(5)
    saver.wait()
    torch.manual_seed(99)
    checkpoint.load(root / "step_00000001", model=model, optimizer=optimizer)
    return came, torch.rand(5)


def test_random_numbers_go_on_on_every_rank(pool: Any, tmp_path: Path) -> None:
    found = pool(2).run(_drawn, tmp_path / "c")
    assert all(torch.equal(came, again) for came, again in found) and not torch.equal(found[0][0], found[1][0])
