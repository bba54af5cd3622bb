"""The dynamic map in a kernel: what ``optimizers.quantize`` does by tables, with a search by arithmetic.

Every decade from 1e-7 to 1 is cut into twice as many intervals as the one below, whose centres are the numbers (arXiv
2110.02861, section 2.2, figure 2)::

    signed      code 0      126    127    128    129..130     131..134    191..254    255
                -0.993   -5.5e-7    0   5.5e-7  3.3, 7.8e-6    1e-5..     0.107..     1.0
    unsigned    code 0     1..2         3..6         7..14     127..254    255
                0       3.3, 7.8e-7   2.1e-6..     1.6e-5..    0.104..     1.0

The guess of the arithmetic is at most one off, and the true edges beside it settle that.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from optimizers.kernels.language import jit, tl
from optimizers.quantize import dynamic_map

ZERO = 127  # code of zero in the signed map; in the unsigned one it is 0


@functools.cache
def tables(device: torch.device) -> Tensor:
    """Returns what the kernels read, (4, 256) float32: numbers and ends of the signed map, then of the unsigned.

    A code ends half-way to the next number, the last one never.
    """
    rows = []
    for values in (dynamic_map(True), dynamic_map(False)):
        rows += [values, torch.cat([(values[:-1] + values[1:]) / 2, torch.tensor([torch.inf])])]
    return torch.stack(rows).to(device)


@jit
def decoded(codes, numbers):
    """The numbers of ``codes``, from their table."""
    return tl.load(numbers + codes.to(tl.int64))


@jit
def encoded(x, edges, SIGNED: tl.constexpr):
    """The codes of the nearest numbers, int32, the larger one where two are equally near.

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
    place = tl.minimum(tl.where(place >= 0.0, place, 0.0), count - 1.0)  # a NaN is no index: it becomes 0
    if SIGNED:
        code = tl.where(x < 0, 127.0 - count - place, 127.0 + count + place).to(tl.int32)
    else:
        code = (count - 1.0 + place).to(tl.int32)
    code += (x >= tl.load(edges + code.to(tl.int64))).to(tl.int32)
    below = tl.maximum(code - 1, 0)
    return code - ((x < tl.load(edges + below.to(tl.int64))) & (code > 0)).to(tl.int32)
