"""Metrics of a run: every row goes to ``metrics.jsonl``, and to Weights & Biases when it can be had. Rank 0 only.

The file is the record; W&B is a view of it. So nothing W&B does may stop or delay a run: whether its server answers is
asked, with a deadline, before ``wandb.init`` is called, and whether it takes the key; whatever fails becomes one
warning, after which the file goes on alone. Nor does a full disk stop a run: rows wait in memory until there is room.
This is the only file that imports wandb, and it does so inside a function.
"""

from __future__ import annotations

import base64
import configparser
import contextlib
import json
import logging
import math
import netrc
import numbers
import os
import secrets
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.parse import urlsplit

from vescale import whole_file

logger = logging.getLogger(__name__)

SERVER = "https://api.wandb.ai"  # wandb's own default
# This share of the allowed time is for the server's first answer; the rest is for starting offline (about 0.7 s).
ANSWER_SHARE = 1 / 2
# Options of wandb.Settings where no WANDB_* variable says otherwise; the timeouts are seconds. By default a server that
# answers and then hangs holds a run for 90 s when it starts, and without limit when it ends.
QUIET = {"console": "off", "silent": True, "init_timeout": 30.0, "finish_timeout": 60.0}
FILE_ONLY = "metrics.jsonl only"
# HTTP codes of a server that may be W&B: an older one, one that wants another kind of key, one that asks to wait.
UNDERSTOOD = (400, 401, 403, 429)
NAMES = {math.inf: "Infinity", -math.inf: "-Infinity"}  # JSON has no such numbers; float() reads these words


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Where the metrics of a run go; ``open()`` begins.

    What is None here is taken from the environment as wandb does (``WANDB_PROJECT``, ``WANDB_RUN_GROUP`` and so on).

    Args:
        project: Defaults to ``vescale``.
        entity: The team or user that owns the project.
        group: Runs to show together, such as those of a sweep.
        job_type: Kind of run within its group.
        name: Shown name.
        id: Identity of the run at W&B. None: the one it had before, else a new one.
        tags: Words to filter by.
        notes: Free text.
        mode: ``auto`` is ``WANDB_MODE``, else online. ``online`` needs a key and a server that answers, and becomes
            ``offline`` without. ``disabled``: the file only, wandb is not imported.
        timeout_s: Seconds until a run without key or network has started offline.

    Raises:
        ValueError: ``mode`` or ``timeout_s`` is out of range.
    """

    project: str | None = None
    entity: str | None = None
    group: str | None = None
    job_type: str | None = None
    name: str | None = None
    id: str | None = None
    tags: tuple[str, ...] = ()
    notes: str | None = None
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    timeout_s: float = 3.0

    def __post_init__(self) -> None:
        modes = ("auto", "online", "offline", "disabled")
        problems = [] if self.mode in modes else [f"mode: expected one of {', '.join(modes)}, got {self.mode!r}"]
        if not self.timeout_s > 0:
            problems.append(f"timeout_s: expected seconds > 0, got {self.timeout_s}")
        if problems:
            raise ValueError(f"tracking: {'; '.join(problems)}")

    def open(
        self,
        folder: str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        first_step: int = 0,
        id: str | None = None,
    ) -> Tracker:
        """Returns a tracker that appends to ``folder/metrics.jsonl``.

        Args:
            folder: The run's folder; made if need be.
            config: The resolved configuration, shown at W&B.
            first_step: The first step that will be logged. Rows from there on are left over from before a resume and
                are dropped, so that the file of a resumed run equals an uninterrupted one's; 0 starts afresh.
            id: The identity that a checkpoint remembers, ``Tracker.id``.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        _trim(path, first_step)
        left = _remembered(folder / "wandb-id")
        identity = self.id or os.environ.get("WANDB_RUN_ID") or id or left or secrets.token_hex(4)
        if identity != left:  # a full disk would truncate it
            (folder / "wandb-id").write_text(identity)
        run, where = self._start(folder, config=config or {}, identity=identity)
        return Tracker(path, id=identity, run=run, where=where)

    def _start(self, folder: Path, *, config: Mapping[str, Any], identity: str) -> tuple[Any, str]:
        """Returns a W&B run, or None, and where it can be seen."""
        deadline = time.monotonic() + self.timeout_s * ANSWER_SHARE
        asked = self.mode if self.mode != "auto" else _setting("mode") or "online"
        mode = {"run": "online", "dryrun": "offline"}.get(asked, asked)  # wandb's older words
        if mode == "disabled":
            return None, FILE_ONLY
        server = _setting("base_url") or SERVER
        key = None if mode == "offline" else _key(server)
        answer = None if key is None else _Answer(server, key)  # asks while wandb is imported (0.8 s)
        # wandb 0.31 reports on itself to the server even offline, and waits 10 s for a silent one when the process ends
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            import wandb
        except Exception as error:  # not installed, or broken
            logger.warning("W&B cannot be imported (%s)", _line(error))
            return None, FILE_ONLY
        if mode != "offline" and (problem := answer.problem(deadline) if answer else "no API key"):
            level = logging.INFO if self.mode == "auto" and answer is None else logging.WARNING
            logger.log(level, "W&B is offline: %s", problem)
            mode = "offline"
        for attempt in dict.fromkeys((mode, "offline")):
            try:
                return self._init(wandb, folder, config=config, identity=identity, mode=attempt)
            except Exception as error:  # whatever wandb raises, the run is worth more
                logger.warning("W&B could not start %s (%s)", attempt, _line(error))
                with contextlib.suppress(Exception):
                    wandb.teardown()  # else it holds the run's id
        return None, FILE_ONLY

    def _init(
        self, wandb: Any, folder: Path, *, config: Mapping[str, Any], identity: str, mode: str
    ) -> tuple[Any, str]:
        known = wandb.Settings()
        options = {name: value for name, value in QUIET.items() if f"WANDB_{name.upper()}" not in os.environ}
        run = wandb.init(
            project=self.project or _setting("project") or "vescale",
            entity=self.entity,
            group=self.group,
            job_type=self.job_type,
            name=self.name,
            id=identity,
            tags=list(self.tags) or None,
            notes=self.notes,
            config=dict(config),
            dir=os.environ.get("WANDB_DIR") or str(folder),
            mode=mode,
            resume=os.environ.get("WANDB_RESUME", "allow"),
            settings=wandb.Settings(**{name: value for name, value in options.items() if hasattr(known, name)}),
        )
        # W&B's own step may not go back, as a resume does: it would ignore those rows. Tokens may, and compare runs.
        run.define_metric("tokens")
        run.define_metric("*", step_metric="tokens")
        kept = Path(run.dir).parent
        return run, f"offline in {kept} (wandb sync {kept})" if mode == "offline" else str(run.url)


