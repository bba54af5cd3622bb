"""Counting: what a sharded model copied and moved, counted where it happens.

Per segment and step there is one cast of the local shard into its slot for each gather, and nothing for a gradient that
its layer wrote into its slot. ``tests/promises/test_copies.py`` counts the same from outside.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass
class Counters:
    """Since the beginning, on this rank."""

    gathers: int = 0  # all-gathers begun
    gather_bytes: int = 0  # of the gathered buffers
    cast_bytes: int = 0  # written into this rank's slots before they were gathered
    reduces: int = 0  # reduce-scatters begun
    reduce_bytes: int = 0  # of the buffers that were summed
    grad_copies: int = 0  # gradients that autograd produced elsewhere and a hook copied into their slot
    grad_copy_bytes: int = 0
    grads_in_place: int = 0  # gradients that their layer wrote into their slot
    exchange_bytes: int = 0  # sent by the optimizer: blocks that rank edges cut, directions that copies share

    def add(self, other: Counters) -> None:
        """Adds ``other`` to this."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


def counters(*owners: Any) -> Counters:
    """Returns the sum over the units of sharded models and over optimizers.

    Args:
        owners: Modules that ``fully_shard`` was called on, and ``vescale.Optimizer``s.

    Raises:
        ValueError: For anything else.
    """
    total = Counters()
    for owner in owners:
        if hasattr(owner, "units"):
            parts = [unit.counters for unit in owner.units()]
        elif hasattr(owner, "counters"):
            parts = [owner.counters]
        else:
            raise ValueError(f"counters: expected sharded modules and Optimizers, got {type(owner).__name__}")
        for part in parts:
            total.add(part)
    return total
