"""Blueprint: a run on any number of ranks as its own code would lay it out, without ranks and without weights.

Plans come from ``fully_shard``'s ``preview``, runs, owners and all-to-alls from the code of the ``Optimizer``: on
parameters of the meta device, each at home in a segment that knows its rank but has no process group. So what is said
here of a rank is what that rank would do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from vescale.block import Lattice
from vescale.bucket import exchange_of, together
from vescale.commit import preview
from vescale.exchange import Crossing, Exchange
from vescale.owners import Deal, Load, assign, granule_costs, owned_blocks
from vescale.planner import ALIGN, SegmentPlan, plan_segment
from vescale.rule import Routing
from vescale.run import Run, chunk_state, runs_of
from vescale.trainer import Trainer
from vescale.unit import HOME, Home, Segment


@dataclass(frozen=True)
class PlannedUnit:
    """One unit: its name, "" for the root, and its buffers."""

    name: str
    plans: tuple[SegmentPlan, ...]
    trainable: tuple[bool, ...]  # of each buffer

    @cached_property
    def shard(self) -> int:
        """Elements of one rank's shards."""
        return sum(plan.shard_size for plan in self.plans)

    @cached_property
    def whole(self) -> int:
        """Elements of the gathered buffers, padding included."""
        return sum(plan.numel for plan in self.plans)

    @cached_property
    def trained_shard(self) -> int:
        """Elements of one rank's gradient shards."""
        return sum(plan.shard_size for plan, trains in zip(self.plans, self.trainable, strict=True) if trains)

    @cached_property
    def trained(self) -> int:
        """Elements of the buffers that gradients are written to."""
        return sum(plan.numel for plan, trains in zip(self.plans, self.trainable, strict=True) if trains)

    @cached_property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max((tensor.numel for plan in self.plans for tensor in plan.tensors), default=0)


class PlannedBucket(NamedTuple):
    """What travels together in the optimizer's step of one rank, as ``vescale.bucket.Bucket`` without its jobs."""

    runs: list[Run]
    exchange: Exchange | None

    @property
    def rule(self) -> Any:
        """Of all its runs."""
        return self.runs[0].rule

    @property
    def largest(self) -> int:
        """Elements of the largest block; 0 for a rule without blocks."""
        if not hasattr(self.rule, "block"):
            return 0
        return max(math.prod(run.lattice(i).block) for run in self.runs for i in range(len(run.names)))


