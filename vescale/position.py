"""Position: what a run goes on from: its newest good checkpoint, and the values in it that a trainer needs.

A checkpoint that is damaged, or whose seal lacks a value or has one that cannot be, is passed over for the one before,
with a line. Where there are checkpoints and none is good, the run is refused: nothing begins anew over somebody's work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from vescale import checkpoint, health
from vescale.stop import Stopped

MOST_TOKENS = 2**62  # they are counted in 64 bits, and there are more to come
NEEDED = ("step", "tokens", "data")  # every checkpoint of a trainer has them; their types are checkpoint.EXTRA's


class Position(NamedTuple):
    """Where a run stands."""

    path: Path | None  # of the checkpoint; None: the run begins
    extra: dict[str, Any]  # its values; of a run that begins, no step and no tokens
    wrong: list[str]  # newer checkpoints that were passed over, a line each


BEGINNING = Position(None, {"step": 0, "tokens": 0}, [])


def newest(root: Path, *, decides: bool = True) -> Position:
    """Returns the position of the run whose checkpoints lie in ``root``; sizes of files are compared, no checksums.

    Args:
        root: Holds the checkpoints.
        decides: Whether this is rank 0. Another rank may see a shared folder a little later: what it finds no good
            there is only not good yet.

    Raises:
        ValueError: On rank 0, if there are checkpoints and none is good.
    """
    try:
        return _newest(root, checkpoint.whole(root), checkpoint.read_extra)
    except ValueError:
        if decides:
            raise
        return BEGINNING


def agreed(root: Path) -> Position:
    """Returns the position that all ranks go on from, called by all together.

    Rank 0 says which checkpoints there are, as ranks may see a shared folder at different times; each rank compares
    the checksums of its share of the files.

    Raises:
        Stopped: On every rank, if there are checkpoints and none is good.
    """
    verify = partial(checkpoint.verify, rank=dist.get_rank(), world=dist.get_world_size())
    paths = checkpoint.from_rank_0(checkpoint.whole(root))
    try:
        return _newest(root, paths, lambda path: checkpoint.together(partial(verify, path)))
    except ValueError as problem:
        raise Stopped(str(problem), code=2) from None


def _newest(root: Path, paths: list[Path], read: Callable[[Path], dict[str, Any]]) -> Position:
    path, extra, wrong = checkpoint.newest_good(root, paths, lambda path: _checked(path, read(path)))
    return BEGINNING if path is None or extra is None else Position(path, extra, wrong)


def _checked(path: Path, extra: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a seal that a trainer can go on from.

    Raises:
        ValueError: In one line, with all that is missing or cannot be.
    """
    missing = [name for name in NEEDED if name not in extra]
    if missing:
        raise ValueError(f"checkpoint {path} was not written by a trainer: it lacks {', '.join(missing)}")
    problems = [f"health.{problem}" for problem in health.problems(extra.get("health", {}))]
    if extra["step"] != checkpoint.step_of(path):
        problems.append(f"step: expected {checkpoint.step_of(path)}, as its folder says, got {extra['step']}")
    if not 0 <= extra["tokens"] <= MOST_TOKENS:
        problems.append(f"tokens: expected a number in [0, 2**62], got {extra['tokens']}")
    if problems:
        raise ValueError(f"checkpoint {path} is corrupt: {checkpoint.SEAL}: extra.{'; extra.'.join(problems)}")
    return extra
