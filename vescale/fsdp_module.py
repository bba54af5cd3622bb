"""FSDPModule: the calls that ``fully_shard`` adds to a module; FSDP2's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from vescale.commit import commit, states_below
from vescale.shard_state import ShardState
from vescale.unit import Unit


class FSDPModule:
    """What ``fully_shard`` adds to a module."""

    _vescale_state: ShardState

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
        commit(self._vescale_state)
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
        commit(self._vescale_state)
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
        commit(self._vescale_state)
        if not recurse:
            return [self._vescale_state]
        return states_below(self)  # type: ignore[arg-type]

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
