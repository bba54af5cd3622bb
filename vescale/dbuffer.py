"""DBuffer: one flat local tensor that holds many logical tensors, and its cut.

Three tensors on two ranks, planned into shards of 64 elements (the numbers are ``plan_segment``'s, a test asserts
them)::

    element   0            48  64          96         120  128
              |  a (6, 8)   | gap| b (5,5) .. | c (24,)  | gap |
    rank      <------- 0 -------><----------- 1 -------------->

Sharded, a rank's local tensor is its 64 elements and ``tensor(i)`` is a ``RaggedTensor`` over a part of them. Gathered,
the local tensor is all 128 elements and ``view(i)`` *is* the parameter: contiguous, nothing to copy out. Partial, the
same 128 elements are this rank's term of a sum. All-gather and reduce-scatter are changes of placement in place: the
shard is a slice of the gathered buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from vescale import collectives
from vescale.kernels.pieces import Pieces
from vescale.placement import RaggedShard
from vescale.planner import SegmentPlan
from vescale.ragged_tensor import RaggedTensor, from_local


class Layout:
    """What all buffers of one plan share on this rank, worked out once.

    Args:
        plan: Where each tensor lies and how long a shard is.
        shapes: Logical shape of each tensor, in the plan's order.
        mesh: The ranks of its last axis share the buffer; those of a first axis of two hold copies of it (HSDP).
    """

    replicas: dist.ProcessGroup | None  # ranks that hold the same shard; None when there is one copy

    def __init__(self, plan: SegmentPlan, shapes: Sequence[Sequence[int]], mesh: DeviceMesh) -> None:
        if plan.capacity:
            raise NotImplementedError("a DBuffer has equal shards; a plan of unequal capacity is for looking at")
        self.plan, self.shapes, self.mesh = plan, tuple(tuple(shape) for shape in shapes), mesh
        self.rank, self.group = mesh.get_local_rank(mesh.ndim - 1), mesh.get_group(mesh.ndim - 1)
        self.replicas = mesh.get_group(0) if mesh.ndim == 2 else None
        self.spans = [self._span(index) for index in range(len(self.shapes))]  # of each run in this rank's slot
        self.strides = [tuple(math.prod(shape[d + 1 :]) for d in range(len(shape))) for shape in self.shapes]
        self._specs: dict[torch.dtype, list[DTensorSpec]] = {}
        self._gaps: dict[bool, Pieces] = {}

    def placement_of(self, index: int) -> RaggedShard:
        """What tensor ``index`` sees of the buffer's cut."""
        plan = self.plan
        return RaggedShard.of_slot(
            self.shapes[index], offset=plan.offsets[index], shard_size=plan.shard_size, num_ranks=plan.num_ranks
        )

    def wrap(self, index: int, run: torch.Tensor) -> RaggedTensor:
        """Returns the DTensor whose local tensor is ``run``: this rank's elements of tensor ``index``."""
        if run.dtype not in self._specs:
            whole = [Replicate()] * (self.mesh.ndim - 1)
            self._specs[run.dtype] = [
                from_local(
                    run.new_empty(stop - start), self.mesh, [*whole, self.placement_of(i)], shape=self.shapes[i]
                )._spec
                for i, (start, stop) in enumerate(self.spans)
            ]
        # Not through the constructor, which costs more than all of this: gradients are wrapped anew at every step.
        return torch.Tensor._dtensor__new__(RaggedTensor, run, self._specs[run.dtype][index], requires_grad=False)

    def gaps(self, sharded: bool) -> Pieces:
        """What belongs to no tensor, in this rank's shard or in the whole buffer."""
        if sharded not in self._gaps:
            low, high = (self.rank * self.plan.shard_size, self.plan.shard_size) if sharded else (0, self.plan.numel)
            spans = [(max(start - low, 0), min(stop - low, high)) for start, stop in self.plan.gaps()]
            self._gaps[sharded] = Pieces([(start, stop) for start, stop in spans if stop > start])
        return self._gaps[sharded]

    def _span(self, index: int) -> tuple[int, int]:
        start, stop = self.plan.local(index, self.rank)
        first = self.plan.offsets[index] + start - self.rank * self.plan.shard_size if stop > start else 0
        return first, first + stop - start


