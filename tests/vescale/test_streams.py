"""Lanes beside the compute stream, with streams that write down what they are told: who waits for whom, and when.

T-M7 (prime-rl#3196): streams are made once. T-R4 (DeepSpeed#7898, #8061): a lane waits for the *current* stream, and
the current stream for the lane's last event. What is in flight stays referenced until then.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from vescale import streams

LOG: list[str] = []


class Stream:
    def __init__(self, *device: Any, priority: int = 0, name: str = "lane") -> None:
        self.name = name
        LOG.append(f"made {name}, priority {priority}")

    def wait_stream(self, other: Stream) -> None:
        LOG.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        LOG.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        return f"event {sum(entry.startswith('start') for entry in LOG)}"

    def __enter__(self) -> None:
        LOG.append(f"on {self.name}")

    def __exit__(self, *_: Any) -> None:
        LOG.append("off")


@pytest.fixture(autouse=True)
def _streams(monkeypatch: pytest.MonkeyPatch) -> None:
    LOG.clear()
    current = Stream(name="side")  # as inside a user's torch.cuda.stream(...)
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: current)
    monkeypatch.setattr(streams, "_lanes", {})
    LOG.clear()


def test_streams_are_made_once_and_a_cpu_has_none() -> None:
    for _ in range(3):
        lanes = streams.lanes_of(torch.device("cuda", 0))
    assert LOG == ["made lane, priority -1"] * 2 and lanes.gather is not lanes.reduce
    streams.lanes_of(torch.device("cpu"))
    assert len(LOG) == 2


def test_a_collective_waits_for_what_was_computed_and_is_waited_for_where_it_is_read() -> None:
    lane = streams.lanes_of(torch.device("cuda", 0)).gather
    LOG.clear()
    buffer = torch.empty(3)
    alive = weakref.ref(buffer)

    def start(*, async_op: bool) -> None:
        LOG.append(f"start, asynchronous {async_op}")

    flights = [lane.launch(start, buffer), lane.launch(start)]
    del buffer
    gc.collect()
    assert alive() is not None, "what is in flight may not be freed"
    for flight in reversed(flights):
        flight.wait()
    assert alive() is None
    once = ["lane waits for side", "on lane", "start, asynchronous False", "off"]
    assert [*once, *once, "side waits for event 2", "side waits for event 1"] == LOG
