"""The dynamic map: 256 numbers in [-1, 1] or [0, 1] that are dense where Adam's moments are, and the nearest one.

Every decade from 1e-7 to 1 is cut into twice as many intervals as the one below, whose centres are the numbers (arXiv
2110.02861, section 2.2, figure 2)::

    signed      code 0      126    127    128    129..130     131..134    191..254    255
                -0.993   -5.5e-7    0   5.5e-7  3.3, 7.8e-6    1e-5..     0.107..     1.0
    unsigned    code 0     1..2         3..6         7..14     127..254    255
                0       3.3, 7.8e-7   2.1e-6..     1.6e-5..    0.104..     1.0

Rounding is to the nearest number, half-way downwards, and exact: a first guess by arithmetic, or by a table of the
leading bits, is at most one off, and one comparison with the true edge settles it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from optimizers.kernels.language import jit, tl

DECADES = 7  # bits of the exponent: bitsandbytes 0.50.2 functional.py create_dynamic_map, max_exponent_bits
ZERO = 127  # code of zero in the signed map; in the unsigned one it is 0
# Leading bits of a float32 that choose a cell of the twin's table: sign, exponent and nine bits of the fraction. The
# narrowest interval, 0.7 % wide, is three cells, so that a cell never has two edges.
LEADING = 18


@functools.cache
def codebook(signed: bool) -> Tensor:
    """Returns the numbers of the map, (256,) float32, ascending, on CPU; the same bits as bitsandbytes and torchao."""
    numbers = [torch.tensor([0.0, 1.0])]
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1, (1 if signed else 2) * 2**decade + 1)
        centres = 10 ** (decade - DECADES + 1) * ((edges[:-1] + edges[1:]) / 2)
        numbers += [centres, -centres] if signed else [centres]
    return torch.cat(numbers).sort().values


@functools.cache
def edges_of(signed: bool) -> Tensor:
    """Returns the upper edge of each code, (256,) float32: half-way to the next number, infinite for the last."""
    numbers = codebook(signed).double()
    return torch.cat([((numbers[1:] + numbers[:-1]) / 2).float(), torch.tensor([torch.inf])])


@functools.cache
def tables(device: torch.device) -> Tensor:
    """Returns what the kernels read, (4, 256) float32: numbers and edges of the signed map, then of the unsigned."""
    rows = [table(signed) for signed in (True, False) for table in (codebook, edges_of)]
    return torch.stack(rows).to(device)


@functools.cache
def _cells(signed: bool) -> Tensor:
    """The code of the lowest number of each cell of leading bits, (2**LEADING,) int32."""
    bits = torch.arange(2**LEADING, dtype=torch.int64) << (32 - LEADING)
    negative = bits >= 2**31
    lowest = torch.where(negative, bits + (1 << (32 - LEADING)) - 1 - 2**32, bits).int().view(torch.float32)
    return torch.bucketize(lowest.nan_to_num(), edges_of(signed)).clamp(max=255).int()


def decode(codes: Tensor, signed: bool) -> Tensor:
    """Returns the numbers of ``codes``, (n,) uint8, as (n,) float32, on CPU."""
    return codebook(signed).index_select(0, codes.int())


def encode(x: Tensor, signed: bool) -> Tensor:
    """Returns the codes of the nearest numbers, (n,) uint8, on CPU.

    Args:
        x: (n,) float32 in [-1, 1], or [0, 1].
        signed: Which map.
    """
    cell = x.view(torch.int32) >> (32 - LEADING)
    cell &= 2**LEADING - 1
    code = _cells(signed).index_select(0, cell)
    code += x > edges_of(signed).index_select(0, code)
    return code.to(torch.uint8)


@jit
def decoded(codes, numbers):
    """The numbers of ``codes``, from their table."""
    return tl.load(numbers + codes.to(tl.int64))


@jit
def encoded(x, edges, SIGNED: tl.constexpr):
    """The codes of the nearest numbers, int32.

    The decade says where its codes begin and how many they are, the place in the decade which of them.
    """
    magnitude = tl.abs(x)
    scale, count = tl.full(x.shape, 1e6, tl.float32), tl.full(x.shape, 1.0, tl.float32)
    scale, count = tl.where(magnitude >= 1e-6, 1e5, scale), tl.where(magnitude >= 1e-6, 2.0, count)
    scale, count = tl.where(magnitude >= 1e-5, 1e4, scale), tl.where(magnitude >= 1e-5, 4.0, count)
    scale, count = tl.where(magnitude >= 1e-4, 1e3, scale), tl.where(magnitude >= 1e-4, 8.0, count)
    scale, count = tl.where(magnitude >= 1e-3, 1e2, scale), tl.where(magnitude >= 1e-3, 16.0, count)
    scale, count = tl.where(magnitude >= 1e-2, 1e1, scale), tl.where(magnitude >= 1e-2, 32.0, count)
    scale, count = tl.where(magnitude >= 1e-1, 1e0, scale), tl.where(magnitude >= 1e-1, 64.0, count)
    if not SIGNED:
        count = 2.0 * count
    place = tl.floor((magnitude * scale - 0.1) * (count / 0.9))
    place = tl.minimum(tl.maximum(place, 0.0), count - 1.0)  # also what makes a NaN a code
    if SIGNED:
        code = tl.where(x < 0, 127.0 - count - place, 127.0 + count + place).to(tl.int32)
    else:
        code = (count - 1.0 + place).to(tl.int32)
    code += (x > tl.load(edges + code.to(tl.int64))).to(tl.int32)
    below = tl.maximum(code - 1, 0)
    return code - ((x <= tl.load(edges + below.to(tl.int64))) & (code > 0)).to(tl.int32)
