"""FSDPModule: the calls that ``fully_shard`` adds to a module; FSDP2's names.

Those that cannot work here are here too, and say what to do instead. The README's table lists every one.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vescale.commit import commit, states_below, survey
from vescale.comms import Comms, registered_pool, second_group, symmetric_pool
from vescale.member import put
from vescale.shard_state import ShardState
from vescale.twin import copied, move_in
from vescale.unit import Unit, mesh_device


def _refused(name: str, instead: str) -> Callable[..., None]:
    def method(self: FSDPModule, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{name}: {instead}")

    method.__name__, method.__doc__ = name, f"Refused: {instead}."
    return method


class FSDPModule:
    """What ``fully_shard`` adds to a module."""

    _vescale_state: ShardState

    # --- gathering and freeing ---

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's own unit; returns a handle to wait on when ``async_op``."""
        commit(self._vescale_state)
        self._vescale_state.unit.unshard()
        handle = UnshardHandle(self._vescale_state.unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Frees the whole parameters of this module's own unit."""
        commit(self._vescale_state)
        self._vescale_state.unit.reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Frees the whole parameters after forward, or keeps them for backward.

        Raises:
            ValueError: Unless it is a bool.
        """
        _check_bool("set_reshard_after_forward", reshard_after_forward)
        for state in self._states(recurse):
            state.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Frees the whole parameters after backward, or keeps them for the next forward.

        Kept ones are freed by that forward if an optimizer has changed their shards meanwhile.

        Raises:
            ValueError: Unless it is a bool.
        """
        _check_bool("set_reshard_after_backward", reshard_after_backward)
        for state in self._states(recurse):
            state.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Gathers this module's own unit for backward, or not: for one whose backward reads no parameter (embedding).

        Raises:
            ValueError: Unless it is a bool.
        """
        _check_bool("set_unshard_in_backward", unshard_in_backward)
        self._vescale_state.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Gathers the units of ``modules`` while this one computes forward, instead of the next in the recorded order.

        Args:
            modules: Of the same outermost module; an empty list goes back to the recorded order.

        Raises:
            ValueError: If one is not sharded, or belongs to another outermost module.
        """
        self._vescale_state.forward_prefetch = self._states_of(modules, "set_modules_to_forward_prefetch")

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """As ``set_modules_to_forward_prefetch``, in backward."""
        self._vescale_state.backward_prefetch = self._states_of(modules, "set_modules_to_backward_prefetch")

    def set_post_optim_event(self, event: torch.Event) -> None:
        """The next forward waits for ``event`` before it gathers anything; for an optimizer on another stream.

        Args:
            event: Recorded after the optimizer step; forgotten once waited for.
        """
        commit(self._vescale_state)
        self._vescale_state.tree.post_optim_event = event

    # --- reducing ---

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Reduces gradients after backward, or keeps them whole and unreduced until a backward with True.

        Args:
            requires_gradient_sync: False for all but the last micro-batch saves communication for memory.
            recurse: Also set the sharded modules inside.

        Raises:
            ValueError: Unless it is a bool.
        """
        _check_bool("set_requires_gradient_sync", requires_gradient_sync)
        for state in self._states(recurse):
            state.controls.requires_gradient_sync = requires_gradient_sync
            state.controls.requires_all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Sums gradients over the replicas of a two-dimensional mesh after backward, or only once it is True again.

        Raises:
            ValueError: Unless it is a bool.
        """
        _check_bool("set_requires_all_reduce", requires_all_reduce)
        for state in self._states(recurse):
            state.controls.requires_all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Waits for every reduction when backward ends, or leaves the last one in flight for a backward that follows.

        Raises:
            ValueError: Unless it is a bool.
        """
        _check_bool("set_is_last_backward", is_last_backward)
        commit(self._vescale_state)
        self._vescale_state.tree.is_last_backward = is_last_backward

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
            state.controls.divide_factor = factor

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Calls ``hook`` with each reduced and divided gradient shard of this module's unit, before it is accumulated.

        Args:
            hook: Gets a (S,) tensor of ``reduce_dtype``, one per segment of the unit, and may write to it.
            stream: Refused; the hook runs on the current stream.

        Raises:
            NotImplementedError: With a stream.
        """
        if stream is not None:
            raise NotImplementedError("set_all_reduce_hook: no stream; the hook may switch to one itself")
        self._vescale_state.controls.all_reduce_hook = hook

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Does nothing: reductions are always sums, and the division is part of the accumulation.

        Raises:
            ValueError: Unless it is True.
        """
        _check_always("set_force_sum_reduction_for_comms", enable, True, "every reduction is a sum")

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Does nothing: parameters that got no gradient are always reduced as zeros.

        Raises:
            ValueError: Unless it is True.
        """
        why = "what is reduced is a function of the plan only, so unused parameters are zeros"
        _check_always("set_reduce_scatter_unused_params", reduce_scatter_unused_params, True, why)

    set_reduce_scatter_divide_factor = _refused(
        "set_reduce_scatter_divide_factor", "call set_gradient_divide_factor(factor), its newer name"
    )
    set_reduce_scatter_max_input_buffers = _refused(
        "set_reduce_scatter_max_input_buffers", "one unit's reduce-scatter is in flight behind the next unit's backward"
    )
    # --- what a collective is ---

    def set_custom_all_gather(self, comm: Callable[..., Any] | None) -> None:
        """Gathers this module's own unit by ``comm``; None goes back to torch's all-gather.

        Args:
            comm: Called as torch's ``AllGather``: ``comm(output, input, group=, async_op=)``. The output is the buffer
                whose views the parameters are and the input this rank's slot of it, so its ``allocate`` is not called.
                Returns a handle to wait on, or None when it has waited.

        Raises:
            ValueError: If it cannot be called, or buffers come from the process group or symmetric memory.
        """
        self._comms("set_custom_all_gather", comm).all_gather = comm

    def set_custom_reduce_scatter(self, comm: Callable[..., Any] | None) -> None:
        """Reduces this module's own unit by ``comm``; None goes back to torch's reduce-scatter.

        Sums over replicas are all-reduces as before.

        Args:
            comm: Called as torch's ``ReduceScatter``: ``comm(output, input, group=, op=, async_op=)``, always with SUM.
                The input is the buffer in which gradients were written; its ``allocate`` is not called.

        Raises:
            ValueError: If it cannot be called, or buffers come from the process group or symmetric memory.
        """
        self._comms("set_custom_reduce_scatter", comm).reduce_scatter = comm

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduces over a process group of its own, so that gathers do not wait behind reductions; all ranks must call.

        Raises:
            ValueError: Unless ``enable`` is a bool.
        """
        _check_bool("set_separate_reduce_scatter_group", enable)
        commit(self._vescale_state)
        for state in self._states(recurse):
            group = state.unit.mesh.get_group(state.unit.mesh.ndim - 1)
            state.controls.comms.reduce_group = second_group(group) if enable else None

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Takes the memory of this module's own unit's buffers from its process group, which NCCL then need not stage.

        Raises:
            ValueError: Unless ``enable`` is a bool, or if a collective of the unit is custom.
            NotImplementedError: If the process group has none, as gloo.
        """
        _check_bool("set_allocate_memory_from_process_group_for_comm", enable)
        comms, group, device = self._pooled("set_allocate_memory_from_process_group_for_comm")
        comms.pool, comms.symmetric = registered_pool(group, device) if enable else contextlib.nullcontext, False

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Takes the memory of this module's own unit's buffers from symmetric memory.

        Raises:
            ValueError: If a collective of the unit is custom.
            NotImplementedError: Over anything but NCCL.
        """
        comms, group, device = self._pooled("set_symm_mem_for_comm")
        comms.pool, comms.symmetric = symmetric_pool(group, device, backend), True

    def _comms(self, call: str, comm: Any) -> Comms:
        comms = self._vescale_state.controls.comms
        if not (comm is None or callable(comm)):
            raise ValueError(f"{call}: expected a function, got {type(comm).__name__}")
        if comms.pool is not contextlib.nullcontext:
            raise ValueError(f"{call}: this module's buffers come from the process group or symmetric memory already")
        return comms

    def _pooled(self, call: str) -> tuple[Comms, dist.ProcessGroup, torch.device]:
        """The communication, process group and device of a unit whose buffers shall come from a pool."""
        commit(self._vescale_state)
        state, mesh = self._vescale_state, self._vescale_state.unit.mesh
        if state.controls.comms.all_gather or state.controls.comms.reduce_scatter:
            raise ValueError(f"{call}: a collective of this module is custom, and it knows best what memory it wants")
        return state.controls.comms, mesh.get_group(mesh.ndim - 1), mesh_device(mesh)

    # --- the iteration ---

    def reset_iter_state(self) -> None:
        """Discards an iteration that an exception ended.

        Waits for what is in flight, frees it, and the next forward starts clean (it does so by itself, too).
        """
        commit(self._vescale_state)
        self._vescale_state.tree.reset()

    def units(self) -> Iterator[Unit]:
        """The planned units of this module and of the sharded modules inside, in definition order."""
        return (state.unit for state in self._planned())

    # --- as nn.Module ---

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As ``nn.Module.named_parameters``.

        Plans the units first, so that what it yields are the parameters to hold.
        """
        commit(self._vescale_state)
        return super().named_parameters(prefix, recurse, remove_duplicate)  # type: ignore[misc]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``, of the sharded parameters also while whole ones are in their place."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for param in (p for unit in self.units() for segment in unit.segments for p in segment.sharded):
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As ``nn.Module.state_dict``, of sharded parameters under their plain names; no communication."""
        for state in self._planned():
            state.unit.realias()
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As ``nn.Module.load_state_dict``; values may be sharded alike, or whole and equal on every rank.

        With ``assign`` too the values are copied, and the Parameter objects stay: an optimizer goes on holding them.
        """
        commit(self._vescale_state)
        return super().load_state_dict(state_dict, strict, assign)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns a sharded model of its own, with the same plan, mesh and weights and no gradients; for an EMA.

        Raises:
            NotImplementedError: For a sharded module inside another one, unless that one is copied.
        """
        commit(self._vescale_state)
        outermost = self._vescale_state.outermost
        if self not in outermost.modules and id(outermost.modules[0]) not in memo:
            raise NotImplementedError("deepcopy of a sharded module inside another one; copy the outermost one")
        twin = memo[id(self)] = type(self).__new__(type(self))
        first = id(self._vescale_state.tree) not in memo
        if first:
            self._vescale_state.tree.finish_reduce()
            twins = [copied(state.unit, memo) for state in self._vescale_state.tree.states]
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        if first:
            for unit in twins:
                move_in(unit, memo)
            twin._vescale_state.tree.anatomy = survey(twin._vescale_state.outermost)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to be pickled.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "a sharded module cannot be pickled or shallow-copied: it holds process groups; save its state_dict() with "
            "torch.distributed.checkpoint, or pickle what vescale.full_state_dict(model) returns"
        )

    def _states(self, recurse: bool) -> Iterable[ShardState]:
        return states_below(self) if recurse else [self._vescale_state]  # type: ignore[arg-type]

    def _planned(self) -> list[ShardState]:
        commit(self._vescale_state)
        return states_below(self)  # type: ignore[arg-type]

    def _states_of(self, modules: Sequence[FSDPModule], call: str) -> list[ShardState]:
        wrong = [type(module).__name__ for module in modules if not isinstance(module, FSDPModule)]
        if wrong:
            raise ValueError(f"{call}: expected modules that fully_shard was called on, got {', '.join(wrong)}")
        states = [module._vescale_state for module in modules]
        if any(state.outermost is not self._vescale_state.outermost for state in states):
            raise ValueError(f"{call}: expected modules inside one outermost sharded module; shard that one first")
        return states

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Moves master shards as a whole, so that views stay views and Parameter objects stay the same objects."""
        states = [state for state in self._planned() if not state.applying]
        for state in states:
            state.unit.apply_(fn)
            state.applying = True
        homes = [home for state in states for home in state.unit.homes()]
        before = {module: dict(module._parameters) for module, _ in homes}
        for module, name in homes:
            module._parameters.pop(name, None)
        try:
            return super()._apply(fn, recurse)  # type: ignore[misc]
        finally:
            for module, params in before.items():
                for name, param in params.items():  # in their order; one of no unit may be another object now
                    put(module, name, module._parameters.pop(name, param))
            for state in states:
                state.applying = False


class UnshardHandle:
    """Waits for an asynchronous ``unshard``."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Waits for the all-gathers and puts the whole parameters into the modules."""
        self._unit.wait_unshard()


def _check_bool(call: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{call}: expected True or False, got {value!r}")


def _check_always(call: str, value: Any, only: bool, why: str) -> None:
    if value is not only:
        raise ValueError(f"{call}: expected {only}, got {value!r}: {why}")
