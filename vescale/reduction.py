"""Reduction: a segment's gradients on their way, and how what arrives becomes the gradients of sharded parameters.

What arrives is this rank's shard of a sum, in the reduce dtype. Where that is the masters' dtype it *is* the gradient
shard. Where it is narrower it has to be widened, and the wide shard is what takes the memory: S = 64 elements reduced
in bfloat16 arrive in 128 bytes and become 256. So nothing is widened while layers are gathered, as far as nobody looks
at gradients before backward ends::

    backward of layer i      two gathered layers, two gradient buffers, 2 S bytes of every layer that has arrived
    end of backward          4 S bytes of every layer, and 2 S of the one that is widened last
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from vescale import scratch
from vescale.aliases import copy_in, realias_grads
from vescale.kernels.accumulate import accumulate_
from vescale.member import Segment
from vescale.streams import Flight

Hook = Callable[[torch.Tensor], None]


class Reduction(NamedTuple):
    """A segment's gradients on their way: over the shards first, then over the replicas."""

    segment: Segment
    shard: torch.Tensor  # (S,), the result, once the flight has landed
    flight: Flight
    whole: torch.Tensor | None  # (m * S,), what is summed; None where `shard` is all there is
    inside: bool = False  # `shard` is this rank's slot of `whole`, which must live until it has been read

    @property
    def nbytes(self) -> int:
        """Of everything that it holds, and of the copy of the whole that gloo adds up in and shows when waited for."""
        whole = 0 if self.whole is None else self.whole.nbytes * (2 if self.whole.device.type == "cpu" else 1)
        return whole + (0 if self.inside else self.shard.nbytes)

    def land(self) -> torch.Tensor:
        """Waits, gives back the memory of what was summed unless the result lies in it, and returns the result."""
        self.flight.wait()
        if not self.inside:
            self.free()
        return self.shard

    def free(self) -> None:
        """Gives back the memory of what was summed."""
        if self.whole is not None:
            scratch.give(self.whole)


def converts(segment: Segment, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether what arrives with this dtype, on this device, cannot itself be the gradient shard."""
    return (dtype, device) != (segment.master.local.dtype, segment.master.local.device)


def can_wait(segment: Segment, reduced: torch.Tensor) -> bool:
    """Whether what arrived may stay as narrow as it is until backward ends: nobody has asked to see it earlier."""
    master = segment.master.local
    if reduced.device != master.device or reduced.element_size() >= master.element_size():
        return False
    return all(
        param.grad is None and not param._backward_hooks and not getattr(param, "_post_accumulate_grad_hooks", None)
        for param in segment.sharded
    )


def accumulate(segment: Segment, reduced: torch.Tensor, *, multiplier: float, hook: Hook | None) -> None:
    """gradient shard = (what was there) + multiplier * reduced, in the master's dtype.

    Args:
        segment: Whose parameters get the gradients.
        reduced: (S,) reduce dtype; may become the gradient shard.
        multiplier: What the sum is scaled by.
        hook: Sees the scaled sum before it is added; None for none.
    """
    if hook is not None:
        hook(reduced.mul_(multiplier))
        multiplier = 1.0
    if any(param._backward_hooks for param in segment.sharded):
        reduced, multiplier = _hooked(segment, _scaled(segment, reduced, multiplier)), 1.0
    _add(segment, reduced, multiplier)
    assert segment.grad is not None
    for index, param in enumerate(segment.sharded):
        if not param.requires_grad:
            continue
        if param.grad is None:
            param.grad = segment.grad.tensor(index)
        for own in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
            own(param)


def _add(segment: Segment, reduced: torch.Tensor, multiplier: float) -> None:
    """Leaves ``multiplier * reduced`` in the gradient shard, added to what parameters have already."""
    fresh = [index for index, param in enumerate(segment.sharded) if param.grad is None]
    if len(fresh) < len(segment.sharded):
        realias_grads(segment)  # a hook or a user may have put another gradient there
    master = segment.master.local
    empty = len(fresh) == len(segment.sharded) or segment.grad is None
    if empty and not converts(segment, reduced.dtype, reduced.device):
        # What arrived is the gradient: nothing is copied.
        segment.grad = segment.master.sibling(segment.master.placement, reduced)
        if multiplier != 1.0:
            reduced.mul_(multiplier)
        return
    if empty:
        segment.grad = segment.master.sibling(segment.master.placement, torch.empty_like(master))
    assert segment.grad is not None
    for index in () if empty else fresh:
        segment.grad.run(index).zero_()
    accumulate_(segment.grad.local, reduced.to(master.device), scale=multiplier, fresh=empty)


def _scaled(segment: Segment, reduced: torch.Tensor, multiplier: float) -> torch.Tensor:
    fresh = torch.empty_like(reduced, dtype=segment.master.local.dtype)
    accumulate_(fresh, reduced, scale=multiplier, fresh=True)
    return fresh


def _hooked(segment: Segment, fresh: torch.Tensor) -> torch.Tensor:
    """Shows each fresh gradient to the hooks of its sharded parameter, as autograd would, and returns the shard."""
    shard = segment.master.sibling(segment.master.placement, fresh)
    for index, param in enumerate(segment.sharded):
        for hook in (param._backward_hooks or {}).values():
            grad = hook(shard.tensor(index))
            if grad is not None:
                copy_in(shard.run(index), grad, param, f"a hook of {segment.members[index].name} returned")
    return fresh
