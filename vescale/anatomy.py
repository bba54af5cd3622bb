"""Anatomy: the modules and parameters of a sharded model as they were when its units were planned.

A module or parameter that is put in later belongs to no unit: every rank would train its own copy, and nobody would
notice. So the first forward of an iteration compares, at the price of one dict comparison per module, and refuses what
it does not know by its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

Place = tuple[int, str]  # id of a module and the name of its parameter


class Shape(NamedTuple):
    """What one module holds."""

    module: nn.Module
    children: dict[str, nn.Module | None]
    num_params: int


class Anatomy:
    """Remembers every module below ``roots`` and where parameters are.

    Args:
        roots: The outermost sharded modules.
        homes: Name and places of every parameter of the units, ``(name, [(module, attribute), ...])``.
    """

    roots: tuple[nn.Module, ...]
    names: dict[Place, str]  # of the parameters of units
    places: frozenset[Place]  # of every parameter, also those that no unit holds
    shapes: list[Shape]

    def __init__(self, roots: Sequence[nn.Module], homes: Iterable[tuple[str, list[tuple[nn.Module, str]]]]) -> None:
        self.roots = tuple(roots)
        self.names = {(id(module), attribute): name for name, places in homes for module, attribute in places}
        self._remember()
        self.places = frozenset(place for _, place in self._walk())

    def check(self) -> None:
        """Passes wrappers that were put around modules since, e.g. by ``torch.compile`` or activation checkpointing.

        Raises:
            ValueError: If a module or parameter of a unit is gone, or there is one that was not there.
        """
        if all(m._modules == children and len(m._parameters) == count for m, children, count in self.shapes):
            return
        now = {place: name for name, place in self._walk()}
        gone = [name for place, name in self.names.items() if place not in now]
        added = [name for place, name in now.items() if place not in self.places]
        if gone or added:
            problems = [f"{name} was replaced or removed" for name in gone] + [f"{name} was put in" for name in added]
            raise ValueError(
                f"fully_shard: {'; '.join(problems[:4])}{' ...' * (len(problems) > 4)} after the parameters were "
                "planned; change the model before its parameters are first asked for"
            )
        self._remember()

    def _remember(self) -> None:
        modules = dict.fromkeys(module for root in self.roots for module in root.modules())
        self.shapes = [Shape(module, dict(module._modules), len(module._parameters)) for module in modules]

    def _walk(self) -> Iterator[tuple[str, Place]]:
        for root in self.roots:
            for name, module in root.named_modules():
                for attribute, param in module._parameters.items():
                    if param is not None:
                        yield f"{name}.{attribute}" if name else attribute, (id(module), attribute)
