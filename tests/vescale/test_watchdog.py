"""A run that hangs ends on every rank with one line that names the missing rank and the collective."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from waiting import wait_for

from vescale import watchdog
from vescale.watchdog import Watchdog, collectives, diagnose


def _state(done: int, begun: int, name: str = "all_reduce") -> dict[str, Any]:
    return {"done": done, "begun": begun, "name": name}


def test_a_rank_that_has_not_come_is_named_and_a_silent_one_too() -> None:
    waits = _state(1202, 1203)
    line = diagnose({0: waits, 1: waits, 2: _state(1202, 1202), 3: None}, seconds=600)
    begins = (
        "no step for 600 s: rank 2 has not called all_reduce 1203, which ranks 0, 1 wait in; rank 3 does not answer;"
    )
    assert line.startswith(begins)
    assert diagnose({0: waits, 1: None, 2: None}, seconds=5).startswith(
        "no step for 5 s: rank 0 wait in all_reduce 1203; ranks 1, 2 do not answer"
    )
    assert "ranks 0, 1 wait in no collective" in diagnose({0: _state(3, 3), 1: _state(3, 3)}, seconds=5)


def test_a_run_that_goes_on_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, looks = [], threading.Semaphore(0)
    now = 0.0  # seconds of a clock that this test turns

    def monotonic() -> float:
        looks.release()
        return now

    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    with Watchdog(tmp_path, rank=0, world=1, timeout_s=0.4, first_s=0.4, end=ended.append) as watched:
        for _ in range(5):
            now += 0.3
            watched.beat()
            looks = threading.Semaphore(0)
            assert looks.acquire(timeout=60)  # the thread has seen the clock
    watched._thread.join(60)
    assert not watched._thread.is_alive()
    assert ended == [] and not (tmp_path / "hang").exists()
    with Watchdog(tmp_path, rank=0, world=1, timeout_s=None, first_s=0.01, end=ended.append) as unwatched:
        assert not unwatched._thread.is_alive()
    assert ended == []


def _hang(folder: Path) -> tuple[list[int], str, dict[str, Any]]:
    """Rank 1 never comes to the second collective."""
    ended: list[int] = []
    group = dist.group.WORLD
    dist.all_reduce(torch.ones(1))
    with (
        contextlib.redirect_stderr(io.StringIO()) as said,
        Watchdog(folder, rank=dist.get_rank(), world=2, timeout_s=2.0, first_s=0.1, end=ended.append),
    ):
        work = dist.all_gather_single(torch.zeros(2), torch.ones(1), async_op=True) if dist.get_rank() == 0 else None
        state = collectives()
        wait_for(lambda: ended)
    assert group is not None and (work is None or not work.is_completed())
    return ended, said.getvalue(), state


def test_every_rank_of_a_hanging_run_says_who_is_missing(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")  # of the processes started below
    ranks = Pool(2)
    try:
        (ended, line, state), other = ranks.run(_hang, tmp_path)
    finally:
        ranks.stop()
    assert ended == [70] and other[:2] == ([70], line)
    assert state["begun"] == state["done"] + 1 and state["name"].startswith("all_gather")
    wanted = (
        f"vescale.train: no step for 2 s: rank 1 has not called {state['name']} {state['begun']}, which rank 0 wait in;"
    )
    assert line.startswith(wanted) and line.count("\n") == 1


def test_a_rank_that_cannot_meet_the_others_ends_all_the_same(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "hang").touch()  # no folder: as on a full disk, nothing can be left there
    ended: list[int] = []
    with Watchdog(tmp_path, rank=1, world=2, timeout_s=0.2, first_s=0.1, end=ended.append):
        wait_for(lambda: ended)
    line = capsys.readouterr().err
    assert ended == [70] and line.startswith("vescale.train: no step for 0.2 s: rank 1 wait")
    assert "of the other ranks nothing is known: " in line and line.count("\n") == 1
