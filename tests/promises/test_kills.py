"""A run may be killed at any moment: it loses at most the steps since its last checkpoint, and goes on bit for bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pool import Pool
from waiting import wait_for

from vescale import checkpoint, collectives, train
from vescale.tracking import read_metrics

ARGV = [
    *("model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=1", "data.seq_len=16"),
    *("trainer.log_every=1", "trainer.eval_every=100", "trainer.eval_sequences=2", "trainer.save_every=4"),
    *("trainer.steps=12", "trainer.keep=1", "trainer.device=cpu", "tracking.mode=disabled"),
]
# Where, on which rank, and the checkpoint that a run goes on from: saves are at steps 4, 8 and 12.
POINTS = {
    "in a shard": (1, 4),
    "before the part that says it wrote": (0, 4),
    "before the end mark": (0, 4),
    "before the rename": (0, 4),
    "between the renames of an old one": (0, 8),
    "inside a collective": (1, 4),
}


def _die(*args: Any, **options: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _before(owner: Any, name: str, dies: Any) -> None:
    """The process dies in the call of ``owner.name`` for whose arguments ``dies`` is true."""
    real = getattr(owner, name)
    setattr(owner, name, lambda *args, **options: _die() if dies(*args) else real(*args, **options))


def _killed(point: str, argv: list[str]) -> None:
    """Trains, and dies while the checkpoint of step 8 is written."""
    if dist.get_rank() == POINTS[point][0]:
        if point == "in a shard":
            _before(dcp.FileSystemWriter, "write_data", lambda writer, *_: "08" in _torn(writer.path))
        elif point == "before the part that says it wrote":
            _before(checkpoint, "fingerprint", lambda path: "_00000008" in str(path))
        elif point == "before the end mark":
            _before(checkpoint, "write_json", lambda path, _: path.name == "seal.json" and "_00000008" in str(path))
        elif point == "before the rename":
            _before(Path, "rename", lambda path, target: target.name == "step_00000008")
        elif point == "between the renames of an old one":
            _before(checkpoint.shutil, "rmtree", lambda path: "step_00000004" in str(path))
        else:
            calls: list[int] = []
            _before(collectives, "reduce_scatter", lambda *_: calls.append(1) or len(calls) == 14 and _saved(argv))
    train.main(argv)


def _saved(argv: list[str]) -> bool:
    """Waits for the checkpoint of step 4, which a thread writes while the next steps are made."""
    return wait_for(lambda: checkpoint.whole(Path(argv[-1].removeprefix("run_dir=")) / "checkpoints"))


def _torn(folder: Any) -> str:
    """Leaves half a shard."""
    (Path(folder) / "__1_0.distcp").write_bytes(b"half")
    return Path(folder).name


def _run(argv: list[str]) -> None:
    assert train.main(argv) == 0


def _rows(folder: Path) -> list[dict[str, Any]]:
    kept = ("step", "tokens", "loss", "grad_norm", "validation_loss")
    return [{key: row[key] for key in kept if key in row} for row in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def whole(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("whole")
    pool(2).run(_run, [*ARGV, f"run_dir={folder}"])
    return _rows(folder)


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_loses_at_most_the_steps_since_the_last_checkpoint(
    pool: Any, tmp_path: Path, whole: list[dict[str, Any]], point: str
) -> None:
    argv = [*ARGV, f"run_dir={tmp_path}"]
    with pytest.raises(AssertionError, match="the process died|ended|closed"):
        Pool(2).run(_killed, point, argv)
    newest = checkpoint.newest(tmp_path / "checkpoints")
    assert newest is not None and checkpoint.step_of(newest) == POINTS[point][1]
    checkpoint.verify(newest)
    pool(2).run(_run, argv)
    assert _rows(tmp_path) == whole
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000012"]
