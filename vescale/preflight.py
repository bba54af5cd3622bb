"""Preflight: what would stop a run after it began, looked for before: its folder, its weights, its data, its export.

Nothing is allocated or written, and no other rank is asked.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def check_folder(run_dir: Path) -> None:
    """Raises if the run's folder, or that of its checkpoints, cannot be made.

    Raises:
        ValueError: In one line.
    """
    for folder in (run_dir, run_dir / "checkpoints"):
        _check_makeable("run_dir", folder)


def check_weights(model_config: Any) -> None:
    """Raises if the model is to begin from weights that are not there, or not its own; models may have none.

    Raises:
        ValueError: In one message.
    """
    getattr(model_config, "check_weights", lambda: None)()


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


def check_export(folder: Path) -> None:
    """Raises if there is something already where the weights are to go, or nothing can be put there.

    Raises:
        ValueError: In one line.
    """
    if occupied(folder):
        raise ValueError(f"trainer.export: expected a new or empty folder, got {folder}, which exists")
    _check_makeable("trainer.export", folder)


def _check_makeable(key: str, wanted: Path) -> None:
    folder = wanted.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)) or Path("/proc") in (there, *there.parents):
        raise ValueError(f"{key}: {wanted} cannot be made: {there} is no folder that can be written")


def occupied(folder: Path) -> bool:
    """Returns whether a path exists and is no empty folder."""
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