class Tracker:
    """Writes the rows of a run; made by ``Tracking.open``. As a context it finishes, with 1 after an exception."""

    path: Path  # of the file
    id: str  # of the run at W&B, for the checkpoint
    where: str  # what to print: an address, or what to do with an offline run
    _run: Any  # None: W&B is disabled, finished, or has failed once

    def __init__(self, path: Path, *, id: str, run: Any, where: str) -> None:
        self.path, self.id, self.where, self._run = path, id, where, run
        self._file = path.open("ab", buffering=0)
        self._waiting = b""  # lines that a full disk did not take

    def log(self, metrics: Mapping[str, Any], *, step: int, tokens: int) -> None:
        """Appends one row, whole, and sends it to W&B in one call; what the disk does not take waits for the next.

        Args:
            metrics: Numbers, words or truth values; a 0-d tensor is read, which waits for its device.
            step: Of the row; several rows may share one.
            tokens: Tokens trained on so far, the x axis.

        Raises:
            ValueError: ``metrics`` has a key of the row itself.
            TypeError: A value is no number.
        """
        if taken := {"step", "tokens"} & metrics.keys():
            raise ValueError(f"tracking: expected metrics without {', '.join(sorted(taken))}, which every row has")
        row = {"step": int(step), "tokens": int(tokens), **{name: _plain(name, metrics[name]) for name in metrics}}
        words = {name: _word(value) for name, value in row.items()}
        self._append(json.dumps(words, allow_nan=False).encode() + b"\n")
        self._tell("log", row)

    def finish(self, exit_code: int = 0) -> None:
        """Closes the file and ends the W&B run, as failed unless ``exit_code`` is 0. Again: does nothing."""
        if self._waiting:
            self._append(b"")
        if self._waiting:
            logger.warning("%s lacks its last %d rows", self.path, self._waiting.count(b"\n"))
        self._file.close()
        self._tell("finish", exit_code=exit_code)
        self._run, self._waiting = None, b""

    def _append(self, line: bytes) -> None:
        """Writes what waits and ``line``; one write of a whole line: a kill leaves it out or in."""
        first = not self._waiting
        self._waiting += line
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if first:
                logger.warning("%s takes no row (%s): rows wait in memory, training goes on", self.path, _line(error))

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(exit_code=0 if kind is None else 1)

    def _tell(self, method: str, *args: Any, **options: Any) -> None:
        """Calls a method of the W&B run; the first failure is the last call."""
        if self._run is None:
            return
        try:
            getattr(self._run, method)(*args, **options)
        except Exception as error:  # whatever wandb raises, the run is worth more
            logger.warning("W&B %s failed (%s); %s goes on without it", method, _line(error), self.path)
            self._run = None


def read_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a ``metrics.jsonl`` as they were logged; a last line cut short by a kill is left out."""
    backwards = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    with Path(path).open("rb") as file:
        for line in file:
            if (row := _parse(line)) is not None:
                yield {
                    name: backwards.get(value, value) if isinstance(value, str) else value
                    for name, value in row.items()
                }


def _parse(line: bytes) -> dict[str, Any] | None:
    """Returns the row of a line, or None when it is not a whole row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # the last, of brackets in brackets
        return None
    whole = isinstance(row, dict) and all(type(row.get(name)) is int for name in ("step", "tokens"))
    return row if whole else None


