"""Gradient norms that are complete.

Over any mix of meshes, dtypes, plain parameters and empty shards, in one collective per mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from vescale import collectives
from vescale.ragged_tensor import RaggedTensor


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    scaled: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Scales gradients in place so that their joint norm is at most ``max_norm``; returns the norm before.

    Args:
        parameters: Parameters, those without a gradient are passed over; sharded ones count once, plain ones are taken
            as equal on every rank. One with an attribute ``part_of`` is rows of a larger one whose other rows are with
            the other ranks of ``part_of.group``.
        max_norm: Upper bound of the norm, in units of the gradient; ``inf`` only measures.
        norm_type: Order of the norm, > 0; ``inf`` for the largest magnitude.
        scaled: The parameters whose gradients are scaled, of ``parameters``; None: all.

    Returns:
        () float32, a plain tensor, equal on every rank.

    Raises:
        ValueError: If ``max_norm`` is negative or ``norm_type`` not positive.
    """
    if not (_is_number(max_norm) and max_norm >= 0 and _is_number(norm_type) and norm_type > 0):
        raise ValueError(
            f"clip_grad_norm_: expected max_norm >= 0 and norm_type > 0, got {max_norm!r} and {norm_type!r}"
        )
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    params = [param for param in params if param.grad is not None]
    grads: list[torch.Tensor] = [param.grad for param in params]  # type: ignore[misc]
    norm = grad_norm(grads, norm_type, parts=[getattr(param, "part_of", None) for param in params])
    if not math.isinf(max_norm):
        # 1e-6 as in torch.nn.utils.clip_grad_norm_. No branch on the norm: nothing here reads the device.
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        targets = params if scaled is None else scaled
        locals_ = [_local(param.grad) for param in targets if param.grad is not None]
        if locals_:
            torch._foreach_mul_(locals_, scale)
    return norm


@torch.no_grad()
def non_finite(norm: torch.Tensor) -> torch.Tensor:
    """Returns the flag that makes ``Optimizer.step(skip=...)`` write nothing when the norm is not finite.

    Args:
        norm: () float32, as ``clip_grad_norm_`` returns it: NaN or infinite if one gradient anywhere is.

    Returns:
        () float32 on the same device, 1.0 or 0.0; the device is not read.
    """
    return 1.0 - torch.isfinite(norm).to(torch.float32)


@torch.no_grad()
def grad_norm(grads: Sequence[torch.Tensor], norm_type: float = 2.0, *, parts: Sequence[Any] = ()) -> torch.Tensor:
    """Returns the joint norm of ``grads``, () float32, complete on every rank.

    Args:
        grads: Sharded or plain tensors.
        norm_type: Order of the norm, > 0.
        parts: ``part_of`` of each parameter, or None; empty: none has one.
    """
    powers = {
        groups: [_power(tensor, norm_type) for tensor in members]
        for groups, members in _by_groups(grads, parts or [None] * len(grads)).items()
    }
    return _complete(powers, norm_type)


class NormInParts:
    """The joint 2-norm of gradients that are never there all at once: ``add`` some, and so on, then ``take`` the norm.

    Every rank adds parameters of the same meshes. Nothing is communicated before ``take``, which no rank leaves out.
    """

    def __init__(self) -> None:
        self._powers: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}

    @torch.no_grad()
    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Takes the gradients of ``parameters`` into account; they are not kept, and may be freed or changed."""
        params = [param for param in parameters if param.grad is not None]
        grads: list[torch.Tensor] = [param.grad for param in params]  # type: ignore[misc]
        parts = [getattr(param, "part_of", None) for param in params]
        for groups, members in _by_groups(grads, parts).items():
            self._powers.setdefault(groups, []).extend(_power(tensor, 2.0) for tensor in members)

    @torch.no_grad()
    def take(self) -> torch.Tensor:
        """Returns the norm of what was added since the last time, () float32, complete on every rank."""
        powers, self._powers = self._powers, {}
        return _complete(powers, 2.0)


def _complete(powers: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]], norm_type: float) -> torch.Tensor:
    """The norm of all ranks' gradients, from the powers of this rank's by the groups over which they add up."""
    device = next((of[0].device for of in powers.values() if of), torch.device("cpu"))
    total = torch.zeros((), dtype=torch.float32, device=device)
    for groups, members in powers.items():
        part = _combine(members, norm_type)
        for group in groups:
            collectives.all_reduce(
                part, op=dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, group=group
            )
        total = _combine([total, part], norm_type)
    return total if math.isinf(norm_type) else total ** (1 / norm_type)


def _by_groups(
    grads: Sequence[torch.Tensor], parts: Sequence[Any]
) -> dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]]:
    """Local gradients by the groups over which their powers add up: that of their cut, then that of their parts."""
    found: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for grad, part in zip(grads, parts, strict=True):
        cut = grad.groups if isinstance(grad, RaggedTensor) else _shard_groups(grad)
        found.setdefault(cut + ((part.group,) if part is not None else ()), []).append(_local(grad))
    return found


def _shard_groups(grad: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups over which a stock DTensor is cut; none for a plain tensor.

    Raises:
        ValueError: If it is a partial sum, whose norm is not known.
    """
    if not isinstance(grad, DTensor):
        return ()
    if any(placement.is_partial() for placement in grad.placements):
        raise ValueError(f"clip_grad_norm_: a gradient is {grad.placements}, a partial sum; redistribute it first")
    axes = (axis for axis, placement in enumerate(grad.placements) if not placement.is_replicate())
    return tuple(grad.device_mesh.get_group(axis) for axis in axes)


def _power(local: torch.Tensor, p: float) -> torch.Tensor:
    """Sum of |x|**p, or the largest |x|; zero for an empty run."""
    if local.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=local.device)
    norm = torch.linalg.vector_norm(local, p, dtype=torch.promote_types(local.dtype, torch.float32)).float()
    return norm if math.isinf(p) else norm**p


def _combine(parts: list[torch.Tensor], p: float) -> torch.Tensor:
    stacked = torch.stack(parts)
    return stacked.amax() if math.isinf(p) else stacked.sum()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
