"""Works: what a test puts between the library and its collectives, to see when each begins and is waited for, and to
hold one back until then."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple
from unittest import mock

import torch

from vescale import collectives

CALLS = ("all_gather", "reduce_scatter")


class Event(NamedTuple):
    """``what`` is "start", "wait", or what a test notes itself; ``numel`` is the whole buffer's."""

    what: str
    call: str
    number: int  # of the work, in the order of starts
    numel: int


class Works:
    """While active, records every asynchronous all-gather and reduce-scatter.

    Args:
        late: Numbers of the works that do not begin before they are waited for: whoever reads too soon reads what was
            there before, and whoever frees or reuses a buffer too soon breaks them.
    """

    def __init__(self, late: Collection[int] = ()) -> None:
        self.late, self.log = late, list[Event]()
        self._count = 0
        self._patches = [mock.patch.object(collectives, call, self._wrapped(call)) for call in CALLS]

    def __enter__(self) -> Works:
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()

    def note(self, what: str, call: str = "") -> None:
        """Writes an event of the test's own into the log."""
        self.log.append(Event(what, call, -1, 0))

    def _wrapped(self, call: str) -> Callable[..., Any]:
        original = getattr(collectives, call)

        def run(out: torch.Tensor, given: torch.Tensor, *, group: Any, async_op: bool = False) -> Any:
            if not async_op:
                return original(out, given, group=group)
            work = _Work(self, Event("start", call, self._count, max(out.numel(), given.numel())))
            self._count += 1
            self.log.append(work.event)
            start = lambda: original(out, given, group=group, async_op=True)  # noqa: E731
            work.start = start if work.event.number in self.late else None
            work.handle = None if work.start else start()
            return work

        return run


class _Work:
    def __init__(self, works: Works, event: Event) -> None:
        self.works, self.event = works, event
        self.start: Callable[[], Any] | None = None
        self.handle: Any = None

    def wait(self) -> None:
        if self.start is not None:
            self.handle, self.start = self.start(), None
        self.works.log.append(self.event._replace(what="wait"))
        self.handle.wait()
