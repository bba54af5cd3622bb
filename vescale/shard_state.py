"""ShardState: one ``fully_shard`` call and where it stands in the iteration; the hooks that drive its unit.

What runs when, for units root, 0, 1 (g = all-gather, f / b = compute, r = reduce-scatter; prefetch is one unit deep)::

    compute    f.root f.0    f.1    | b.root b.1      b.0      |
    gathers    g.root g.0 g.1       | (kept) g.1  g.0          |
    reduces                         |             r.1      r.0 r.root

The root keeps its parameters between forward and backward: they would be gathered again at once.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.utils._pytree import tree_leaves, tree_map

from vescale import scratch
from vescale.anatomy import Anatomy
from vescale.block import Block
from vescale.unit import Controls, Unit

BlockOf = Callable[[str, nn.Parameter], "Block | tuple[int, ...]"]


class Tree:
    """What the units below one outermost module share during an iteration."""

    states: list[ShardState]  # in definition order
    order: list[ShardState]  # as forward entered them last time; prefetch follows it
    entered: list[ShardState]  # as forward enters them this time
    hinted: set[ShardState]  # gathered ahead of a forward that has not entered them
    anatomy: Anatomy
    reducing: Unit | None  # at most one unit's reduce-scatters are in flight,
    replicating: Unit | None  # and, with replicas, the all-reduces of the one before
    root: ShardState | None  # the outermost module whose forward is running
    backwards: int  # that have ended
    differentiable: bool  # a graph of this backward itself is made (create_graph), for a backward of it
    stepped: list[Unit]  # in this backward
    is_last_backward: bool  # False leaves the last reduce-scatter in flight when backward ends
    post_optim_event: Any  # the next forward waits for it before it gathers; then it is forgotten

    def __init__(self, states: Sequence[ShardState], anatomy: Anatomy) -> None:
        self.states, self.anatomy = list(states), anatomy
        self.order, self.entered, self.hinted, self.stepped = [], [], set(), []
        self.reducing, self.replicating, self.root, self.callback_queued = None, None, None, False
        self.backwards, self.is_last_backward, self.post_optim_event = 0, True, None
        self.differentiable = False

    def neighbours(self, state: ShardState, step: int) -> list[ShardState]:
        """The unit that ran after (+1) or before (-1) ``state`` in the recorded order; none at its ends."""
        if state not in self.order:
            return []
        at = self.order.index(state) + step
        return [self.order[at]] if 0 <= at < len(self.order) else []

    def __deepcopy__(self, memo: dict[int, Any]) -> Tree:
        twin = memo[id(self)] = Tree((), self.anatomy)  # whoever copies the modules surveys them when all are there
        twin.states, twin.order = copy.deepcopy(self.states, memo), copy.deepcopy(self.order, memo)
        return twin

    def start_reduce(self, unit: Unit) -> None:
        """Starts the reduce-scatters of ``unit``, and takes those in flight one stage on; what landed is stepped."""
        landed = [] if self.replicating is None else [self.replicating]
        if self.replicating is not None:
            self.replicating.wait_reduce()
        self.replicating = self.reducing if self.reducing is not None and self.reducing.advance_reduce() else None
        if self.reducing is not None and self.replicating is None:
            landed.append(self.reducing)
        unit.reduce()
        self.reducing = unit
        self._step(landed)

    def finish_reduce(self) -> None:
        """Waits for the reductions in flight."""
        if self.reducing is not None:
            self.reducing.advance_reduce()
        landed = [unit for unit in (self.replicating, self.reducing) if unit is not None]
        self.reducing = self.replicating = None
        for unit in landed:
            unit.wait_reduce()
        self.settle()
        self._step(landed)

    def settle(self, room: float = math.inf) -> None:
        """Makes gradients of what has arrived, as far as there is room; backward writes no more of them.

        Args:
            room: Bytes.
        """
        scratch.clear()
        for state in self.states:
            room = state.unit.settle(room)

    def _step(self, landed: Sequence[Unit]) -> None:
        """Steps units that step in backward; behind the reduce-scatters that were started before."""
        for unit in landed:
            if unit.after_reduce is None or not unit.has_fresh_grads:
                continue
            if unit in self.stepped:
                raise RuntimeError(f"{unit.name}: gradients came after the unit was stepped in this backward")
            self.stepped.append(unit)
            unit.step()

    def reset(self) -> None:
        """Forgets an iteration that did not end, and frees what it held."""
        self.reducing, self.replicating, self.root, self.callback_queued = None, None, None, False
        self.entered, self.hinted, self.stepped = [], set(), []
        for state in self.states:
            state.in_backward, state.owes, state.pending = False, False, 0
            state.to_run.clear()
            state.unit.drop()
        scratch.clear()


class ShardState:
    """One ``fully_shard`` call: its arguments, its unit once planned, and where it stands in the iteration.

    Modules of one call share the unit: a pass of forward through them begins with the first that is called and ends
    when each has been, or with the forward of the outermost module (a head that is called later, chunk by chunk).
    """

    modules: tuple[nn.Module, ...]
    controls: Controls  # shared with the unit
    unit: Unit  # set by commit
    tree: Tree  # set by commit; shared with every unit of the outermost module
    parent: ShardState | None  # the next sharded module above
    in_backward: bool  # between its pre-backward and its post-backward
    owes: bool  # took part in a backward whose gradients have not been reduced; the same on every rank
    pending: int  # forwards whose backward has not come yet
    to_run: set[int]  # ids of the modules that this pass of forward has not called yet
    reshard_after_backward: bool
    unshard_in_backward: bool  # False: backward needs none of the parameters, as for an embedding
    forward_prefetch: Sequence[ShardState]  # gathered while this one computes; empty: the next in the recorded order
    backward_prefetch: Sequence[ShardState]
    committed: bool  # the unit is planned
    applying: bool  # an outer _apply has taken care of the unit

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        mesh: DeviceMesh | None,
        reshard_after_forward: bool | int | None,
        mp_policy: MixedPrecisionPolicy,
        ignored: frozenset[nn.Parameter],
        block_of: BlockOf | None,
        max_padding: float,
        offload_policy: OffloadPolicy,
        zero: int,
    ) -> None:
        self.modules, self.mesh, self.mp_policy = tuple(modules), mesh, mp_policy
        self.offload_policy, self.zero = offload_policy, zero
        self.reshard_after_forward, self.ignored = reshard_after_forward, ignored
        self.block_of, self.max_padding = block_of, max_padding
        self.parent, self.in_backward, self.owes, self.pending = None, False, False, 0
        self.committed, self.applying = False, False
        self.controls, self.to_run = Controls(), set()
        self.reshard_after_backward = self.unshard_in_backward = True
        self.forward_prefetch, self.backward_prefetch = (), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardState:
        """The state of a copied module: idle, planned alike, over the same mesh."""
        twin = memo[id(self)] = copy.copy(self)
        twin.in_backward, twin.owes, twin.pending, twin.to_run = False, False, 0, set()
        for name in ("modules", "parent", "unit", "tree", "controls", "forward_prefetch", "backward_prefetch"):
            setattr(twin, name, copy.deepcopy(getattr(self, name), memo))
        twin.unit.driver = twin
        return twin

    @property
    def outermost(self) -> ShardState:
        """The sharded module above which there is none."""
        return self if self.parent is None else self.parent.outermost

    def reshards_after_forward(self) -> bool:
        """Whether to free the whole parameters after forward; without gradients no backward will want them."""
        keep = self.reshard_after_forward is False or (self.reshard_after_forward is None and self.parent is None)
        return not (keep and torch.is_grad_enabled())

    def keeps_part(self) -> bool:
        """Whether to keep a share of the whole parameters for backward."""
        return self.part_ranks is not None and torch.is_grad_enabled()

    def reshards_after_backward(self) -> bool:
        """Whether to free the whole parameters after backward; a backward of a backward will want them."""
        return self.reshard_after_backward and not self.tree.differentiable

    @property
    def part_ranks(self) -> int | None:
        """Ranks among whom the gathered parameters are shared out after forward; None when an int was not asked for."""
        value = self.reshard_after_forward
        return None if value is None or isinstance(value, bool) else value

    # --- forward ---

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        tree, in_graph_task = self.tree, torch._C._current_graph_task_id() != -1
        if tree.root is self or (tree.callback_queued and not in_graph_task):
            tree.reset()  # an exception ended the last forward, or the last backward
        if self._recomputing():
            self._whole()
            return self._cast_inputs(args, kwargs)
        if not in_graph_task:  # else a reentrant checkpoint recomputes a forward that was counted already
            self._enter()
        self._whole()
        if not in_graph_task:
            ahead = [s for s in self.forward_prefetch or tree.neighbours(self, +1) if not s.unit.unsharded]
            tree.hinted.update(ahead)
            self._prefetch(ahead)
        args, kwargs = self._cast_inputs(args, kwargs)
        return self._watch_inputs(args, kwargs) if torch.is_grad_enabled() else (args, kwargs)

    def _enter(self) -> None:
        """A pass of forward reaches this unit; the first one of an iteration finds the modules as they were planned."""
        tree = self.tree
        if tree.root is None:
            tree.root, tree.entered = self, []
            if tree.post_optim_event is not None:
                tree.post_optim_event.wait()
                tree.post_optim_event = None
            tree.anatomy.check()
            for state in tree.states:
                state.unit.realias()
        tree.hinted.discard(self)
        if not self.to_run:
            self.to_run.update(map(id, self.modules))
            tree.entered.append(self)

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._recomputing():
            bare = self._watch_outputs(output)
            if torch._C._current_graph_task_id() == -1:
                self._leave(module, keep=bare and torch.is_grad_enabled())
        if self.mp_policy.output_dtype is not None:
            output = _cast(output, self.mp_policy.output_dtype)
        return output

    def _leave(self, module: nn.Module, *, keep: bool) -> None:
        """A module is done; what it computed may have left by another way than its output, then backward comes unseen
        and finds the parameters gathered (``keep``).
        """
        self.to_run.discard(id(module))
        if self.tree.root is self:
            self._end_forward()
        elif not self.to_run and not keep and self.reshards_after_forward():
            self.unit.reshard(to_part=self.keeps_part())

    def _end_forward(self) -> None:
        tree = self.tree
        tree.root = None
        if self.parent is None or not tree.order:  # a part of the model called on its own teaches no order
            tree.order = list(dict.fromkeys(tree.entered))
        for state in tree.states:
            unfinished = state is self or bool(state.to_run)
            state.to_run.clear()
            if state in tree.hinted or (unfinished and state.reshards_after_forward()):
                state.unit.reshard(to_part=unfinished and state.keeps_part())
        tree.hinted.clear()

    def _prefetch(self, states: Sequence[ShardState]) -> None:
        for state in states:
            state.unit.unshard()

    def _recomputing(self) -> bool:
        """Whether activation checkpointing runs this forward again: after its own backward began, or, inside a module
        that is recomputed, before. What the first run watched is what backward goes through.
        """
        return self.in_backward or (self.pending > 0 and torch._C._current_graph_task_id() != -1)

    def _whole(self) -> None:
        self.unit.unshard()
        self.unit.wait_unshard()

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = self.mp_policy.param_dtype
        if dtype is None or not self.mp_policy.cast_forward_inputs:
            return args, kwargs
        return _cast(args, dtype), _cast(kwargs, dtype)

    # --- backward ---

    def _watch_outputs(self, output: Any) -> bool:
        """Runs ``_pre_backward`` once per forward, when the first gradient of an output arrives.

        Returns:
            Whether no tensor was found in ``output``.
        """
        found: list[torch.Tensor] = []
        _map_tensors(found.append, output)
        if not found:  # attributes of objects that torch knows nothing of
            _map_tensors(found.append, [vars(leaf) for leaf in tree_leaves(output) if hasattr(leaf, "__dict__")])
        tensors = [tensor for tensor in found if tensor.requires_grad]
        if not (tensors and torch.is_grad_enabled()):
            return not found
        self.pending += 1
        fired: list[int] = []  # the backward in which it ran: one graph may have several

        def hook(grad: torch.Tensor) -> None:
            if fired != [self.tree.backwards]:
                fired[:] = [self.tree.backwards]
                self._pre_backward()

        for tensor in tensors:
            tensor.register_hook(hook)
        return False

    def _watch_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Routes the inputs through a node whose backward says that this module's backward is done."""
        found: dict[int, torch.Tensor] = {}
        _map_tensors(lambda t: found.setdefault(id(t), t) if t.requires_grad else t, (args, kwargs))
        if not found:
            return args, kwargs
        watched = dict(zip(found, _Watch.apply(self, *found.values()), strict=True))
        return _map_tensors(lambda t: watched.get(id(t), t), (args, kwargs))

    def expect_grads(self) -> None:
        """Gradients of this unit come in a backward: at its end they leave, whatever announced it or did not."""
        if not self.tree.callback_queued:
            self.tree.callback_queued, self.tree.differentiable = True, torch.is_grad_enabled()
            Variable._execution_engine.queue_callback(self._end_backward)

    def _pre_backward(self) -> None:
        self.in_backward = self.owes = True
        self.expect_grads()
        if self.unshard_in_backward:
            self._whole()
        preceding = [state for state in self.tree.neighbours(self, -1) if state.pending and state.unshard_in_backward]
        self._prefetch(self.backward_prefetch or preceding)

    def _post_backward(self) -> None:
        """One forward's backward is done; after the last one, the gradients are complete and leave."""
        self.in_backward, self.pending = False, max(self.pending - 1, 0)
        if self.reshards_after_backward() and (self.pending == 0 or len(self.modules) == 1):
            self.unit.reshard()  # first, so that the gradients that land have its memory
        if self.pending == 0:
            self._reduce()

    def _reduce(self) -> None:
        if self.controls.requires_gradient_sync or self.zero == 2:
            self.tree.start_reduce(self.unit)
            self.owes = False

    def _end_backward(self) -> None:
        """Runs once when autograd is done.

        Units whose inputs needed no gradient, and gradients that came late, leave here.
        """
        tree = self.tree
        for state in tree.states:
            state.in_backward, state.pending = False, 0
            if state.unit.unsharded and state.reshards_after_backward():
                state.unit.reshard()
        # While the last unit's reduce-scatter is on its way: no more of them than will live when all have landed.
        tree.settle(sum(state.unit.growth() for state in tree.states))
        for state in reversed(tree.states):
            if state.owes or state.unit.has_unreduced:
                state._reduce()
        if tree.is_last_backward:
            tree.finish_reduce()
        else:
            tree.settle()
        tree.callback_queued = False
        tree.backwards += 1
        tree.stepped.clear()


def state_of(module: nn.Module) -> ShardState | None:
    """Returns the state that ``fully_shard`` gave a module; None for a module of no call of its own."""
    return module.__dict__.get("_vescale_state")


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


_PLAIN = (type(None), bool, int, float, str)


def _map_tensors(fn: Callable[[torch.Tensor], Any], values: Any) -> Any:
    """Applies ``fn`` to every tensor in containers that torch knows, and in dataclasses, which it takes for leaves."""

    if isinstance(values, torch.Tensor):
        return fn(values)
    if type(values) in _PLAIN:
        return values
    if type(values) is tuple:  # what modules mostly get; pytree costs ten times as much
        return tuple([_map_tensors(fn, value) for value in values])
    if type(values) is dict:
        return {key: _map_tensors(fn, value) for key, value in values.items()}

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
