"""What a machine does to a run is one clear line; where training can go on, it goes on."""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from vescale import checkpoint, train
from vescale.tracking import read_metrics

ARGV = [
    *("model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=1", "data.seq_len=16"),
    *("trainer.log_every=1", "trainer.eval_every=100", "trainer.eval_sequences=2", "trainer.save_every=2"),
    *("trainer.steps=6", "trainer.device=cpu", "tracking.mode=disabled"),
]
ROOM = 40_000  # bytes of a file that a nearly full disk still takes: metrics, but no shard of the 300 kB of a rank


def _run(argv: list[str]) -> tuple[int, str, str]:
    """Runs the command; returns its exit code and what it said."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        return train.main(argv), out.getvalue(), err.getvalue()


def _on_a_disk_of(room: int, argv: list[str], until: int) -> tuple[int, str, str]:
    """Runs the command while no file may grow beyond ``room`` bytes; from step ``until`` on there is room."""
    from vescale.trainer import Trainer

    old, step = resource.getrlimit(resource.RLIMIT_FSIZE), Trainer.train_step

    def stepped(trainer: Trainer) -> Any:
        if trainer.step == until:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
        return step(trainer)

    Trainer.train_step = stepped  # type: ignore[method-assign]
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, old[1]))
    try:
        return _run(argv)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        Trainer.train_step = step  # type: ignore[method-assign]


def _losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]


def test_a_full_disk_costs_checkpoints_and_no_step(pool: Any, tmp_path: Path) -> None:
    argv = [*ARGV, f"run_dir={tmp_path}"]
    (code, out, err), other = pool(2).run(_on_a_disk_of, ROOM, argv, 5)
    assert (code, err) == (0, "") and other == (0, "", "")
    lines = [line for line in out.splitlines() if line.startswith("warning: ")]
    said = r"warning: checkpoint .*step_0000000{} was not written: .*File too large; training goes on"
    assert len(lines) == 2 and all(re.fullmatch(said.format(n), line) for n, line in zip((2, 4), lines, strict=True))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000006"]
    assert len(_losses(tmp_path)) == 6


@pytest.mark.parametrize(
    ("room", "said"),
    [
        (ROOM, "vescale.train: checkpoint .*step_00000006 was not written: .*File too large"),
        (0, "vescale.train: run_dir: .* cannot be written: .*File too large"),
    ],
)
def test_a_run_that_can_keep_nothing_ends_in_one_line(pool: Any, tmp_path: Path, room: int, said: str) -> None:
    (code, _, err), other = pool(2).run(_on_a_disk_of, room, [*ARGV, f"run_dir={tmp_path}"], -1)
    assert code == 1 and re.fullmatch(said + "\n", err), err
    assert (other[0], other[2]) == (1, "")
    assert checkpoint.newest(tmp_path / "checkpoints") is None


def test_data_may_lie_where_nothing_can_be_written(tmp_path: Path) -> None:
    """For root, whom no mode stops, the folder's time says that nothing was tried."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "text.txt").write_text("to be or not to be\f" * 200)
    (folder / "text.txt").chmod(0o444)
    folder.chmod(0o555)
    before = folder.stat()
    try:
        code, _, err = _run([*ARGV, "trainer.steps=2", f"data.path={folder}/text.txt", f"run_dir={tmp_path / 'run'}"])
    finally:
        folder.chmod(0o755)
    assert (code, err) == (0, "") and folder.stat().st_mtime_ns == before.st_mtime_ns


def test_a_run_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # as a read-only mount answers root too
    code, out, err = _run([*ARGV, f"run_dir={tmp_path / 'run'}"])
    assert (code, out, err.count("\n")) == (2, "", 1) and "is no folder that can be written" in err


def test_a_missing_shard_is_named_before_anything_starts(tmp_path: Path) -> None:
    for number in (0, 1, 3):
        np.zeros(400, np.uint16).tofile(tmp_path / f"shard_{number}.bin")
    argv = [*ARGV, f"data.path={tmp_path}/shard_*.bin", "data.dtype=uint16", f"run_dir={tmp_path / 'run'}"]
    code, out, err = _run(argv)
    assert (code, out, err.count("\n")) == (2, "", 1) and not dist.is_initialized()
    assert re.fullmatch(r"vescale.train: data: path: the shard after \S+shard_1.bin is missing: number 2 of .*\n", err)
