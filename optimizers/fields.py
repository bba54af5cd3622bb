"""What rules and schedules ask of their fields: one check that names all problems in one sentence."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import Any

from torch import Tensor


def check(owner: object, /, **wanted: tuple[bool, str]) -> None:
    """Refuses an object whose fields are out of range.

    Args:
        owner: The dataclass to name in the message.
        **wanted: Field name to ``(holds, expected)``: whether the field is as it should be, and how it should be.

    Raises:
        ValueError: Names every field that does not hold, what was expected and what it is.
    """
    problems = [
        f"{name}: expected {expected}, got {getattr(owner, name)!r}"
        for name, (holds, expected) in wanted.items()
        if not holds
    ]
    if problems:
        raise ValueError(f"{type(owner).__name__}: " + "; ".join(problems))


def within(value: object, low: float, high: float) -> bool:
    """Returns whether ``value`` is a number in [low, high): not NaN, not a bool, not a string such as YAML's "1e-3"."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value < high


def is_rate(value: object) -> bool:
    """Returns whether ``value`` can be a learning rate, or a decay in proportion to it: a finite number >= 0, or a 0-d
    tensor, which is not read."""
    return value.ndim == 0 if isinstance(value, Tensor) else within(value, 0, math.inf)


def is_beta(value: object) -> bool:
    """Returns whether ``value`` can be the decay of an average: a number in [0, 1), or a 0-d tensor, which is not
    read."""
    return value.ndim == 0 if isinstance(value, Tensor) else within(value, 0, 1)


def are_betas(value: object) -> bool:
    """Returns whether ``value`` are the decays of two averages."""
    return isinstance(value, Sequence) and len(value) == 2 and all(map(is_beta, value))


def exact(value: float | Tensor) -> float | Tensor:
    """Returns a number that further arithmetic takes as Python would: a tensor in host memory is read, one on a device
    is float64 there and is not read."""
    if not isinstance(value, Tensor):
        return value
    return float(value) if value.device.type == "cpu" else value.double()


def weight(value: float | Tensor, like: Tensor) -> Any:
    """Returns ``value``, of ``exact``, as ``like.lerp`` takes it: a number, or a tensor of the dtype of ``like``."""
    return value.to(like.dtype) if isinstance(value, Tensor) else value


def is_key(value: object, table: Container[str]) -> bool:
    """Returns whether ``value`` is a name in ``table``; what YAML may have in a name's place cannot even be looked
    up."""
    return isinstance(value, str) and value in table


def are_counts(value: object, low: int) -> bool:
    """Returns whether ``value`` is a list of integers of at least ``low``, not an empty one."""
    return isinstance(value, Sequence) and len(value) > 0 and all(is_count(item, low) for item in value)


def is_count(value: object, low: int) -> bool:
    """Returns whether ``value`` is an integer of at least ``low``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= low
