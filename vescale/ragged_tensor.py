"""RaggedTensor: a DTensor whose one axis is cut by RaggedShard; what users, hooks, optimizers and checkpoints hold.

Stock DTensor refuses placements that it does not know, so this subclass answers the operators itself, on the local run:

- element-wise operators, ``_foreach_*`` and fused optimizer steps, when every tensor has the same cut (or is a scalar);
- random in-place operators draw the *whole* logical tensor from the default generator, seeded alike on every rank, and
  keep the run, so that an initialisation has the same bits on any number of ranks;
- full reductions (``norm``, ``sum``, ``max``, ...) are complete: a plain tensor, equal on every rank;
- everything else raises, and says to take ``full_tensor()`` or ``to_local()``.

``torch.optim.AdamW`` in all its forms and ``torch.nn.utils.clip_grad_norm_`` work on it unchanged, and so does torch's
distributed checkpoint.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from vescale import collectives
from vescale.elementwise import is_elementwise
from vescale.placement import Box, RaggedShard, boxes
from vescale.reductions import REDUCTIONS

aten = torch.ops.aten


class RaggedTensor(DTensor):
    """A logical tensor of which this rank holds one contiguous run of elements, as a 1-D local tensor.

    Made by ``fully_shard``, by ``distribute`` and by ``from_local``. ``shape``, ``numel()`` and ``requires_grad`` are
    those of the logical tensor; ``to_local()`` is this rank's run, perhaps empty.

    Another mesh axis may be ``Shard(dim)``, as tensor parallelism makes it. It cuts first, whatever the order of the
    axes, and RaggedShard cuts what it leaves (torch's ``_StridedShard`` is the same order)::

        (4, 6) over mesh (2, 2) by (RaggedShard, Shard(1))      Shard(1) leaves (4, 3): columns 0-2 | columns 3-5
        RaggedShard((0, 1), (5, 7)) of (4, 3)                   rank (0, 1): elements [0, 5) of columns 3-5
    """

    __slots__ = ()

    def __new__(cls, local: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool = False) -> RaggedTensor:
        return torch.Tensor._dtensor__new__(cls, local, spec, requires_grad=requires_grad)

    def __init__(self, local: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool = False) -> None:
        super().__init__()

    # --- what it is ---

    @property
    def ragged_axis(self) -> int:
        """Index of the mesh axis that RaggedShard cuts."""
        return _ragged_axis(self.placements)

    @property
    def placement(self) -> RaggedShard:
        """The RaggedShard."""
        return self.placements[self.ragged_axis]  # type: ignore[return-value]

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of the mesh axis that RaggedShard cuts."""
        return self.device_mesh.get_group(self.ragged_axis)

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Process groups of every mesh axis that is cut: this one, and those of ``Shard``."""
        cut = (axis for axis, placement in enumerate(self.placements) if not placement.is_replicate())
        return tuple(self.device_mesh.get_group(axis) for axis in cut)

    @property
    def box(self) -> Box:
        """What the other axes leave to this rank's coordinate on them; all of the tensor unless one is ``Shard``."""
        return _inner(self.shape, self.device_mesh, self.placements)

    @property
    def run(self) -> tuple[int, int]:
        """Elements ``[start, stop)`` of the flattened tensor in its ``box`` that this rank holds."""
        return self.placement.run(self.box.sizes, self.device_mesh.get_local_rank(self.ragged_axis))

    @property
    def data(self) -> RaggedTensor:
        """The same run outside autograd; assigning copies the values into it.

        torch's setter would change the wrapper alone and leave the run as it was.

        Raises:
            ValueError: If the value has another dtype, shape or cut.
        """
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.dtype is not self.dtype:
            raise ValueError(f"data: expected {self.dtype}, got {value.dtype}; cast the module, not a parameter of it")
        with torch.no_grad():
            self.copy_(value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        what = f"shape={tuple(self.shape)}, dtype={self.dtype}, run={self.run}, placements={self.placements}"
        return f"RaggedTensor({what}, local={self._local_tensor})"

    # --- changes of cut ---

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """Returns the same logical tensor under other placements; see ``vescale.redistribute``.

        Raises:
            ValueError: If ``placements`` is missing or does not fit the tensor, or an option of DTensor is not
                supported.
            NotImplementedError: For another mesh.
        """
        if options:
            raise ValueError(f"RaggedTensor.redistribute does not take {sorted(options)}; cast before or after")
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise NotImplementedError("redistribute to another mesh: gather with full_tensor() and distribute there")
        if placements is None:
            raise ValueError("redistribute needs placements")
        return redistribute(self, placements)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Returns the whole logical tensor on every rank; the gradient flows back as this rank's run of it.

        Raises:
            ValueError: With ``grad_placements``, which this tensor fixes itself.
        """
        if grad_placements is not None:
            raise ValueError("RaggedTensor.full_tensor fixes its gradient's placement; leave grad_placements out")
        return _Gather.apply(self)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Returns this rank's run, (stop - start,); writes to it are writes to the tensor.

        Raises:
            ValueError: With ``grad_placements``, which this tensor fixes itself.
        """
        if grad_placements is not None:
            raise ValueError("RaggedTensor.to_local fixes its gradient's placement; leave grad_placements out")
        if not (torch.is_grad_enabled() and self.requires_grad):
            return self._local_tensor
        return _ToLocal.apply(self)

    # --- what stock helpers ask ---

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Any], meta: Any, outer_size: torch.Size, outer_stride: Any
    ) -> RaggedTensor:
        placements, old, _, requires_grad = meta
        spec = DTensorSpec(
            inner["device_mesh"], placements, tensor_meta=TensorMeta(outer_size, outer_stride, old.dtype)
        )
        return RaggedTensor(inner["_local_tensor"], spec, requires_grad=requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedTensor:
        if id(self) in memo:
            return memo[id(self)]
        twin = RaggedTensor(self._local_tensor.detach().clone(), self._spec, requires_grad=self.requires_grad)
        for name, value in self.__dict__.items():
            if not name.startswith("_vescale"):  # the copy lies in no unit
                setattr(twin, name, copy.deepcopy(value, memo))
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            "a RaggedTensor cannot be pickled: it holds a process group; save with vescale.checkpoint or "
            "torch.distributed.checkpoint, or pickle full_tensor()"
        )

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        chunks = self.__create_chunk_list__()
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets, i),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for i, chunk in enumerate(chunks)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(self._moved(box.offsets)), torch.Size(box.sizes))
            for box in boxes(self.box.sizes, *self.run)
        ]

    def _moved(self, offsets: tuple[int, ...]) -> tuple[int, ...]:
        """Where an element of the inner tensor is in the whole one."""
        return tuple(map(operator.add, offsets, self.box.offsets))

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        start, sizes = self.run[0], self.box.sizes
        for box in boxes(sizes, *self.run):
            numel = math.prod(box.sizes)
            if index.offset is None or tuple(index.offset) == self._moved(box.offsets):
                at = sum(o * math.prod(sizes[d + 1 :]) for d, o in enumerate(box.offsets)) - start
                return self._local_tensor[at : at + numel].view(box.sizes)
        raise ValueError(f"{index.fqn}: this rank holds elements {self.run} and no piece that begins at {index.offset}")

    # --- operators ---

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in REDUCTIONS:
            return REDUCTIONS[func](*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return _random(func, args, kwargs)
        if func is aten.copy_.default and not (isinstance(args[0], RaggedTensor) and isinstance(args[1], RaggedTensor)):
            return _copy_whole(*args, **kwargs)
        if func in _PARTS and isinstance(args[0], RaggedTensor):
            return _PARTS[func](*args, **kwargs)
        if is_elementwise(func):
            return _local(func, args, kwargs)
        raise NotImplementedError(
            f"{func} on a RaggedTensor {_shapes(args)}: only element-wise operators and full reductions see a run of "
            "elements; take full_tensor() for the whole tensor or to_local() for this rank's run. Parameters are whole "
            "in a module's forward, and in a method given to register_fsdp_forward_method"
        )


# What torch's asynchronous checkpoint copies of a tensor without storage; the slots themselves are DTensor's.
RaggedTensor.__slots__ = ("_local_tensor", "_spec")  # type: ignore[assignment]


def _shapes(args: Any) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]


