"""How a run ends before its last step: signals that ask for it, and the one line that says why.

SIGTERM and SIGUSR1 ask a run to save and leave; a scheduler sends one of them some time before it takes the machine
away. The handler only notes it: the ranks agree on it at the end of a step, since the signal may have reached one rank
alone. The exit code is REQUEUE then, which no failure uses. Ctrl-C is Python's KeyboardInterrupt, at once.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

REQUEUE = 75  # exit code: sysexits.h EX_TEMPFAIL, "try again later"
ASKING = (signal.SIGTERM, signal.SIGUSR1)


class Stopped(RuntimeError):
    """The run has ended early, on every rank, for the reason in its message; the process exits with ``code``."""

    def __init__(self, line: str, *, code: int = 1) -> None:
        super().__init__(line)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return _stopped, (str(self), self.code)


def _stopped(line: str, code: int) -> Stopped:
    return Stopped(line, code=code)


class StopSignals:
    """As a context, notes the signals that ask a run to stop, and puts the old handlers back at its end."""

    received: int  # number of the signal, 0 while there was none

    def __init__(self) -> None:
        self.received = 0
        self._old: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python allows no other to set handlers
            self._old = {number: signal.signal(number, self._note) for number in ASKING}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
