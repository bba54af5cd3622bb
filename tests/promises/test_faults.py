"""What a machine does to a run is one clear line; where training can go on, it goes on."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from pool import Pool
from unprivileged import as_modes_say
from waiting import free_port, wait_for
from wandb_file import Kept, ended, kept

from vescale import checkpoint, train
from vescale.data.__main__ import main as prepare_main
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


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder of data that nobody can write to: a text, and the tokens that were made of it."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "text.txt").write_text("to be or not to be\f" * 200)
    assert prepare_main(["prepare", f"{folder}/text.txt", "--out", f"{folder}/tokens.bin", "--workers", "1"]) == 0
    for path in (*folder.iterdir(), folder):
        path.chmod(path.stat().st_mode & ~0o222)
    yield folder
    folder.chmod(0o755)


def _where_modes_hold(argv: list[str], folder: Path) -> tuple[int, str, str]:
    def run() -> tuple[int, str, str]:
        with pytest.raises(PermissionError):
            (folder / "new").touch()
        return _run(argv)

    return as_modes_say(run)


@pytest.mark.parametrize("name", ["text.txt", "tokens.bin"])
def test_data_may_lie_where_nothing_can_be_written(pool: Any, read_only: Path, tmp_path: Path, name: str) -> None:
    argv = [*ARGV, f"data.path={read_only / name}", f"run_dir={tmp_path / 'run'}"]
    (code, _, err), other = pool(2).run(_where_modes_hold, argv, read_only)
    assert (code, err) == (0, "") and other == (0, "", "") and len(_losses(tmp_path / "run")) == 6


def test_a_folder_that_cannot_be_written_is_one_line(read_only: Path, tmp_path: Path, capsys: Any) -> None:
    code, out, err = _where_modes_hold([*ARGV, f"run_dir={read_only / 'run'}"], read_only)
    assert (code, out, err.count("\n")) == (2, "", 1) and "data is no folder that can be written" in err
    words = ["prepare", f"{read_only}/text.txt", "--out", f"{read_only}/t.bin", "--workers", "1"]
    assert as_modes_say(prepare_main, words) == 2
    err = capsys.readouterr().err
    assert err.startswith("vescale.data: ") and "Permission denied" in err and err.count("\n") == 1


def _again(argv: list[str], folder: Path) -> tuple[int, str, str]:
    """Runs the command twice; before the second time the folder, and all in it, can no longer be written."""
    assert _run(argv)[0] == 0
    dist.barrier()
    if dist.get_rank() == 0:
        for path in (*folder.rglob("*"), folder):
            path.chmod(path.stat().st_mode & ~0o222)
    dist.barrier()
    try:
        return _where_modes_hold(argv, folder)
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            for path in (folder, *folder.rglob("*")):
                path.chmod(path.stat().st_mode | 0o200)


def test_a_complete_run_says_so_and_touches_nothing(pool: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (code, out, err), other = pool(2).run(_again, [*ARGV, f"run_dir={folder}"], folder)
    assert (code, err) == (0, "") and other == (0, "", "")
    said = rf"complete: {folder}/checkpoints/step_00000006; validation loss [\d.]+ nats per token after 6 steps; .*\n"
    assert re.fullmatch(said, out), out
    (loss,) = [row["validation_loss"] for row in read_metrics(folder / "metrics.jsonl") if "validation_loss" in row]
    assert f"validation loss {loss:.4f} nats" in out


def test_a_rank_that_cannot_read_leaves_the_checkpoint_whole_that_was_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vescale.data import Samples
    from vescale.saver import Saver

    gate, write, join, read = threading.Event(), Saver._write, Saver.join, Samples.read
    monkeypatch.setattr(Saver, "_write", lambda *args: (gate.wait(60), write(*args)))
    monkeypatch.setattr(Saver, "join", lambda *args, **options: (gate.set(), join(*args, **options)))

    def broken(samples: Samples, first: int, count: int, **options: Any) -> Any:
        if first >= 24:  # of step 3
            raise OSError(5, "Input/output error", "t.bin")
        return read(samples, first, count, **options)

    monkeypatch.setattr(Samples, "read", broken)
    code, _, err = _run([*ARGV, f"run_dir={tmp_path}"])
    assert (code, err) == (1, "vescale.train: [Errno 5] Input/output error: 't.bin'\n")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]


def test_a_file_where_checkpoints_are_to_be_is_told_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    code, out, err = _run([*ARGV, f"run_dir={tmp_path}"])
    assert (code, out, err.count("\n")) == (2, "", 1) and "checkpoints is no folder that can be written" in err


def test_a_missing_shard_is_named_before_anything_starts(tmp_path: Path) -> None:
    for number in (0, 1, 3):
        np.zeros(400, np.uint16).tofile(tmp_path / f"shard_{number}.bin")
    argv = [*ARGV, f"data.path={tmp_path}/shard_*.bin", "data.dtype=uint16", f"run_dir={tmp_path / 'run'}"]
    code, out, err = _run(argv)
    assert (code, out, err.count("\n")) == (2, "", 1) and not dist.is_initialized()
    assert re.fullmatch(r"vescale.train: data: path: the shard after \S+shard_1.bin is missing: number 2 of .*\n", err)


# --- Weights & Biases, the real one


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    """Two ranks of their own: W&B leaves a process and variables behind."""
    started = Pool(2)
    yield started
    started.stop()


class Refuses(BaseHTTPRequestHandler):
    """A server that knows no key."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(401)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def _with_key(argv: list[str], home: str, address: str) -> tuple[int, str, str]:
    for name in [name for name in os.environ if name.startswith("WANDB_") or name.lower().endswith("_proxy")]:
        del os.environ[name]
    os.environ.update(HOME=home, NETRC=f"{home}/netrc", WANDB_API_KEY="0" * 40, WANDB_BASE_URL=address)
    return _run([word for word in argv if word != "tracking.mode=disabled"])


