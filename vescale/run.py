"""Run: neighbouring parameters of one rule as one flat stretch of this rank's shard; what rules work on element-wise.

A shard of 128 elements that begins at element 256 of its buffer holds the end of ``a`` and all of ``b``, which are
Muon's, and a norm, which is AdamW's::

    element   256       272 288          336 352         372  384
              | a's end | gap | b (6, 8) |gap| norm (20,) | gap |
    runs      <--------- Muon ---------------><---- AdamW ------>

A run ends where its last parameter's padding ends, so that vector loops have no tail and the bits do not depend on the
cut. A rule that never lets runs of 256 elements be cut counts them from each tensor's first element: its runs are of
one parameter.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from vescale.block import Lattice
from vescale.host_read import HostRead
from vescale.placement import RaggedShard
from vescale.planner import ALIGN
from vescale.ragged_tensor import RaggedTensor, from_local
from vescale.rule import rule_for, unwrapped, whole_shape
from vescale.shards import Boundary
from vescale.unit import Home, home_of


class BlockState(NamedTuple):
    """What this rank keeps of the blocks of one parameter.

    A block at the edge of a tensor, shorter than the others, has its state in the first elements of its row.

    Args:
        first: Index of the first block here.
        rows: name -> (blocks here, *state).
        units: Blocks of each rank, in rank order.
    """

    first: int
    rows: dict[str, torch.Tensor]
    units: tuple[int, ...]

    def row(self, name: str, block: int, shape: Sequence[int]) -> torch.Tensor:
        """The state of one block, of the shape that its size gives it."""
        row = self.rows[name][block - self.first]
        return row if row.shape == torch.Size(shape) else row.reshape(-1)[: math.prod(shape)].view(tuple(shape))

    def begin(self, block: int, values: dict[str, torch.Tensor]) -> None:
        """Makes ``values`` the state of a block that is shorter than the others; the rest of its rows is zero."""
        for name, value in values.items():
            self.rows[name][block - self.first].zero_()
            self.row(name, block, value.shape).copy_(value)


def chunk_state(rule: Any) -> dict[str, torch.dtype]:
    """Names and dtypes of the rule's state that has one number for each ``finest`` elements."""
    return rule.chunk_state() if hasattr(rule, "chunk_state") else {}