def _ragged_axis(placements: Sequence[Placement]) -> int:
    axes = [axis for axis, placement in enumerate(placements) if isinstance(placement, RaggedShard)]
    others = [p for p in placements if not isinstance(p, RaggedShard) and not p.is_replicate() and not _is_shard(p)]
    if len(axes) != 1 or others:
        raise NotImplementedError(
            f"a RaggedTensor has one RaggedShard and otherwise Replicate or Shard placements, got {tuple(placements)}"
        )
    return axes[0]


def _is_shard(placement: Placement) -> bool:
    return type(placement) is Shard


def _inner(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> Box:
    """The part of a tensor that every axis but the ragged one leaves to this rank."""
    if not any(map(_is_shard, placements)):
        return Box((0,) * len(shape), tuple(shape))
    others = [placement if _is_shard(placement) else Replicate() for placement in placements]
    sizes, offsets = compute_local_shape_and_global_offset(tuple(shape), mesh, others)
    # An empty part has no place; torch puts it at the end of the tensor.
    return Box(tuple(offsets), tuple(sizes))


def _own(whole: torch.Tensor, like: RaggedTensor) -> torch.Tensor:
    """This rank's run of a whole tensor."""
    return _sliced(whole, like.box).reshape(-1)[slice(*like.run)]


def _sliced(whole: torch.Tensor, box: Box) -> torch.Tensor:
    """A box of a tensor."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dim, min(offset, whole.shape[dim]), size) if size != whole.shape[dim] else whole
    return whole


def _wrap(local: torch.Tensor, like: RaggedTensor) -> RaggedTensor:
    meta = TensorMeta(like.shape, like._spec.tensor_meta.stride, local.dtype)  # type: ignore[union-attr]
    return RaggedTensor(local, DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta))


def _local(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs ``func`` on the local runs and wraps what it made; in-place results are the arguments themselves."""
    _check_operands(func, args, kwargs)
    local_args, local_kwargs = torch.utils._pytree.tree_map_only(
        RaggedTensor, lambda t: t._local_tensor, (args, kwargs)
    )
    out = func(*local_args, **local_kwargs)
    ragged = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, RaggedTensor)]
    owner = {id(t._local_tensor): t for t in ragged}

    def wrap(local: Any, like: RaggedTensor) -> Any:
        if not isinstance(local, torch.Tensor):
            return local
        return owner[id(local)] if id(local) in owner else _wrap(local, like)

    if isinstance(out, list | tuple):
        return type(out)(wrap(local, like) for local, like in zip(out, args[0], strict=True))
    return wrap(out, ragged[0])


