from __future__ import annotations

import math
from typing import Any

import pytest

from optimizers import WSD, Constant, Linear, WarmupCosine

SCHEDULES = [
    Constant(warmup_steps=4),
    Linear(total_steps=20, warmup_steps=4, final=0.2),
    WarmupCosine(total_steps=20, warmup_steps=4, final=0.2),
    WSD(total_steps=20, warmup_steps=4, decay_steps=8, final=0.2),
    WSD(total_steps=20, warmup_steps=4, decay_steps=8, final=0.2, shape="cosine"),
    WSD(total_steps=20, warmup_steps=4, decay_steps=8, final=0.2, shape="sqrt"),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_warm_up_rises_in_equal_steps_from_above_zero_to_one(schedule: Any) -> None:
    assert [schedule.scale(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0], abs=1e-15)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_after_the_warm_up_a_schedule_never_rises(schedule: Any) -> None:
    scales = [schedule.scale(step) for step in range(4, 30)]
    assert all(later <= earlier for earlier, later in zip(scales, scales[1:], strict=False))


@pytest.mark.parametrize("schedule", SCHEDULES[1:], ids=str)
def test_the_last_step_lies_above_final_and_everything_after_the_run_at_it(schedule: Any) -> None:
    assert schedule.scale(19) > 0.2
    assert {schedule.scale(step) for step in (20, 21, 10**9)} == {0.2}


def test_constant_stays_at_one() -> None:
    assert {Constant().scale(step) for step in (0, 1, 10**9)} == {1.0}


def test_linear_is_halfway_at_the_middle_of_its_fall() -> None:
    schedule = Linear(total_steps=20, warmup_steps=4, final=0.2)
    assert [schedule.scale(step) for step in (8, 12, 16)] == pytest.approx([0.8, 0.6, 0.4], abs=1e-15)


def test_cosine_falls_as_half_a_cosine() -> None:
    schedule = WarmupCosine(total_steps=20, warmup_steps=4, final=0.2)
    assert schedule.scale(12) == pytest.approx(0.6, abs=1e-15)
    assert schedule.scale(8) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2, abs=1e-15)


def test_wsd_holds_one_until_its_decay_begins() -> None:
    schedule = WSD(total_steps=20, warmup_steps=4, decay_steps=8, final=0.2)
    assert {schedule.scale(step) for step in range(4, 13)} == {1.0}
    assert schedule.scale(16) == pytest.approx(0.6, abs=1e-15)
    quarter = WSD(total_steps=20, decay_steps=8, shape="sqrt").scale(14)
    assert quarter == pytest.approx(0.5, abs=1e-15)


def test_without_warm_up_the_first_step_is_at_one() -> None:
    assert Linear(total_steps=10).scale(0) == WarmupCosine(total_steps=10).scale(0) == 1.0


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_negative_step_is_refused(schedule: Any) -> None:
    with pytest.raises(ValueError, match="expected a step >= 0, got -1"):
        schedule.scale(-1)


def test_all_bad_fields_are_named_at_once() -> None:
    with pytest.raises(ValueError) as error:
        WSD(total_steps=0, warmup_steps=-1, decay_steps=2.5, final=1.5, shape="cubic")  # type: ignore[arg-type]
    message = str(error.value)
    assert message.startswith("WSD: ")
    for wrong in ("total_steps: ", "warmup_steps: ", "decay_steps: ", "final: ", "shape: ", "got 2.5", "got 'cubic'"):
        assert wrong in message


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Constant, {"warmup_steps": 1.0}),
        (Linear, {"total_steps": 10, "warmup_steps": 10}),
        (WarmupCosine, {"total_steps": 10, "warmup_steps": 11}),
        (WarmupCosine, {"total_steps": True, "warmup_steps": 0}),
        (WarmupCosine, {"total_steps": 10, "final": math.nan}),
        (WSD, {"total_steps": 10, "warmup_steps": 4, "decay_steps": 7}),
        (WSD, {"total_steps": 10, "decay_steps": 0}),
    ],
)
def test_a_schedule_that_does_not_fit_its_run_is_refused(kind: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__}: .* expected .*, got"):
        kind(**fields)
