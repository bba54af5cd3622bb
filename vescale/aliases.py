"""Aliases: parameters and gradients lie in their shards, whatever was assigned to them meanwhile.

``Unit.realias()`` owns the promise; here is how one segment is looked at and put right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vescale.dbuffer import DBuffer
from vescale.member import Member, Segment, home_of
from vescale.ragged_tensor import RaggedTensor


def intact(segment: Segment) -> bool:
    """Whether modules hold the segment's own parameters, these lie in the master shard, and nobody was frozen since.

    Asked before every step, for every parameter: no call per parameter but those that look at it.
    """
    sharded, wholes = segment.sharded, segment.unsharded or segment.sharded
    trains = [param.requires_grad for param in sharded]
    segment.trainable = True in trains
    if trains != [whole.requires_grad for whole in wholes]:
        return False
    for param, whole, member in zip(sharded, wholes, segment.members, strict=True):
        for module, attribute in member.homes:
            held = module._parameters.get(attribute)
            if held is not param and held is not whole:
                return False
    return _lie_in([param._local_tensor for param in sharded], segment.master)  # type: ignore[attr-defined]


def _lie_in(runs: Sequence[torch.Tensor], buffer: DBuffer) -> bool:
    """Whether the runs of all parameters are their runs in a sharded buffer; empty ones lie nowhere, at 0."""
    base, size, dtype = buffer.local.data_ptr(), buffer.local.element_size(), buffer.local.dtype
    expected = [base + start * size if start < stop else 0 for start, stop in buffer.layout.spans]
    return [run.data_ptr() for run in runs] == expected and all([run.dtype is dtype for run in runs])


def realias_param(segment: Segment, index: int, member: Member) -> None:
    """Puts one parameter back into the master shard, with the values it was given.

    Raises:
        ValueError: If a module holds another Parameter, or it has another dtype.
    """
    param, expected = segment.sharded[index], segment.master.run(index)
    for held in strangers(segment, index, member):
        home = home_of(held)
        how = "replaced" if home is None else f"tied to {home.segment.members[home.at].name}"
        raise ValueError(
            f"{member.name} {tuple(param.shape)} was {how} after fully_shard planned it; tie and replace before "
            "the parameters are first asked for, or copy the values in (copy_, load_state_dict)"
        )
    if param.dtype != expected.dtype:
        raise ValueError(f"{member.name} is {param.dtype} in a shard of {expected.dtype}; convert the whole model")
    if param._local_tensor.data_ptr() != expected.data_ptr() and expected.numel():  # type: ignore[attr-defined]
        expected.copy_(param._local_tensor)  # type: ignore[attr-defined]
        param._local_tensor = expected  # type: ignore[attr-defined]


def strangers(segment: Segment, index: int, member: Member) -> list[nn.Parameter]:
    """Parameters that modules hold in the place of this one."""
    known = (segment.sharded[index], segment.unsharded[index] if segment.unsharded else None)
    held = (module._parameters.get(attribute) for module, attribute in member.homes)
    return [param for param in held if param is not None and all(param is not own for own in known)]


def realias_grads(segment: Segment) -> None:
    """Puts gradients that were assigned into the gradient shard; frees it when there are none."""
    grads = [param.grad for param in segment.sharded]
    if all([grad is None for grad in grads]):
        segment.grad = None
        return
    ragged = segment.grad is not None and all([type(grad) is RaggedTensor for grad in grads])
    if not (ragged and _lie_in([grad._local_tensor for grad in grads], segment.grad)):  # type: ignore[union-attr, arg-type]
        _realias_each_grad(segment, grads)


def _realias_each_grad(segment: Segment, grads: Sequence[torch.Tensor | None]) -> None:
    if segment.grad is None:
        segment.grad = segment.master.sibling(segment.master.placement, torch.zeros_like(segment.master.local))
    for index, (param, grad) in enumerate(zip(segment.sharded, grads, strict=True)):
        if grad is None:
            continue
        expected = segment.grad.run(index)
        run = grad._local_tensor if isinstance(grad, RaggedTensor) else None
        if run is None or run.dtype is not expected.dtype or run.data_ptr() != expected.data_ptr():
            copy_in(expected, grad, param, f"{segment.members[index].name}.grad is")
            param.grad = segment.grad.tensor(index)


def copy_in(expected: torch.Tensor, stranger: torch.Tensor, param: Any, what: str) -> None:
    """Copies a stranger's values into the view that belongs there.

    Raises:
        ValueError: If it has another shape or another cut.
    """
    if tuple(stranger.shape) != tuple(param.shape):
        raise ValueError(f"{what} a tensor of shape {tuple(stranger.shape)}, expected {tuple(param.shape)}")
    with torch.no_grad():
        if not isinstance(stranger, RaggedTensor):
            expected.copy_(stranger.detach().reshape(-1)[slice(*param.run)])
        elif stranger.placements == param.placements:
            expected.copy_(stranger._local_tensor)
        else:
            raise ValueError(f"{what} cut by {stranger.placements}, expected {param.placements}; redistribute it first")