def _check_operands(func: Any, args: Any, kwargs: Any) -> None:
    """Refuses to mix cuts; the lists of a foreach or fused operator meet position by position."""
    lists = [
        arg
        for arg in (*args, *kwargs.values())
        if isinstance(arg, list | tuple) and len(arg) and isinstance(arg[0], torch.Tensor)
    ]
    rows = zip(*lists, strict=False) if lists else [torch.utils._pytree.tree_leaves((args, kwargs))]
    for row in rows:
        tensors = [t for t in row if isinstance(t, torch.Tensor) and (isinstance(t, RaggedTensor) or t.numel() > 1)]
        kinds = {
            (t.shape, t.placements, t.device_mesh) if isinstance(t, RaggedTensor) else (t.shape, "plain")
            for t in tensors
        }
        if len(kinds) > 1:
            raise ValueError(
                f"{func}: operands are cut differently: {', '.join(map(str, kinds))}; redistribute them first"
            )


def _random(func: Any, args: Any, kwargs: Any) -> RaggedTensor:
    """Draws the whole logical tensor with the default generator and keeps this rank's run."""
    self = args[0]
    if not isinstance(self, RaggedTensor):
        raise NotImplementedError(f"{func}: the first argument must be the RaggedTensor")
    whole = self._local_tensor.new_empty(self.shape)
    drawn = func(whole, *args[1:], **kwargs)
    if not isinstance(drawn, torch.Tensor) or drawn.shape != self.shape:
        raise NotImplementedError(f"{func} on a RaggedTensor; take full_tensor() for the whole tensor")
    mine = _own(drawn, self)
    if drawn is not whole:
        return _wrap(mine.clone(), self)
    self._local_tensor.copy_(mine)
    return self


