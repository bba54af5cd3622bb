"""What a field of a config may be; a bool is no number here."""

from __future__ import annotations

import math


def is_count(value: object) -> bool:
    """Returns whether ``value`` is an integer >= 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_positive(value: object) -> bool:
    """Returns whether ``value`` is a finite number > 0."""
    return _is_finite(value) and value > 0  # type: ignore[operator]


def is_not_negative(value: object) -> bool:
    """Returns whether ``value`` is a finite number >= 0."""
    return _is_finite(value) and value >= 0  # type: ignore[operator]


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