class Blueprint:
    """What the ranks that share one copy of a run's model would hold and exchange.

    Args:
        trainer: Of the run; its model stays on the meta device and is used up.
        num_ranks: Ranks that share the model, whatever the stage of the run: at stage 0 each is alone with a copy.

    Raises:
        ValueError: Where ``fully_shard`` or the rules would raise.
        NotImplementedError: Where the Optimizer would.
    """

    units: list[PlannedUnit]  # the root first, then the layers in the order of forward
    routing: Routing
    num_ranks: int

    def __init__(self, trainer: Trainer, num_ranks: int) -> None:
        self.num_ranks, self.routing, self.rules = num_ranks, trainer.routing, trainer.rules
        self._model = trainer.model
        self._params: dict[str, nn.Parameter] = dict(trainer.model.named_parameters())
        trainer.parallelism = replace(trainer.parallelism, zero=3)  # at stage 0 there would be no cut to preview
        trainer.shard()
        self._preview()

    def _preview(self) -> None:
        self._runs: dict[int, list[Run]] = {}
        self._buckets: dict[int, list[PlannedBucket]] = {}
        self.units = [self._unit(name, plans) for name, plans in preview(self._model, self.num_ranks)]

    def over(self, num_ranks: int) -> Blueprint:
        """Returns the same model shared by another number of ranks."""
        other = Blueprint.__new__(Blueprint)
        other.num_ranks, other.routing, other.rules = num_ranks, self.routing, self.rules
        other._model, other._params = self._model, self._params
        other._preview()
        return other

    def _unit(self, name: str, plans: Sequence[SegmentPlan]) -> PlannedUnit:
        trainable = tuple(self._params[plan.tensors[0].name].requires_grad for plan in plans)
        return PlannedUnit(name, tuple(plans), trainable)

    @property
    def root(self) -> PlannedUnit:
        """The outermost unit: what is in no layer."""
        return self.units[0]

    @property
    def layers(self) -> list[PlannedUnit]:
        """The other units, in the order of forward."""
        return self.units[1:]

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(plan.useful for unit in self.units for plan in unit.plans)

    # --- the optimizer, seen from one rank ---

    def runs(self, rank: int) -> list[Run]:
        """Returns the runs of the Optimizer on ``rank``; their tensors are on the meta device."""
        if rank not in self._runs:
            self._runs[rank] = self._laid_out(rank)
            for run in self._runs[rank]:
                if hasattr(run.rule, "block_state"):
                    run.create_blocks(owned_blocks(run, self._dealt.owners))
        return self._runs[rank]

    def _laid_out(self, rank: int) -> list[Run]:
        group = SimpleNamespace() if self.num_ranks > 1 else None
        for unit in self.units:
            for plan, trains in zip(unit.plans, unit.trainable, strict=True):
                shard = torch.empty(plan.shard_size, device="meta")
                master: Any = SimpleNamespace(rank=rank, group=group, local=shard)
                segment = Segment(plan, [], master, trains)
                for at, tensor in enumerate(plan.tensors):
                    self._params[tensor.name].__dict__[HOME] = Home(None, segment, at)
        runs: list[Run] = []
        for name, routes in self.routing.routes.items():
            names = [route.name for route in routes if self._params[route.name].requires_grad]
            members = {"name": name, "param_names": names, "params": [self._params[n] for n in names]}
            runs += runs_of(members, self.rules.groups[name].rule) if names else []
        return runs

    @cached_property
    def _dealt(self) -> Deal:
        """The owner of each cut granule, and the work of every rank."""
        return assign(self._laid_out(0))

    def buckets(self, rank: int) -> list[PlannedBucket]:
        """Returns what travels together in the step of ``rank``, in order."""
        if rank not in self._buckets:
            owners = self._dealt.owners
            self._buckets[rank] = [PlannedBucket(runs, exchange_of(runs, owners)) for runs in together(self.runs(rank))]
        return self._buckets[rank]

    @cached_property
    def lattices(self) -> list[tuple[Run, int, Lattice]]:
        """Every parameter of a rule over blocks: its run, its index there, its blocks."""
        runs = [run for run in self.runs(0) if hasattr(run.rule, "block")]
        return [(run, index, run.lattice(index)) for run in runs for index in range(len(run.names))]

    @cached_property
    def load(self) -> Load | None:
        """What each rank computes on whole blocks in a step; None without a rule over blocks."""
        return next(iter(self._dealt.loads), None)

    def without_cuts(self) -> tuple[int, np.ndarray]:
        """Returns what it would take to cut no block at all, at any price in padding.

        Returns:
            Elements of one rank's shards, and (num_ranks,) float64, the work of each rank.
        """
        load, shard = np.zeros(self.num_ranks), 0
        blocks = {run.names[index]: (run, index, lattice) for run, index, lattice in self.lattices}
        known: dict[Any, SegmentPlan] = {}  # equal layers are planned once
        for plan in (plan for unit in self.units for plan in unit.plans):
            key = tuple((tensor.numel, tensor.granularity, tensor.finest) for tensor in plan.tensors)
            if key not in known:
                known[key] = plan_segment(plan.tensors, num_ranks=self.num_ranks)
            whole = known[key]
            shard += whole.shard_size
            for tensor, offset in zip(plan.tensors, whole.offsets, strict=True):
                if tensor.name in blocks:
                    run, index, lattice = blocks[tensor.name]
                    starts = offset + lattice.granularity * np.arange(lattice.num_granules)
                    np.add.at(load, starts // whole.shard_size, granule_costs(run, index))
        return shard, load

    @cached_property
    def blocks(self) -> tuple[int, int]:
        """Whole blocks that no edge cuts, and those that one does."""
        kept = cut = 0
        for run, index, lattice in self.lattices:
            boundary = len(run.boundary(index))
            kept += (lattice.num_granules - boundary) * lattice.blocks_per_granule
            cut += boundary * lattice.blocks_per_granule
        return kept, cut

    @property
    def block_bytes(self) -> int:
        """Bytes of everything that rules over blocks would put on a wire."""
        return sum(blocks.numel * run.rule.wire_dtype.itemsize for run, _, blocks in self.lattices)

    @property
    def largest_numel(self) -> int:
        """Elements of the largest parameter of a rule over blocks."""
        return max((blocks.numel for _, _, blocks in self.lattices), default=0)

    @cached_property
    def crossings(self) -> list[tuple[Crossing, int]]:
        """Every granule that edges cut, with the bytes of an element on the wire."""
        return [
            (crossing, bucket.rule.wire_dtype.itemsize)
            for bucket in self.buckets(0)
            if bucket.exchange
            for crossing in bucket.exchange.crossings
        ]

    @cached_property
    def exchanged(self) -> np.ndarray:
        """(num_ranks, 2) int64: bytes that each rank sends in a step, payloads out and directions back."""
        sent = np.zeros((self.num_ranks, 2), dtype=np.int64)
        for crossing, itemsize in self.crossings:
            held = crossing.holders()
            edges = np.arange(held.start, held.stop + 1) * crossing.shard_size
            parts = np.diff(edges.clip(crossing.start, crossing.stop)) * itemsize
            sent[held.start : held.stop, 0] += parts
            own = int(parts[crossing.owner - held.start]) if crossing.owner in held else 0
            sent[crossing.owner, 0] -= own
            sent[crossing.owner, 1] += (crossing.stop - crossing.start) * itemsize - own
        return sent

    @cached_property
    def state(self) -> np.ndarray:
        """(num_ranks,) int64: bytes of optimizer state on each rank, but for what is one number of a parameter."""
        held = np.zeros(self.num_ranks, dtype=np.int64)
        for run in self.runs(0):
            end = -(-(run.offsets[-1] + run.params[-1].numel()) // ALIGN) * ALIGN
            edges = np.clip(np.arange(self.num_ranks + 1) * run.shard_size, run.offsets[0], end)
            lengths, chunks = np.diff(edges), chunk_state(run.rule)
            for name, dtype in (run.rule.element_state() | chunks).items():
                held += dtype.itemsize * (-(-lengths // run.rule.finest) if name in chunks else lengths)
            for of in run.blocks:
                row = sum(
                    row[:1].nbytes if len(row) else row.new_empty(row.shape[1:]).nbytes for row in of.rows.values()
                )
                held += row * np.array(of.units)
        return held

    @property
    def worst_rank(self) -> int:
        """The rank that holds the most: state, and what it receives and assembles in a step."""
        return int((self.state + 2 * self.exchanged[:, 1]).argmax())

    def describe(self) -> str:
        """Returns the plan of every unit; those with equal plans once, with how many there are of each."""
        found: dict[Any, tuple[PlannedUnit, int]] = {}
        for unit in self.units:
            key = tuple((plan.offsets, plan.shard_size, tuple(t.numel for t in plan.tensors)) for plan in unit.plans)
            first, count = found.get(key, (unit, 0))
            found[key] = (first, count + 1)
        lines = []
        for unit, count in found.values():
            lines += [f"\n{count} x unit like {unit.name or 'the root'}", *map(str, unit.plans)]
        return "\n".join(lines)


def state_by_kind(runs: Sequence[Run]) -> dict[str, int]:
    """Returns the bytes of each kind of optimizer state that these runs hold, ``Muon.momentum`` and so on.

    Args:
        runs: Of one rank.
    """
    kinds: dict[str, int] = {}
    for run in runs:
        rule = type(run.rule).__name__
        counted = {"steps": run.steps, "steps begun": run.begun}
        counted |= {f"{rule}.{name}": value for name, value in (run.state | run.numbers).items()}
        for name, value in counted.items():
            kinds[name] = kinds.get(name, 0) + value.nbytes
        for of in run.blocks:
            for name, rows in of.rows.items():
                kinds[f"{rule}.{name}"] = kinds.get(f"{rule}.{name}", 0) + rows.nbytes
    return kinds
