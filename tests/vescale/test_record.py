"""A record can be verified without a process group, and two of them say how their runs differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from optimizers import AdamW
from vescale import checkpoint, record
from vescale.saver import Saver


def _save(root: Path) -> None:
    from vescale import Optimizer, Rules, fully_shard

    torch.manual_seed(1)
    model = fully_shard(nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 3)))
    optimizer = Optimizer(model.named_parameters(), Rules(all=("*", AdamW())))
    settings = {"trainer": {"seed": 7}, "parallelism": {"zero": 3}, "name": "x"}
    facts = record.facts(settings, data={"seed": 1, "fingerprint": "f"}, world=2, device=torch.device("cpu"))
    saver = Saver(root, keep=1)
    tensors = checkpoint.tensors(model, optimizer) | checkpoint.random_state()
    saver.save(1, tensors=tensors, extra={}, record={**facts, "step": 1})
    saver.wait()
    dist.barrier()


@pytest.fixture
def run(pool: Any, tmp_path: Path) -> Path:
    pool(2).run(_save, tmp_path / "run" / "checkpoints")
    return tmp_path / "run"


def test_a_checkpoint_is_verified_tensor_by_tensor(run: Path, capsys: Any) -> None:
    assert record.main(["verify", str(run)]) == 0
    assert "step_00000001: all checksums agree\n  nothing differs" in capsys.readouterr().out
    path = run / "checkpoints" / "step_00000001"
    facts = record.read(path)
    assert facts["seeds"] == {"weights": 7, "data": 1} and facts["mesh"] == {"ranks": 2, "zero": 3}
    assert facts["versions"]["torch"] == torch.__version__ and len(facts["config_sha256"]) == 64
    facts["tensors"]["model.1.bias"] = "0" * 16
    (path / "record.json").write_text(json.dumps(facts))
    assert record.main(["verify", str(run)]) == 2  # it is no longer what was sealed
    assert "is corrupt: record.json" in capsys.readouterr().err
    seal = json.loads((path / "seal.json").read_text())
    seal["files"]["record.json"] = checkpoint.fingerprint(path / "record.json")
    (path / "seal.json").write_text(json.dumps(seal))
    assert record.main(["verify", str(path)]) == 1
    assert "tensors.model.1.bias: is " in capsys.readouterr().out


def test_two_runs_are_explained(tmp_path: Path, capsys: Any) -> None:
    base = {"weights": "1", "optimizer": "2", "config_sha256": "c", "data": {"fingerprint": "f"}, "git": {}, "step": 5}
    changes = {
        "same": ({}, "bit for bit the same"),
        "later": ({"weights": "9", "step": 6}, "at different steps: 5 and 6"),
        "data": ({"weights": "9", "data": {"fingerprint": "g"}}, "other weights, from another data"),
        "odd": ({"weights": "9"}, "the same configuration, data and code, yet other weights"),
    }
    for name, (change, verdict) in changes.items():
        for side, facts in (("a", base), ("b", base | change)):
            (tmp_path / side).mkdir(exist_ok=True)
            (tmp_path / side / "record.json").write_text(json.dumps(facts))
        assert record.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == (name != "same")
        assert verdict in capsys.readouterr().out
    assert record.explain(base, base | {"data": {"fingerprint": "g"}})[1:] == ["data.fingerprint: A f, B g"]


def test_what_cannot_be_read_is_one_line(tmp_path: Path, capsys: Any) -> None:
    for words, said in ((["verify", str(tmp_path)], "is no checkpoint"), (["compare"], "expected: verify DIR")):
        assert record.main(words) == 2
        line = capsys.readouterr().err
        assert said in line and line.count("\n") == 1