def _trim(path: Path, first_step: int) -> None:
    """Drops broken lines and rows from ``first_step`` on; a file that this changes is replaced in one move."""
    if not path.exists():
        return
    text = path.read_bytes()
    rows = ((line, _parse(line)) for line in text.splitlines())
    kept = b"".join(line + b"\n" for line, row in rows if row is not None and row["step"] < first_step)
    if kept != text:
        whole_file.replace(path, kept)


def _plain(name: str, value: Any) -> Any:
    """Returns a metric as a Python value."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"tracking: {name}: expected a number, got {type(value).__name__}: {_line(error)}") from error


def _word(value: Any) -> Any:
    """Returns a value that JSON can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return NAMES.get(value, "NaN")
    return value


def _line(error: Exception) -> str:
    """Returns an exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _remembered(path: Path) -> str:
    """Returns the identity that an earlier process left in the run's folder, or nothing where it is damaged."""
    left = path.read_bytes().decode(errors="replace").strip() if path.exists() else ""
    return left if left.isprintable() and "\ufffd" not in left else ""


def _setting(name: str) -> str | None:
    """Returns a setting from where wandb has it: WANDB_*, ``./wandb/settings``, ``~/.config/wandb/settings``."""
    if value := os.environ.get(f"WANDB_{name.upper()}"):
        return value
    files = configparser.ConfigParser(interpolation=None)
    home = Path(os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")).expanduser()
    try:
        files.read([home / "settings", Path("wandb/settings")])  # the later wins
    except (configparser.Error, OSError, UnicodeDecodeError) as error:
        logger.warning("W&B settings cannot be read (%s)", _line(error))
    return files.get("default", name, fallback=None) or None


def _key(server: str) -> str | None:
    """Returns the key that wandb would find for ``server`` without asking somebody at a terminal.

    "" where it has a token in a file instead, None where it has nothing.
    """
    if key := _setting("api_key"):
        return key
    if _setting("identity_token_file"):
        return ""
    try:
        found = netrc.netrc(os.environ.get("NETRC")).authenticators(urlsplit(server).netloc)
    except (OSError, ValueError, netrc.NetrcParseError):
        return None
    return found[2] if found else None


class _Answer:
    """A question to a server, on a thread of its own: looking up a name may take half a minute, and has no timeout.

    Asks who the key's owner is, as wandb does: a key that is refused would hold ``wandb.init`` up.
    """

    def __init__(self, server: str, key: str) -> None:
        self._server, self._key = server, key
        self._problem = f"{server} does not answer"
        self._ended = threading.Event()
        threading.Thread(target=self._ask, name="wandb-answer", daemon=True).start()

    def problem(self, deadline: float) -> str:
        """Returns what is wrong by ``deadline``, seconds of ``time.monotonic``, or nothing; waits no longer."""
        self._ended.wait(max(0.0, deadline - time.monotonic()))
        return self._problem

    def _ask(self) -> None:
        try:
            self._problem = self._asked()
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):  # it is there; wandb may hold its certificate
                self._problem = ""
        except Exception as error:  # a broken address or answer
            logger.debug("no answer from %s (%s)", self._server, _line(error))
        finally:
            self._ended.set()

    def _asked(self) -> str:
        body = json.dumps({"query": "query { viewer { id } }"}).encode()
        url, kind = f"{self._server.rstrip('/')}/graphql", {"Content-Type": "application/json"}
        question = urllib.request.Request(url, body, kind)
        if self._key:
            word = base64.b64encode(f"api:{self._key}".encode()).decode()
            question.add_unredirected_header("Authorization", f"Basic {word}")  # no other server sees it
        given = {scheme: _setting(f"{scheme}_proxy") for scheme in ("http", "https")}
        proxies = urllib.request.getproxies() | {scheme: proxy for scheme, proxy in given.items() if proxy}
        opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
        try:
            with opener.open(question, timeout=10.0) as answer:  # seconds for each read; problem() has the deadline
                said = answer.read(1 << 16)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (401, 403) and self._key:
                return f"{self._server} refuses the API key (HTTP {error.code})"
            if error.code in UNDERSTOOD:
                return ""
            return (
                f"{self._server} {'does not answer' if error.code >= 500 else 'is no W&B server'} (HTTP {error.code})"
            )
        return self._heard(said)

    def _heard(self, said: bytes) -> str:
        """What is wrong with an answer, which is GraphQL's if this is a W&B server."""
        try:
            answer = json.loads(said)
        except ValueError:
            answer = None
        if not (isinstance(answer, dict) and {"data", "errors"} & answer.keys()):
            return f"{self._server} is no W&B server"
        nobody = "viewer" in (answer.get("data") or {}) and answer["data"]["viewer"] is None
        return f"{self._server} refuses the API key" if self._key and nobody else ""
