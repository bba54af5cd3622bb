"""StateHooks: a module's state goes out and in through its sharded parameters, whoever asks.

``state_dict`` of a plain layer inside a unit, or ``load_state_dict`` of a wrapper around the whole model, never pass
through ``FSDPModule``. While a unit is gathered they would see whole parameters: what is loaded there is lost with
them, and ``assign=True`` puts in Parameters of no unit. So each module that holds a parameter of a unit has these.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from vescale.member import home_of
from vescale.unit import Unit


class StateHooks:
    """The hooks of one module.

    Args:
        unit: Whose parameters the module holds; None in a copy of the module, until a copy of the unit takes it over.
    """

    def __init__(self, unit: Unit | None) -> None:
        self.unit = unit

    def register(self, module: nn.Module) -> None:
        """Adds the hooks to ``module``."""
        module.register_state_dict_pre_hook(self.reshard)
        module.register_load_state_dict_pre_hook(self.reshard)
        module.register_load_state_dict_post_hook(self.adopt)

    def reshard(self, *_: Any) -> None:
        """Before a state goes out or in: the module holds sharded parameters."""
        if self.unit is not None:
            self.unit.reshard()

    def adopt(self, module: nn.Module, _: Any) -> None:
        """After a state came in: what was assigned is copied into the shards."""
        if self.unit is not None and any(p is not None and home_of(p) is None for p in module._parameters.values()):
            self.unit.adopt()

    def __deepcopy__(self, memo: dict[int, Any]) -> StateHooks:
        return StateHooks(None)  # a deepcopy may come here long before the unit, or without it


def watch_states(unit: Unit) -> None:
    """Registers the hooks on every module that holds a parameter of ``unit``."""
    hooks = unit.hooks = StateHooks(unit)
    for module in dict.fromkeys(module for module, _ in unit.homes()):
        hooks.register(module)
