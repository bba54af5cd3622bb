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

Buffers of one segment (S = shard size, m ranks)::

    master       (S,)      stored dtype   lives always
    full         (m * S,)  param_dtype    unshard to reshard
    grad_full    (m * S,)  reduce_dtype   first gradient to the end of the reduce-scatter
    grad         (S,)      stored dtype   reduce to ``zero_grad``; ``param.grad`` are views of it
"""

from __future__ import annotations

import copy
import functools
import os.path
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Partial, Replicate

from vescale.block import Block, Lattice
from vescale.counting import Counters
from vescale.dbuffer import DBuffer
from vescale.planner import SegmentPlan, TensorSpec
from vescale.ragged_tensor import RaggedTensor
from vescale.streams import Flight, labelled, lanes_of

HOME = "_vescale_home"  # attribute of a sharded parameter: its Home
PENDING = "_vescale_pending"  # attribute of a whole parameter that a sharded one will replace


@dataclass(eq=False)
class Member:
    """One parameter: its name, every module attribute that is it (several when tied), and its block."""

    name: str
    param: nn.Parameter
    homes: list[tuple[nn.Module, str]]
    block: Block = Block(())


@dataclass(eq=False)
class Segment:
    """One buffer of a unit: parameters of one dtype and trainability, with one plan."""

    plan: SegmentPlan
    members: list[Member]
    master: DBuffer
    trainable: bool
    sharded: list[nn.Parameter] = field(default_factory=list)
    unsharded: list[nn.Parameter] = field(default_factory=list)
    full: DBuffer | None = None
    grad_full: DBuffer | None = None
    grad: DBuffer | None = None
    gathered_version: int = 0  # of the master shard, when it was gathered last


class Reduction(NamedTuple):
    """A reduce-scatter under way: `partial` must live until it has landed in `shard`, (S,) reduce_dtype."""

    segment: Segment
    partial: DBuffer
    shard: torch.Tensor
    flight: Flight


class Home(NamedTuple):
    """Where a sharded parameter lies."""

    unit: Unit
    segment: Segment
    at: int  # index in the segment


def home_of(param: torch.Tensor) -> Home | None:
    """Returns where a parameter lies; None when no unit holds it."""
    return param.__dict__.get(HOME)


@dataclass
class Controls:
    """What a module's setters change between steps."""

    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True  # over replicas; one mesh axis has none
    divide_factor: float | None = None  # None divides by the number of ranks
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None  # sees each reduced shard before it is accumulated