class DBuffer:
    """The logical tensors of one plan in one flat tensor.

    Args:
        plan: Where each tensor lies and how long a shard is.
        shapes: Logical shape of each tensor, in the plan's order.
        mesh: The ranks of its last axis share the buffer.
        placement: ``Shard(0)`` for one shard, ``Replicate()`` for the gathered buffer, ``Partial()`` for a term of a
            sum.
        local: (S,) when sharded, else (m * S,), any dtype.

    Raises:
        ValueError: If the local tensor is not one-dimensional or not of the length that the placement asks for.
    """

    layout: Layout
    sharded: bool  # whether the local tensor is one shard
    placement: Placement  # of the flat buffer, over the axis that shares it
    local: torch.Tensor  # padding is zero in every sharded buffer that somebody reads
    _slot: torch.Tensor  # made once: a buffer is gathered and reduced many times

    def __init__(
        self,
        plan: SegmentPlan,
        shapes: Sequence[Sequence[int]],
        mesh: DeviceMesh,
        placement: Placement,
        local: torch.Tensor,
    ) -> None:
        self._fill(Layout(plan, shapes, mesh), placement, local)

    def _fill(self, layout: Layout, placement: Placement, local: torch.Tensor) -> None:
        self.sharded = placement == Shard(0)
        expected = layout.plan.shard_size if self.sharded else layout.plan.numel
        if local.ndim != 1 or local.numel() != expected:
            raise ValueError(
                f"DBuffer {placement}: expected a flat local tensor of {expected} elements, got {tuple(local.shape)}"
            )
        self.layout, self.plan, self.placement, self.local = layout, layout.plan, placement, local
        size = layout.plan.shard_size
        self._slot = local if self.sharded else local[layout.rank * size : (layout.rank + 1) * size]

    @classmethod
    def zeros(
        cls,
        plan: SegmentPlan,
        shapes: Sequence[Sequence[int]],
        mesh: DeviceMesh,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> DBuffer:
        """Returns a sharded buffer of zeros."""
        return cls(plan, shapes, mesh, Shard(0), torch.zeros(plan.shard_size, dtype=dtype, device=device))

    def sibling(self, placement: Placement, local: torch.Tensor) -> DBuffer:
        """Returns the buffer of the same plan whose local tensor is ``local`` under ``placement``."""
        other = DBuffer.__new__(DBuffer)
        other._fill(self.layout, placement, local)
        return other

    @property
    def rank(self) -> int:
        """Position of this rank in the cut."""
        return self.layout.rank

    @property
    def group(self) -> dist.ProcessGroup:
        """Ranks that share the buffer."""
        return self.layout.group

    @property
    def nbytes(self) -> int:
        """Bytes of the local tensor, also while its storage is freed."""
        return self.local.nbytes

    def slot(self) -> torch.Tensor:
        """This rank's shard of the buffer, (S,): the whole local tensor, or its part of a gathered or partial one."""
        return self._slot

    def view(self, index: int) -> torch.Tensor:
        """Tensor ``index`` whole, in its logical shape, as a view of a gathered or partial buffer.

        Raises:
            ValueError: If the buffer is sharded: no rank has the whole tensor.
        """
        if self.sharded:
            raise ValueError(
                f"{self.plan.tensors[index].name}: a sharded DBuffer has no whole tensor; call all_gather() first"
            )
        return self.local.as_strided(self.layout.shapes[index], self.layout.strides[index], self.plan.offsets[index])

    def run(self, index: int) -> torch.Tensor:
        """This rank's run of tensor ``index``, (stop - start,), as a view of its slot."""
        start, stop = self.layout.spans[index]
        return self.slot()[start:stop]

    def tensor(self, index: int) -> RaggedTensor:
        """Tensor ``index`` as a DTensor whose local tensor is a view of this rank's slot."""
        return self.layout.wrap(index, self.run(index))

    def all_gather(
        self, out: torch.Tensor | None = None, *, async_op: bool = False
    ) -> tuple[DBuffer, collectives.Handle | None]:
        """Sharded to gathered: casts the shard into its slot of ``out`` and gathers the others around it, in place.

        Args:
            out: (m * S,) any dtype, the gathered buffer; allocated in the shard's dtype when left out.
            async_op: Return a handle to wait on before reading.

        Returns:
            The gathered buffer and the handle, None when the call has waited.

        Raises:
            ValueError: If the buffer is not sharded.
        """
        if not self.sharded:
            raise ValueError(f"all_gather: expected a sharded DBuffer, got {self.placement}")
        full = self.sibling(Replicate(), self.local.new_empty(self.plan.numel) if out is None else out)
        full._slot.copy_(self.local)
        return full, collectives.all_gather(full.local, full._slot, group=self.group, async_op=async_op)

    def reduce_scatter(self, *, async_op: bool = False) -> tuple[DBuffer, collectives.Handle | None]:
        """Partial to sharded, by summing; the result lies in this rank's slot, in place.

        Args:
            async_op: Return a handle to wait on before reading.

        Returns:
            The sharded buffer, a view of this one, and the handle, None when the call has waited.

        Raises:
            ValueError: If the buffer is not partial.
        """
        if self.placement != Partial():
            raise ValueError(f"reduce_scatter: expected a partial DBuffer, got {self.placement}")
        work = collectives.reduce_scatter(self._slot, self.local, group=self.group, async_op=async_op)
        return self.sibling(Shard(0), self._slot), work

    def zero_gaps(self) -> None:
        """Zeroes the elements that belong to no tensor, so that nothing of a recycled storage is ever reduced."""
        self.layout.gaps(self.sharded).zero_(self.local)

    def norm(self, p: float = 2.0) -> torch.Tensor:
        """The p-norm over every tensor of the buffer, complete on every rank; 0-d float32, float64 of a float64 buffer.

        Args:
            p: Order of the norm, > 0; ``inf`` for the largest magnitude.
        """
        value = torch.linalg.vector_norm(self.local, p, dtype=torch.promote_types(self.local.dtype, torch.float32))
        if not self.sharded or self.plan.num_ranks == 1:
            return value
        if math.isinf(p):
            collectives.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
            return value
        total = value**p
        collectives.all_reduce(total, group=self.group)
        return total ** (1 / p)
