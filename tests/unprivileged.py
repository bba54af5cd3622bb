"""What the modes of files forbid, forbidden to root too: a thread that has given up the right to pass them by."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
VERSION, THIS_THREAD = 0x20080522, 0  # linux/capability.h, _LINUX_CAPABILITY_VERSION_3
PASSING = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


def as_modes_say(act: Callable[..., T], *args: Any) -> T:
    """Returns ``act(*args)``, run on a thread that modes stop, as are the threads that it starts."""
    found: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            _give_up()
            found.append((act(*args), None))
        except BaseException as problem:
            found.append((None, problem))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    ((result, problem),) = found
    if problem is not None:
        raise problem
    return result  # type: ignore[return-value]


def _give_up() -> None:
    """Capabilities are a thread's own on Linux; nobody but root has these."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    who, held = struct.pack("Ii", VERSION, THIS_THREAD), ctypes.create_string_buffer(24)
    if libc.capget(who, held) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    low = [word & ~PASSING for word in struct.unpack("3I", held.raw[:12])]  # effective, permitted, inheritable
    if libc.capset(who, struct.pack("3I", *low) + held.raw[12:]) != 0:
        raise OSError(ctypes.get_errno(), "capset")