class Unit:
    """Parameters that are gathered, reduced and freed together.

    Args:
        members: The parameters, in definition order; their values are copied into the master shards, nothing is
            communicated.
        plans: Of all segments: where the members lie.
        mesh: One-dimensional; its ranks share the parameters.
        mp_policy: Compute and reduce dtypes, with torch's meaning.
        controls: Read at every step; whoever made them may change them.
    """

    segments: list[Segment]
    mesh: DeviceMesh
    mp_policy: MixedPrecisionPolicy
    controls: Controls
    counters: Counters
    name: str  # of the modules, as far as its parameters' names agree; labels the profiler's ranges
    after_reduce: Callable[[Unit], None] | None  # called when fresh gradients lie in the shards; may step and free them

    def __init__(
        self,
        members: Sequence[Member],
        plans: Sequence[SegmentPlan],
        mesh: DeviceMesh,
        *,
        mp_policy: MixedPrecisionPolicy,
        controls: Controls,
    ) -> None:
        self.mesh, self.mp_policy, self.controls = mesh, mp_policy, controls
        self.counters, self.after_reduce = Counters(), None
        self.name = _common_name([member.name for member in members])
        self._gathers: list[Flight] = []
        self._reduces: list[Reduction] = []
        self._unsharded = False
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
                self._gathers.append(self._gather(segment))

    def _gather(self, segment: Segment) -> Flight:
        full, master = self._full(segment), segment.master
        full.local.untyped_storage().resize_(full.nbytes)
        segment.gathered_version = master.local._version
        self.counters.gathers += 1
        self.counters.gather_bytes += full.nbytes
        self.counters.cast_bytes += full.nbytes // full.plan.num_ranks
        lane = lanes_of(full.local.device).gather
        return lane.launch(lambda async_op: master.gather_into(full, async_op=async_op), full.local)

    def wait_unshard(self) -> None:
        """Waits for the all-gathers and puts the whole parameters into the modules."""
        if not self._gathers:
            return
        with labelled("wait_gather", self.name):
            for flight in self._gathers:
                flight.wait()
        self._gathers.clear()
        self._swap("unsharded")

    def reshard(self) -> None:
        """Frees the gathered buffers and puts the sharded parameters back."""
        if not self._unsharded:
            return
        self.wait_unshard()
        for segment in self.segments:
            if segment.full is not None:
                segment.full.local.untyped_storage().resize_(0)
        self._unsharded = False
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
        partial, segment.grad_full = self._grad_full(segment), None
        for index, param in enumerate(segment.unsharded):
            if param.grad_slot_written:  # type: ignore[attr-defined]
                param.grad_slot_written = False  # type: ignore[attr-defined]
            else:
                partial.view(index).zero_()
        partial.zero_gaps()
        self.counters.reduces += 1
        self.counters.reduce_bytes += partial.nbytes
        shard = partial.local.new_empty(partial.plan.shard_size)
        lane = lanes_of(shard.device).reduce
        flight = lane.launch(lambda async_op: partial.reduce_into(shard, async_op=async_op), partial.local, shard)
        return Reduction(segment, partial, shard, flight)

    def wait_reduce(self) -> None:
        """Waits for the reduce-scatters and adds their results, scaled, to the gradients of the sharded parameters."""
        while self._reduces:
            with torch.no_grad(), labelled("wait_reduce", self.name):
                segment, partial, shard, flight = self._reduces.pop(0)
                flight.wait()
                del partial
                self._accumulate(segment, shard)

    def step(self) -> None:
        """Calls ``after_reduce``, once the gradients are in."""
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
            segment.grad_full = None
            for param in segment.unsharded:
                param.grad, param.grad_slot_written = None, False  # type: ignore[attr-defined]
        self.reshard()

    # --- gradients ---

    def _slot(self, segment: Segment, index: int) -> torch.Tensor:
        """Where the gradient of a whole parameter is to be written; ``param.grad_slot``."""
        self.counters.grads_in_place += 1
        return self._grad_full(segment).view(index)

    def _take(self, segment: Segment, index: int, param: Any) -> None:
        """The post-accumulate hook of a whole parameter: its gradient goes to its slot, by one copy."""
        grad, param.grad = param.grad, None
        if grad is None:  # a layer wrote the slot and returned nothing
            return
        slot = self._grad_full(segment).view(index)
        if param.grad_slot_written:
            slot.add_(grad)
        else:
            slot.copy_(grad)
            param.grad_slot_written = True
        self.counters.grad_copies += 1
        self.counters.grad_copy_bytes += slot.nbytes

    def _accumulate(self, segment: Segment, reduced: torch.Tensor) -> None:
        """gradient shard = (what was there) + multiplier * reduced, in the master's dtype."""
        multiplier = 1.0 / (self.controls.divide_factor or self.mesh.size())
        if self.controls.all_reduce_hook is not None:
            self.controls.all_reduce_hook(reduced.mul_(multiplier))
            multiplier = 1.0
        if any(param._backward_hooks for param in segment.sharded):
            reduced, multiplier = self._hooked(segment, reduced.to(segment.master.local.dtype) * multiplier), 1.0
        fresh = [index for index, param in enumerate(segment.sharded) if param.grad is None]
        if len(fresh) < len(segment.sharded):
            self._realias_grads(segment)  # a hook or a user may have put another gradient there
        if len(fresh) == len(segment.sharded) or segment.grad is None:
            # What arrived is the gradient: nothing is copied, unless its dtype is not the master's.
            grad = reduced.to(segment.master.local.dtype)
            segment.grad = segment.master.sibling(segment.master.placement, grad)
            if multiplier != 1.0:
                grad.mul_(multiplier)
        else:
            for index in fresh:
                segment.grad.run(index).zero_()
            segment.grad.local.add_(reduced, alpha=multiplier)
        for index, param in enumerate(segment.sharded):
            if not param.requires_grad:
                continue
            if param.grad is None:
                param.grad = segment.grad.tensor(index)
            for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(param)

    def _hooked(self, segment: Segment, fresh: torch.Tensor) -> torch.Tensor:
        """Shows each fresh gradient to the hooks of its sharded parameter, as autograd would, and returns the shard."""
        shard = segment.master.sibling(segment.master.placement, fresh)
        for index, param in enumerate(segment.sharded):
            for hook in (param._backward_hooks or {}).values():
                grad = hook(shard.tensor(index))
                if grad is not None:
                    _copy_in(shard.run(index), grad, param, f"a hook of {segment.members[index].name} returned")
        return fresh

    # --- aliases ---

    def realias(self) -> None:
        """Makes parameters and gradients lie in their shards again, whatever was assigned to them meanwhile.

        ``param.data = ...``, ``param.grad = ...`` and the like leave a stranger where a view of the shard should be. A
        stranger's values are copied in and the view is put back; nothing a user assigned is ignored. Whole parameters
        that were kept while their shards changed are freed.

        Raises:
            ValueError: If a stranger has another shape or another cut, or a module holds another Parameter.
        """
        if self._unsharded and any(s.gathered_version != s.master.local._version for s in self.segments):
            self.reshard()
        for segment in self.segments:
            if not _intact(segment):
                self._follow_requires_grad(segment)
                for index, member in enumerate(segment.members):
                    self._realias_param(segment, index, member)
            self._realias_grads(segment)

    def _follow_requires_grad(self, segment: Segment) -> None:
        """Parameters frozen or unfrozen since: the whole ones follow the sharded ones."""
        segment.trainable = any(param.requires_grad for param in segment.sharded)
        for index, (param, whole) in enumerate(zip(segment.sharded, segment.unsharded, strict=False)):
            if param.requires_grad != whole.requires_grad:
                self.reshard()  # while the modules hold the one that is replaced, nothing is
                segment.unsharded[index] = self._unsharded_parameter(segment, index, whole.data)

    def _realias_param(self, segment: Segment, index: int, member: Member) -> None:
        param, expected = segment.sharded[index], segment.master.run(index)
        for held in self._strangers(segment, index, member):
            home = home_of(held)
            how = "replaced" if home is None else f"tied to {home.segment.members[home.at].name}"
            raise ValueError(
                f"{member.name} {tuple(param.shape)} was {how} after fully_shard planned it; tie and replace before the "
                "parameters are first asked for, or copy the values in (copy_, load_state_dict)"
            )
        if param.dtype != expected.dtype:
            raise ValueError(f"{member.name} is {param.dtype} in a shard of {expected.dtype}; convert the whole model")
        if param._local_tensor.data_ptr() != expected.data_ptr() and expected.numel():  # type: ignore[attr-defined]
            expected.copy_(param._local_tensor)  # type: ignore[attr-defined]
            param._local_tensor = expected  # type: ignore[attr-defined]

    def adopt(self) -> None:
        """Copies in the values of Parameters that modules hold instead of this unit's, and puts this unit's back.

        For ``load_state_dict(assign=True)``.

        Raises:
            ValueError: If one has another shape or another cut.
        """
        for segment in self.segments:
            for index, member in enumerate(segment.members):
                for held in self._strangers(segment, index, member):
                    _copy_in(segment.master.run(index), held, segment.sharded[index], f"{member.name} was replaced by")
        self._swap("sharded")
        self.realias()

    def _strangers(self, segment: Segment, index: int, member: Member) -> list[nn.Parameter]:
        known = (segment.sharded[index], segment.unsharded[index] if segment.unsharded else None)
        held = (module._parameters.get(attribute) for module, attribute in member.homes)
        return [param for param in held if param is not None and all(param is not own for own in known)]

    def _realias_grads(self, segment: Segment) -> None:
        if segment.grad is not None and all(param.grad is None for param in segment.sharded):
            segment.grad = None
        for index, param in enumerate(segment.sharded):
            if param.grad is not None:
                self._realias_grad(segment, index, param)

    def _realias_grad(self, segment: Segment, index: int, param: nn.Parameter) -> None:
        grad = param.grad
        if segment.grad is None:
            segment.grad = segment.master.sibling(segment.master.placement, torch.zeros_like(segment.master.local))
        if isinstance(grad, RaggedTensor) and _lies_in(grad, segment.grad, index):
            return
        expected = segment.grad.run(index)
        _copy_in(expected, grad, param, f"{segment.members[index].name}.grad is")  # type: ignore[arg-type]
        param.grad = segment.grad.tensor(index)

    # --- building ---

    def _segment(self, plan: SegmentPlan, members: Sequence[Member]) -> Segment:
        by_name = {member.name: member for member in members}
        mine = [by_name[spec.name] for spec in plan.tensors]
        dtype, trainable = mine[0].param.dtype, mine[0].param.requires_grad
        master = DBuffer.zeros(
            plan, [m.param.shape for m in mine], self.mesh, dtype=dtype, device=_device(mine, self.mesh)
        )
        segment = Segment(plan, mine, master, trainable)
        for index, member in enumerate(mine):
            if not member.param.is_meta:
                start, stop = plan.local(index, master.rank)
                master.run(index).copy_(member.param.detach().reshape(-1)[start:stop])
            param = nn.Parameter(master.tensor(index), requires_grad=trainable)
            param.__dict__.update(_own_attributes(member.param) | {HOME: Home(self, segment, index)})
            segment.sharded.append(param)
            member.param = param  # the whole tensor is not kept alive
        return segment

    def copied(self, memo: dict[int, Any]) -> Unit:
        """Returns a unit of the same plan with a copy of the master shards and without gradients, for ``deepcopy``.

        Args:
            memo: Of the deepcopy; learns the unit and each of its parameters. ``move_in`` follows once it knows the
                modules.
        """
        self.reshard()
        twin = memo[id(self)] = copy.copy(self)
        twin.controls = copy.deepcopy(self.controls, memo)
        twin._gathers, twin._reduces, twin.counters, twin.after_reduce = [], [], Counters(), None
        twin.segments = [twin._copied_segment(segment, memo) for segment in self.segments]
        return twin

    def _copied_segment(self, old: Segment, memo: dict[int, Any]) -> Segment:
        master = old.master.sibling(old.master.placement, old.master.local.clone())
        segment = Segment(old.plan, [replace(member) for member in old.members], master, old.trainable)
        for index, (member, param) in enumerate(zip(segment.members, old.sharded, strict=True)):
            twin = memo[id(param)] = nn.Parameter(master.tensor(index), requires_grad=param.requires_grad)
            twin.__dict__.update(copy.deepcopy(_own_attributes(param), memo) | {HOME: Home(self, segment, index)})
            segment.sharded.append(twin)
            member.param = twin
        return segment

    def move_in(self, memo: dict[int, Any]) -> None:
        """Points a copied unit at the copied modules."""
        for segment in self.segments:
            for member in segment.members:
                member.homes = [(memo[id(module)], attribute) for module, attribute in member.homes]

    def apply_(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Moves or casts the master shards by ``fn``, as ``nn.Module._apply`` does.

        The Parameter objects stay the same objects.
        """
        self.reshard()
        for segment in self.segments:
            local = fn(segment.master.local)
            segment.master = segment.master.sibling(segment.master.placement, local)
            segment.master.zero_gaps()  # to_empty promises nothing, and padding must be zero
            segment.full, segment.grad, segment.unsharded = None, None, []
            for index, param in enumerate(segment.sharded):
                grad = param.grad
                moved = nn.Parameter(segment.master.tensor(index), requires_grad=param.requires_grad)
                moved.__dict__.update(param.__dict__)
                torch.utils.swap_tensors(param, moved)
                param.grad = None if grad is None else fn(grad)

    def _full(self, segment: Segment) -> DBuffer:
        """The gathered buffer and the parameters that are views of it, made at the first unshard."""
        if segment.full is None:
            master = segment.master
            dtype = (
                self.mp_policy.param_dtype
                if self.mp_policy.param_dtype and master.local.is_floating_point()
                else master.local.dtype
            )
            with torch.inference_mode(False):  # the first forward may be an inference, the next one is not
                local = torch.empty(segment.plan.numel, dtype=dtype, device=master.local.device)
                segment.full = master.sibling(Replicate(), local)
                views = [segment.full.view(i) for i in range(len(segment.members))]
                segment.unsharded = [self._unsharded_parameter(segment, i, view) for i, view in enumerate(views)]
        return segment.full

    def _unsharded_parameter(self, segment: Segment, index: int, view: torch.Tensor) -> nn.Parameter:
        trainable = segment.sharded[index].requires_grad
        param = nn.Parameter(torch.empty(0, dtype=view.dtype, device=view.device), requires_grad=trainable)
        param.data = view  # through .data, so that it has a version counter of its own
        param.__dict__.update(_own_attributes(segment.sharded[index]))
        if trainable:
            param.grad_slot = functools.partial(self._slot, segment, index)  # type: ignore[attr-defined]
            param.register_post_accumulate_grad_hook(functools.partial(self._take, segment, index))
        param.grad_slot_written = False  # type: ignore[attr-defined]
        return param

    def _grad_full(self, segment: Segment) -> DBuffer:
        if segment.grad_full is None:
            dtype = self.mp_policy.reduce_dtype or self._full(segment).local.dtype
            local = torch.empty(segment.plan.numel, dtype=dtype, device=segment.master.local.device)
            segment.grad_full = segment.master.sibling(Partial(), local)
        return segment.grad_full

    def _swap(self, side: str) -> None:
        for segment in self.segments:
            for member, param in zip(segment.members, getattr(segment, side), strict=True):
                for module, attribute in member.homes:
                    module._parameters[attribute] = param


def _intact(segment: Segment) -> bool:
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


def _common_name(names: Sequence[str]) -> str:
    """The dotted prefix that all names share: ``layers.0`` of ``layers.0.up.weight`` and ``layers.0.norm.weight``."""
    paths = [name.split(".")[:-1] for name in names]
    return ".".join(os.path.commonprefix(paths)) if paths else ""


def member_specs(members: Sequence[Member]) -> list[TensorSpec]:
    """Returns a unit's parameters as the planner sees them.

    Parameters of one group lie next to each other, so that an optimizer step is one run per group.
    """
    groups = list(dict.fromkeys(member.block.group for member in members))
    ordered = sorted(members, key=lambda member: groups.index(member.block.group))
    return [
        TensorSpec(
            name=member.name,
            numel=member.param.numel(),
            granularity=Lattice(tuple(member.param.shape), member.block.shape).granularity,
            finest=member.block.finest,
            kind=(str(member.param.dtype), member.param.requires_grad),
            itemsize=member.param.element_size(),
        )
        for member in ordered
    ]


def _own_attributes(param: torch.Tensor) -> dict[str, Any]:
    """What a user attached to a parameter; both sides of it carry that."""
    ours = (HOME, PENDING, "grad_slot", "grad_slot_written")
    return {name: value for name, value in param.__dict__.items() if name not in ours}


def _device(members: Sequence[Member], mesh: DeviceMesh) -> torch.device:
    """Meta stays meta; anything else goes to the mesh's device, as FSDP2 does."""
    if any(member.param.is_meta for member in members):
        return torch.device("meta")
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _copy_in(expected: torch.Tensor, stranger: torch.Tensor, param: Any, what: str) -> None:
    """Copies a stranger's values into the view that belongs there."""
    if tuple(stranger.shape) != tuple(param.shape):
        raise ValueError(f"{what} a tensor of shape {tuple(stranger.shape)}, expected {tuple(param.shape)}")
    with torch.no_grad():
        if not isinstance(stranger, RaggedTensor):
            expected.copy_(stranger.detach().reshape(-1)[slice(*param.run)])
        elif stranger.placements == param.placements:
            expected.copy_(stranger._local_tensor)
        else:
            raise ValueError(f"{what} cut by {stranger.placements}, expected {param.placements}; redistribute it first")
