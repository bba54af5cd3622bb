"""Aliases: parameters and gradients lie in their shards, whatever was assigned to them meanwhile.

``Unit.realias()`` owns the promise; here is how one segment is looked at and put right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vescale.dbuffer import DBuffer
from vescale.member import Member, Segment, home_of
from vescale.ragged_tensor import RaggedTensor


def intact(segment: Segment) -> bool:
    """Whether modules hold the segment's own parameters, these lie in the master shard, and nobody was frozen since."""
    wholes = segment.unsharded or segment.sharded
    segment.trainable = any(param.requires_grad for param in segment.sharded)
    for index, (param, whole, member) in enumerate(zip(segment.sharded, wholes, segment.members, strict=True)):
        if param.requires_grad != whole.requires_grad or not _lies_in(param, segment.master, index):
            return False
        for module, attribute in member.homes:
            held = module._parameters.get(attribute)
            if held is not param and held is not whole:
                return False
    return True


def _lies_in(tensor: Any, buffer: DBuffer, index: int) -> bool:
    """Whether a sharded tensor's run is the run of ``index`` in a sharded buffer; empty runs lie anywhere."""
    run, (start, stop) = tensor._local_tensor, buffer.layout.spans[index]
    at = buffer.local.data_ptr() + start * buffer.local.element_size()
    return run.dtype == buffer.local.dtype and (start == stop or run.data_ptr() == at)


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
    if segment.grad is not None and all(param.grad is None for param in segment.sharded):
        segment.grad = None
    for index, param in enumerate(segment.sharded):
        if param.grad is not None:
            _realias_grad(segment, index, param)


def _realias_grad(segment: Segment, index: int, param: nn.Parameter) -> None:
    grad = param.grad
    if segment.grad is None:
        segment.grad = segment.master.sibling(segment.master.placement, torch.zeros_like(segment.master.local))
    if isinstance(grad, RaggedTensor) and _lies_in(grad, segment.grad, index):
        return
    expected = segment.grad.run(index)
    copy_in(expected, grad, param, f"{segment.members[index].name}.grad is")  # type: ignore[arg-type]
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
