"""Bubbles of pipeline schedules."""

from __future__ import annotations

import pytest

from vescale.pipeline import schedules


@pytest.mark.parametrize(("micro_batches", "bubble"), [(8, 46.7), (64, 9.9)])
def test_eight_stages(micro_batches: int, bubble: float) -> None:
    known = {schedule.name: schedule for schedule in schedules(8, micro_batches)}
    assert round(100 * known["GPipe"].bubble, 1) == round(100 * known["1F1B"].bubble, 1) == bubble
    assert (known["GPipe"].kept, known["1F1B"].kept) == (micro_batches, 8)
    assert known["ZB-H1"].bubble < known["interleaved 1F1B, 2 chunks"].bubble < known["1F1B"].bubble


def test_a_chart_counted_by_hand() -> None:
    # 2 stages, 3 micro-batches, slots of equal length: GPipe is 4 slots wide in each direction and idles in one.
    assert schedules(2, 3)[0].bubble == 1 / 4
    assert schedules(1, 5)[1].bubble == 0


def test_numbers_below_one() -> None:
    with pytest.raises(ValueError, match="stages: expected a number >= 1, got 0; micro_batches: .* got -1"):
        schedules(0, -1)
