"""Pipeline bubbles: the share of a step in which a stage has nothing to do, by schedule."""

from __future__ import annotations

from typing import NamedTuple


class Schedule(NamedTuple):
    """One schedule's idle time and what it keeps.

    Args:
        name: Of the schedule.
        bubble: Idle share of a step, in [0, 1).
        kept: Micro-batches whose activations the first stage holds at a time.
    """

    name: str
    bubble: float
    kept: float


def schedules(stages: int, micro_batches: int, *, chunks: int = 2) -> list[Schedule]:
    """Returns every schedule for ``stages`` pipeline stages.

    GPipe (arXiv 1811.06965) and 1F1B (arXiv 1806.03377) idle ``(p - 1) / (m + p - 1)`` of a step, interleaved 1F1B with
    ``v`` chunks a stage ``(p - 1) / (v m + p - 1)`` (arXiv 2104.04473, section 2.2). ZB-H1 (arXiv 2401.10241, section
    2.3), with forward, input gradient and weight gradient of equal length, idles a third of 1F1B's slots. 8 stages:
    46.7 % with 8 micro-batches, 9.9 % with 64.

    Args:
        stages: ``p``.
        micro_batches: ``m``.
        chunks: Model chunks of a stage in the interleaved schedule, ``v``.

    Raises:
        ValueError: If a number is below 1.
    """
    low = {"stages": stages, "micro_batches": micro_batches, "chunks": chunks}
    problems = [f"{name}: expected a number >= 1, got {value}" for name, value in low.items() if value < 1]
    if problems:
        raise ValueError("; ".join(problems))
    p, m, v = stages, micro_batches, chunks
    idle = p - 1
    return [
        Schedule("GPipe", idle / (m + idle), m),
        Schedule("1F1B", idle / (m + idle), min(p, m)),
        Schedule(f"interleaved 1F1B, {v} chunks", idle / (v * m + idle), min(p, m) * (1 + idle / (p * v))),
        # A slot of 1F1B is three of F, B and W: 3 m of work and p - 1 of idling.
        Schedule("ZB-H1", idle / (3 * m + idle), min(p, m)),
    ]
