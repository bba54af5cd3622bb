"""The one door to torch's collectives.

Every byte that leaves a rank passes through here, so that a test can count it from one place, and so that a torch that
renames its calls (2.13 renamed ``all_gather_into_tensor`` to ``all_gather_single``) is met in one file. A group of one
rank runs the same calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Handle(Protocol):
    """What an asynchronous call returns."""

    def wait(self) -> object:
        """Blocks until the result may be read."""


def all_gather(
    out: torch.Tensor, slot: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool = False
) -> Handle | None:
    """Fills ``out`` with every rank's ``slot``; in place when ``slot`` is this rank's part of ``out``.

    Args:
        out: (m * S,) any dtype, the gathered buffer of the ``m`` ranks of ``group``.
        slot: (S,) same dtype, this rank's part.
        group: The ranks that hold the parts, in the order of their offsets.
        async_op: Return a handle to wait on instead of waiting.

    Returns:
        The handle, or None when the call has waited.
    """
    return dist.all_gather_single(out, slot, group=group, async_op=async_op)


def reduce_scatter(
    out: torch.Tensor, full: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool = False
) -> Handle | None:
    """Leaves in ``out`` this rank's part of the sum of every rank's ``full``; in place when ``out`` is a part of
    ``full``.

    Args:
        out: (S,) any dtype.
        full: (m * S,) same dtype; its contents are undefined afterwards when ``out`` lies in it, and it must outlive
            the returned handle.
        group: The ranks that add up.
        async_op: Return a handle to wait on instead of waiting.

    Returns:
        The handle, or None when the call has waited.
    """
    return dist.reduce_scatter_single(out, full, op=dist.ReduceOp.SUM, group=group, async_op=async_op)


def all_reduce(
    tensor: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    async_op: bool = False,
) -> Handle | None:
    """Replaces ``tensor`` by its reduction over ``group``; returns the handle when ``async_op``."""
    return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)


def all_to_all(
    out: torch.Tensor,
    send: torch.Tensor,
    *,
    out_splits: Sequence[int],
    send_splits: Sequence[int],
    group: dist.ProcessGroup,
    async_op: bool = False,
) -> Handle | None:
    """Fills ``out`` with what each rank sent here; splits may be uneven and empty.

    Args:
        out: (sum(out_splits),) any dtype.
        send: (sum(send_splits),) same dtype; must outlive the returned handle.
        out_splits: Elements that come from each rank.
        send_splits: Elements that go to each rank.
        group: The ranks that exchange.
        async_op: Return a handle to wait on instead of waiting.

    Returns:
        The handle, or None when the call has waited.
    """
    return dist.all_to_all_single(out, send, list(out_splits), list(send_splits), group=group, async_op=async_op)


def scatter(out: torch.Tensor, shards: Sequence[torch.Tensor] | None, *, source: int = 0) -> None:
    """Leaves in ``out`` what rank ``source`` of the default group has for this rank.

    Args:
        out: (S,) any dtype.
        shards: On ``source`` one (S,) tensor per rank, elsewhere None.
        source: Global rank that sends.
    """
    dist.scatter(out, None if shards is None else list(shards), src=source)


def broadcast(tensor: torch.Tensor, *, source: int = 0) -> None:
    """Fills ``tensor`` with what it is on rank ``source`` of the default group."""
    dist.broadcast(tensor, src=source)


def broadcast_object(value: Any, *, source: int = 0) -> Any:
    """Returns what ``value`` is on rank ``source`` of the default group; any picklable object."""
    box = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def gather_objects(value: Any) -> list[Any]:
    """Returns the ``value`` of every rank of the default group, in rank order; any picklable object."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def same_on_every_rank(digest: str, *, what: str, group: dist.ProcessGroup) -> None:
    """Compares a digest over ``group``, once, before anything depends on it.

    Args:
        digest: A hash of plain integers and names, e.g. of a plan.
        what: The thing hashed, for the message.
        group: The ranks that must agree.

    Raises:
        RuntimeError: On every rank, when two ranks differ; the message names each rank's digest.
    """
    seen: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(seen, digest, group=group)
    if len(set(seen)) > 1:
        table = ", ".join(f"rank {rank}: {value[:12]}" for rank, value in enumerate(seen))
        raise RuntimeError(
            f"{what} differs between ranks ({table}); every rank must build the same model with the same arguments"
        )
