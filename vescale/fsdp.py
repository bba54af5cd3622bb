"""fully_shard: FSDP2's call, with parameters packed so that the blocks of their optimizer stay whole.

::

    for layer in model.layers:
        fully_shard(layer, mesh=mesh, block_of=rules.block_of)
    fully_shard(model, mesh=mesh, block_of=rules.block_of)

A call only declares a unit. Plans are made when the parameters are first needed (first forward, ``parameters()``,
``state_dict()``, ``to_empty``): then the outermost sharded module is known, so names are complete, and a parameter that
several units share goes to their lowest common unit.

What runs when, for units root, 0, 1 (g = all-gather, f / b = compute, r = reduce-scatter; prefetch is one unit deep)::

    compute    f.root f.0    f.1    | b.root b.1      b.0      |
    gathers    g.root g.0 g.1       | (kept) g.1  g.0          |
    reduces                         |             r.1      r.0 r.root

The root keeps its parameters between forward and backward: they would be gathered again at once.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.utils._pytree import tree_map

from vescale import collectives
from vescale.block import Block
from vescale.planner import SegmentPlan
from vescale.segments import plan_model
from vescale.unit import PENDING, Member, Unit, home_of, member_specs

BlockOf = Callable[[str, nn.Parameter], "Block | tuple[int, ...]"]


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    block_of: BlockOf | None = None,
    max_padding: float = 0.01,
    zero: int = 3,
) -> nn.Module:
    """Makes the parameters of ``module`` that no inner call has taken one unit: gathered, reduced and freed together.

    The module is changed in place: its class becomes a subclass of it and of ``FSDPModule``.

    Args:
        module: Any module; call on inner modules first, on the root last.
        mesh: One-dimensional; its ranks share the parameters. All ranks when left out.
        reshard_after_forward: Free the whole parameters after forward and gather them again for backward; None is True,
            except at the root.
        mp_policy: torch's ``MixedPrecisionPolicy``: ``param_dtype`` of compute and all-gather, ``reduce_dtype`` (None
            is ``param_dtype``), and so on.
        offload_policy: torch's ``OffloadPolicy``.
        ignored_params: Parameters to leave alone.
        block_of: Block of a parameter, from its name in the outermost sharded module; ``Rules.block_of``, or any
            function. None: single elements.
        max_padding: Padding that may be paid to keep blocks whole, as a fraction of the elements of all units that
            have the same.
        zero: ZeRO stage; 3 cuts parameters, gradients and optimizer state.

    Returns:
        The module itself.

    Raises:
        ValueError: For an argument of the wrong kind or range, or a module that is sharded already.
        NotImplementedError: For an option that is legal but not built.
    """
    _check(module, mesh, reshard_after_forward, offload_policy, max_padding, zero)
    state = ShardState(
        module,
        mesh=mesh,
        reshard_after_forward=None if reshard_after_forward is None else bool(reshard_after_forward),
        mp_policy=mp_policy or MixedPrecisionPolicy(),
        ignored=frozenset(map(id, ignored_params or ())),
        block_of=block_of,
        max_padding=max_padding,
    )
    state.install()
    return module


def _check(module: Any, mesh: Any, reshard: Any, offload: Any, max_padding: float, zero: int) -> None:
    problems, missing = [], []
    if isinstance(module, list | tuple):
        missing.append("a list of modules as one unit; call it on their common parent")
    elif not isinstance(module, nn.Module):
        problems.append(f"module must be an nn.Module, got {type(module).__name__}")
    elif isinstance(module, FSDPModule):
        problems.append(f"{type(module).__name__} is sharded already")
    elif isinstance(module, nn.ModuleList | nn.ModuleDict):
        problems.append(f"{type(module).__name__} has no forward; call fully_shard on each of its modules")
    if mesh is not None and mesh.ndim != 1:
        missing.append(f"a mesh of {mesh.ndim} axes; slice one axis out of it")
    if not (reshard is None or isinstance(reshard, bool)):
        missing.append(f"reshard_after_forward={reshard!r}; use True, False or None")
    if offload is not None and type(offload) is not OffloadPolicy:
        missing.append(f"{type(offload).__name__}; use OffloadPolicy()")
    if not max_padding >= 0:
        problems.append(f"max_padding must be a fraction >= 0, got {max_padding}")
    if zero not in (0, 1, 2, 3):
        problems.append(f"zero must be 0, 1, 2 or 3, got {zero!r}")
    elif zero != 3:
        missing.append(f"zero={zero}; use 3")
    if problems:
        raise ValueError("fully_shard: " + "; ".join(problems))
    if missing:
        raise NotImplementedError("fully_shard cannot yet do " + "; ".join(missing))


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        raise ValueError(
            "fully_shard: no mesh given and no process group: call torch.distributed.init_process_group() first"
        )
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    return init_device_mesh(device.type, (dist.get_world_size(),))  # type: ignore[union-attr]


class Tree:
    """What the units below one outermost module share during an iteration."""

    states: list[ShardState]  # in definition order
    order: list[ShardState]  # as forward entered them last time; prefetch follows it
    entered: list[ShardState]  # as forward enters them this time
    reducing: Unit | None  # at most one unit's reduce-scatters are in flight
    root: ShardState | None  # the outermost module whose forward is running
    backwards: int  # that have ended

    def __init__(self, states: Sequence[ShardState]) -> None:
        self.states, self.order, self.entered = list(states), [], []
        self.reducing, self.root, self.callback_queued = None, None, False
        self.backwards = 0

    def neighbour(self, state: ShardState, step: int) -> ShardState | None:
        """The unit that ran after (+1) or before (-1) ``state`` in the recorded order."""
        if state not in self.order:
            return None
        at = self.order.index(state) + step
        return self.order[at] if 0 <= at < len(self.order) else None

    def finish_reduce(self) -> None:
        """Waits for the reduce-scatters in flight."""
        if self.reducing is not None:
            self.reducing.wait_reduce()
            self.reducing = None

    def reset(self) -> None:
        """Forgets an iteration that did not end, and frees what it held."""
        self.reducing, self.root, self.callback_queued = None, None, False
        self.entered = []
        for state in self.states:
            state.in_backward, state.owes, state.pending = False, False, 0
            state.unit.drop()


class ShardState:
    """One ``fully_shard`` call: its arguments, its unit once planned, and where it stands in the iteration."""

    module: nn.Module
    unit: Unit  # set by commit()
    tree: Tree  # set by commit(); shared with every unit of the outermost module
    parent: ShardState | None  # the next sharded module above
    in_backward: bool  # between its pre-backward and its post-backward
    owes: bool  # took part in a backward whose gradients have not been reduced; the same on every rank
    pending: int  # forwards whose backward has not come yet
    committed: bool  # the unit is planned
    applying: bool  # an outer _apply has taken care of the unit

    def __init__(
        self,
        module: nn.Module,
        *,
        mesh: DeviceMesh | None,
        reshard_after_forward: bool | None,
        mp_policy: MixedPrecisionPolicy,
        ignored: frozenset[int],
        block_of: BlockOf | None,
        max_padding: float,
    ) -> None:
        self.module, self.mesh, self.mp_policy = module, mesh, mp_policy
        self.reshard_after_forward, self.ignored = reshard_after_forward, ignored
        self.block_of, self.max_padding = block_of, max_padding
        self.parent, self.in_backward, self.owes, self.pending = None, False, False, 0
        self.committed, self.applying = False, False

    def install(self) -> None:
        """Gives the module its class and hooks, and tells the sharded modules inside who is above them."""
        cls = type(self.module)
        self.module.__class__ = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
        self.module._vescale_state = self  # type: ignore[assignment]
        self.module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
        self.module.register_forward_hook(self._post_forward, prepend=False)
        for inner in self.module.modules():
            for param in inner._parameters.values():
                if param is not None and home_of(param) is None and id(param) not in self.ignored:
                    param.__dict__[PENDING] = True
            if isinstance(inner, FSDPModule) and inner is not self.module and inner._vescale_state.parent is None:
                inner._vescale_state.parent = self

    @property
    def outermost(self) -> ShardState:
        """The sharded module above which there is none."""
        return self if self.parent is None else self.parent.outermost

    def commit(self) -> None:
        """Plans every unit of the outermost module, and puts sharded parameters into the modules; once."""
        if not self.committed:
            _commit(self.outermost)

    def reshards_after_forward(self) -> bool:
        """Whether to free the whole parameters after forward; without gradients no backward will want them."""
        keep = self.reshard_after_forward is False or (self.reshard_after_forward is None and self.parent is None)
        return not (keep and torch.is_grad_enabled())

    # --- forward ---

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.commit()
        tree = self.tree
        if tree.root is self or (tree.callback_queued and torch._C._current_graph_task_id() == -1):
            tree.reset()  # an exception ended the last forward, or the last backward
        if self.in_backward:  # recomputation by activation checkpointing
            self._whole()
            return self._cast_inputs(args, kwargs)
        if tree.root is None:
            tree.root, tree.entered = self, []
            for state in tree.states:
                state.unit.realias()
        tree.entered.append(self)
        self._whole()
        following = tree.neighbour(self, +1)
        if following is not None:
            following.unit.unshard()
        args, kwargs = self._cast_inputs(args, kwargs)
        return self._watch_inputs(args, kwargs) if torch.is_grad_enabled() else (args, kwargs)

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.in_backward:
            self._watch_outputs(output)
            if self.reshards_after_forward():
                self.unit.reshard()
            if self.tree.root is self:
                self._end_forward()
        if self.mp_policy.output_dtype is not None:
            output = _cast(output, self.mp_policy.output_dtype)
        return output

    def _end_forward(self) -> None:
        self.tree.root = None
        self.tree.order = list(dict.fromkeys(self.tree.entered))
        for state in self.tree.states:
            if state not in self.tree.order:  # prefetched on a hint that did not come true
                state.unit.reshard()

    def _whole(self) -> None:
        self.unit.unshard()
        self.unit.wait_unshard()

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = self.mp_policy.param_dtype
        if dtype is None or not self.mp_policy.cast_forward_inputs:
            return args, kwargs
        return _cast(args, dtype), _cast(kwargs, dtype)

    # --- backward ---

    def _watch_outputs(self, output: Any) -> None:
        """Runs ``_pre_backward`` once per forward, when the first gradient of an output arrives."""
        if not torch.is_grad_enabled():
            return
        tensors: list[torch.Tensor] = []
        _map_tensors(lambda t: tensors.append(t) if t.requires_grad else None, output)
        if not tensors:
            return
        self.pending += 1
        fired: list[int] = []  # the backward in which it ran: one graph may have several

        def hook(grad: torch.Tensor) -> None:
            if fired != [self.tree.backwards]:
                fired[:] = [self.tree.backwards]
                self._pre_backward()

        for tensor in tensors:
            tensor.register_hook(hook)

    def _watch_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Routes the inputs through a node whose backward says that this module's backward is done."""
        found: dict[int, torch.Tensor] = {}
        _map_tensors(lambda t: found.setdefault(id(t), t) if t.requires_grad else None, (args, kwargs))
        if not found:
            return args, kwargs
        watched = dict(zip(found, _Watch.apply(self, *found.values()), strict=True))
        return _map_tensors(lambda t: watched.get(id(t), t), (args, kwargs))

    def _pre_backward(self) -> None:
        self.in_backward = self.owes = True
        if not self.tree.callback_queued:
            self.tree.callback_queued = True
            Variable._execution_engine.queue_callback(self._end_backward)
        self._whole()
        preceding = self.tree.neighbour(self, -1)
        if preceding is not None and preceding.pending:
            preceding.unit.unshard()

    def _post_backward(self) -> None:
        """One forward's backward is done; after the last one, the gradients are complete and leave."""
        self.in_backward, self.pending = False, max(self.pending - 1, 0)
        if self.pending == 0:
            self._reduce()
        self.unit.reshard()

    def _reduce(self) -> None:
        if self.unit.requires_gradient_sync:
            self.tree.finish_reduce()
            self.unit.reduce()
            self.tree.reducing, self.owes = self.unit, False

    def _end_backward(self) -> None:
        """Runs once when autograd is done.

        Units whose inputs needed no gradient, and gradients that came late, leave here.
        """
        tree = self.tree
        for state in reversed(tree.states):
            if state.owes or state.unit.has_unreduced:
                state._reduce()
            state.in_backward, state.pending = False, 0
            if state.unit.unsharded:
                state.unit.reshard()
        tree.finish_reduce()
        tree.callback_queued = False
        tree.backwards += 1


