"""FSDPModule: the calls that ``fully_shard`` adds to a module; FSDP2's names.

Those that cannot work here are here too, and say what to do instead. The README's table lists every one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from vescale.commit import commit, states_below, survey
from vescale.shard_state import ShardState
from vescale.unit import Unit


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
    set_separate_reduce_scatter_group = _refused(
        "set_separate_reduce_scatter_group", "gathers and reductions of a unit share the process group of its mesh"
    )
    set_custom_all_gather = _refused(
        "set_custom_all_gather",
        "collectives run in place on buffers that are the parameters; give fully_shard a mesh over your process group",
    )
    set_custom_reduce_scatter = _refused(
        "set_custom_reduce_scatter",
        "collectives run in place on the gradients' buffer; give fully_shard a mesh over your process group",
    )
    set_allocate_memory_from_process_group_for_comm = _refused(
        "set_allocate_memory_from_process_group_for_comm",
        "there are no staging buffers to allocate: what is sent lies in the parameters' own buffer",
    )
    set_symm_mem_for_comm = _refused(
        "set_symm_mem_for_comm", "there are no staging buffers: what is sent lies in the parameters' own buffer"
    )

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

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As ``nn.Module.state_dict``, of sharded parameters under their plain names; no communication."""
        for state in self._planned():
            state.unit.realias()
            state.unit.reshard()
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As ``nn.Module.load_state_dict``; values may be sharded alike, or whole and equal on every rank.

        With ``assign`` too the values are copied, and the Parameter objects stay: an optimizer goes on holding them.
        """
        states = self._planned()
        for state in states:
            state.unit.reshard()
        try:
            return super().load_state_dict(state_dict, strict, assign)  # type: ignore[misc]
        finally:
            for state in states:
                state.unit.adopt()

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
            copied = [state.unit.copied(memo) for state in self._vescale_state.tree.states]
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        if first:
            for unit in copied:
                unit.move_in(memo)
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


def _check_bool(call: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{call}: expected True or False, got {value!r}")


def _check_always(call: str, value: Any, only: bool, why: str) -> None:
    if value is not only:
        raise ValueError(f"{call}: expected {only}, got {value!r}: {why}")