class Run:
    """Neighbouring parameters of one group, as one flat run of this rank's shard, to its padded end.

    Args:
        group: Name of the group.
        rule: Its rule.
        names: Names of the parameters.
        params: The parameters, in buffer order.
        parent: The run that holds the state of this part of it; None for a whole run.
        first: Index of the first parameter in the parent.
        offload_state: State lies in the CPU's memory and comes to the parameters' device for the step.
    """

    group: str
    home: Home | None  # of the first parameter; None for parameters outside any unit
    start: int  # of the run, in elements of the buffer
    stop: int
    offloaded: bool  # whether state is in the CPU's memory
    state: dict[str, torch.Tensor]  # name -> (stop - start,) flat; chunk state -> one for each rule.finest elements
    numbers: dict[str, torch.Tensor]  # name -> (len(params),) float32, state that is one number of a parameter
    taken: list[int]  # steps completed, as far as the host knows; on the parent, kept where there is block state
    blocks: list[BlockState]  # of each parameter; on a whole run of a rule with block state
    steps: torch.Tensor  # (len(params),) float32, completed steps
    all_state: dict[str, Any]  # what the rule is given: ``state`` on the device, "step", () float32, and ``place``
    ages: list[int]  # equal for parameters that took part in the same steps; others are stepped apart
    clock: int  # steps begun, on the parent
    unread: list[tuple[range, HostRead | None]]  # on the parent: members of a step, and the flag that skips it

    def __init__(
        self,
        group: str,
        rule: Any,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        *,
        parent: Run | None = None,
        first: int = 0,
        offload_state: bool = False,
    ) -> None:
        self.group, self.rule, self.names, self.params, self.first = group, rule, list(names), list(params), first
        self.home = home_of(params[0])
        self.offsets = [home.segment.plan.offsets[home.at] for home in map(home_of, params) if home] or [0]
        self.start, self.stop = self._slice()
        base = self.rank * self.shard_size if self.home else 0
        self._within = slice(self.start - base, self.stop - base)  # of the shard
        self.parent = parent or self
        self._parts: dict[tuple[int, int], Run] = {}
        self._lattices: dict[int, Lattice] = {}  # asked for once for each granule: there may be thousands
        if parent is None:
            flat = self.param()
            self.offloaded, sizes = offload_state, dict.fromkeys(rule.element_state(), flat.numel())
            sizes |= dict.fromkeys(chunk_state(rule), -(-flat.numel() // rule.finest))
            self.state = {
                name: self._held(torch.zeros(sizes[name], dtype=dtype, device="cpu" if offload_state else flat.device))
                for name, dtype in (rule.element_state() | chunk_state(rule)).items()
            }
            self.steps = torch.zeros(len(params), dtype=torch.float32, device=flat.device)
            numbers = rule.parameter_state() if hasattr(rule, "parameter_state") else {}
            self.numbers = {
                name: torch.full_like(self.steps, value, device="cpu" if offload_state else None)
                for name, value in numbers.items()
            }
            self.clock, self.ages, self.blocks = 0, [0] * len(params), []
            self.taken, self.unread = [0] * len(params), []
        else:
            self.offloaded = parent.offloaded
            at = self.start - parent.start
            stop = at + self.stop - self.start
            self.state = {name: parent.state[name][at:stop] for name in rule.element_state()}
            mine = slice(first, first + len(params))
            self.steps = parent.steps[mine]
            self.numbers = {name: values[mine] for name, values in parent.numbers.items()}
            self.blocks = parent.blocks[mine]
        self.all_state = {} if self.offloaded else {**self.state, "step": self.steps[0], **self.place}

    def _held(self, value: torch.Tensor) -> torch.Tensor:
        """``value`` as state is held: pinned, if it is offloaded from an accelerator, so that copies do not wait."""
        return value.pin_memory() if self.offloaded and self.param().device.type != "cpu" else value

    def fetch(self) -> None:
        """Brings offloaded state to the device: always a copy, so that a failed step is forgotten by dropping it."""
        if self.offloaded:
            device = self.steps.device
            copies = {name: value.to(device, copy=True, non_blocking=True) for name, value in self.state.items()}
            self.all_state = {**copies, "step": self.steps[0], **self.place}

    def put_back(self, *, failed: bool = False) -> None:
        """Writes fetched state back where it is held, unless the step failed."""
        if self.offloaded and self.all_state:
            for name, value in self.state.items():
                if not failed:
                    value.copy_(self.all_state[name], non_blocking=True)  # the next fetch is on this stream too
            self.all_state = {}

    @property
    def num_ranks(self) -> int:
        """Ranks that share the buffer."""
        return self.home.segment.plan.num_ranks if self.home else 1

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """Ranks that hold the same shard; None where there is one copy of the parameters."""
        return self.home.segment.master.layout.replicas if self.home else None

    @property
    def num_replicas(self) -> int:
        """Copies of the parameters."""
        return self.replicas.size() if self.replicas else 1

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Their group; None outside any unit."""
        return self.home.segment.master.group if self.home else None

    @property
    def shard_size(self) -> int:
        """Elements of one rank's shard."""
        return self.home.segment.plan.shard_size if self.home else max(self.params[0].numel(), 1)

    @property
    def rank(self) -> int:
        """Position of this rank in the cut."""
        return self.home.segment.master.rank if self.home else 0

    def _slice(self) -> tuple[int, int]:
        end = self.offsets[-1] + self.params[-1].numel()
        if self.home is None:
            return 0, end
        low, high = self.rank * self.shard_size, (self.rank + 1) * self.shard_size
        start = min(max(self.offsets[0], low), high)
        return start, max(start, min(-(-end // ALIGN) * ALIGN, high))

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return self.home.segment.master.local.dtype if self.home else self.params[0].dtype

    def param(self) -> torch.Tensor:
        """The parameters, (stop - start,)."""
        return self.home.segment.master.local[self._within] if self.home else self.params[0].detach().view(-1)

    def grad(self) -> torch.Tensor:
        """The gradients, (stop - start,)."""
        if self.home is None:
            return self.params[0].grad.reshape(-1)  # type: ignore[union-attr]
        return self.home.segment.grad.local[self._within]  # type: ignore[union-attr]

    @property
    def place(self) -> dict[str, int]:
        """Which parameter this is and where in it the run begins, for a rule that asks: one with ``places``."""
        if not getattr(self.rule, "places", False):
            return {}
        return {"stream": zlib.crc32(unwrapped(self.names[0]).encode()), "first": self.start - self.offsets[0]}

    def view(self, name: str, index: int) -> torch.Tensor:
        """The part of a flat state that is parameter ``index``, cut as the parameter is."""
        param, flat = self.params[index], self.state[name]
        if name in chunk_state(self.rule):
            return self._chunks(flat)
        if not isinstance(param, RaggedTensor):
            return flat.view(param.shape)
        begin, end = param.run
        at = self.offsets[index] + begin - self.start if end > begin else 0
        return from_local(flat[at : at + end - begin], param.device_mesh, param.placements, shape=param.shape)

    def _chunks(self, flat: torch.Tensor) -> torch.Tensor:
        """Chunk state of the one parameter, cut where the parameter is; ``rule.finest`` elements are one."""
        (param,) = self.params
        if not isinstance(param, RaggedTensor):
            return flat
        edges = [param.placement.run(param.shape, rank)[1] for rank in range(self.num_ranks)]
        counts = [-(-edge // self.rule.finest) for edge in edges]
        units = [stop - start for start, stop in zip([0, *counts], counts, strict=False)]
        placements = [RaggedShard((0,), units) if isinstance(p, RaggedShard) else p for p in param.placements]
        return from_local(flat, param.device_mesh, placements, shape=(counts[-1],))

    def lattice(self, index: int) -> Lattice:
        """Blocks of parameter ``index``."""
        if index not in self._lattices:
            shape = tuple(self.params[index].shape)
            self._lattices[index] = Lattice(shape, self.rule.block_shape(shape))
        return self._lattices[index]

    def boundary(self, index: int) -> Boundary:
        """Granules of parameter ``index`` that rank edges cut.

        By this rule's blocks, whatever the plan was made for.
        """
        return Boundary(
            self.offsets[index], self.params[index].numel(), self.lattice(index).granularity, self.shard_size
        )

    def active(self) -> list[Run]:
        """The parts of this run that have gradients and equal age; normally the run itself."""
        if len(set(self.ages)) == 1 and all(param.grad is not None for param in self.params):
            return [self]
        parts, index = [], 0
        while index < len(self.params):
            end = index
            while end < len(self.params) and self.params[end].grad is not None and self.ages[end] == self.ages[index]:
                end += 1
            if end > index:
                parts.append(self._part(index, end))
            index = max(end, index + 1)
        return parts

    def _part(self, first: int, end: int) -> Run:
        if (first, end) not in self._parts:
            self._parts[first, end] = Run(
                self.group, self.rule, self.names[first:end], self.params[first:end], parent=self, first=first
            )
        return self._parts[first, end]

    def create_blocks(self, owned: Sequence[Sequence[int]]) -> None:
        """Makes the block state.

        Args:
            owned: For each parameter, how many of its blocks each rank computes, in rank order.
        """
        device = torch.device("cpu") if self.offloaded else self.steps.device
        for index, units in enumerate(owned):
            first, lattice = sum(units[: self.rank]), self.lattice(index)
            rows = {
                # A copy: an expansion to no rows would keep the memory of one.
                name: self._held(value.to(device).repeat(units[self.rank], *[1] * value.ndim))
                for name, value in self.rule.block_state(lattice.block).items()
            }
            self.blocks.append(BlockState(first, rows, tuple(units)))
            short: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}
            for block in range(first, first + units[self.rank]):
                if (shape := lattice.block_at(block)) != lattice.block:
                    values = short.get(shape) or short.setdefault(shape, self.rule.block_state(shape))
                    self.blocks[-1].begin(block, values)

    def block_view(self, name: str, index: int) -> torch.Tensor:
        """Block state of parameter ``index``, (blocks, *state), cut between the ranks that compute its blocks."""
        param, held = self.params[index], self.blocks[index]
        rows = held.rows[name]
        if not isinstance(param, RaggedTensor):
            return rows
        placements = [RaggedShard((0,), held.units) if isinstance(p, RaggedShard) else p for p in param.placements]
        shape = (sum(held.units), *rows.shape[1:])
        return from_local(rows.view(-1), param.device_mesh, placements, shape=shape)

    def rows_of_one(self, name: str, index: int) -> int:
        """Rows that state ``name`` has for each matrix of parameter ``index``, a stack that may be empty here.

        0 if no number of whole rows is one matrix's.
        """
        shape = (1, *self.params[index].shape[1:])
        if name in chunk_state(self.rule):
            chunks, rest = divmod(math.prod(shape), self.rule.finest)
            return 0 if rest else chunks
        if self.blocks and name in self.blocks[index].rows:
            return Lattice(shape, self.rule.block_shape(shape)).num_blocks
        return 1

    def advance(self, skip: torch.Tensor | None) -> None:
        """Counts a step that was begun; ``steps``, which counts those completed, is its bucket's to raise.

        Args:
            skip: The flag of the step, which a device may not know yet: ``count`` looks at it.
        """
        members = range(self.first, self.first + len(self.params))
        if self.blocks:
            self.parent.unread.append((members, skip if skip is None else HostRead(skip)))
        ages = self.parent.ages
        age = hash((ages[self.first], self.parent.clock))  # theirs are equal: see ``active``
        ages[members.start : members.stop] = [age] * len(members)

    def count(self) -> None:
        """Brings ``taken`` up to date; flags of the step before have long been on their way to the host."""
        for members, skipped in self.unread:
            if skipped is None or not skipped.wait():
                for index in members:
                    self.taken[index] += 1
        self.unread.clear()

    def recount(self) -> None:
        """Takes the counts from ``steps``, which was written from elsewhere."""
        self.ages = [int(step) for step in self.steps.tolist()]
        self.taken, self.unread = [*self.ages], []

    def taken_by(self, index: int) -> int:
        """Steps that parameter ``index`` has completed; no device is read."""
        return self.parent.taken[self.first + index]


def runs_of(group: dict[str, Any], rule: Any, *, offload_state: bool = False) -> list[Run]:
    """Cuts a group into runs: parameters of one rule that follow each other in one buffer."""
    pairs = list(zip(group["param_names"], group["params"], strict=True))
    place = {id(p): (i, home_of(p)) for i, (_, p) in enumerate(pairs)}
    order = {id(home.segment): n for n, home in enumerate(h for _, h in place.values() if h)}
    rules = {id(p): rule_for(rule, whole_shape(p)) for _, p in pairs}

    def key(pair: tuple[str, nn.Parameter]) -> tuple[int, int]:
        position, home = place[id(pair[1])]
        return (order[id(home.segment)], home.at) if home else (len(order) + position, 0)

    def joins(last: nn.Parameter, param: nn.Parameter) -> bool:
        before, home, of = home_of(last), home_of(param), rules[id(param)]
        same = type(rules[id(last)]) is type(of) and of.finest == 1
        return bool(same and home and before and home.segment is before.segment and home.at == before.at + 1)

    runs: list[list[tuple[str, nn.Parameter]]] = []
    for name, param in sorted(pairs, key=key):
        if runs and joins(runs[-1][-1][1], param):
            runs[-1].append((name, param))
        else:
            runs.append([(name, param)])
    return [
        Run(
            group["name"],
            rules[id(run[0][1])],
            [name for name, _ in run],
            [param for _, param in run],
            offload_state=offload_state,
        )
        for run in runs
    ]
