"""Comms: the collectives of a unit as its module's setters change them, and where the memory of their buffers is from.

A custom collective gets the unit's own buffers: what is gathered *is* the parameters, and what is reduced is where
gradients were written, so nothing is allocated for a call and nothing is copied around it.

NCCL moves buffers that it knows beforehand without staging them. torch offers two ways to make them known, both by a
memory pool from which a unit then takes its buffers, each time their storage is restored::

    registered    a pool of the process group's allocator; segments are registered as they are allocated
    symmetric     a pool of symmetric memory; a buffer is announced to its peers (rendezvous) before each collective

torch's ``ProcessGroupAllocMixin`` and ``SymmMemAllocMixin`` (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py)
are the same recipes for FSDP2's staging buffers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from vescale import collectives
from vescale.collectives import Handle

Pool = Callable[[], contextlib.AbstractContextManager[Any]]  # what is allocated inside is the pool's


@dataclass
class Comms:
    """How one unit communicates."""

    all_gather: Callable[..., Any] | None = None  # (out, own, group=, async_op=), in place of torch's
    reduce_scatter: Callable[..., Any] | None = None  # (out, whole, group=, op=, async_op=)
    reduce_group: dist.ProcessGroup | None = None  # of the ranks of the gathers' group; None: that one
    pool: Pool = contextlib.nullcontext
    symmetric: bool = False  # announce buffers before each collective

    @property
    def in_place(self) -> bool:
        """Whether the result of a reduction may lie in what is reduced: torch's may, and of others nothing is known."""
        return self.reduce_scatter is None and self.pool is contextlib.nullcontext

    def gather(
        self, out: torch.Tensor, own: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool
    ) -> Handle | None:
        """As ``collectives.all_gather``."""
        self._announce(group, out)
        call = self.all_gather or collectives.all_gather
        return call(out, own, group=group, async_op=async_op)

    def reduce(
        self, out: torch.Tensor, whole: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool
    ) -> Handle | None:
        """As ``collectives.reduce_scatter``."""
        group = self.reduce_group or group
        self._announce(group, whole, out)
        if self.reduce_scatter is not None:
            return self.reduce_scatter(out, whole, group=group, op=dist.ReduceOp.SUM, async_op=async_op)
        return collectives.reduce_scatter(out, whole, group=group, async_op=async_op)

    def _announce(self, group: dist.ProcessGroup, *buffers: torch.Tensor) -> None:
        for buffer in buffers if self.symmetric else ():
            symmetric_memory.rendezvous(buffer, group=group.group_name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Comms:
        return copy.copy(self)  # process groups and pools are not copied


@functools.cache
def second_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns a process group of its own over the ranks of ``group``, the same at every call.

    Every rank of ``group`` must call.
    """
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend=dist.get_backend(group), use_local_synchronization=True)


@functools.cache
def registered_pool(group: dist.ProcessGroup, device: torch.device) -> Pool:
    """Returns the pool whose memory the backend of ``group`` registers.

    Raises:
        NotImplementedError: If it registers none.
    """
    backend: Any = group._get_backend(device)
    if not backend.supports_tensor_alloc(device):
        raise NotImplementedError(
            f"set_allocate_memory_from_process_group_for_comm: {dist.get_backend(group)} on {device.type} has no memory"
            " of its own to allocate from; it takes NCCL, on GPUs for which it supports that"
        )
    dist.barrier(group=group)  # memory is registered with a communicator, which comes with the first collective
    pool = torch.cuda.MemPool(backend.mem_allocator)
    backend.register_mem_pool(pool)
    return functools.partial(torch.cuda.use_mem_pool, pool)


@functools.cache
def symmetric_pool(group: dist.ProcessGroup, device: torch.device, backend: str) -> Pool:
    """Returns the pool of symmetric memory of ``device``.

    Raises:
        NotImplementedError: If ``backend`` is not NCCL, or ``group`` is not of it.
    """
    if backend != "NCCL" or device.type != "cuda" or "nccl" not in dist.get_backend(group):
        raise NotImplementedError(
            f"set_symm_mem_for_comm: expected backend 'NCCL' over NCCL on CUDA devices, got {backend!r} over "
            f"{dist.get_backend(group)} on {device.type}; ordinary memory works everywhere, drop the call"
        )
    symmetric_memory.set_backend("NCCL")
    dist.barrier(group=group)
    return functools.partial(torch.cuda.use_mem_pool, symmetric_memory.get_mem_pool(device))