def _copy_whole(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``copy_`` between a RaggedTensor and a plain tensor that is equal on every rank."""
    if not isinstance(self, RaggedTensor):
        raise ValueError("copy_ of a RaggedTensor into a plain tensor: take full_tensor() or to_local() first")
    if source.shape != self.shape:
        raise ValueError(
            f"copy_: expected a plain tensor of the whole shape {tuple(self.shape)}, got {tuple(source.shape)}"
        )
    self._local_tensor.copy_(_own(source, self), non_blocking)
    return self


# --- parts of it, and memory like it ---


def _part(self: RaggedTensor, start: int, shape: Sequence[int]) -> RaggedTensor:
    """The view of elements ``[start, start + prod(shape))``: consecutive ones lie with consecutive ranks."""
    if self.box.sizes != tuple(self.shape):
        raise NotImplementedError("a part of a RaggedTensor that another mesh axis cuts; take full_tensor()")
    placement, placements = self.placement.part(self.shape, start, shape), list(self.placements)
    placements[self.ragged_axis] = placement
    size = placement.local_units[self.device_mesh.get_local_rank(self.ragged_axis)]
    first = min(max(start - self.run[0], 0), self._local_tensor.numel())
    return from_local(self._local_tensor[first : first + size], self.device_mesh, placements, shape=shape)


def _select(self: RaggedTensor, dim: int, index: int) -> RaggedTensor:
    """``self[index]``, a view; rows are all that a run has in one piece."""
    rows = self.shape[0] if self.ndim else 0
    if dim % max(self.ndim, 1) or self.ndim < 2 or not -rows <= index < rows:
        raise NotImplementedError(f"select({dim}, {index}) of a RaggedTensor {tuple(self.shape)}; take full_tensor()")
    inner = self.shape[1:]
    return _part(self, index % rows * math.prod(inner), inner)


def _slice(
    self: RaggedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> RaggedTensor:
    """``self[start:end]``, a view."""
    if dim % self.ndim or step != 1:
        raise NotImplementedError(f"a slice of dim {dim}, step {step}, of a RaggedTensor; take full_tensor()")
    first, last, _ = slice(start, end).indices(self.shape[0])
    rows, inner = max(last - first, 0), self.shape[1:]
    return _part(self, first * math.prod(inner), (rows, *inner))


def _new_empty(self: RaggedTensor, size: Sequence[int], **options: Any) -> RaggedTensor:
    if tuple(size) != tuple(self.shape):
        raise NotImplementedError(f"new_empty({tuple(size)}) of a RaggedTensor {tuple(self.shape)}; of its shape only")
    return _wrap(self._local_tensor.new_empty(self._local_tensor.shape, **options), self)


_PARTS: dict[Any, Any] = {aten.select.int: _select, aten.slice.Tensor: _slice, aten.new_empty.default: _new_empty}


# --- making one, and changing its cut ---


def from_local(
    local: torch.Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement], *, shape: Sequence[int]
) -> RaggedTensor:
    """Returns the RaggedTensor of which ``local`` is this rank's run; the two share memory.

    Args:
        local: (stop - start,) any dtype, this rank's elements in row-major order.
        device_mesh: The mesh; one axis is ragged, the others replicate or are ``Shard(dim)``, which cuts first.
        placements: One placement per mesh axis.
        shape: Shape of the logical tensor.

    Raises:
        ValueError: If the placement does not cut what the other axes leave of ``shape``, or ``local`` is not its run.
    """
    axis = _ragged_axis(placements)
    placement: RaggedShard = placements[axis]  # type: ignore[assignment]
    sizes = _inner(shape, device_mesh, placements).sizes
    placement.check(sizes, device_mesh.size(axis))
    start, stop = placement.run(sizes, device_mesh.get_local_rank(axis))
    if local.ndim != 1 or local.numel() != stop - start:
        raise ValueError(
            f"expected a 1-D local run of {stop - start} elements [{start}, {stop}), got shape {tuple(local.shape)}"
        )
    whole = torch.empty(tuple(shape), device="meta")
    spec = DTensorSpec(device_mesh, tuple(placements), tensor_meta=TensorMeta(whole.shape, whole.stride(), local.dtype))
    return RaggedTensor(local.detach(), spec, requires_grad=local.requires_grad)


def distribute(tensor: torch.Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> RaggedTensor:
    """Returns ``tensor``, which is equal on every rank, cut by ``placements``; no communication, the run is copied.

    Args:
        tensor: any shape and dtype, the logical tensor.
        device_mesh: The mesh; one axis is ragged, the others replicate or are ``Shard(dim)``, which cuts first.
        placements: One placement per mesh axis.

    Raises:
        ValueError: If the placement does not cut what the other axes leave of the tensor.
    """
    inner = _sliced(tensor.detach(), _inner(tensor.shape, device_mesh, placements))
    cut = _cut(inner, device_mesh, placements, tensor.shape)
    cut.requires_grad_(tensor.requires_grad)
    return cut


def _cut(inner: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> RaggedTensor:
    """The RaggedTensor of what the other axes leave to this rank; the run is copied."""
    axis = _ragged_axis(placements)
    placement: RaggedShard = placements[axis]  # type: ignore[assignment]
    placement.check(inner.shape, mesh.size(axis))
    run = slice(*placement.run(inner.shape, mesh.get_local_rank(axis)))
    return from_local(inner.detach().reshape(-1)[run].clone(), mesh, placements, shape=shape)


def redistribute(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """Returns the same logical tensor under other placements of the same mesh.

    ===========================  ==========================================================
    RaggedShard -> RaggedShard   one uneven all-to-all of the elements that change their rank
    RaggedShard -> Replicate     one all-gather; the gradient is the run of the gradient
    RaggedShard -> Shard(dim)    the same, then a local slice
    Replicate -> RaggedShard     local
    Partial -> RaggedShard       one reduce-scatter
    ===========================  ==========================================================

    Args:
        tensor: A DTensor of any of these placements.
        placements: One per mesh axis; of axes that are not ragged, what they were.

    Raises:
        ValueError: If the placement does not fit the tensor.
        NotImplementedError: For any other change.
    """
    mesh, placements = tensor.device_mesh, tuple(placements)
    if placements == tensor.placements:
        return tensor
    if isinstance(tensor, RaggedTensor):
        return _from_ragged(tensor, placements)
    if not any(isinstance(p, RaggedShard) for p in placements):
        raise NotImplementedError(f"redistribute from {tensor.placements} to {placements}: use DTensor's own")
    axis = _ragged_axis(placements)
    source = tuple(p for a, p in enumerate(tensor.placements) if a != axis)
    if source == tuple(p for a, p in enumerate(placements) if a != axis):  # the other axes stay as they are
        if tensor.placements[axis].is_replicate():
            return _cut(tensor.to_local(), mesh, placements, tensor.shape)
        if tensor.placements[axis] == Partial():
            return _reduce_to_ragged(tensor, placements, axis)
    raise NotImplementedError(f"redistribute from {tensor.placements} to {placements}")


def _from_ragged(tensor: RaggedTensor, placements: tuple[Placement, ...]) -> DTensor:
    mesh, axis = tensor.device_mesh, tensor.ragged_axis
    if any(isinstance(p, RaggedShard) for p in placements):
        others = [(p, q) for a, (p, q) in enumerate(zip(tensor.placements, placements, strict=True)) if a != axis]
        if any(p != q for p, q in others):
            raise NotImplementedError("redistribute of a RaggedShard to another mesh axis, or of two axes at once")
        return _recut(tensor, placements)
    gathered = _gathered(_gather(tensor), tensor)
    return gathered if placements == gathered.placements else gathered.redistribute(mesh, placements)


def _gathered(inner: torch.Tensor, like: RaggedTensor) -> DTensor:
    """A stock DTensor: what was ragged is whole, the other axes are as they were."""
    left = [Replicate() if isinstance(p, RaggedShard) else p for p in like.placements]
    return DTensor.from_local(
        inner,
        like.device_mesh,
        left,
        run_check=False,
        shape=like.shape,
        stride=torch.empty(like.shape, device="meta").stride(),
    )


def _runs(placement: RaggedShard, shape: Sequence[int]) -> list[tuple[int, int]]:
    return [placement.run(shape, rank) for rank in range(placement.num_ranks)]


def _recut(tensor: RaggedTensor, placements: tuple[Placement, ...]) -> RaggedTensor:
    """One uneven all-to-all: what I hold of each new run goes there, and the pieces arrive in order."""
    axis = _ragged_axis(placements)
    target: RaggedShard = placements[axis]  # type: ignore[assignment]
    sizes, rank = tensor.box.sizes, tensor.device_mesh.get_local_rank(axis)
    target.check(sizes, tensor.device_mesh.size(axis))
    old, new = _runs(tensor.placement, sizes), _runs(target, sizes)
    out = tensor._local_tensor.new_empty(new[rank][1] - new[rank][0])
    send_splits = [_overlap(old[rank], run) for run in new]
    out_splits = [_overlap(run, new[rank]) for run in old]
    collectives.all_to_all(
        out, tensor._local_tensor.contiguous(), out_splits=out_splits, send_splits=send_splits, group=tensor.group
    )
    return from_local(out, tensor.device_mesh, placements, shape=tensor.shape)


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


def _padded(runs: Sequence[tuple[int, int]]) -> int:
    return max(stop - start for start, stop in runs)


def _gather(tensor: RaggedTensor) -> torch.Tensor:
    """The inner tensor on every rank; runs travel padded to the longest, which is what all-gather can carry."""
    sizes = tensor.box.sizes
    runs = _runs(tensor.placement, sizes)
    width, local = _padded(runs), tensor._local_tensor
    slots = local.new_empty(len(runs), width)
    rank = tensor.device_mesh.get_local_rank(tensor.ragged_axis)
    slots[rank, : local.numel()].copy_(local)
    if width:
        collectives.all_gather(slots.view(-1), slots[rank], group=tensor.group)
    return torch.cat([slots[k, : stop - start] for k, (start, stop) in enumerate(runs)]).view(sizes)


def _reduce_to_ragged(tensor: DTensor, placements: tuple[Placement, ...], axis: int) -> RaggedTensor:
    """A reduce-scatter of runs padded to the longest."""
    target: RaggedShard = placements[axis]  # type: ignore[assignment]
    inner = tensor.to_local()
    target.check(inner.shape, tensor.device_mesh.size(axis))
    runs, flat = _runs(target, inner.shape), inner.reshape(-1)
    slots = flat.new_zeros(len(runs), _padded(runs))
    for k, (start, stop) in enumerate(runs):
        slots[k, : stop - start].copy_(flat[start:stop])
    rank = tensor.device_mesh.get_local_rank(axis)
    out = torch.empty_like(slots[rank])
    collectives.reduce_scatter(out, slots.view(-1), group=tensor.device_mesh.get_group(axis))
    return from_local(out[: runs[rank][1] - runs[rank][0]].clone(), tensor.device_mesh, placements, shape=tensor.shape)


class _Gather(torch.autograd.Function):
    """full_tensor(): all-gather forward; backward keeps this rank's run of a gradient that is equal on every rank."""

    @staticmethod
    def forward(ctx: Any, tensor: RaggedTensor) -> torch.Tensor:
        ctx.like = tensor.detach()
        inner = _gather(tensor)
        return inner if inner.shape == tensor.shape else _gathered(inner, tensor).full_tensor()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> RaggedTensor:
        return _wrap(_own(grads[0], ctx.like).clone(), ctx.like)


class _ToLocal(torch.autograd.Function):
    """to_local(): the gradient of a run is the run of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: RaggedTensor) -> torch.Tensor:
        ctx.like = tensor.detach()
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> RaggedTensor:
        return _wrap(grads[0], ctx.like)
