"""Kronecker: what Shampoo and SOAP share: b x b blocks, and the statistics of a block's rows and columns.

A matrix of 5 x 7 in blocks of 3 x 3; those at the edge are blocks of their own, smaller ones::

    3 x 3   3 x 3   3 x 1        left (rows)     L <- beta L + (1 - beta) G G^T      (3, 3), for the lower ones (2, 2)
    2 x 3   2 x 3   2 x 1        right (columns) R <- beta R + (1 - beta) G^T G      (3, 3), for the last ones (1, 1)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optimizers.fields import exact
from optimizers.kernels.adamw import adamw_each_
from optimizers.symmetric import symmetric_


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


def follow_(average: Tensor, rows: Tensor, beta: float) -> None:
    """Sets ``average`` to ``beta average + (1 - beta) rows rows^T``, without the factor for a beta of 1.

    Args:
        average: (B, d, d) float32, symmetric.
        rows: (B, d, k) float32.
        beta: Decay of the average.
    """
    symmetric_(average, rows, rows.mT, beta=beta, alpha=1 if beta == 1 else 1 - beta)


def adam_(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    step: Tensor,
    *,
    betas: Sequence[float | Tensor],
    eps: float,
    out: Tensor,
) -> Tensor:
    """Moves both moments in place and returns ``mhat / (sqrt(vhat) + eps)``, Adam's step, in one pass.

    It is the step of AdamW, by a learning rate of -1, of a parameter of zeros.

    Args:
        exp_avg: (B, m, n) float32.
        exp_avg_sq: (B, m, n) float32.
        grad: (B, m, n) float32, left as it is.
        step: () float32, the steps before this one, by which the moments are corrected; infinity: not at all.
        betas: Decay of the two moments per step, each in [0, 1); numbers or 0-d tensors.
        eps: Added to the root of the second moment, in units of the gradient.
        out: (B, m, n) float32 of any contents, where the step goes: memory that is in the cache already.
    """
    moments = [exp_avg], [exp_avg_sq]
    adamw_each_([out.zero_()], [grad], *moments, [step], lr=-1.0, betas=betas, eps=eps, weight_decay=0.0)
    return out


def correction(beta: float | Tensor, steps: Tensor) -> Tensor:
    """Returns what an average from zero sums to after that many steps, () float32; 1 for a number 1: a sum."""
    kept = exact(beta)
    if isinstance(kept, Tensor):
        return (1 - kept**steps).to(steps.dtype)
    return torch.ones_like(steps) if kept == 1 else 1 - kept**steps


def size_of(blocks: Tensor) -> Tensor:
    """Returns the Frobenius norm of each block, (B, 1, 1)."""
    return torch.linalg.matrix_norm(blocks, keepdim=True)
