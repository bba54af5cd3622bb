"""alone: one run at a time in a folder; a second one is refused with a line, before it has changed anything.

The kernel lets go of the lock when the process ends, however it ends, so that a killed run goes on at once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch.distributed as dist

from vescale.checkpoint import together
from vescale.stop import Stopped

LOCK = "lock"  # file in the run's folder; it stays there, and says who held it last
# What flock(2) answers on a shared file system that has no locks.
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """As a context, on every rank: makes the run's folder, and rank 0 holds its lock.

    Args:
        folder: Of the run. On a file system without locks the run goes on without one.

    Raises:
        Stopped: On every rank, if another run is going on in the folder, or it cannot be written.
    """
    file = together(lambda: _hold(folder) if dist.get_rank() == 0 else None)
    try:
        yield
    finally:
        if file is not None:
            file.close()


def _hold(folder: Path) -> IO[bytes]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("ab+", buffering=0)  # a full disk is told at once, not at the end
    except OSError as problem:
        raise Stopped(f"run_dir: {folder} cannot be written: {problem}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read(200).decode(errors="replace").strip() or "another process"
        file.close()
        line = f"run_dir: a run is going on in {folder} ({holder}); wait for its end, or give this one its own name=..."
        raise Stopped(line, code=2) from None
    except OSError as problem:
        if problem.errno not in WITHOUT_LOCKS:
            file.close()
            raise Stopped(f"run_dir: {folder} cannot be locked: {problem}") from None
        return file
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    except OSError as problem:  # of a full disk
        file.close()
        raise Stopped(f"run_dir: {folder} cannot be written: {problem}") from None
    return file
