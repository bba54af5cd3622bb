"""Quantize: 256 float32 numbers as 256 bytes and one scale.

The byte is an index into a *dynamic map*: seven decades, the upper ones cut finer (arXiv 2110.02861, section 2.2)::

    signed     127 negative values, 0 (code 127), 128 positive ones; from -0.993 over 5.5e-7 to 1.0
    unsigned   0 (code 0), 255 positive ones; from 3.25e-7, then 7.75e-7, to 1.0

A block of ``BLOCK`` numbers is divided by its scale and each quotient becomes the nearest value of the map. Two things
differ from the published scheme, because they go wrong there; ``signed_scale=False`` and ``floor=False`` give it back:

- The map has no -1.0, so a block whose largest number is negative shrinks by 0.7 % each time it is written. Here the
  scale is that number with its sign: it always becomes +1.0, and writing what was read changes nothing.
- A positive second moment may become 0 while its first moment does not, and the step explodes. Here what is positive
  never becomes 0.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

BLOCK = 256  # arXiv 2110.02861 has 2048; bitsandbytes 0.44 and torchao take 256 for optimizers
DECADES = 7  # bitsandbytes/functional.py, create_dynamic_map: max_exponent_bits
TINY = 1e-38  # a scale below this is a denormal number, whose quotients are not numbers to rely on


@functools.cache
def dynamic_map(signed: bool) -> Tensor:
    """Returns the 256 values of a map, ascending, (256,) float32, on the CPU.

    Means of neighbours on a linear grid of each decade, as create_dynamic_map of bitsandbytes/functional.py, bit for
    bit.
    """
    values = [0.0, 1.0]
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (0 if signed else 1)) + 1)
        means = 10.0 ** (decade - DECADES + 1) * ((edges[:-1] + edges[1:]) / 2.0)
        values += means.tolist() + ((-means).tolist() if signed else [])
    return torch.tensor(sorted(values))


@functools.cache
def _tables(signed: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Values; for each upper half of a float32 the code of the least number that has it; the end of each code.

    Two values of a map are further apart than two numbers with neighbouring upper halves: one comparison is left.
    """
    values = dynamic_map(signed)
    ends = (values[:-1] + values[1:]) / 2
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    least = torch.where(halves < 0, halves | 0xFFFF, halves).view(torch.float32)
    first = torch.bucketize(least.nan_to_num(0.0), ends, right=True, out_int32=True)
    ends = torch.cat([ends, torch.tensor([torch.inf])])
    return values.to(device), first.to(device), ends.to(device)


def nearest(x: Tensor, *, signed: bool) -> Tensor:
    """Returns the codes of the values nearest to ``x``, int32, the larger code where two are equally near.

    Args:
        x: (n,) float32 in [-1, 1].
        signed: Which map.
    """
    _, first, ends = _tables(signed, x.device)
    code = first.index_select(0, (x.view(torch.int32) >> 16).add_(2**15))
    return code.add_(x >= ends.index_select(0, code))


def quantize(
    x: Tensor, *, signed: bool, signed_scale: bool = True, floor: bool = True, least: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Returns the codes, (n,) uint8, and one scale per block, (n / 256,) float32.

    Args:
        x: (n,) float32, n a multiple of ``BLOCK``.
        signed: Which map; the unsigned one takes numbers >= 0.
        signed_scale: A block's scale is its number of largest magnitude with its sign, else the magnitude.
        floor: No positive number becomes 0; for the unsigned map.
        least: Scales are at least this. A block with a scale below ``TINY`` is one of zeros, with scale 0.
    """
    blocks = x.view(-1, BLOCK)
    if signed:
        low, high = torch.aminmax(blocks, dim=1)
        scale = torch.where(high >= -low, high, low) if signed_scale else torch.maximum(high, -low)
    else:
        scale = blocks.amax(1)
    scale = scale.clamp(min=least) if least else torch.where(scale.abs() < TINY, 0.0, scale)
    divided = blocks / torch.where(scale == 0, 1.0, scale)[:, None]
    if not least:
        divided = torch.where((scale == 0)[:, None], 0.0, divided)
    codes = nearest(divided.view(-1), signed=signed)
    if floor and not signed:
        codes = torch.maximum(codes, (divided.view(-1) > 0).to(codes.dtype))
    return codes.to(torch.uint8), scale


def dequantize(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """Returns (n,) float32: the value of each code times the scale of its block.

    Args:
        codes: (n,) uint8, n a multiple of ``BLOCK``.
        scale: (n / 256,) float32.
        signed: Which map.
    """
    values, _, _ = _tables(signed, codes.device)
    return values.index_select(0, codes.to(torch.int32)).view(-1, BLOCK).mul_(scale[:, None]).view(-1)