def _kept(folder: Path) -> Kept:
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    assert wait_for(lambda: ended(path))
    return kept(path)


@pytest.mark.parametrize("kind", ["unreachable server", "wrong key"])
def test_wandb_costs_a_line_and_the_run_goes_on_offline(ranks: Pool, tmp_path: Path, kind: str) -> None:
    server = HTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    address, said = f"http://127.0.0.1:{server.server_port}", r"refuses the API key \(HTTP 401\)"
    if kind == "unreachable server":
        address, said = f"http://127.0.0.1:{free_port()}", "does not answer"
    (code, out, err), other = ranks.run(_with_key, [*ARGV, f"run_dir={tmp_path / 'run'}"], str(tmp_path), address)
    server.shutdown()
    server.server_close()
    assert code == 0 and other == (0, "", "") and re.fullmatch(f"W&B is offline: {address} {said}\n", err), err
    assert f"offline in {tmp_path}/run/wandb/offline-run-" in out and len(_losses(tmp_path / "run")) == 6
    found = _kept(tmp_path / "run")  # of rank 0, alone
    assert found.exit_codes == [0] and ("*", "tokens") in found.axes
    rows = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert [row["tokens"] for row in found.rows] == [row["tokens"] for row in rows]
    assert [row.get("loss") for row in found.rows] == pytest.approx([row.get("loss") for row in rows])
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert found.config["record"]["config_sha256"] == record["config_sha256"]
    assert found.config["record"]["data"]["fingerprint"] == record["data"]["fingerprint"]
    assert found.config["model"]["hidden_size"] == 32 and found.run.run_id == (tmp_path / "run/wandb-id").read_text()
    assert found.config["plan"]["segments"] and any("Muon" in line for line in found.config["plan"]["optimizer"])


def test_a_run_that_fails_is_a_failed_one_at_wandb(ranks: Pool, tmp_path: Path) -> None:
    lost = ["optimizer=adamw", "optimizer.rest.rule.lr=1e30", "trainer.max_grad_norm=null", "tracking.mode=offline"]
    argv = [*ARGV, *lost, f"run_dir={tmp_path / 'run'}"]
    (code, _, err), other = ranks.run(_with_key, argv, str(tmp_path), "http://127.0.0.1:1")
    assert code == 1 and err.startswith("vescale.train: step 2: expected finite loss") and other == (1, "", "")
    assert _kept(tmp_path / "run").exit_codes == [1]
