"""Prefetch: reads the next step's batches on a thread while this step computes, and measures what a step waits for."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Calls ``read(step)`` one step ahead.

    Args:
        read: A pure function of the step; it reads files and touches no device.
        last: Steps from here on are not read ahead.
        depth: Steps to be ahead, > 0.
    """

    waited_s: float  # seconds that ``take`` has waited, in all

    def __init__(self, read: Callable[[int], T], *, last: int, depth: int = 2) -> None:
        self.read, self.last, self.depth, self.waited_s = read, last, depth, 0.0
        self._ahead: dict[int, Future[T]] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="data")

    def take(self, step: int) -> T:
        """Returns ``read(step)``, and has the steps after it read meanwhile; what ``read`` raises is raised here."""
        ahead = range(step, min(step + 1 + self.depth, max(self.last, step + 1)))
        self._ahead = {i: self._ahead.get(i) or self._reader.submit(self.read, i) for i in ahead}
        began = time.perf_counter()
        batch = self._ahead[step].result()
        self.waited_s += time.perf_counter() - began
        return batch
