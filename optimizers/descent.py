"""Descent: the last, element-wise part of a rule over blocks: decoupled decay and a step along the direction."""

from __future__ import annotations

import torch
from torch import Tensor

from optimizers.fields import exact
from optimizers.in_cache import in_cache


def descend(
    param: Tensor,
    direction: Tensor,
    *,
    lr: float | Tensor,
    weight_decay: float | Tensor,
    skip: Tensor | None,
    cautious: bool = False,
) -> None:
    """Decays ``param`` and steps it along ``direction``, in place: ``w <- w (1 - lr weight_decay) - lr direction``.

    Args:
        param: (n,) float32, a flat run.
        direction: (n,) of any float dtype.
        lr: Parameter units per step; a number or a 0-d tensor on the parameter's device.
        weight_decay: Fraction of the parameter removed per step and per unit of ``lr``; a number or a 0-d tensor.
        skip: None, or () float32: 1.0 writes nothing.
        cautious: Decay only the elements that the step makes smaller (arXiv 2510.12402, algorithm 1).
    """
    lr, weight_decay = exact(lr), exact(weight_decay)
    kept = 1 - lr * weight_decay
    for some, along in in_cache(param, direction):
        _descend(some, along, lr=lr, kept=kept, skip=skip, cautious=cautious)


def _descend(
    param: Tensor,
    direction: Tensor,
    *,
    lr: float | Tensor,
    kept: float | Tensor,
    skip: Tensor | None,
    cautious: bool,
) -> None:
    """``descend``, of a stretch; ``kept`` is what the decay leaves of a parameter."""
    if cautious:
        # Signs, so that a product too small for float32 does not count as agreement.
        against = torch.sign(direction.to(param.dtype)) * torch.sign(param) < 0
        stepped = torch.where(against, param, param * kept)
    else:
        stepped = torch.mul(param, kept, out=param if skip is None else None)
    # param is float32, so these sums are too, whatever the wire. In bfloat16 the vector loop of a multiply-add and
    # its tail round differently, and where a run was cut would show.
    if isinstance(lr, Tensor):
        stepped.addcmul_(direction, lr.to(stepped.dtype), value=-1)
    else:
        stepped.add_(direction, alpha=-lr)
    if skip is not None:
        torch.where(skip > 0, param, stepped, out=param)
    elif cautious:
        param.copy_(stepped)
