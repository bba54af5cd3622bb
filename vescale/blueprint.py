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
from vescale.exchange import Exchange
from vescale.owners import Deal, Load, assign, granule_costs, owned_blocks
from vescale.planner import ALIGN, SegmentPlan, plan_segment
from vescale.rule import Routing
from vescale.run import Run, chunk_state, runs_of
from vescale.sharing import Sharing, sharing_of
from vescale.trainer import Trainer
from vescale.unit import HOME, Home, Segment


@dataclass(frozen=True)
class PlannedUnit:
    """One unit: its name, "" for the root, and its buffers; of a layer also those of its experts that are dealt."""

    name: str
    plans: tuple[SegmentPlan, ...]
    trainable: tuple[bool, ...]  # of each buffer
    itemsizes: tuple[int, ...]  # of each buffer: bytes of an element of its masters, and of their gradients
    parts: tuple[int, ...]  # of each buffer: ranks that hold other experts in its place, counting this; 1 for the rest

    @cached_property
    def shard(self) -> int:
        """Elements of one rank's shards."""
        return sum(plan.shard_size for plan in self.plans)

    @cached_property
    def whole(self) -> int:
        """Elements of the gathered buffers, padding included."""
        return sum(plan.numel for plan in self.plans)

    @cached_property
    def everywhere(self) -> int:
        """Elements of the gathered buffers and of those that other ranks have in their place, padding included."""
        return sum(plan.numel * parts for plan, parts in zip(self.plans, self.parts, strict=True))

    @cached_property
    def master_bytes(self) -> int:
        """Bytes of one rank's shards."""
        return sum(plan.shard_size * size for plan, size in zip(self.plans, self.itemsizes, strict=True))

    @cached_property
    def grad_bytes(self) -> int:
        """Bytes of one rank's gradient shards."""
        each = zip(self.plans, self.trainable, self.itemsizes, strict=True)
        return sum(plan.shard_size * size for plan, trains, size in each if trains)

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
    offloaded: bool  # its state is brought to the device for the step
    sharing: Sharing | None  # between copies of the model

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
        copies: Of the model, where these share blocks; 1: each computes its own.
        copy: Whose ranks these are.

    Where experts are dealt (``parallelism.ep``), rank ``e ep + p`` holds the p-th part of every stack with the others
    of that p, of which there are ``num_ranks / ep``: all parts have one plan.

    Raises:
        ValueError: Where ``fully_shard`` or the rules would raise.
        NotImplementedError: Where the Optimizer would, and for experts that cannot be dealt evenly.
    """

    units: list[PlannedUnit]  # the root first, then the layers in the order of forward
    routing: Routing
    num_ranks: int
    in_backward: bool  # whether each unit is stepped by itself
    offloaded: bool  # whether state is held in host memory
    ep: int  # ranks that deal the experts; 1: every rank has a shard of all
    stacks: tuple[nn.Module, ...]  # of dealt experts

    def __init__(self, trainer: Trainer, num_ranks: int, *, copies: int = 1, copy: int = 0) -> None:
        self.copies, self.copy = copies, copy
        self.num_ranks, self.routing, self.rules = num_ranks, trainer.routing, trainer.rules
        self.in_backward, self.offloaded = trainer.config.step_in_backward, trainer.engine["offload_state"]
        self._model, self.ep = trainer.model, trainer.parallelism.ep
        self.stacks = _dealt_stacks(trainer) if self.ep > 1 else ()
        self._params: dict[str, nn.Parameter] = dict(trainer.model.named_parameters())
        asked = trainer.parallelism
        trainer.parallelism = replace(asked, zero=3)  # at stage 0 there would be no cut to preview
        if self.stacks:
            trainer.shard(self.stacks)
        trainer.shard()
        trainer.parallelism = asked
        self._preview()

    @classmethod
    def of_job(cls, trainer: Trainer, ranks: int, *, stage: int | None = None) -> Blueprint:
        """Returns that of a job of ``ranks``, at a ZeRO stage; None: the run's."""
        cuts = trainer.parallelism.zero if stage is None else stage
        shards = trainer.parallelism.shard_ranks(ranks) if cuts else 1
        return cls(trainer, shards, copies=ranks // shards if trainer.engine["share_replicas"] else 1)

    def _preview(self) -> None:
        self._runs: dict[int, list[Run]] = {}
        self._steps: dict[int, dict[str, list[PlannedBucket]]] = {}
        fewer = dict.fromkeys(self.stacks, max(self.num_ranks // self.ep, 1))
        plans = dict(preview(self._model, self.num_ranks, fewer=fewer))
        dealt = {name: plans.pop(name) for name, module in self._model.named_modules() if module in fewer}
        self.units = []
        for name, own in plans.items():
            inside = [plan for stack, some in dealt.items() if name and stack.startswith(f"{name}.") for plan in some]
            self.units.append(self._unit(name, [*own, *inside], [1] * len(own) + [self.ep] * len(inside)))

    def over(self, num_ranks: int, *, copies: int = 1, copy: int = 0) -> Blueprint:
        """Returns the same model shared by another number of ranks, or as another copy's ranks have it."""
        other = Blueprint.__new__(Blueprint)
        other.copies, other.copy = copies, copy
        other.num_ranks, other.routing, other.rules = num_ranks, self.routing, self.rules
        other.in_backward, other.offloaded = self.in_backward, self.offloaded
        other.ep, other.stacks = self.ep, self.stacks
        other._model, other._params = self._model, self._params
        other._preview()
        return other

    def _unit(self, name: str, plans: Sequence[SegmentPlan], parts: Sequence[int]) -> PlannedUnit:
        firsts = [self._params[plan.tensors[0].name] for plan in plans]
        trainable, itemsizes = tuple(p.requires_grad for p in firsts), tuple(p.itemsize for p in firsts)
        return PlannedUnit(name, tuple(plans), trainable, itemsizes, tuple(parts))

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
        pairs = (pair for unit in self.units for pair in zip(unit.plans, unit.parts, strict=True))
        return sum(plan.useful * parts for plan, parts in pairs)

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
        groups = {parts: SimpleNamespace() for parts in (1, self.ep)}
        for unit in self.units:
            for plan, trains, parts in zip(unit.plans, unit.trainable, unit.parts, strict=True):
                dtype = self._params[plan.tensors[0].name].dtype
                shard = torch.empty(plan.shard_size, dtype=dtype, device="meta")
                group = groups[parts] if plan.num_ranks > 1 else None
                layout = SimpleNamespace(replicas=self._replicas)
                master: Any = SimpleNamespace(rank=rank // parts, group=group, local=shard, layout=layout)
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
    def _replicas(self) -> Any:
        """Stands for the group of ranks that hold the same shard, where copies share blocks."""
        size, rank = self.copies, self.copy
        return SimpleNamespace(size=lambda: size, rank=lambda: rank) if size > 1 else None

    @cached_property
    def _dealt(self) -> Deal:
        """The owner of each cut granule, and the work of every rank."""
        return assign(self._laid_out(0), share_replicas=self.copies > 1)

    def buckets(self, rank: int) -> list[PlannedBucket]:
        """Returns what travels together in the steps of ``rank``, in order."""
        return [bucket for step in self.steps(rank).values() for bucket in step]

    def steps(self, rank: int) -> dict[str, list[PlannedBucket]]:
        """Returns the buckets of each call of ``Optimizer.step`` on ``rank`` by unit; one of all by the root's name."""
        if rank not in self._steps:
            self._steps[rank] = {
                name: [self._bucket(packed) for packed in together(runs)] for name, runs in self._stepped(rank).items()
            }
        return self._steps[rank]

    def _bucket(self, runs: list[Run]) -> PlannedBucket:
        owners, replicas = self._dealt.owners, self._dealt.replicas
        exchange = exchange_of(runs, owners, replicas=replicas)
        return PlannedBucket(runs, exchange, self.offloaded, sharing_of(runs, replicas, None))

    def _stepped(self, rank: int) -> dict[str, list[Run]]:
        """The runs of each call of ``Optimizer.step``."""
        if not self.in_backward:
            return {self.root.name: self.runs(rank)}
        names = {tensor.name: unit.name for unit in self.units for plan in unit.plans for tensor in plan.tensors}
        found: dict[str, list[Run]] = {}
        for run in self.runs(rank):
            found.setdefault(names[run.names[0]], []).append(run)
        return found

    @cached_property
    def lattices(self) -> list[tuple[Run, int, Lattice]]:
        """Every parameter of a rule over blocks: its run, its index there, its blocks."""
        runs = [run for run in self.runs(0) if hasattr(run.rule, "block")]
        return [(run, index, run.lattice(index)) for run in runs for index in range(len(run.names))]

    @cached_property
    def load(self) -> Load | None:
        """What each rank computes on whole blocks in a step; None without a rule over blocks."""
        loads = self._dealt.loads
        if not loads:
            return None
        most = [np.array(load.flops).reshape(self.copies, -1).max(axis=0) for load in loads]  # of any copy's rank
        flops = np.sum([self._everybody(each) for each in most], axis=0)
        return Load(loads[0].group, tuple(flops), max(load.largest for load in loads), sum(load.cut for load in loads))

    @property
    def work(self) -> float:
        """FLOPs of all whole blocks of a rank and of those that it shares them with."""
        return sum(sum(load.flops) for load in self._dealt.loads)

    def _everybody(self, values: np.ndarray) -> np.ndarray:
        """(num_ranks, ...) values of all ranks, from those of the ranks that share a buffer, alike for every part."""
        return np.repeat(values, self.num_ranks // len(values), axis=0)

    def _parts(self, run: Run) -> int:
        """Ranks that have other experts in place of this run's, counting this."""
        return self.ep if hasattr(run.params[0], "part_of") else 1

    @property
    def num_experts(self) -> int:
        """Experts of a layer where they are dealt; 0 elsewhere."""
        return max((p.part_of.total for p in self._params.values() if hasattr(p, "part_of")), default=0)

    def without_cuts(self) -> tuple[int, np.ndarray]:
        """Returns what it would take to cut no block at all, at any price in padding.

        Returns:
            Elements of one rank's shards, and (num_ranks,) float64, the work of each rank.
        """
        load, shard = np.zeros(self.num_ranks), 0
        blocks = {run.names[index]: (run, index, lattice) for run, index, lattice in self.lattices}
        known: dict[Any, SegmentPlan] = {}  # equal layers are planned once
        for plan in (plan for unit in self.units for plan in unit.plans):
            key = plan.num_ranks, tuple((tensor.numel, tensor.granularity, tensor.finest) for tensor in plan.tensors)
            if key not in known:
                known[key] = plan_segment(plan.tensors, num_ranks=plan.num_ranks)
            whole, part = known[key], np.zeros(plan.num_ranks)
            shard += whole.shard_size
            for tensor, offset in zip(plan.tensors, whole.offsets, strict=True):
                if tensor.name in blocks:
                    run, index, lattice = blocks[tensor.name]
                    starts = offset + lattice.granularity * np.arange(lattice.num_granules)
                    np.add.at(part, starts // whole.shard_size, granule_costs(run, index))
            load += self._everybody(part)
        return shard, load

    @cached_property
    def blocks(self) -> tuple[int, int]:
        """Whole blocks that no edge cuts, and those that one does."""
        kept = cut = 0
        for run, index, lattice in self.lattices:
            boundary, each = len(run.boundary(index)), lattice.blocks_per_granule * self._parts(run)
            kept += (lattice.num_granules - boundary) * each
            cut += boundary * each
        return kept, cut

    @property
    def block_bytes(self) -> int:
        """Bytes of everything that rules over blocks would put on a wire, of dealt experts one part."""
        return sum(blocks.numel * run.rule.wire_dtype.itemsize for run, _, blocks in self.lattices)

    @property
    def largest_numel(self) -> int:
        """Elements of the largest parameter of a rule over blocks."""
        return max((blocks.numel for _, _, blocks in self.lattices), default=0)

    @cached_property
    def exchanged(self) -> np.ndarray:
        """(num_ranks, 2) int64: bytes that each rank sends in a step, payloads out and directions back."""
        total = np.zeros((self.num_ranks, 2), dtype=np.int64)
        for bucket in self.buckets(0):
            if bucket.exchange:
                total += self._everybody(_sent(bucket.exchange, bucket.rule.wire_dtype.itemsize))
        return total

    @cached_property
    def state(self) -> np.ndarray:
        """(num_ranks,) int64: bytes of optimizer state on each rank, but for what is one number of a parameter."""
        held = np.zeros(self.num_ranks, dtype=np.int64)
        for run in self.runs(0):
            end = -(-(run.offsets[-1] + run.params[-1].numel()) // ALIGN) * ALIGN
            edges = np.clip(np.arange(run.num_ranks + 1) * run.shard_size, run.offsets[0], end)
            lengths, chunks = self._everybody(np.diff(edges)), chunk_state(run.rule)
            for name, dtype in (run.rule.element_state() | chunks).items():
                held += dtype.itemsize * (-(-lengths // run.rule.finest) if name in chunks else lengths)
            for of in run.blocks:
                row = sum(
                    row[:1].nbytes if len(row) else row.new_empty(row.shape[1:]).nbytes for row in of.rows.values()
                )
                held += row * self._everybody(np.array(of.units))
        return held

    @property
    def worst_rank(self) -> int:
        """The rank that holds the most: state, and what it receives and assembles in a step."""
        return int((self.state + 2 * self.exchanged[:, 1]).argmax())

    def held(self) -> str:
        """Returns in one line what the rank that has the most state holds at the end of backward, in bytes."""
        masters, grads = (sum(getattr(unit, of) for unit in self.units) for of in ("master_bytes", "grad_bytes"))
        rank = int(self.state.argmax())
        state = sum(state_by_kind(self.runs(rank)).values())
        where, grads = " in host memory" if self.offloaded else "", 0 if self.in_backward else grads
        return (
            f"bytes of a rank: {masters:,} of parameters, {grads:,} of gradients, {state:,} of optimizer "
            f"state{where} (rank {rank}, which has the most)"
        )

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


def _dealt_stacks(trainer: Trainer) -> tuple[nn.Module, ...]:
    """Leaves one rank's part of every stack of experts, and returns the stacks."""
    ep, stacks = trainer.parallelism.ep, tuple(trainer.model.expert_units())
    uneven = {len(p) for stack in stacks for p in stack.parameters() if len(p) % ep}
    if uneven:
        raise NotImplementedError(f"parallelism.ep={ep} does not divide {max(uneven)} experts: not planned yet")
    trainer.model.deal_experts(SimpleNamespace(rank=lambda: 0, size=lambda: ep))  # stands in for a process group
    return stacks


def _sent(exchange: Exchange, itemsize: int) -> np.ndarray:
    """(ranks that share the buffers, 2) int64: bytes that each sends, payloads out and directions back."""
    sent = np.zeros((exchange.num_ranks, 2), dtype=np.int64)
    for crossing in exchange.crossings:
        held = crossing.holders()
        edges = np.arange(held.start, held.stop + 1) * crossing.shard_size
        parts = np.diff(edges.clip(crossing.start, crossing.stop)) * itemsize
        sent[held.start : held.stop, 0] += parts
        own = int(parts[crossing.owner - held.start]) if crossing.owner in held else 0
        sent[crossing.owner, 0] -= own
        sent[crossing.owner, 1] += (crossing.stop - crossing.start) * itemsize - own
    return sent


def state_by_kind(runs: Sequence[Run]) -> dict[str, int]:
    """Returns the bytes of each kind of optimizer state that these runs hold, ``Muon.momentum`` and so on.

    Args:
        runs: Of one rank.
    """
    kinds: dict[str, int] = {}
    for run in runs:
        rule = type(run.rule).__name__
        counted = {"steps": run.steps}
        counted |= {f"{rule}.{name}": value for name, value in (run.state | run.numbers).items()}
        for name, value in counted.items():
            kinds[name] = kinds.get(name, 0) + value.nbytes
        for of in run.blocks:
            for name, rows in of.rows.items():
                kinds[f"{rule}.{name}"] = kinds.get(f"{rule}.{name}", 0) + rows.nbytes
    return kinds
