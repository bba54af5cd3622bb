"""Preflight: what would stop a run after it began, looked for before: its folder, its data, its checkpoint, its export.

Nothing is allocated or written, and no other rank is asked.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vescale import checkpoint

WRITTEN = ("data", "step", "tokens")  # what a trainer says in each of its checkpoints


def check_folder(run_dir: Path) -> None:
    """Raises if the run's folder cannot be made.

    Raises:
        ValueError: In one line.
    """
    folder = run_dir.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise ValueError(f"run_dir: {run_dir} cannot be made: {there} is no folder that can be written")


def check_data(data: Any, *, vocab_size: int) -> None:
    """Raises if the model cannot read the data, or nothing is left to validate on.

    Args:
        data: An opened data set.
        vocab_size: Of the model.

    Raises:
        ValueError: In one line.
    """
    problems = []
    if data.vocab_size is not None and data.vocab_size > vocab_size:
        problems.append(f"model.vocab_size={vocab_size}, but the data have {data.vocab_size} ids")
    if not data.validations:
        problems.append("data.val_fraction=0 leaves nothing to validate on")
    if problems:
        raise ValueError("; ".join(problems))


def check_checkpoints(folder: Path, data: Any) -> int:
    """Returns the step of the newest checkpoint that has all its files, 0 if there is none.

    Checksums are compared when the ranks are there.

    Args:
        folder: Of checkpoints.
        data: An opened data set, which must be the one that the checkpoint was trained on.

    Raises:
        ValueError: In one line, if no trainer wrote it, or it is of other data.
    """
    path, extra, _ = checkpoint.newest_good(folder, checkpoint.whole(folder), checkpoint.read_extra)
    if path is None or extra is None:
        return 0
    missing = sorted({*WRITTEN} - extra.keys())
    if missing:
        raise ValueError(f"checkpoint {path} was not written by a trainer: it lacks {', '.join(missing)}")
    data.check(extra["data"])
    return int(extra["step"])


def check_export(folder: Path) -> None:
    """Raises if there is something already where the weights are to go.

    Raises:
        ValueError: In one line.
    """
    if occupied(folder):
        raise ValueError(f"trainer.export: expected a new or empty folder, got {folder}, which exists")


def occupied(folder: Path) -> bool:
    """Returns whether a path exists and is no empty folder."""
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
