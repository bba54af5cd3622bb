"""Promises of vescale/tracking.py: the file is always whole, and W&B neither stops nor delays a run."""

from __future__ import annotations

import base64
import json
import logging
import math
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from wandb_file import kept

import vescale.tracking
from vescale.tracking import Tracking, read_metrics

FILE_ONLY = Tracking(mode="disabled")
KEY = "0" * 40
PROBE = b'{"query": "query { viewer { id } }"}'
SOMEBODY = b'{"data": {"viewer": {"id": "me"}}}'


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable, settings file or netrc of whoever runs the suite is seen; wandb cannot be imported."""
    for name in [name for name in os.environ if name.startswith("WANDB_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setitem(sys.modules, "wandb", None)


class Wandb:
    """A wandb that remembers what it was told; ``fails`` names the calls that raise."""

    def __init__(self, *fails: str) -> None:
        self.fails = fails
        self.told: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def Settings(self, **options: Any) -> SimpleNamespace:
        self.tell("Settings")
        return SimpleNamespace(**{**dict.fromkeys(vescale.tracking.QUIET), **options})

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **options: self.tell(name, *args, **options)

    def tell(self, name: str, /, *args: Any, **options: Any) -> Any:
        self.told.append((name, args, options))
        if {name, f"{name} {options.get('mode')}"} & {*self.fails}:
            raise RuntimeError("wandb is\nbroken")
        return SimpleNamespace(dir="/run/files", url="https://there", **{call: getattr(self, call) for call in CALLS})

    def calls(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, options) for told, args, options in self.told if told == name]


CALLS = ("log", "finish", "define_metric")


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Wandb]:
    def install(*fails: str) -> Wandb:
        fake = Wandb(*fails)
        monkeypatch.setitem(sys.modules, "wandb", fake)
        return fake

    return install


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Starts a server that answers everything with a status and some bytes, and returns its address.

    With ``probe_only`` it does so when asked who the key's owner is, and knows nothing else.
    """
    servers: list[HTTPServer] = []

    def start(status: int, said: bytes = b"", *, probe_only: bool = False) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(404 if probe_only and asked != PROBE else status)
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, *args: object) -> None:
                pass

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train(folder: Path, steps: range, *, tracking: Tracking = FILE_ONLY) -> None:
    with tracking.open(folder, first_step=steps.start) as tracker:
        for step in steps:
            tracker.log({"loss": 1 / (step + 1)}, step=step, tokens=step * 100)
            if step % 3 == 0:
                tracker.log({"val_loss": step}, step=step, tokens=step * 100)


# ---- the file


def test_rows_that_a_full_disk_does_not_take_wait_for_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    tracker = FILE_ONLY.open(tmp_path)
    try:
        tracker.log({"loss": 0.5}, step=0, tokens=0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (tracker.path.stat().st_size + 10, old[1]))  # half a row
        for step in (1, 2):
            tracker.log({"loss": 0.5}, step=step, tokens=step)
        assert [row["step"] for row in read_metrics(tracker.path)] == [0]
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        tracker.log({"loss": 0.5}, step=3, tokens=3)
        assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3]
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, old[1]))
        tracker.log({"loss": 0.5}, step=4, tokens=4)
        tracker.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    once = f"{tracker.path} takes no row (OSError: [Errno 27] File too large): rows wait in memory, training goes on"
    assert [record.message for record in caplog.records] == [once, once, f"{tracker.path} lacks its last 1 rows"]


def test_every_row_is_in_the_file_before_log_returns(tmp_path: Path) -> None:
    tracker = FILE_ONLY.open(tmp_path)
    for step in range(3):
        tracker.log({"loss": 2.5}, step=step, tokens=8 * step)
        assert rows(tmp_path)[-1] == {"step": step, "tokens": 8 * step, "loss": 2.5}
    tracker.finish()


