"""Unit: the sharded and the unsharded parameters of one ``fully_shard`` call, and the three changes of cut between
them.

Every parameter is two ``nn.Parameter`` objects, made once and swapped in ``module._parameters``::

    sharded      RaggedTensor over the master shard, stored dtype     what users, hooks, optimizers and checkpoints hold
    unsharded    view of the gathered buffer, ``param_dtype``         what forward and backward compute with

    unshard()    master shard --cast--> its slot of `full`, all-gather in place; the views are the parameters
    reshard()    storage of `full` freed; the views stay, and become valid again with the next unshard
    reduce()     `grad_full`, each gradient written once, is reduce-scattered; the sum is the gradient shard, or is
                 added to it

A gradient reaches `grad_full` in one of two ways. A layer that knows the contract asks its weight for
``weight.grad_slot()``, writes there, and sets ``weight.grad_slot_written`` (the first write replaces, later ones add:
tied weights, several forwards, accumulated micro-batches). Any other gradient is copied there, once, by a hook.

Stages 0 to 2 keep ``full`` between steps: reshard() only puts the sharded parameters back, and unshard() gathers only
when a master was written since. Stage 0 is a cut over one rank with a copy on every other.

Buffers of one segment (S = shard size, m ranks)::

    master       (S,)      stored dtype   lives always
    full         (m * S,)  param_dtype    unshard to reshard
    grad_full    (m * S,)  reduce_dtype   first gradient to the end of the reduce-scatter
    reduced      (S,)      reduce_dtype   from then to the end of backward, where it is to be widened (``reduction``)
    grad         (S,)      stored dtype   first reduce to ``zero_grad``; ``param.grad`` are views of it
"""

from __future__ import annotations

import functools
import os.path
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Partial, Replicate

from vescale import collectives, scratch
from vescale.aliases import copy_in, intact, realias_grads, realias_param, strangers
from vescale.collectives import Handle
from vescale.comms import Comms
from vescale.counting import Counters
from vescale.dbuffer import DBuffer
from vescale.member import HOME, Home, Member, Part, Segment, own_attributes, put
from vescale.planner import SegmentPlan
from vescale.reduction import Reduction, accumulate, can_wait, converts
from vescale.streams import Flight, labelled, lanes_of


@dataclass
class Controls:
    """What a module's setters change between steps."""

    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True  # over replicas; one mesh axis has none
    divide_factor: float | None = None  # None divides by the number of ranks
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None  # sees each reduced shard before it is accumulated
    comms: Comms = field(default_factory=Comms)


