"""Many stretches in one launch: the same bits as slices copied one by one."""

from __future__ import annotations

import pytest
import torch

from vescale.kernels.pieces import CHUNK, Pieces

MOVES = ((0, 9000, CHUNK + 3), (7000, 0, 100), (77, 77, 0), (7001, 201, 1), (32, 320, 4096))
SIZE = 9000 + CHUNK + 3


def _copies() -> None:
    torch.manual_seed(0)
    for moves in (MOVES, ((64, 32, 5000), (0, 16, 16)), ()):
        pieces = Pieces(moves)
        for source, to in (
            (torch.float32, torch.bfloat16),
            (torch.bfloat16, torch.float32),
            (torch.uint8, torch.uint8),
        ):
            for scale in (None,) if to is torch.uint8 else (None, 0.3, torch.tensor(0.3)):
                x = torch.randint(0, 99, (SIZE,)).to(source)
                results = [torch.full((SIZE,), 7).to(to) for _ in range(3)]
                pieces.copy_triton(x, results[0], scale=scale)
                pieces.copy_torch(x, results[1], scale=scale)
                for first, at, size in moves:
                    piece = x[first : first + size]
                    results[2][at : at + size] = piece if scale is None else piece.float() * torch.as_tensor(scale)
                assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[2])


def test_pack_cast_and_scale(interpreter) -> None:
    interpreter.run(_copies)


def _in_place() -> None:
    ranges = ((5, 20), (100, 100 + CHUNK + 1), (8000, 8000))
    pieces, x = Pieces.within(ranges), torch.randn(9000)
    for zeroed, run in ((x.clone(), pieces.zero_triton), (x.clone(), pieces.zero_torch)):
        run(zeroed)
        wanted = x.clone()
        for start, stop in ranges:
            wanted[start:stop] = 0
        assert torch.equal(zeroed, wanted)
    doubled = x.clone()
    pieces.copy_triton(doubled, doubled, scale=2.0)
    assert torch.equal(doubled, x + (x - wanted))
    sums = torch.stack([x[start:stop].double().square().sum() for start, stop in ranges[:2]])
    for run in (pieces.square_sums_triton, pieces.square_sums_torch):
        torch.testing.assert_close(run(x).double(), sums, rtol=1e-5, atol=0)
    assert Pieces(()).square_sums_triton(x).shape == (0,)


def test_zero_scale_and_norm_of_ranges(interpreter) -> None:
    interpreter.run(_in_place)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"write no element twice, got \(0, 3, 5\) with \[0, 4\)"):
        Pieces([(0, 0, 4), (0, 3, 5)])
    with pytest.raises(ValueError, match="write no element twice"):
        Pieces([(-1, 0, 4)])
    pieces = Pieces([(0, 4, 4)])
    with pytest.raises(ValueError, match="of at least 8 elements, got"):
        pieces.copy(torch.zeros(8), torch.zeros(7))
    with pytest.raises(ValueError, match="expected float32, bfloat16 or float16"):
        pieces.copy(torch.zeros(8, dtype=torch.uint8), torch.zeros(8))
    with pytest.raises(ValueError, match="flat"):
        pieces.zero_(torch.zeros(4, 4))
    x = torch.ones(8)
    pieces.scale_(x, 3.0)
    pieces.zero_(x)
    assert x.tolist() == [1.0] * 4 + [0.0] * 4 and pieces.square_sums(x).tolist() == [4.0]
