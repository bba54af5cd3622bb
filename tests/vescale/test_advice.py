"""Advice names what to change and never what is set already; what is hopeless is not advised."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from vescale.advice import KEEP, MISSING, NO, SHORT, YES, Facts, Setting, advise, group_size, readable


def _peak(setting: Setting) -> int:
    """States of 160 over 8 ranks by the textbook, and 10 a sequence, 2 where it is computed again."""
    states = (160, 40 + 120 / 8, 20 + 140 / 8, 160 / 8)[setting.stage]
    return round(states) + setting.micro_batch * (2 if setting.recomputed else 10)


def _facts(available: float, configured: Setting = Setting(3, True, 4), **changes: Any) -> Facts:  # noqa: B008
    facts = Facts(
        available=available,
        configured=configured,
        peak=_peak,
        micro_batches=(8, 4, 2, 1),
        layer=10,
        layers=80,
        ranks=8,
        replicas=1,
        dealt=False,
        devices=8,
        latency=0.0,
        copies=0,
        bubble=(0.4, 0.1),
    )
    return facts._replace(**changes)


def _changes(facts: Facts) -> list[str]:
    return [advice.change for advice in advise(facts).decisions if advice.change]


@pytest.mark.parametrize(
    ("available", "configured", "changes", "conclusion"),
    [
        (28, Setting(3, True, 4), [], "it fits, and nothing is to change"),
        (28, Setting(0, True, 4), ["parallelism.zero=3"], "it does not fit as configured"),
        (28, Setting(2, False, 4), ["parallelism.zero=3", "model.checkpoint=full"], "it does not fit as configured"),
        (200, Setting(0, True, 4), ["model.checkpoint=none"], "it fits as configured"),
        (200, Setting(3, False, 4), ["parallelism.zero=0"], "it fits as configured"),
        (24, Setting(3, True, 4), ["trainer.micro_batch=2"], "it does not fit as configured"),
        (15, Setting(3, True, 1), [], "no setting makes it fit: .* it would take pipeline parallel, or larger devices"),
    ],
)
def test_what_is_to_change(available: int, configured: Setting, changes: list[str], conclusion: str) -> None:
    facts = _facts(available, configured)
    assert _changes(facts) == changes and re.match(conclusion, advise(facts).conclusion)


def test_no_setting_is_advised_that_is_set_already() -> None:
    """Whatever a device has, and whatever is configured; and what is advised fits, where anything does."""
    for available, stage, again, size in itertools.product(range(5, 300, 5), range(4), (False, True), (1, 2, 4, 8)):
        facts = _facts(available, Setting(stage, again, size))
        configured = {f"parallelism.zero={stage}", f"model.checkpoint={'full' if again else 'none'}"}
        configured.add(f"trainer.micro_batch={size}")
        changes = _changes(facts)
        assert not configured & {*changes}
        values = dict(change.split("=") for change in changes)
        then = Setting(
            int(values.get("parallelism.zero", stage)),
            values.get("model.checkpoint", "full" if again else "none") == "full",
            int(values.get("trainer.micro_batch", size)),
        )
        possible = min(_peak(Setting(3, True, some)) for some in (1, 2, 4, 8) if some <= size)
        assert facts.fits(then) == (possible <= available)


def test_a_layer_that_is_too_large_is_told_what_it_would_take() -> None:
    found = advise(_facts(15, layer=16))
    verdicts = {advice.question: advice.verdict for advice in found.decisions}
    assert verdicts["tensor parallel"] == MISSING
    assert verdicts["pipeline parallel, with many micro-batches"] == NO  # a stage has a layer at least
    assert "it would take tensor parallel, or larger devices" in found.conclusion
    assert KEEP not in verdicts.values() and YES not in verdicts.values() and SHORT in verdicts.values()


def test_copies_of_the_model_are_advised_where_they_fit() -> None:
    many = {"ranks": 1536, "latency": 0.5}
    assert _changes(_facts(28, **many)) == [f"parallelism.dp_shard={group_size(1536)}"] == ["parallelism.dp_shard=512"]
    assert _changes(_facts(28, **many, copies=1)) == _changes(_facts(28, **many, dealt=True)) == []
    assert group_size(1000) == 500 and group_size(7) == 7


def test_a_run_of_many_copies_is_told_to_have_fewer() -> None:
    assert "it would take fewer copies of the model" in advise(_facts(15, layers=4, replicas=2)).conclusion


def test_a_rank_that_is_alone_is_told_nothing_of_stages() -> None:
    assert _changes(_facts(200, Setting(3, False, 4), ranks=1)) == []


def test_bytes_are_told_in_a_unit_that_shows_them() -> None:
    sizes = (1.129e12, 4.411e9, 12_345_678, 99_999, 64, 0)
    assert [readable(size) for size in sizes] == ["1,129 GB", "4.41 GB", "12.35 MB", "99,999 B", "64 B", "0 B"]
