"""Garbage: Python's collector runs at steps that are the same on all ranks, and at no other time.

A collection takes tens of milliseconds in a process that holds a model. Left to itself it comes at another step on each
rank, and every time all ranks wait for the one.
"""

from __future__ import annotations

import gc
from types import TracebackType


class Garbage:
    """As a context, holds the collector back; ``collect`` runs it."""

    def __enter__(self) -> Garbage:
        self._was = gc.isenabled()
        gc.collect()
        gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._was:
            gc.enable()

    def collect(self, *, everything: bool = False) -> None:
        """Collects the young generations: what steps leave behind.

        Args:
            everything: Collect the old one too: what two of these found in use, and nobody uses any more.
        """
        gc.collect(2 if everything else 1)
