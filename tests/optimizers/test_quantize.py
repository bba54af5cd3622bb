"""Bytes: the published map, the nearest code, and what is written is what was read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optimizers.quantize import BLOCK, dequantize, dynamic_map, nearest, quantize


def spread(blocks: int, seed: int = 0) -> Tensor:
    """Numbers of eight decades in every block."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(blocks * BLOCK, generator=generator)
    return x * 10.0 ** (-8 * torch.rand(blocks * BLOCK, generator=generator))


@pytest.mark.parametrize("signed", [True, False])
def test_the_maps_are_the_published_ones(signed: bool) -> None:
    from torchao.optim.quant_utils import create_dynamic_map

    assert torch.equal(dynamic_map(signed), torch.tensor(create_dynamic_map(signed)))


@pytest.mark.parametrize("signed", [True, False])
def test_the_nearest_code_is_the_nearest(signed: bool) -> None:
    values = dynamic_map(signed)
    ends = (values[:-1] + values[1:]) / 2
    around = torch.cat([values, ends, ends.nextafter(torch.tensor(-2.0)), ends.nextafter(torch.tensor(2.0))])
    x = torch.cat([around, spread(64).clamp(-1, 1), torch.linspace(-1, 1, 9999)])
    x = x.clamp(-1, 1) if signed else x.abs().clamp(max=1)
    expected = torch.bucketize(x, ends, right=True)
    assert torch.equal(nearest(x, signed=signed).long(), expected)


def test_what_was_read_is_written_again() -> None:
    """Also where the largest number of a block is negative: the published scheme shrinks it by 0.7 % each time."""
    for signed in (True, False):
        x = spread(32) if signed else spread(32).abs()
        codes, scale = quantize(x, signed=signed)
        again, rescale = quantize(dequantize(codes, scale, signed=signed), signed=signed)
        assert torch.equal(again, codes) and torch.equal(rescale, scale)
    x = -torch.ones(BLOCK)
    published = dequantize(*quantize(x, signed=True, signed_scale=False), signed=True)
    assert torch.equal(dequantize(*quantize(x, signed=True), signed=True), x) and published[0] > -0.994


def test_what_is_positive_stays_positive() -> None:
    x = torch.full((BLOCK,), 1e-12)
    x[0] = 1.0
    kept, published = (dequantize(*quantize(x, signed=False, floor=floor), signed=False) for floor in (True, False))
    assert (kept > 0).all() and int((published > 0).sum()) == 1


@pytest.mark.parametrize("signed", [True, False])
def test_zeros_and_denormal_numbers_are_zeros(signed: bool) -> None:
    for x in (torch.zeros(BLOCK), torch.full((BLOCK,), 1e-40)):
        codes, scale = quantize(x, signed=signed)
        assert scale.item() == 0 and torch.equal(dequantize(codes, scale, signed=signed), torch.zeros(BLOCK))
        assert torch.equal(codes, torch.full((BLOCK,), 127 if signed else 0, dtype=torch.uint8))
