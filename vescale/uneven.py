"""uneven: what ranks of unequal memory would hold; a plan that ``fully_shard`` does not build yet.

Capacities 1, 1 and 2 cut a buffer of 4 S elements at S and 2 S: the third rank holds as much as the other two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vescale.commit import preview

if TYPE_CHECKING:
    from vescale.trainer import Trainer


def uneven(trainer: Trainer, capacity: Sequence[int]) -> dict[str, Any]:
    """Returns the shards of ranks whose memories are in the ratio of ``capacity``, and what they cost.

    Args:
        trainer: Of the run; it is used up.
        capacity: Of each rank, > 0, in any unit.

    Raises:
        ValueError: If a capacity is not a positive number.
        NotImplementedError: If experts are dealt.
    """
    if trainer.parallelism.ep > 1:
        raise NotImplementedError(f"capacity: unequal ranks are not planned with ep={trainer.parallelism.ep}; use ep=1")
    trainer.shard()
    plans = [plan for _, unit in preview(trainer.model, len(capacity), capacity=capacity) for plan in unit]
    held = [0] * len(capacity)
    for plan in plans:
        for rank in range(len(capacity)):
            start, stop = plan.shard(rank)
            held[rank] += stop - start
    return {
        "capacity": list(capacity),
        "elements": held,
        "padding": sum(plan.numel for plan in plans) / sum(plan.useful for plan in plans) - 1,
        "bytes_cut": sum(plan.cut_bytes for plan in plans),
    }
