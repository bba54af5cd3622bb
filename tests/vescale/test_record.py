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
from vescale import checkpoint, record, report, train
from vescale.saver import Saver

ARGV = [
    *("model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=1", "data.seq_len=16"),
    *("trainer.log_every=1", "trainer.eval_every=100", "trainer.eval_sequences=2", "trainer.save_every=1"),
    *("trainer.steps=2", "trainer.device=cpu", "tracking.mode=disabled"),
]


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
    (path / "seal.json").write_text(json.dumps(checkpoint.seal_of(seal["extra"], seal["files"])))
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
    assert record.explain(base, base | {"data": {"fingerprint": "g"}}).lines == {"data": ["data.fingerprint: A f, B g"]}


def test_what_explains_comes_first_and_what_was_measured_is_rounded() -> None:
    one: dict[str, Any] = {
        "weights": "1", "data": {"files": 1}, "config": {"trainer": {"steps": 5, "lr": 0.1234567}, "name": "a"},
        "git": {"commit": "c"}, "machine": {"cores": 2}, "metrics": {"loss": 2.31840123, "tflops": 123456.789, "x": 1},
    }  # fmt: skip
    other: dict[str, Any] = {
        "weights": "2", "data": {"files": 2}, "config": {"trainer": {"steps": 6, "lr": 0.1234568}, "name": "b"},
        "git": {"commit": "d"}, "machine": {"cores": 4}, "metrics": {"loss": 2.31840456, "tflops": 9.87654321, "x": 2},
        "odd": 1,
    }  # fmt: skip
    lines = record.explain(one, other).lines
    assert [*lines] == ["weights", "data", "configuration", "code", "machine", "measured", record.WATCHED, "other"]
    assert lines["configuration"] == [
        "config.trainer.lr: A 0.1234567, B 0.1234568",
        "config.trainer.steps: A 5, B 6",
    ]  # what was asked for is exact
    assert lines["measured"] == [
        "metrics.loss: A 2.318401, B 2.318405",  # to the digit at which they differ
        "metrics.tflops: A 123,500, B 9.877",
        "metrics.x: A 1, B 2",
    ]
    assert lines[record.WATCHED] == ["config.name: A a, B b"]


def test_every_difference_is_printed_below_its_heading(tmp_path: Path, capsys: Any) -> None:
    for side in (1, 2):
        facts = {"config": {f"key{i}": i * side for i in range(1, 31)}, "step": 1}
        (tmp_path / f"{side}.json").write_text(json.dumps(facts))
    assert record.main(["compare", str(tmp_path / "1.json"), str(tmp_path / "2.json")]) == 1
    _, heading, *lines = capsys.readouterr().out.splitlines()
    assert heading == "configuration" and len(lines) == 30 and all(line.startswith("  config.key") for line in lines)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: a and b are the same command in two folders, c has another seed."""
    folder = tmp_path_factory.mktemp("runs")
    for name, more in (("a", []), ("b", []), ("c", ["trainer.seed=9"])):
        assert train.main([*ARGV, *more, f"run_dir={folder / name}"]) == 0
    return folder


def _compared(one: Path, other: Path, capsys: Any) -> tuple[str, dict[str, str]]:
    """The verdict of the command, and what it says of each key."""
    capsys.readouterr()
    assert record.main(["compare", str(one), str(other)]) == 1
    verdict, *lines = capsys.readouterr().out.splitlines()
    return verdict, dict(line.strip().split(": ", 1) for line in lines if ": " in line)


def test_real_runs_are_explained(runs: Path, capsys: Any) -> None:
    verdict, keys = _compared(runs / "a", runs / "b", capsys)
    assert verdict == "the weights and the optimizer's state are bit for bit the same"
    assert keys["config.run_dir"] == f"A {runs / 'a'}, B {runs / 'b'}"
    measured = {f"metrics.{name}" for name in ("step_seconds", "tokens_per_second", "tflops_per_device", "memory_gib")}
    assert {*keys} <= {"config.run_dir", "config.name", "config.tracking.name", "metrics.data_wait", *measured}
    verdict, keys = _compared(runs / "a", runs / "c", capsys)
    assert verdict == "other weights, from another configuration"  # not from the name, which differs for a and b too
    assert keys["config.trainer.seed"] == "A 0, B 9" and "weights" in keys and "metrics.loss" in keys
    steps = [runs / "a" / "checkpoints" / f"step_0000000{step}" for step in (1, 2)]
    verdict, keys = _compared(*steps, capsys)
    assert verdict == "they are at different steps: 1 and 2" and keys["step"] == "A 1, B 2"


def test_the_record_of_a_run_has_all_that_was_promised(runs: Path, capsys: Any) -> None:
    facts = record.read(runs / "c")
    assert facts == record.read(runs / "c" / "checkpoints" / "step_00000002")
    assert record.main(["verify", str(runs / "c")]) == 0 and "nothing differs" in capsys.readouterr().out
    sums = {"weights", "optimizer", "tensors"}
    wanted = {"config", "config_sha256", "data", "seeds", "git", "versions", "mesh", "machine", "metrics"}
    assert facts.keys() == {*sums, *wanted, "step", "tokens"}
    assert (facts["step"], facts["seeds"]) == (2, {"weights": 9, "data": 0}) and 240 < facts["tokens"] <= 2 * 8 * 16
    assert facts["data"]["fingerprint"].startswith("sha256:") and facts["data"]["tokenizer"] == "bytes-320"
    assert facts["config"]["trainer"]["seed"] == 9 and facts["mesh"]["ranks"] == 1
    assert {"loss", "grad_norm", "validation_loss"} <= facts["metrics"].keys() and facts["machine"]["cores"]
    assert {name.partition(".")[0] for name in facts["tensors"]} == {"model", "optimizer"}


def test_a_report_overlays_real_runs(runs: Path, capsys: Any) -> None:
    assert report.main([str(runs / "a"), str(runs / "c"), "--out", str(runs / "r.html")]) == 0
    page = (runs / "r.html").read_text()
    for title in ("training loss", "validation loss", "gradient norm", "lr/matrices", "lr/rest", "tokens per second"):
        chart = page.split(f">{title}</text>")[1].split("</svg>")[0]
        assert chart.count("<polyline") == 2, title
    assert page.count('<svg class="plan"') > 2 and record.read(runs / "c")["weights"] in page


def test_what_cannot_be_read_is_one_line(tmp_path: Path, capsys: Any) -> None:
    for words, said in ((["verify", str(tmp_path)], "is no checkpoint"), (["compare"], "expected: verify DIR")):
        assert record.main(words) == 2
        line = capsys.readouterr().err
        assert said in line and line.count("\n") == 1
