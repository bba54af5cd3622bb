"""Kronecker: what Shampoo and SOAP share: b x b blocks, and the statistics of a block's rows and columns.

A matrix of 5 x 7 in blocks of 3 x 3; those at the edge are blocks of their own, smaller ones::

    3 x 3   3 x 3   3 x 1        left (rows)     L <- beta L + (1 - beta) G G^T      (3, 3), for the lower ones (2, 2)
    2 x 3   2 x 3   2 x 1        right (columns) R <- beta R + (1 - beta) G^T G      (3, 3), for the last ones (1, 1)
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimizers.fields import exact, weight


def kronecker_block(owner: object, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Returns the block of a matrix, or of a stack of them, of which no block spans two.

    Args:
        owner: The rule, for the message.
        shape: Of the whole parameter.
        size: Rows and columns of a block at most.

    Raises:
        ValueError: If the parameter is neither a matrix nor a stack of matrices.
    """
    if len(shape) == 2:
        return size, size
    if len(shape) == 3:
        # Within a stack rows are cut evenly, or a block would reach into the next matrix.
        rows = _divisor(shape[1], size)
        return 1, rows, size if rows > 1 else _divisor(shape[2], size)
    name = type(owner).__name__
    raise ValueError(f"{name}: expected a matrix (m, n) or a stack of them (E, m, n), got shape {tuple(shape)}")


def _divisor(length: int, most: int) -> int:
    """Returns the largest divisor of ``length`` up to ``most``; 1 for a length of zero."""
    return next((size for size in range(min(length, most), 1, -1) if length % size == 0), 1)


def average(old: Tensor, new: Tensor, beta: float | Tensor) -> Tensor:
    """Returns ``beta old + (1 - beta) new``, as a new tensor; ``beta`` is a number below 1 or a 0-d tensor."""
    return old.lerp(new, weight(1 - exact(beta), old))


def followed(old: Tensor, rows: Tensor, beta: float) -> Tensor:
    """Returns ``beta old + (1 - beta) rows rows^T``, without the factor for a beta of 1, as a new tensor, in one pass.

    Args:
        old: (B, d, d) float32.
        rows: (B, d, k) float32.
        beta: Decay of the average.
    """
    return torch.baddbmm(old, rows, rows.mT, beta=beta, alpha=1 if beta == 1 else 1 - beta)


def square_average(old: Tensor, new: Tensor, beta: float | Tensor) -> Tensor:
    """Returns ``beta old + (1 - beta) new^2`` as a new tensor; ``beta`` is a number below 1 or a 0-d tensor."""
    kept = exact(beta)
    if isinstance(kept, Tensor):
        return (old * kept).addcmul_(new, new * (1 - kept))
    return (old * kept).addcmul_(new, new, value=1 - kept)


def correction(beta: float | Tensor, steps: Tensor) -> Tensor:
    """Returns what an average from zero sums to after that many steps, () float32; 1 for a number 1: a sum."""
    kept = exact(beta)
    if isinstance(kept, Tensor):
        return (1 - kept**steps).to(steps.dtype)
    return torch.ones_like(steps) if kept == 1 else 1 - kept**steps


def size_of(blocks: Tensor) -> Tensor:
    """Returns the Frobenius norm of each block, (B, 1, 1)."""
    return torch.linalg.matrix_norm(blocks, keepdim=True)
