"""Schedules: what a step multiplies the learning rate of every group by.

Every schedule is a line through the same four points; they differ in where the fall begins and in its shape. The first
and the last point lie just outside the run, so no step is spent on a rate of zero::

    scale 1          .---------.
                   .'           '-.
    final        .'                '------
    0           '
    step       -1    warmup    |    total          steps 0 .. total - 1 are run
                         total - decay

A schedule never sees a rate: each group keeps its own, and all of them follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from optimizers.fields import check, is_count, within

# How much of the fall is behind after the fraction x of its steps.
DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda x: x,
    "cosine": lambda x: 0.5 - 0.5 * math.cos(math.pi * x),  # arXiv 1608.03983, eq. 5, without restarts
    "sqrt": math.sqrt,  # "1-sqrt", arXiv 2405.18392, section 3
}


@dataclass(frozen=True, kw_only=True)
class Constant:
    """One, after a warm-up.

    Args:
        warmup_steps: Steps below 1; step ``warmup_steps`` is the first at 1.

    Raises:
        ValueError: If ``warmup_steps`` is not a count.
    """

    warmup_steps: int = 0

    def __post_init__(self) -> None:
        check(self, warmup_steps=(is_count(self.warmup_steps, 0), "an integer >= 0"))

    def scale(self, step: int) -> float:
        """Returns the multiplier at the 0-based ``step``."""
        return _line(step, warmup=self.warmup_steps, total=math.inf, decay=1, final=1.0, shape="linear")


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A straight fall from the end of the warm-up to the end of the run.

    Args:
        total_steps: Steps of the run.
        warmup_steps: Steps below 1 at the start; step ``warmup_steps`` is the first at 1.
        final: Multiplier from step ``total_steps`` on, in [0, 1].

    Raises:
        ValueError: If a field is out of range, or the run ends before the warm-up; all of them are named.
    """

    total_steps: int
    warmup_steps: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        _check(self, decay=1)

    def scale(self, step: int) -> float:
        """Returns the multiplier at the 0-based ``step``."""
        decay = self.total_steps - self.warmup_steps
        return _line(
            step, warmup=self.warmup_steps, total=self.total_steps, decay=decay, final=self.final, shape="linear"
        )


@dataclass(frozen=True, kw_only=True)
class WarmupCosine:
    """Half a cosine from the end of the warm-up to the end of the run.

    Args:
        total_steps: Steps of the run.
        warmup_steps: Steps below 1 at the start; step ``warmup_steps`` is the first at 1.
        final: Multiplier from step ``total_steps`` on, in [0, 1].

    Raises:
        ValueError: If a field is out of range, or the run ends before the warm-up; all of them are named.
    """

    total_steps: int
    warmup_steps: int = 0
    final: float = 0.1

    def __post_init__(self) -> None:
        _check(self, decay=1)

    def scale(self, step: int) -> float:
        """Returns the multiplier at the 0-based ``step``."""
        decay = self.total_steps - self.warmup_steps
        return _line(
            step, warmup=self.warmup_steps, total=self.total_steps, decay=decay, final=self.final, shape="cosine"
        )


@dataclass(frozen=True, kw_only=True)
class WSD:
    """Warm-up, a stable stretch at 1, and a fall over the last ``decay_steps`` (arXiv 2404.06395, section 4).

    Args:
        total_steps: Steps of the run.
        decay_steps: Steps of the fall, the last of the run.
        warmup_steps: Steps below 1 at the start; step ``warmup_steps`` is the first at 1.
        final: Multiplier from step ``total_steps`` on, in [0, 1].
        shape: A key of ``DECAYS``.

    Raises:
        ValueError: If a field is out of range, or the run is shorter than warm-up and fall; all of them are named.
    """

    total_steps: int
    decay_steps: int
    warmup_steps: int = 0
    final: float = 0.0
    shape: str = "linear"

    def __post_init__(self) -> None:
        _check(
            self,
            decay=self.decay_steps,
            decay_steps=(is_count(self.decay_steps, 1), "an integer >= 1"),
            shape=(self.shape in DECAYS, f"one of {sorted(DECAYS)}"),
        )

    def scale(self, step: int) -> float:
        """Returns the multiplier at the 0-based ``step``."""
        return _line(
            step,
            warmup=self.warmup_steps,
            total=self.total_steps,
            decay=self.decay_steps,
            final=self.final,
            shape=self.shape,
        )


def _check(schedule: Linear | WarmupCosine | WSD, *, decay: int, **more: tuple[bool, str]) -> None:
    """Refuses a schedule that breaks one of ``more``, or whose warm-up and ``decay`` do not fit into its run."""
    total, warmup, final = schedule.total_steps, schedule.warmup_steps, schedule.final
    counts = is_count(total, 1) and is_count(warmup, 0) and is_count(decay, 1)
    check(
        schedule,
        total_steps=(is_count(total, 1), "an integer >= 1"),
        warmup_steps=(
            is_count(warmup, 0) and (not counts or warmup + decay <= total),
            f"an integer >= 0 that leaves {decay} of {total} steps to fall",
        ),
        final=(within(final, 0, 1) or final == 1, "a number in [0, 1]"),
        **more,
    )


def _line(step: int, *, warmup: int, total: float, decay: int, final: float, shape: str) -> float:
    """Returns the multiplier at ``step`` on the line drawn at the top of this file."""
    if step < 0:
        raise ValueError(f"scale: expected a step >= 0, got {step}")
    if step < warmup:
        return (step + 1) / (warmup + 1)
    behind = min(max(step - (total - decay), 0) / decay, 1.0)
    return final + (1 - final) * (1 - DECAYS[shape](behind))
