"""A checksum is the same for any cut, and no change of the values escapes it."""

from __future__ import annotations

import pytest
import torch

from vescale.checksum import add, checksum

VALUES = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
WHOLE = checksum(VALUES, name="w")


@pytest.mark.parametrize("edges", [[0], [1, 65_536, 65_537], [99_999, 99_999, 150_000]])
def test_the_sum_over_any_cut_is_the_whole(edges: list[int]) -> None:
    cuts = [0, *edges, len(VALUES)]
    parts = [checksum(VALUES[a:b], name="w", first=a) for a, b in zip(cuts, cuts[1:], strict=False)]
    assert add(*parts) == WHOLE and 0 <= WHOLE < 2**64


def test_a_changed_bit_two_that_change_places_and_another_name_are_seen() -> None:
    flipped = VALUES.clone()
    flipped.view(torch.int32)[123_456] ^= 1
    swapped = VALUES.clone()
    swapped[[5, 70_000]] = VALUES[[70_000, 5]]
    others = [checksum(flipped, name="w"), checksum(swapped, name="w"), checksum(VALUES, name="v")]
    assert len({WHOLE, *others}) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.bool, torch.int64, torch.float64])
def test_every_width_and_shape_is_taken_as_bits(dtype: torch.dtype) -> None:
    values = (VALUES[:600] * 100).clamp(min=0).to(dtype).view(20, 30)
    assert checksum(values, name="w") == checksum(values.flatten(), name="w")
    assert checksum(values.t(), name="w") != checksum(values, name="w")
    assert checksum(values[:0], name="w") == 0
    assert checksum(torch.tensor(0.0), name="w") != checksum(torch.tensor(-0.0), name="w")


def test_the_sums_never_change() -> None:
    """Records of old runs are compared with new ones."""
    assert f"{checksum(torch.arange(1000), name='model.a'):016x}" == "2478b1a873a38301"
