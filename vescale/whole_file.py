"""Whole file: a file that is there as it was or as it is to be, whatever stops the writer."""

from __future__ import annotations

import os
from pathlib import Path


def replace(path: Path, contents: bytes) -> None:
    """Writes a file beside ``path``, waits for the disk and renames: a kill leaves the old file or the new one.

    Raises:
        OSError: The disk is full, say; ``path`` is as it was, and nothing is left beside it.
    """
    fresh = path.with_name(path.name + ".new")
    try:
        with fresh.open("wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    fresh.replace(path)
