"""Watchdog: ends a run that hangs, and says which rank and which collective is missing.

Each rank's thread looks for a step completed lately. When none was, it leaves in the run's folder what torch's flight
recorder knows of its collectives, and reads what the others left::

    hang/rank_0.json   all_reduce 1203 begun      hang/rank_1.json   all_reduce 1203 begun
    hang/rank_2.json   all_gather 1202 done       (rank 3 left nothing)

    -> no step for 600 s: rank 2 has not called all_reduce 1203, which ranks 0, 1 wait in; rank 3 does not answer

The folder is the meeting place, since the network is what may be broken. A stopped process leaves nothing, so silence
names it. Every rank ends with the same line: the lowest rank that is alive writes it, the others read it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from vescale.checkpoint import write_json

HUNG = 70  # exit code: sysexits.h EX_SOFTWARE
RECORDED = 2000  # collectives that torch keeps; an old one that a rank is missing is still among them
ANSWER_S = 5.0  # seconds for the other ranks to notice too, and to write


def record_collectives() -> None:
    """Turns torch's flight recorder on for process groups made from now on, unless the environment says otherwise."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))


class Watchdog:
    """As a context, watches for ``beat``; ends the process when none comes in time.

    Args:
        folder: Of the run, shared by all ranks.
        rank: Of this process.
        world: Number of ranks.
        timeout_s: Seconds between two beats, after the first; > 0, or None: does not watch.
        first_s: Seconds until the first beat: compilation and first contact take longer than a step.
        end: Called with the exit code once the line is printed; for tests.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        world: int,
        timeout_s: float | None,
        first_s: float = 1800.0,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self.folder, self.rank, self.world, self.timeout_s, self.end = folder / "hang", rank, world, timeout_s, end
        self._deadline = time.monotonic() + max(first_s, timeout_s or 0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self.timeout_s is not None:
            for left in self.folder.glob(f"*_{self.rank}.json") if self.folder.is_dir() else ():
                left.unlink(missing_ok=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def beat(self) -> None:
        """Says that a step was completed."""
        if self.timeout_s is not None:
            self._deadline = time.monotonic() + self.timeout_s

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, (self.timeout_s or 1.0) / 4)):
            if time.monotonic() > self._deadline:
                line = self._agreed()
                if not self._over.is_set():
                    print(f"vescale.train: {line}", file=sys.stderr, flush=True)
                    self.end(HUNG)
                return

    def _agreed(self) -> str:
        """Returns the line that all ranks print, or this rank's own where they cannot meet: on a full disk, say."""
        try:
            return self._line()
        except OSError as problem:
            own = diagnose({self.rank: collectives()}, seconds=self.timeout_s or 0)
            return f"{own}; of the other ranks nothing is known: {problem}"

    def _line(self) -> str:
        """Meets the other ranks and returns the line that all of them print."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / f"rank_{self.rank}.json", collectives())
        wait = min(ANSWER_S, self.timeout_s or ANSWER_S)
        self._over.wait(wait)
        seen = {rank: _read(self.folder / f"rank_{rank}.json") for rank in range(self.world)}
        first = min((rank for rank, state in seen.items() if state), default=self.rank)
        verdict = self.folder / f"verdict_{first}.json"
        if first == self.rank:
            write_json(verdict, {"line": diagnose(seen, seconds=self.timeout_s or 0)})
        end = time.monotonic() + wait
        while not _read(verdict) and time.monotonic() < end:
            time.sleep(0.05)
        return (_read(verdict) or {"line": diagnose(seen, seconds=self.timeout_s or 0)})["line"]


def collectives() -> dict[str, Any]:
    """Returns the number and name of the last collective that this rank completed, and of the one it waits in."""
    try:
        dump = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())  # type: ignore[attr-defined]
    except Exception:  # no recorder in this build: the others are told that this rank is alive
        return {"done": -1, "begun": -1, "name": "a collective"}
    status = dump.get("pg_status", {}).get("0", {})
    entries = [entry for entry in dump.get("entries", []) if str(entry["process_group"][0]) == "0"]
    begun = int(status.get("last_enqueued_collective", -1))
    waits = [entry for entry in entries if not entry["retired"]]
    name = waits[0]["profiling_name"].rpartition(":")[2] if waits else "a collective"
    return {"done": int(status.get("last_completed_collective", -1)), "begun": begun, "name": name}


def diagnose(seen: dict[int, dict[str, Any] | None], *, seconds: float) -> str:
    """Returns one line: who is missing in which collective.

    Args:
        seen: Of every rank what ``collectives`` said; None where it said nothing.
        seconds: That nothing happened.
    """
    alive = {rank: state for rank, state in seen.items() if state}
    silent = [rank for rank in seen if rank not in alive]
    waiting = {rank: state for rank, state in alive.items() if state["begun"] > state["done"]}
    wanted = min((state["done"] + 1 for state in waiting.values()), default=0)
    absent = [rank for rank, state in alive.items() if waiting and state["begun"] < wanted]
    parts = []
    if absent:
        held = [rank for rank in waiting if rank not in absent]
        name = waiting[held[0]]["name"] if held else "a collective"
        has = "has" if len(absent) == 1 else "have"
        parts.append(f"{_ranks(absent)} {has} not called {name} {wanted}, which {_ranks(held)} wait in")
    elif waiting:
        name = next(iter(waiting.values()))["name"]
        parts.append(f"{_ranks(list(waiting))} wait in {name} {wanted}")
    else:
        parts.append(f"{_ranks(list(alive))} wait in no collective")
    if silent:
        parts.append(f"{_ranks(silent)} {'does' if len(silent) == 1 else 'do'} not answer")
    return f"no step for {seconds:g} s: {'; '.join(parts)}; the same command goes on from the newest checkpoint"


def _ranks(ranks: list[int]) -> str:
    few = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {few}" if len(ranks) == 1 else f"ranks {few}"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
