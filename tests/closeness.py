"""How far numbers are from what they should be; what the tests of kernels measure by."""

from __future__ import annotations

import torch
from torch import Tensor


def worst(x: Tensor, exact: Tensor) -> float:
    """Returns the largest error, relative to the largest element; zero where there is none."""
    if x.numel() == 0:
        assert x.shape == exact.shape
        return 0.0
    return float((x.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-300))


def apart(x: Tensor, y: Tensor) -> float:
    """Returns how far two float32 tensors are apart, in units in the last place of the larger; NaN counts as equal."""
    if x.numel() == 0:
        return 0.0
    size = torch.maximum(x.abs(), y.abs())
    ulp = torch.nextafter(size, torch.tensor(torch.inf)) - size
    return float(((x.double() - y.double()).abs() / ulp.double()).nan_to_num().max())
