"""Many stretches zeroed in one launch: the same bits as slice after slice."""

from __future__ import annotations

import pytest
import torch

from vescale.kernels.pieces import CHUNK, Pieces


def _zeroed() -> None:
    for ranges in (((100, 100 + CHUNK + 1), (5, 20), (8000, 8000)), ((64, 5008), (5024, 5040)), ()):
        pieces, x = Pieces(ranges), torch.randn(9000)
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            wanted = x.to(dtype)
            results = [wanted.clone(), wanted.clone()]
            pieces.zero_triton(results[0])
            pieces.zero_torch(results[1])
            for start, stop in ranges:
                wanted[start:stop] = 0
            assert torch.equal(results[0], wanted) and torch.equal(results[1], wanted)


def test_ranges_are_zeroed_and_nothing_else(interpreter) -> None:
    interpreter.run(_zeroed)


def test_what_does_not_fit_is_refused() -> None:
    for ranges in ([(0, 4), (3, 8)], [(-1, 3)], [(5, 4)]):
        with pytest.raises(ValueError, match="expected ranges apart from each other, got"):
            Pieces(ranges)
    for x in (torch.zeros(7), torch.zeros(4, 4), torch.zeros(16)[::2]):
        with pytest.raises(ValueError, match="a contiguous flat tensor of at least 8 elements, got"):
            Pieces([(4, 8)]).zero_(x)
    x = torch.ones(8)
    Pieces([(4, 8)]).zero_(x)
    assert x.tolist() == [1.0] * 4 + [0.0] * 4
