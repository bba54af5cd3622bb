"""QK-clip's factors, and which rows take which power of them."""

from __future__ import annotations

import math

import pytest
import torch

from optimizers import QKClip


def test_only_heads_above_the_threshold_shrink_and_by_what_they_exceed_it() -> None:
    seen = torch.tensor([[50.0, 100.0, 400.0], [-math.inf, math.nan, math.inf]])
    assert QKClip().factors(seen).tolist() == [[1.0, 1.0, 0.25], [1.0, 1.0, 1.0]]
    assert QKClip(threshold=25.0).factors(seen[0]).tolist() == [0.5, 0.25, 0.0625]


def test_rows_take_the_power_that_is_said_and_sharing_heads_the_smallest() -> None:
    clip, factors = QKClip(), torch.tensor([1.0, 0.25, 0.0625, 1.0])
    assert clip.rows(factors, shared=1, pieces=((2, 0.5),)).tolist() == [1, 1, 0.5, 0.5, 0.25, 0.25, 1, 1]
    assert clip.rows(factors, shared=2, pieces=((2, 0.5),)).tolist() == [0.5, 0.5, 0.25, 0.25]
    assert clip.rows(factors[1:2], shared=1, pieces=((1, 0.5), (2, 1.0), (1, 0.0))).tolist() == [0.5, 0.25, 0.25, 1]


def test_a_threshold_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="QKClip: threshold: expected a number > 0, got 0"):
        QKClip(threshold=0)
