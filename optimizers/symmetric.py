"""Symmetric: products of matrices whose result is symmetric, so that what is above its diagonal need not be computed.

A result of 512 x 512 in four panels of columns, each computed from the diagonal down and copied to its mirror image::

    1 . . .        computed: 4 + 3 + 2 + 1 tiles of 128 x 128, of 16
    1 2 . .        two panels: 3 of 4 tiles
    1 2 3 .
    1 2 3 4

Meant for Grams ``G G^T``. Products of matrices that commute are symmetric too, but each of their halves is rounded in
its own way, and an iteration that takes one for the other loses digits.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

# Columns of a panel at least: with 64, products are slower by as much as they are fewer (x86_64 with AVX-512, MKL).
PANEL = 128


def symmetric_(out: Tensor, left: Tensor, right: Tensor, *, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    """Sets ``out`` to ``beta out + alpha left right``, which is symmetric, and returns it.

    On an accelerator, where many small launches cost more than they save, all of it is computed.

    Args:
        out: (B, d, d) float32, symmetric; with a beta of 0 of any contents. Neither ``left`` nor ``right``.
        left: (B, d, k) float32.
        right: (B, k, d) float32.
        beta: Factor of what ``out`` was.
        alpha: Factor of the product.
    """
    size = out.shape[-1]
    if out.device.type != "cpu" or size < 2 * PANEL:
        return out.baddbmm_(left, right, beta=beta, alpha=alpha)
    width = -(-size // (size // PANEL))
    edges = [*range(0, size, width), size]
    for start, stop in pairwise(edges):
        out[:, start:, start:stop].baddbmm_(left[:, start:], right[:, :, start:stop], beta=beta, alpha=alpha)
    for start, stop in pairwise(edges[:-1]):
        out[:, start:stop, stop:].copy_(out[:, stop:, start:stop].mT)
    return out
