"""Run: neighbouring parameters of one rule as one flat stretch of this rank's shard; what rules work on element-wise.

A shard of 128 elements that begins at element 256 of its buffer holds the end of ``a`` and all of ``b``, which are
Muon's, and a norm, which is AdamW's::

    element   256       272 288          336 352         372  384
              | a's end | gap | b (6, 8) |gap| norm (20,) | gap |
    runs      <--------- Muon ---------------><---- AdamW ------>

A run ends where its last parameter's padding ends, so that vector loops have no tail and the bits do not depend on the
cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vescale.block import Lattice
from vescale.planner import ALIGN
from vescale.ragged_tensor import RaggedTensor, from_local
from vescale.shards import Boundary
from vescale.unit import Home, home_of


class Run:
    """Neighbouring parameters of one group, as one flat run of this rank's shard, to its padded end.

    Args:
        group: Name of the group.
        rule: Its rule.
        names: Names of the parameters.
        params: The parameters, in buffer order.
        parent: The run that holds the state of this part of it; None for a whole run.
        first: Index of the first parameter in the parent.
    """

    group: str
    home: Home | None  # of the first parameter; None for parameters outside any unit
    start: int  # of the run, in elements of the buffer
    stop: int
    state: dict[str, torch.Tensor]  # name -> (stop - start,) flat
    steps: torch.Tensor  # (len(params),) float32, completed steps
    ages: list[int]  # equal for parameters that took part in the same steps; others are stepped apart
    clock: int  # steps begun, on the parent

    def __init__(
        self,
        group: str,
        rule: Any,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        *,
        parent: Run | None = None,
        first: int = 0,
    ) -> None:
        self.group, self.rule, self.names, self.params, self.first = group, rule, list(names), list(params), first
        self.home = home_of(params[0])
        self.offsets = [home.segment.plan.offsets[home.at] for home in map(home_of, params) if home] or [0]
        self.start, self.stop = self._slice()
        self.parent = parent or self
        self._parts: dict[tuple[int, int], Run] = {}
        if parent is None:
            flat = self.param()
            self.state = {name: torch.zeros_like(flat, dtype=dtype) for name, dtype in rule.element_state().items()}
            self.steps = torch.zeros(len(params), dtype=torch.float32, device=flat.device)
            self.clock, self.ages = 0, [0] * len(params)
        else:
            at = self.start - parent.start
            self.state = {name: flat[at : at + self.stop - self.start] for name, flat in parent.state.items()}
            self.steps = parent.steps[first : first + len(params)]

    @property
    def num_ranks(self) -> int:
        """Ranks that share the buffer."""
        return self.home.segment.plan.num_ranks if self.home else 1

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

    def param(self) -> torch.Tensor:
        """The parameters, (stop - start,)."""
        return self._of(self.home.segment.master.local) if self.home else self.params[0].detach().view(-1)

    def grad(self) -> torch.Tensor:
        """The gradients, (stop - start,)."""
        if self.home is None:
            return self.params[0].grad.reshape(-1)  # type: ignore[union-attr]
        return self._of(self.home.segment.grad.local)  # type: ignore[union-attr]

    def _of(self, shard: torch.Tensor) -> torch.Tensor:
        base = self.rank * self.shard_size
        return shard[self.start - base : self.stop - base]

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """The part of a flat state that is parameter ``index``, cut as the parameter is."""
        param = self.params[index]
        if not isinstance(param, RaggedTensor):
            return flat.view(param.shape)
        begin, end = param.run
        at = self.offsets[index] + begin - self.start if end > begin else 0
        return from_local(flat[at : at + end - begin], param.device_mesh, param.placements, shape=param.shape)

    def lattice(self, index: int) -> Lattice:
        """Blocks of parameter ``index``."""
        shape = tuple(self.params[index].shape)
        return Lattice(shape, self.rule.block_shape(shape))

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

    def advance(self, skip: torch.Tensor | None) -> None:
        """Counts a completed step."""
        self.steps.add_(1 if skip is None else 1 - skip)
        for index in range(self.first, self.first + len(self.params)):
            self.parent.ages[index] = hash((self.parent.ages[index], self.parent.clock))


def runs_of(group: dict[str, Any], rule: Any) -> list[Run]:
    """Cuts a group into runs: parameters that follow each other in one buffer."""
    pairs = list(zip(group["param_names"], group["params"], strict=True))
    place = {id(p): (i, home_of(p)) for i, (_, p) in enumerate(pairs)}
    order = {id(home.segment): n for n, home in enumerate(h for _, h in place.values() if h)}

    def key(pair: tuple[str, nn.Parameter]) -> tuple[int, int]:
        position, home = place[id(pair[1])]
        return (order[id(home.segment)], home.at) if home else (len(order) + position, 0)

    runs: list[list[tuple[str, nn.Parameter]]] = []
    for name, param in sorted(pairs, key=key):
        home, last = home_of(param), home_of(runs[-1][-1][1]) if runs else None
        if home and last and home.segment is last.segment and home.at == last.at + 1:
            runs[-1].append((name, param))
        else:
            runs.append([(name, param)])
    return [Run(group["name"], rule, [name for name, _ in run], [param for _, param in run]) for run in runs]
