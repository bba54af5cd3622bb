"""Comparison: what the library's own code does on one rank, simulated, beside what the plan says of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vescale import memory, traffic
from vescale.blueprint import state_by_kind
from vescale.forecast import Forecast
from vescale.live import Collective
from vescale.simulate import TOLERANCE, simulate
from vescale.trainer import Trainer


def compare(forecast: Forecast, trainer: Trainer, *, rank: int) -> dict[str, Any]:
    """Returns the plan's figures and the simulation's, and whether they agree: to the byte, peaks within TOLERANCE.

    Args:
        forecast: The plan.
        trainer: Of the same run, fresh; it is used up.
        rank: Of the world.
    """
    batch = {"micro_batch": forecast.micro_batch, "micro_batches": min(forecast.micro_batches, 2)}  # a third is alike
    copy, place = divmod(rank, forecast.shard_ranks)
    blueprint = forecast.blueprint
    if blueprint.copies > 1:  # which blocks a rank computes depends on its copy
        blueprint = blueprint.over(forecast.shard_ranks, copies=blueprint.copies, copy=copy)
    moments = memory.moments(
        forecast.trainer,
        blueprint,
        place,
        micro_batch=batch["micro_batch"],
        micro_batches=batch["micro_batches"],
        device="cpu",
    )
    calls = forecast.calls(batch["micro_batches"], blueprint.buckets(place))
    seen = simulate(trainer, rank=rank, num_ranks=forecast.num_ranks, **batch)
    peak = max(moment.nbytes for moment in moments)
    return {
        "rank": rank,
        "micro_batches": batch["micro_batches"],
        "parameters": _exactly(sum(unit.master_bytes for unit in blueprint.units), seen.parameters),
        "optimizer_state": _exactly(sum(state_by_kind(blueprint.runs(place)).values()), seen.state),
        "collectives": _exactly(_rows(traffic.total(calls.values())), _rows(seen.collectives)),
        "peak": {"plan": peak, "seen": seen.peak, "agrees": abs(peak - seen.peak) <= TOLERANCE * seen.peak},
        "allocations": seen.allocations,
    }


def _exactly(plan: Any, seen: Any) -> dict[str, Any]:
    return {"plan": plan, "seen": seen, "agrees": plan == seen}


def _rows(calls: Counter[Collective]) -> list[dict[str, Any]]:
    """Collectives in a fixed order."""
    return [{"collective": call.name, "bytes": call.nbytes, "count": count} for call, count in sorted(calls.items())]