@pytest.mark.parametrize("tail", [b"", b'{"step": 7, "lo', b'{"step": 7, "loss": 1.0}', b"\0\0\0\0", b'{"step": 4'])
@pytest.mark.parametrize("at", [0, 4, 7])
def test_a_resumed_file_equals_an_uninterrupted_one(tmp_path: Path, tail: bytes, at: int) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(whole, range(10))
    train(cut, range(7))
    with (cut / "metrics.jsonl").open("ab") as file:
        file.write(tail)
    train(cut, range(at, 10))
    assert (cut / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert {path.name for path in cut.iterdir()} == {"metrics.jsonl", "wandb-id"}


def test_a_whole_last_row_that_only_lacks_its_line_end_is_kept(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "tokens": 1}')
    FILE_ONLY.open(tmp_path, first_step=1).finish()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "tokens": 1}\n'


def test_a_file_that_needs_no_repair_is_not_touched(tmp_path: Path) -> None:
    train(tmp_path, range(5))
    before = (tmp_path / "metrics.jsonl").stat()
    FILE_ONLY.open(tmp_path, first_step=5).finish()
    after = (tmp_path / "metrics.jsonl").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_numbers_come_back_as_they_were_and_the_file_stays_json(tmp_path: Path) -> None:
    metrics = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1, "e": True, "f": "word", "g": None, "h": 2**60}
    with FILE_ONLY.open(tmp_path) as tracker:
        tracker.log(metrics, step=1, tokens=2)
        tracker.log({"i": torch.tensor(0.5), "j": np.float32(0.25), "k": np.int64(3)}, step=2, tokens=3)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert repr(first) == repr({"step": 1, "tokens": 2, **metrics})
    assert second == {"step": 2, "tokens": 3, "i": 0.5, "j": 0.25, "k": 3}


def test_a_reader_leaves_out_a_line_cut_short(tmp_path: Path) -> None:
    strange = ["[" * 100_000, '{"step": 3}', '{"step": true, "tokens": 2}', "null"]
    (tmp_path / "metrics.jsonl").write_text("\n".join(['{"step": 0, "tokens": 1}', *strange, '{"step": 1, "to']))
    assert [*read_metrics(tmp_path / "metrics.jsonl")] == [{"step": 0, "tokens": 1}]


def test_what_is_no_metric_is_refused_by_name_and_writes_nothing(tmp_path: Path) -> None:
    with FILE_ONLY.open(tmp_path) as tracker:
        with pytest.raises(TypeError, match="grads: expected a number, got list"):
            tracker.log({"grads": [1.0]}, step=0, tokens=0)
        with pytest.raises(TypeError, match="loss: expected a number, got Tensor"):
            tracker.log({"loss": torch.zeros(2)}, step=0, tokens=0)
        with pytest.raises(ValueError, match="without step, tokens"):
            tracker.log({"tokens": 1, "step": 2}, step=0, tokens=0)
    assert rows(tmp_path) == []


def test_options_out_of_range_are_refused_together() -> None:
    with pytest.raises(ValueError, match=r"mode: expected one of auto, .* got 'loud'; timeout_s: .* got 0"):
        Tracking(mode="loud", timeout_s=0)  # type: ignore[arg-type]


# ---- which way W&B is used


def mode_of(fake: Wandb) -> list[str]:
    return [options["mode"] for _, options in fake.calls("init")]


@pytest.mark.parametrize(("mode", "variable"), [("disabled", None), ("auto", "disabled")])
def test_disabled_does_not_import_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: Any, variable: str | None
) -> None:
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    train(tmp_path, range(2), tracking=Tracking(mode=mode))
    assert len(rows(tmp_path)) == 3
    assert not caplog.records


def test_without_a_key_a_run_is_offline_and_says_so_only_when_online_was_asked_for(
    tmp_path: Path, wandb: Callable[..., Wandb], caplog: pytest.LogCaptureFixture
) -> None:
    fake = wandb()
    Tracking().open(tmp_path).finish()
    assert mode_of(fake) == ["offline"]
    assert not caplog.records
    Tracking(mode="online").open(tmp_path).finish()
    assert mode_of(fake) == ["offline", "offline"]
    assert [record.message for record in caplog.records] == ["W&B is offline: no API key"]