class Unit:
    """Parameters that are gathered, reduced and freed together.

    Args:
        members: The parameters, in definition order; their values are copied into the master shards, nothing is
            communicated.
        plans: Of all segments: where the members lie.
        mesh: The ranks of its last axis share the parameters; those of a first axis of two hold copies.
        mp_policy: Compute and reduce dtypes, with torch's meaning.
        controls: Read at every step; whoever made them may change them.
        offload_policy: Masters, gradients and so optimizer state on the CPU, with torch's meaning.
        zero: ZeRO stage; below 3, gathered parameters are kept until a master is written.
        part_group: Neighbouring ranks among whom the gathered parameters are shared out between forward and backward
            when ``reshard`` is asked to.
    """

    segments: list[Segment]
    mesh: DeviceMesh
    mp_policy: MixedPrecisionPolicy
    controls: Controls
    counters: Counters
    name: str  # of the modules, as far as its parameters' names agree; labels the profiler's ranges
    after_reduce: Callable[[Unit], None] | None  # called when fresh gradients lie in the shards; may step and free them
    driver: Any  # the ShardState of the call; told when backward writes the first gradient that no reduce has taken
    hooks: Any  # the StateHooks of the modules that hold the parameters
    has_fresh_grads: bool  # gradients were added that ``after_reduce`` has not seen

    def __init__(
        self,
        members: Sequence[Member],
        plans: Sequence[SegmentPlan],
        mesh: DeviceMesh,
        *,
        mp_policy: MixedPrecisionPolicy,
        controls: Controls,
        offload_policy: OffloadPolicy | None = None,
        zero: int = 3,
        part_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.mesh, self.mp_policy, self.controls = mesh, mp_policy, controls
        self.offload_policy, self.zero, self.part_group = offload_policy or OffloadPolicy(), zero, part_group
        self.counters, self.after_reduce, self.has_fresh_grads = Counters(), None, False
        self.driver = None
        self.name = _common_name([member.name for member in members])
        self._gathers: list[Flight] = []
        self._reduces: list[Reduction] = []
        self._unsharded = self._swapped = False
        with torch.inference_mode(False):  # the first forward may be an inference, the next one is not
            self.segments = [self._segment(plan, members) for plan in plans]
        self._swap("sharded")

    def homes(self) -> list[tuple[nn.Module, str]]:
        """Every module attribute that is one of this unit's parameters."""
        return [home for segment in self.segments for member in segment.members for home in member.homes]

    def named_homes(self) -> Iterator[tuple[str, list[tuple[nn.Module, str]]]]:
        """The name of each parameter, and every module attribute that is it."""
        return ((member.name, member.homes) for segment in self.segments for member in segment.members)

    # --- the three changes of cut ---

    @property
    def unsharded(self) -> bool:
        """Whether the modules hold, or are about to hold, whole parameters."""
        return self._unsharded

    def unshard(self) -> None:
        """Starts the all-gathers; ``wait_unshard`` finishes them. Does nothing when already unsharded."""
        if self._unsharded:
            return
        self._unsharded = True
        with torch.no_grad(), labelled("gather", self.name):
            for segment in self.segments:
                self._gather(segment)

    def wait_unshard(self) -> None:
        """Waits for the all-gathers and puts the whole parameters into the modules."""
        if not self._unsharded or self._swapped:
            return
        with labelled("wait_gather", self.name):
            for flight in self._gathers:
                flight.wait()
        self._gathers.clear()
        self._swap("unsharded")
        self._swapped = True

    def reshard(self, *, to_part: bool = False) -> None:
        """Puts the sharded parameters back, and frees the gathered buffers, unless the stage keeps them.

        Args:
            to_part: Keep this rank's share among the ranks of ``part_group``; the next unshard gathers over them alone.
        """
        if not self._unsharded:
            return
        self.wait_unshard()
        if self.zero == 3:
            for segment in self.segments:
                keeps = to_part and self.part_group
                segment.part = Part(segment.gathered, self._own_part(segment).clone()) if keeps else None
                self._free(segment)
        self._unsharded = self._swapped = False
        self._swap("sharded")

    def reduce(self) -> None:
        """Starts the reduce-scatters of what backward wrote; ``wait_reduce`` finishes them.

        Every trainable segment takes part, also where this rank wrote nothing: sizes are a function of the plan only.
        """
        with torch.no_grad(), labelled("reduce", self.name):
            for segment in self.segments:
                if segment.trainable:
                    self._reduces.append(self._start_reduce(segment))

    def _start_reduce(self, segment: Segment) -> Reduction:
        partial = self.take_partial(segment)
        self.counters.reduces += 1
        self.counters.reduce_bytes += partial.nbytes
        alone, inside = partial.plan.num_ranks == 1, self._reduces_inside(segment, partial)
        comms = self.controls.comms
        with comms.pool():
            shard = partial.slot() if alone or inside else partial.local.new_empty(partial.plan.shard_size)
        reduce = functools.partial(comms.reduce, shard, partial.local, group=partial.group)
        flight = lanes_of(shard.device).reduce.launch(reduce, partial.local, shard)
        return Reduction(segment, shard, flight, None if alone else partial.local, inside)

    def _reduces_inside(self, segment: Segment, partial: DBuffer) -> bool:
        """Whether the sum may lie in this rank's slot of what is summed: it is read as soon as it has landed."""
        alone, replicas = partial.plan.num_ranks == 1, partial.layout.replicas
        if alone or replicas is not None or self.after_reduce is None or not self.controls.comms.in_place:
            return False
        return converts(segment, partial.local.dtype, partial.local.device)

    def take_partial(self, segment: Segment) -> DBuffer:
        """Hands over what backward wrote, zero where it wrote nothing: this rank's term of the sum."""
        partial, segment.grad_full = self._grad_full(segment), None
        for index, param in enumerate(segment.unsharded):
            if param.grad_slot_written:  # type: ignore[attr-defined]
                param.grad_slot_written = False  # type: ignore[attr-defined]
            else:
                partial.view(index).zero_()
        partial.zero_gaps()
        return partial

    def advance_reduce(self) -> bool:
        """Takes the reductions in flight one stage on; returns whether some still are.

        Reduce-scatters are waited for and, where there are replicas, become all-reduces among these.
        """
        replicas = self.segments[0].master.layout.replicas if self.segments else None
        if replicas is None:
            self.wait_reduce()
        elif self.controls.requires_all_reduce:
            self._reduces = [self._all_reduce(reduction, replicas) for reduction in self._reduces]
        else:
            for reduction in self._reduces:
                self._hold(reduction)
            self._reduces.clear()
        return bool(self._reduces)

    def wait_reduce(self) -> None:
        """Waits for the reductions and adds their results, scaled, to the gradients of the sharded parameters.

        Those that have to be widened, and that nobody looks at before, stay as they arrived until ``settle``.
        """
        while self._reduces:
            with torch.no_grad(), labelled("wait_reduce", self.name):
                reduction = self._reduces.pop(0)
                self._arrive(reduction.segment, reduction.land(), reduction.inside)
                if reduction.inside:
                    reduction.free()
                self.has_fresh_grads = True

    def _arrive(self, segment: Segment, reduced: torch.Tensor, inside: bool) -> None:
        if segment.reduced is not None:  # of an earlier reduction in this backward
            self._accumulate(segment)
        at_once = inside or self.after_reduce is not None or self.controls.all_reduce_hook is not None
        segment.reduced = reduced
        if at_once or not can_wait(segment, reduced):
            self._accumulate(segment)

    def growth(self) -> int:
        """Bytes by which what this unit holds of gradients grows until all are in the shards; < 0 if it shrinks."""
        held = [(segment, segment.reduced.nbytes) for segment in self.segments if segment.reduced is not None]
        held += [(segment, segment.grad_full.nbytes) for segment in self.segments if segment.grad_full is not None]
        held += [(reduction.segment, reduction.nbytes) for reduction in self._reduces]
        return sum((segment.master.nbytes if segment.grad is None else 0) - nbytes for segment, nbytes in held)

    def settle(self, room: float) -> float:
        """Makes gradients of what has arrived and was left as it was, as far as there is room.

        Args:
            room: Bytes.

        Returns:
            Bytes that are left of it.
        """
        for segment in self.segments:
            grown = 0 if segment.reduced is None else segment.master.nbytes - segment.reduced.nbytes
            if segment.reduced is not None and grown <= room:
                room -= grown
                with torch.no_grad(), labelled("settle", self.name):
                    self._accumulate(segment)
        return room

    def _accumulate(self, segment: Segment) -> None:
        reduced, segment.reduced = segment.reduced, None
        assert reduced is not None
        multiplier = 1.0 / (self.controls.divide_factor or self.mesh.size())
        accumulate(segment, reduced, multiplier=multiplier, hook=self.controls.all_reduce_hook)

    def _all_reduce(self, reduction: Reduction, replicas: dist.ProcessGroup) -> Reduction:
        segment, shard = reduction.segment, reduction.land()
        if segment.partial is not None:
            shard.add_(segment.partial)
            segment.partial = None
        start = functools.partial(collectives.all_reduce, shard, group=replicas)
        return Reduction(segment, shard, lanes_of(shard.device).reduce.launch(start, shard), None)

    def _hold(self, reduction: Reduction) -> None:
        """Keeps a sum over the shards, in the reduce dtype, until a backward that reduces over the replicas too."""
        segment, shard = reduction.segment, reduction.land()
        segment.partial = shard if segment.partial is None else segment.partial.add_(shard)

    def step(self) -> None:
        """Calls ``after_reduce``, once the gradients are in."""
        self.has_fresh_grads = False
        if self.after_reduce is not None:
            with labelled("step", self.name):
                self.after_reduce(self)

    def forget_grads(self) -> None:
        """Frees gradient shards of which no parameter holds a view any more."""
        for segment in self.segments:
            if all(param.grad is None for param in segment.sharded):
                segment.grad = None

    @property
    def has_unreduced(self) -> bool:
        """Whether backward wrote gradients that no reduce has taken yet."""
        return any(segment.grad_full is not None for segment in self.segments)

    def drop(self) -> None:
        """Forgets gradients in flight and frees what was gathered: the way back to a clean state after an exception."""
        for reduction in self._reduces:
            reduction.flight.wait()
        self._reduces.clear()
        for segment in self.segments:
            segment.grad_full = segment.partial = segment.reduced = None
            for param in segment.unsharded:
                param.grad, param.grad_slot_written = None, False  # type: ignore[attr-defined]
        self.reshard()

    # --- the gathered buffer ---

    def _gather(self, segment: Segment) -> None:
        """Starts the all-gather of one segment, unless what was gathered last still holds."""
        full, master, part = self._full(segment), segment.master, segment.part
        version = segment.version()
        if segment.gathered == version or full.local is master.local:
            return
        with self.controls.comms.pool():
            full.local.untyped_storage().resize_(full.nbytes)
        self.counters.gathers += 1
        self.counters.gather_bytes += full.nbytes
        own, group, source = full.slot(), full.group, master.local
        if part is None or part.version != version:
            self.counters.cast_bytes += own.nbytes
        else:
            own, group, source = self._own_part(segment), self.part_group, part.local  # type: ignore[assignment]

        def start(*, async_op: bool) -> Handle | None:
            own.copy_(source)
            return self.controls.comms.gather(full.local, own, group=group, async_op=async_op)

        self._gathers.append(lanes_of(full.local.device).gather.launch(start, full.local, source))
        segment.gathered, segment.part = version, None

    def _own_part(self, segment: Segment) -> torch.Tensor:
        """This rank's share of the gathered buffer among the ``n`` ranks of ``part_group``, (m * S / n,)."""
        size = segment.plan.numel // self.part_group.size()  # type: ignore[union-attr]
        return segment.full.local[self.part_group.rank() * size :][:size]  # type: ignore[union-attr]

    def _free(self, segment: Segment) -> None:
        if segment.full is not None and segment.full.local is not segment.master.local:
            segment.full.local.untyped_storage().resize_(0)
        segment.gathered = None

    def _drop_stale(self) -> None:
        """A forward without a backward leaves parameters gathered; a step since then has made them old."""
        if self._unsharded and any(s.gathered is not None and s.gathered != s.version() for s in self.segments):
            self.reshard()

    # --- gradients ---

    def _slot(self, segment: Segment, index: int) -> torch.Tensor:
        """Where the gradient of a whole parameter is to be written; ``param.grad_slot``."""
        self.counters.grads_in_place += 1
        return self._grad_view(segment, index)

    def _take(self, segment: Segment, index: int, param: Any) -> None:
        """The post-accumulate hook of a whole parameter: its gradient goes to its slot, by one copy."""
        grad, param.grad = param.grad, None
        if grad is None:  # a layer wrote the slot and returned nothing
            return
        slot, grad = self._grad_view(segment, index), grad.to_dense() if grad.is_sparse else grad
        if param.grad_slot_written:
            slot.add_(grad)
        else:
            slot.copy_(grad)
            param.grad_slot_written = True
        self.counters.grad_copies += 1
        self.counters.grad_copy_bytes += slot.nbytes

    # --- aliases ---

    def realias(self) -> None:
        """Makes parameters and gradients lie in their shards again, whatever was assigned to them meanwhile.

        ``param.data = ...``, ``param.grad = ...`` and the like leave a stranger where a view of the shard should be. A
        stranger's values are copied in and the view is put back; nothing a user assigned is ignored. Whole parameters
        that were kept while their shards changed are freed.

        Raises:
            ValueError: If a stranger has another shape or another cut, or a module holds another Parameter.
        """
        for segment in self.segments:
            if not intact(segment):
                self._follow_requires_grad(segment)
                for index, member in enumerate(segment.members):
                    realias_param(segment, index, member)
            realias_grads(segment)
        self._drop_stale()

    def _follow_requires_grad(self, segment: Segment) -> None:
        """Parameters frozen or unfrozen since: the whole ones follow the sharded ones."""
        segment.trainable = any(param.requires_grad for param in segment.sharded)
        for index, (param, whole) in enumerate(zip(segment.sharded, segment.unsharded, strict=False)):
            if param.requires_grad != whole.requires_grad:
                if whole.grad_slot_written:  # type: ignore[attr-defined]
                    raise ValueError(
                        f"{segment.members[index].name} was frozen with gradients that are not reduced yet"
                    )
                self.reshard()  # while the modules hold the one that is replaced, nothing is
                segment.unsharded[index] = self._unsharded_parameter(segment, index, whole.data)

    def adopt(self) -> None:
        """Copies in the values of Parameters that modules hold instead of this unit's, and puts this unit's back.

        For ``load_state_dict(assign=True)``.

        Raises:
            ValueError: If one has another shape or another cut.
        """
        for segment in self.segments:
            for index, member in enumerate(segment.members):
                for held in strangers(segment, index, member):
                    copy_in(segment.master.run(index), held, segment.sharded[index], f"{member.name} was replaced by")
        self._swap("sharded")
        self.realias()

    # --- building ---

    def _segment(self, plan: SegmentPlan, members: Sequence[Member]) -> Segment:
        by_name = {member.name: member for member in members}
        mine = [by_name[spec.name] for spec in plan.tensors]
        dtype, trainable = mine[0].param.dtype, mine[0].param.requires_grad
        master = DBuffer.zeros(
            plan, [m.param.shape for m in mine], self.mesh, dtype=dtype, device=self._master_device(mine)
        )
        if getattr(self.offload_policy, "pin_memory", False) and self.mesh.device_type != "cpu":
            master.local = master.local.pin_memory()  # so that the copy to the device does not wait
        segment = Segment(plan, mine, master, trainable)
        for index, member in enumerate(mine):
            if not member.param.is_meta:
                start, stop = plan.local(index, master.rank)
                master.run(index).copy_(member.param.detach().reshape(-1)[start:stop])
            param = nn.Parameter(master.tensor(index), requires_grad=trainable)
            param.__dict__.update(own_attributes(member.param) | {HOME: Home(self, segment, index)})
            segment.sharded.append(param)
            member.param = param  # the whole tensor is not kept alive
        return segment

    def apply_(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Moves or casts the shards of masters and gradients by ``fn``, as ``nn.Module._apply`` does.

        The Parameter objects stay the same objects.
        """
        self.reshard()
        for segment in self.segments:
            realias_grads(segment)
            old, shard = segment.grad, segment.master.placement
            segment.master = segment.master.sibling(shard, fn(segment.master.local))
            segment.master.zero_gaps()  # to_empty promises nothing, and padding must be zero
            segment.grad = None if old is None else segment.master.sibling(shard, fn(old.local))
            segment.full, segment.unsharded, segment.gathered, segment.part = None, [], None, None
            for index, param in enumerate(segment.sharded):
                grad = None if param.grad is None or segment.grad is None else segment.grad.tensor(index)
                moved = nn.Parameter(segment.master.tensor(index), requires_grad=param.requires_grad)
                moved.__dict__.update(param.__dict__)
                param.grad = None
                torch.utils.swap_tensors(param, moved)
                param.grad = grad

    def _full(self, segment: Segment) -> DBuffer:
        """The gathered buffer and the parameters that are views of it, made at the first unshard.

        Raises:
            ValueError: If the parameters have no memory yet.
        """
        if segment.full is None:
            master = segment.master
            if master.local.is_meta:
                name = segment.members[0].name
                raise ValueError(f"{name} is on the meta device; call vescale.materialize(model, device) or to_empty()")
            dtype = (
                self.mp_policy.param_dtype
                if self.mp_policy.param_dtype and master.local.is_floating_point()
                else master.local.dtype
            )
            with torch.inference_mode(False):  # the first forward may be an inference, the next one is not
                segment.full = master.sibling(Replicate(), self._whole_local(segment, dtype))
                views = [segment.full.view(i) for i in range(len(segment.members))]
                segment.unsharded = [self._unsharded_parameter(segment, i, view) for i, view in enumerate(views)]
        return segment.full

    def _whole_local(self, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
        """The memory of the gathered buffer; where nothing is cut or cast, the master shard is it already."""
        local, device = segment.master.local, self._device(segment.master.local)
        if segment.plan.num_ranks == 1 and (dtype, device) == (local.dtype, local.device):
            return local
        return torch.empty(segment.plan.numel, dtype=dtype, device=device)

    def _unsharded_parameter(self, segment: Segment, index: int, view: torch.Tensor) -> nn.Parameter:
        trainable = segment.sharded[index].requires_grad
        param = nn.Parameter(torch.empty(0, dtype=view.dtype, device=view.device), requires_grad=trainable)
        param.data = view  # through .data, so that it has a version counter of its own
        param.__dict__.update(own_attributes(segment.sharded[index]))
        if trainable:
            param.grad_slot = functools.partial(self._slot, segment, index)  # type: ignore[attr-defined]
            param.register_post_accumulate_grad_hook(_taker(self, segment, index))
        param.grad_slot_written = False  # type: ignore[attr-defined]
        return param

    def _grad_full(self, segment: Segment) -> DBuffer:
        if segment.grad_full is None:
            dtype = self._full(segment).local.dtype
            if dtype.is_floating_point:  # of complex ones a real sum would lose half
                dtype = self.mp_policy.reduce_dtype or dtype
            with self.controls.comms.pool():
                local = scratch.take(segment.plan.numel, dtype, self._device(segment.master.local))
            segment.grad_full = segment.master.sibling(Partial(), local)
        return segment.grad_full

    def _grad_view(self, segment: Segment, index: int) -> torch.Tensor:
        if segment.grad_full is None and self.driver is not None:
            self.driver.expect_grads()
        return self._grad_full(segment).view(index)

    def _device(self, master: torch.Tensor) -> torch.device:
        """Where to compute: where the masters are, unless these are offloaded."""
        return mesh_device(self.mesh) if isinstance(self.offload_policy, CPUOffloadPolicy) else master.device

    def _master_device(self, members: Sequence[Member]) -> torch.device:
        """Meta stays meta; anything else goes to the mesh's device, as FSDP2 does, or is offloaded."""
        if any(member.param.is_meta for member in members):
            return torch.device("meta")
        return torch.device("cpu") if isinstance(self.offload_policy, CPUOffloadPolicy) else mesh_device(self.mesh)

    def _swap(self, side: str) -> None:
        for segment in self.segments:
            for member, param in zip(segment.members, getattr(segment, side), strict=True):
                for module, attribute in member.homes:
                    put(module, attribute, param)


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """Returns this rank's device of a mesh."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _taker(unit: Unit, segment: Segment, index: int) -> Callable[[Any], None]:
    """The hook that calls ``unit._take``; a strong reference would go through C++, where no collector finds the way
    back to the parameter, and no model would ever be freed.
    """
    owner, of = weakref.ref(unit), weakref.ref(segment)

    def take(param: Any) -> None:
        alive, where = owner(), of()
        if alive is not None and where is not None:
            alive._take(where, index, param)

    return take


def _common_name(names: Sequence[str]) -> str:
    """The dotted prefix that all names share: ``layers.0`` of ``layers.0.up.weight`` and ``layers.0.norm.weight``."""
    paths = [name.split(".")[:-1] for name in names]
    return ".".join(os.path.commonprefix(paths)) if paths else ""
