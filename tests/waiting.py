"""What a test does about other threads and processes, instead of sleeping for as long as they mostly take."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], timeout_s: float = 60.0) -> bool:
    """Returns True as soon as ``condition()`` holds, False if it still does not after ``timeout_s`` seconds."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def free_port() -> int:
    """A port to meet at: below those that the kernel gives out, so that no connection takes it in the meantime.

    Linux gives out 32768 and above (``ip_local_port_range``); asking it for a free one names a port that any other
    process may be given before the ranks have started.
    """
    while True:
        port = random.SystemRandom().randrange(12000, 32000)  # tests seed the other generators
        with socket.socket() as taken:
            if taken.connect_ex(("127.0.0.1", port)) != 0:
                return port