@pytest.mark.parametrize(("status", "mode"), [(200, "online"), (429, "online"), (401, "offline"), (503, "offline")])
@pytest.mark.parametrize("where", ["environment", "files"])
def test_with_a_key_the_servers_answer_decides(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wandb: Callable[..., Wandb],
    serve: Callable[[int], str],
    status: int,
    mode: str,
    where: str,
) -> None:
    address, fake = serve(status, SOMEBODY), wandb()
    if where == "environment":
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
    else:
        settings = tmp_path / "home" / ".config" / "wandb" / "settings"
        settings.parent.mkdir(parents=True)
        settings.write_text(f"[default]\nbase_url = {address}\n")
        (tmp_path / "netrc").write_text(f"machine {address.removeprefix('http://')} login user password {KEY}\n")
    tracker = Tracking(timeout_s=60).open(tmp_path)
    tracker.finish()
    assert mode_of(fake) == [mode]
    assert tracker.where.startswith("https://there" if mode == "online" else "offline in /run (wandb sync")


@pytest.mark.parametrize(
    ("status", "said", "problem"),
    [
        (401, b"", "refuses the API key (HTTP 401)"),
        (403, b"", "refuses the API key (HTTP 403)"),
        (200, b'{"data": {"viewer": null}}', "refuses the API key"),
        (500, b"", "does not answer (HTTP 500)"),
        (404, b"", "is no W&B server (HTTP 404)"),
        (200, b"<html>Please log in</html>", "is no W&B server"),
    ],
)
def test_a_wrong_key_is_one_line_and_wandb_is_not_asked_to_go_online(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wandb: Callable[..., Wandb],
    serve: Callable[..., str],
    caplog: pytest.LogCaptureFixture,
    status: int,
    said: bytes,
    problem: str,
) -> None:
    address = serve(status, said)
    monkeypatch.setenv("WANDB_BASE_URL", address)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    fake = wandb()
    Tracking(timeout_s=60).open(tmp_path).finish()
    assert mode_of(fake) == ["offline"]
    assert [record.message for record in caplog.records] == [f"W&B is offline: {address} {problem}"]


def test_the_key_goes_to_its_own_server_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        vescale.tracking.urllib.request.OpenerDirector, "open", lambda self, question, timeout: asked.append(question)
    )
    answer = vescale.tracking._Answer("https://there/", KEY)
    assert answer.problem(time.monotonic() + 60) == "https://there/ does not answer"  # nothing came back
    (question,) = asked
    word = base64.b64decode(question.unredirected_hdrs["Authorization"].removeprefix("Basic ")).decode()
    assert (question.full_url, word) == ("https://there/graphql", f"api:{KEY}")
    assert question.data == PROBE and "Authorization" not in question.headers


def test_a_refused_connection_means_offline_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wandb: Callable[..., Wandb],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("WANDB_BASE_URL", address)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    fake, start = wandb(), time.monotonic()
    Tracking(timeout_s=60).open(tmp_path).finish()
    assert time.monotonic() - start < 30  # seconds of the 60 that it may wait
    assert mode_of(fake) == ["offline"]
    assert [record.message for record in caplog.records] == [f"W&B is offline: {address} does not answer"]


def test_offline_asks_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb: Callable[..., Wandb], silent: str
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", silent)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    fake, start = wandb(), time.monotonic()
    Tracking(mode="offline", timeout_s=60).open(tmp_path).finish()
    assert time.monotonic() - start < 30  # seconds of the 60 that it may wait
    assert mode_of(fake) == ["offline"]


def test_the_runs_fields_win_over_the_environment_which_wins_over_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb: Callable[..., Wandb]
) -> None:
    for name in ("PROJECT", "NAME", "RUN_ID", "CONSOLE"):
        monkeypatch.setenv(f"WANDB_{name}", "wrap" if name == "CONSOLE" else f"my-{name.lower()}")
    fake = wandb()
    tracking = Tracking(entity="us", group="sweep", job_type="train", name="mine", tags=("a", "b"), notes="why")
    tracker = tracking.open(tmp_path, config={"lr": 1})
    tracker.finish()
    ((_, options),) = fake.calls("init")
    shown = {"entity": "us", "group": "sweep", "job_type": "train", "name": "mine", "tags": ["a", "b"], "notes": "why"}
    assert options.items() >= {**shown, "project": "my-project", "id": "my-run_id", "config": {"lr": 1}}.items()
    assert options["dir"] == str(tmp_path) and options["resume"] == "allow"
    assert tracker.id == "my-run_id"
    assert options["settings"].silent is True and options["settings"].console is None


