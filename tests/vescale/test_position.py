"""A run goes on from the newest checkpoint that a trainer can go on from; rank 0 says which ones there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vescale import checkpoint, position
from vescale.health import MOST, WINDOW, Health
from vescale.stop import Stopped

GOOD: dict[str, Any] = {"step": 2, "tokens": 64, "data": {}, "tracking_id": "x"}


def _seal(root: Path, step: int, extra: Any) -> None:
    (root / f"step_{step:08}").mkdir(parents=True, exist_ok=True)
    (root / f"step_{step:08}" / "seal.json").write_text(json.dumps({"extra": extra, "files": {}}))


def _health(**values: Any) -> dict[str, Any]:
    return {**GOOD, "health": {"norms": [], "skipped": 0, **values}}


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        ({}, "step_00000002 was not written by a trainer: it lacks step, tokens, data"),
        ({"step": 2, "tokens": 1}, "it lacks data"),
        (GOOD | {"step": 9}, "corrupt: seal.json: extra.step: expected 2, as its folder says, got 9"),
        (GOOD | {"tokens": -1}, r"extra.tokens: expected a number in \[0, 2\*\*62\], got -1"),
        (GOOD | {"tokens": 2**63 - 1}, "extra.tokens: expected a number in"),
        (GOOD | {"tokens": 1.5}, "corrupt: seal.json: extra.tokens of another type"),
        (_health(norms=["x"] * WINDOW), "extra.health.norms: expected none, or a norm or null of each of 128 steps"),
        (_health(norms=[1.0]), "extra.health.norms"),
        (_health(norms=[1.0] * (WINDOW + 1)), "extra.health.norms"),
        (_health(norms={}), "extra.health.norms"),
        (_health(norms=[True] * WINDOW), "extra.health.norms"),
        (_health(norms=[float("nan")] * WINDOW), "extra.health.norms"),
        (_health(norms=[1e39] * WINDOW), "extra.health.norms"),  # of no float32
        (_health(norms=[10**400] * WINDOW), "extra.health.norms"),
        (_health(skipped="x"), "extra.health.skipped: expected a number of steps >= 0, got 'x'"),
        (_health(in_a_row=True), "extra.health.in_a_row: expected a number of steps >= 0, got True"),
        (_health(norms=3, skipped=-1), "health.norms: .*; extra.health.skipped: expected a number of steps >= 0"),
    ],
)
def test_a_checkpoint_that_no_trainer_can_go_on_from_is_passed_over(tmp_path: Path, extra: Any, line: str) -> None:
    _seal(tmp_path, 1, GOOD | {"step": 1})
    _seal(tmp_path, 2, extra)
    at = position.newest(tmp_path)
    assert at.path == tmp_path / "step_00000001" and at.extra == GOOD | {"step": 1}
    assert len(at.wrong) == 1 and re.search(line, at.wrong[0]), at.wrong
    _seal(tmp_path, 1, {})
    with pytest.raises(ValueError, match=f"no checkpoint in .* is good: .*{line}.*; .*step_00000001 was not written"):
        position.newest(tmp_path)
    assert position.newest(tmp_path, decides=False) == position.BEGINNING  # rank 0 says what comes of it


def test_what_health_wrote_is_taken(tmp_path: Path) -> None:
    for step, norms in ((2, []), (3, [None] * WINDOW), (4, [0.5] * (WINDOW - 1) + [None]), (5, [MOST, 10**30] * 64)):
        _seal(tmp_path, step, GOOD | {"step": step, "health": {"norms": norms, "skipped": 3}})
        extra = position.newest(tmp_path).extra
        Health(skips=0, spike=2.0, device=torch.device("cpu")).load(extra["health"])
        assert extra["step"] == step
    assert position.newest(tmp_path / "nowhere") == position.BEGINNING


def _seen(root: Path) -> tuple[str, list[str]]:
    """Rank 1 sees an older folder than rank 0, as a shared file system may show it; rank 0 a checkpoint too much."""
    real = checkpoint.whole
    checkpoint.whole = lambda root: real(root)[: 3 - 2 * dist.get_rank()]  # type: ignore[assignment]
    try:
        at = position.agreed(root)
    finally:
        checkpoint.whole = real  # type: ignore[assignment]
    assert at.path is not None
    return at.path.name, at.wrong


def test_rank_0_says_which_checkpoints_there_are(pool: Any, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        _seal(tmp_path, step, GOOD | {"step": step} if step < 3 else {})
    first, second = pool(2).run(_seen, tmp_path)
    assert first == second and first[0] == "step_00000002" and len(first[1]) == 1


def _none_good(root: Path) -> tuple[int, str]:
    with pytest.raises(Stopped) as stopped:
        position.agreed(root)
    return stopped.value.code, str(stopped.value)


def test_no_good_checkpoint_is_everybodys_one_line(pool: Any, tmp_path: Path) -> None:
    _seal(tmp_path, 1, {})
    first, second = pool(2).run(_none_good, tmp_path)
    assert first == second == (2, first[1]) and "\n" not in first[1] and "is good: " in first[1]