class _Watch(torch.autograd.Function):
    """Passes tensors through; its backward runs when the gradients of all of them are known."""

    @staticmethod
    def forward(ctx: Any, state: ShardState, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.state = state
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.state._post_backward()
        return (None, *grads)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return _map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, values)


def _map_tensors(fn: Callable[[torch.Tensor], Any], values: Any) -> Any:
    """Applies ``fn`` to every tensor in containers that torch knows, and in dataclasses, which it takes for leaves."""

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return fn(value)
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return value
        twin = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(twin, field.name, _map_tensors(fn, getattr(value, field.name)))
        return twin

    return tree_map(leaf, values)


class FSDPModule:
    """What ``fully_shard`` adds to a module."""

    _vescale_state: ShardState

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's own unit; returns a handle to wait on when ``async_op``."""
        self._vescale_state.commit()
        self._vescale_state.unit.unshard()
        handle = UnshardHandle(self._vescale_state.unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Frees the whole parameters of this module's own unit."""
        self._vescale_state.commit()
        self._vescale_state.unit.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Reduces gradients after backward, or keeps them whole and unreduced until a backward with True.

        Args:
            requires_gradient_sync: False for all but the last micro-batch saves communication for memory.
            recurse: Also set the sharded modules inside.
        """
        for state in self._states(recurse):
            state.unit.requires_gradient_sync = requires_gradient_sync

    def set_gradient_divide_factor(self, factor: float, *, recurse: bool = False) -> None:
        """Divides the summed gradients by ``factor`` instead of by the number of ranks; 1.0 leaves the sum.

        Args:
            factor: > 0.
            recurse: Also set the sharded modules inside; FSDP2 has no such switch and sets the module alone.

        Raises:
            ValueError: Unless ``factor`` is > 0.
        """
        if not factor > 0:
            raise ValueError(f"set_gradient_divide_factor: expected a factor > 0, got {factor}")
        for state in self._states(recurse):
            state.unit.divide_factor = factor

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Frees the whole parameters after forward, or keeps them for backward."""
        for state in self._states(recurse):
            state.reshard_after_forward = reshard_after_forward

    def reset_iter_state(self) -> None:
        """Discards an iteration that an exception ended.

        Waits for what is in flight, frees it, and the next forward starts clean.
        """
        self._vescale_state.commit()
        self._vescale_state.tree.reset()

    def units(self) -> Iterator[Unit]:
        """The planned units of this module and of the sharded modules inside, in definition order."""
        return (state.unit for state in self._states(recurse=True))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As ``nn.Module.named_parameters``.

        Plans the units first, so that what it yields are the parameters to hold.
        """
        self._vescale_state.commit()
        return super().named_parameters(prefix, recurse, remove_duplicate)  # type: ignore[misc]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As ``nn.Module.state_dict``, of sharded parameters under their plain names; no communication."""
        for state in self._states(recurse=True):
            state.unit.reshard()
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As ``nn.Module.load_state_dict``; values may be sharded alike, or whole and equal on every rank."""
        states = list(self._states(recurse=True))
        for state in states:
            state.unit.reshard()
        result = super().load_state_dict(state_dict, strict, assign)  # type: ignore[misc]
        for state in states:
            state.unit.realias()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Refuses: a copy would share the process groups and the hooks of this module.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "copy.deepcopy of a sharded module: build the second model, call fully_shard on it alike, and copy by "
            "load_state_dict(model.state_dict())"
        )

    def _states(self, recurse: bool) -> Iterable[ShardState]:
        self._vescale_state.commit()
        if not recurse:
            return [self._vescale_state]
        return [m._vescale_state for m in self.modules() if isinstance(m, FSDPModule)]  # type: ignore[attr-defined]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Moves master shards as a whole, so that views stay views and Parameter objects stay the same objects."""
        states = [state for state in self._states(recurse) if not state.applying]
        for state in states:
            state.unit.apply_(fn)
            state.applying = True
        homes = [home for state in states for home in state.unit.homes()]
        hidden = [(module, name, module._parameters.pop(name)) for module, name in homes]
        try:
            return super()._apply(fn, recurse)  # type: ignore[misc]
        finally:
            for module, name, param in hidden:
                module._parameters[name] = param
            for state in states:
                state.applying = False


class UnshardHandle:
    """Waits for an asynchronous ``unshard``."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Waits for the all-gathers and puts the whole parameters into the modules."""
        self._unit.wait_unshard()


# --- commit ---


def _commit(root: ShardState) -> None:
    """Gives every parameter to its unit, plans the units, compares the plans over the ranks.

    And joins the units into a tree.
    """
    states = [m._vescale_state for m in root.module.modules() if isinstance(m, FSDPModule)]
    fresh = [state for state in states if not state.committed]
    mesh = _default_mesh() if any(state.mesh is None for state in fresh) else None
    members = _assign(root)
    for state in fresh:
        state.mesh = state.mesh or mesh
        assert state.mesh is not None
    plans = _plan([(state, members[id(state)], state.mesh.size()) for state in fresh])  # type: ignore[union-attr]
    for state, segments in zip(fresh, plans, strict=True):
        state.unit = Unit(members[id(state)], segments, state.mesh, mp_policy=state.mp_policy)  # type: ignore[arg-type]
        state.committed = True
    tree = Tree(states)
    for state in states:
        state.tree = tree
    digests: dict[dist.ProcessGroup, str] = defaultdict(str)  # ranks that share other parameters have other plans
    for state in fresh:
        digests[state.unit.mesh.get_group()] += "".join(segment.plan.digest() for segment in state.unit.segments)
    for group, digest in digests.items():
        collectives.same_on_every_rank(digest, what="the plan of fully_shard", group=group)


def preview(module: nn.Module, num_ranks: int) -> list[tuple[str, tuple[SegmentPlan, ...]]]:
    """Returns the name and the plans of every unit as ``num_ranks`` ranks would have them, and changes nothing.

    Args:
        module: The outermost module that ``fully_shard`` was called on; its parameters may be on the meta device.
        num_ranks: Ranks to plan for; no process group is needed.

    Raises:
        ValueError: If the module is not sharded, or planned already.
    """
    if not isinstance(module, FSDPModule) or module._vescale_state.committed:
        raise ValueError("preview: expected a module that fully_shard was called on and whose parameters nobody took")
    members = _assign(module._vescale_state)
    named = [(_plain(name), inner) for name, inner in module.named_modules() if isinstance(inner, FSDPModule)]
    plans = _plan([(inner._vescale_state, members[id(inner._vescale_state)], num_ranks) for _, inner in named])
    return [(name, segments) for (name, _), segments in zip(named, plans, strict=True)]


def _plan(units: Sequence[tuple[ShardState, Sequence[Member], int]]) -> list[tuple[SegmentPlan, ...]]:
    """Plans units, each on its number of ranks; those of one number and one ``max_padding`` share their budget."""
    budgets: dict[tuple[int, float], list[int]] = defaultdict(list)
    for i, (state, _, num_ranks) in enumerate(units):
        budgets[num_ranks, state.max_padding].append(i)
    found: dict[int, tuple[SegmentPlan, ...]] = {}
    for (num_ranks, max_padding), some in budgets.items():
        specs = [member_specs(units[i][1]) for i in some]
        found.update(zip(some, plan_model(specs, num_ranks=num_ranks, max_padding=max_padding), strict=True))
    return [found[i] for i in range(len(units))]


def _assign(root: ShardState) -> dict[int, list[Member]]:
    """Finds each parameter's unit: the nearest sharded module above it, or above all its uses when it is tied."""
    found: dict[int, tuple[Member, ShardState]] = {}
    seen: set[int] = set()

    def visit(module: nn.Module, state: ShardState, prefix: str) -> None:
        state = module._vescale_state if isinstance(module, FSDPModule) else state
        if id(module) in seen or (state.committed and state is not root):
            return
        seen.add(id(module))
        for name, param in module._parameters.items():
            if param is None or any(id(param) in s.ignored for s in _chain(state)):
                continue
            if id(param) in found:
                member, owner = found[id(param)]
                found[id(param)] = (member, _common(owner, state))
            else:
                member = Member(_plain(prefix + name), param, [])
                found[id(param)] = (member, state)
            member.homes.append((module, name))
        for name, child in module._modules.items():
            if child is not None:
                visit(child, state, f"{prefix}{name}.")

    visit(root.module, root, "")
    result: dict[int, list[Member]] = defaultdict(list)
    for member, state in found.values():
        member.block = _block(state, member)
        result[id(state)].append(member)
    return result


def _chain(state: ShardState) -> list[ShardState]:
    return [state] if state.parent is None else [state, *_chain(state.parent)]


def _common(a: ShardState, b: ShardState) -> ShardState:
    """The lowest unit above both; the outermost module is above everything."""
    above = set(map(id, _chain(b)))
    return next(state for state in _chain(a) if id(state) in above)


_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def _plain(name: str) -> str:
    """The name a user gave, without what wrappers put into it."""
    return functools.reduce(lambda text, wrapper: text.replace(wrapper, ""), _WRAPPERS, name)


def _block(state: ShardState, member: Member) -> Block:
    if state.block_of is None:
        return Block(())
    block = state.block_of(member.name, member.param)
    return block if isinstance(block, Block) else Block(tuple(block))