def test_a_run_keeps_its_identity_over_a_restart(tmp_path: Path) -> None:
    first = FILE_ONLY.open(tmp_path / "a")
    again = FILE_ONLY.open(tmp_path / "a", first_step=3)
    moved = FILE_ONLY.open(tmp_path / "b", first_step=3, id=first.id)
    other = FILE_ONLY.open(tmp_path / "c")
    chosen = Tracking(mode="disabled", id="mine").open(tmp_path / "a", id=first.id)
    for tracker in (first, again, moved, other, chosen):
        tracker.finish()
    assert first.id == again.id == moved.id != other.id
    assert chosen.id == "mine"
    for damage in (b"", b"\0\0\0\0", b"\xff\xfe", b"two\nlines"):
        (tmp_path / "a" / "wandb-id").write_bytes(damage)
        mended = FILE_ONLY.open(tmp_path / "a", first_step=3, id=first.id)
        mended.finish()
        assert mended.id == first.id and (tmp_path / "a" / "wandb-id").read_text() == first.id


def test_a_row_is_one_call_against_tokens_with_no_step_of_wandbs(tmp_path: Path, wandb: Callable[..., Wandb]) -> None:
    fake = wandb()
    with Tracking().open(tmp_path) as tracker:
        tracker.log({"loss": 1.0, "lr": 0.1}, step=5, tokens=50)
    assert fake.calls("log") == [(({"step": 5, "tokens": 50, "loss": 1.0, "lr": 0.1},), {})]
    assert fake.calls("define_metric") == [(("tokens",), {}), (("*",), {"step_metric": "tokens"})]
    assert fake.calls("finish") == [((), {"exit_code": 0})]


def test_a_failed_run_is_finished_as_failed(tmp_path: Path, wandb: Callable[..., Wandb]) -> None:
    fake = wandb()
    with pytest.raises(KeyError), Tracking().open(tmp_path):
        raise KeyError
    assert fake.calls("finish") == [((), {"exit_code": 1})]


# ---- a broken W&B


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ("init", "W&B could not start offline (RuntimeError: wandb is broken)"),
        ("Settings", "W&B could not start offline (RuntimeError: wandb is broken)"),
        ("define_metric", "W&B could not start offline (RuntimeError: wandb is broken)"),
        ("log", "W&B log failed (RuntimeError: wandb is broken)"),
        ("finish", "W&B finish failed (RuntimeError: wandb is broken)"),
    ],
)
def test_whatever_wandb_raises_is_one_warning_and_the_file_goes_on(
    tmp_path: Path,
    wandb: Callable[..., Wandb],
    caplog: pytest.LogCaptureFixture,
    fails: str,
    said: str,
) -> None:
    wandb(fails)
    train(tmp_path, range(4), tracking=Tracking())
    assert len(rows(tmp_path)) == 6
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.records[0].message.startswith(said) and "\n" not in caplog.records[0].message


def test_a_wandb_that_cannot_be_imported_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, range(4), tracking=Tracking())
    assert len(rows(tmp_path)) == 6
    assert [record.message.split(" (")[0] for record in caplog.records] == ["W&B cannot be imported"]


def test_a_run_that_cannot_start_online_starts_offline(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wandb: Callable[..., Wandb],
    serve: Callable[[int], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", serve(200, SOMEBODY))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    fake = wandb("init online")
    train(tmp_path, range(1), tracking=Tracking(timeout_s=60))
    assert mode_of(fake) == ["online", "offline"]
    assert len(fake.calls("log")) == 2
    assert [record.message for record in caplog.records] == [
        "W&B could not start online (RuntimeError: wandb is broken)"
    ]


# ---- the real wandb, in processes of its own


def run_script(script: str, folder: Path, **variables: str) -> Any:
    """Returns what ``script`` prints as JSON on its last line; it may use Tracking, FOLDER, time and json."""
    front = "import json, sys, time\nfrom vescale.tracking import Tracking\nFOLDER = sys.argv[1]\n"
    folder.mkdir(exist_ok=True)
    source = str(Path(vescale.tracking.__file__).parents[1])
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": source, "COLUMNS": "80", **variables}
    command = [sys.executable, "-W", "error", "-c", front + script, str(folder)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_with_a_key_and_a_silent_server_a_run_starts_offline_within_three_seconds_and_is_all_there(
    tmp_path: Path, silent: str
) -> None:
    script = """
def stretch():  # how much longer things take than on a machine that does nothing else
    start, cpu = time.monotonic(), time.process_time()
    while time.process_time() - cpu < 0.2:
        pass
    return (time.monotonic() - start) / 0.2

before, start = stretch(), time.monotonic()
tracker = Tracking(project="ours", group="g", tags=("t",)).open(FOLDER, config={"model": {"dim": 64}})
took = time.monotonic() - start
slower = max(1.0, before, stretch())
for step in range(40):
    tracker.log({"loss": 1 / (step + 1), "long": "x" * 2000}, step=step, tokens=step * 100)
tracker.finish(exit_code=3)
print(json.dumps([took / slower, slower, time.time(), tracker.id, tracker.where]))
"""
    for attempt in range(3):  # other processes of the suite compete for the machine: the best of three
        folder = tmp_path / str(attempt)
        took, slower, ended, identity, where = run_script(script, folder, WANDB_API_KEY=KEY, WANDB_BASE_URL=silent)
        held = (time.time() - ended) / slower  # nor may it hold the process when it ends
        if took < 3.0 and held < 3.0:
            break
    assert took < 3.0 and held < 3.0, (took, held, slower)
    assert where.startswith("offline in ")

    (path,) = folder.glob(f"wandb/offline-run-*-{identity}/run-{identity}.wandb")
    found = kept(path)
    logged = [{**row, "loss": pytest.approx(row["loss"])} for row in rows(folder)]
    assert found.rows == logged and len(logged) == 40
    run = found.run
    assert (run.project, run.run_group, [*run.tags], run.run_id) == ("ours", "g", ["t"], identity)
    assert found.config["model"] == {"dim": 64} and ("*", "tokens") in found.axes and found.exit_codes == [3]


def test_a_server_that_knows_the_key_and_no_run_costs_a_line_and_the_run_is_offline(tmp_path: Path, serve: Any) -> None:
    address = serve(200, SOMEBODY, probe_only=True)
    script = """
import logging
said = []
handler = logging.Handler()
handler.emit = said.append
logging.getLogger("vescale.tracking").addHandler(handler)
with Tracking(timeout_s=60).open(FOLDER) as tracker:
    tracker.log({"loss": 0.5}, step=1, tokens=2)
print(json.dumps([tracker.id, tracker.where, [record.getMessage() for record in said]]))
"""
    identity, where, said = run_script(script, tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL=address)
    assert len(said) == 1 and said[0].startswith("W&B could not start online (")
    (path,) = tmp_path.glob(f"wandb/offline-run-*-{identity}/run-{identity}.wandb")
    assert where.startswith("offline in ") and kept(path).rows == [{"step": 1, "tokens": 2, "loss": 0.5}]


def test_without_a_key_a_resumed_run_goes_on_under_the_same_id_from_a_step_back(tmp_path: Path) -> None:
    script = """
for first, last in ((0, 4), (2, 6)):
    time.sleep(first and 1)  # seconds; wandb names its folders by the second
    with Tracking().open(FOLDER, first_step=first) as tracker:
        for step in range(first, last):
            tracker.log({"loss": step / 2}, step=step, tokens=step * 100)
print(json.dumps(tracker.id))
"""
    given = {
        "RUN_GROUP": "g",
        "JOB_TYPE": "j",
        "TAGS": "a,b",
        "NOTES": "why",
        "NAME": "n",
        "PROJECT": "p",
        "ENTITY": "e",
    }
    identity = run_script(script, tmp_path, **{f"WANDB_{name}": value for name, value in given.items()})
    paths = sorted(tmp_path.glob(f"wandb/offline-run-*-{identity}/run-{identity}.wandb"))
    steps = [[row["step"] for row in kept(path).rows] for path in paths]
    assert steps == [[0, 1, 2, 3], [2, 3, 4, 5]]
    run = kept(paths[1]).run  # what the configuration leaves open is taken from the environment
    told = (run.run_group, run.job_type, ",".join(run.tags), run.notes, run.display_name, run.project, run.entity)
    assert told == tuple(given.values())
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3, 4, 5]
