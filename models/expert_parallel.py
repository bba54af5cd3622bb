"""Expert parallelism: each rank of a group holds some of the experts, and tokens travel to them and back.

Two ranks, three experts, rank 0 holds the first, rank 1 the other two::

    rank 0 has   0 0 | 1 | 2 2        sends 0 0 here, 1 2 2 there
    rank 1 has   0 | 1 1 |            sends 0 there, 1 1 here, and nothing for expert 2
    rank 1 gets  1 2 2 | 1 1          by rank, then by expert
    and sorts    1 1 1 | 2 2          by expert; the outputs go back the same way

Any number of tokens per expert, none included; nothing is padded. Where there are fewer experts than ranks, some ranks
hold none and take part with no rows, so that the collectives match.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from models.moe import Experts, StackedLinear, inverse

PART = "part_of"  # attribute of a parameter that is some experts of a stack: its Held


class Held:
    """Which experts of a stack a parameter holds, and the ranks that hold the others.

    Args:
        bounds: The experts of rank r are ``[bounds[r], bounds[r + 1])``.
        group: The ranks.
    """

    def __init__(self, bounds: Sequence[int], group: dist.ProcessGroup) -> None:
        self.bounds, self.group = tuple(bounds), group
        rank = group.rank()
        self.first, self.stop, self.total = self.bounds[rank], self.bounds[rank + 1], self.bounds[-1]


def held(parameter: torch.Tensor) -> Held | None:
    """Returns which experts of a stack a parameter holds; None when that is all of them."""
    return getattr(parameter, PART, None)


class ExpertParallel:
    """What ``MoE.run`` is where the experts are dealt over a group: tokens out, experts, tokens back.

    Args:
        group: The ranks that share the experts of a layer.
        num_experts: Of the layer, over all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        size = group.size()
        self.held = Held([rank * num_experts // size for rank in range(size + 1)], group)

    def keep(self, experts: Experts) -> None:
        """Cuts a whole stack down to the experts of this rank, in place."""
        for linear in experts.children():
            assert isinstance(linear, StackedLinear)
            for name, parameter in list(linear.named_parameters(recurse=False)):
                part = nn.Parameter(parameter.detach()[self.held.first : self.held.stop].clone())
                setattr(part, PART, self.held)
                setattr(linear, name, part)

    def __call__(self, x: torch.Tensor, counts: torch.Tensor, experts: nn.Module) -> torch.Tensor:
        """Returns what the experts, wherever they are, make of their tokens; (n, hidden), dtype of ``x``.

        Args:
            x: (n, hidden) floating point, sorted by expert.
            counts: (num_experts,) int64, tokens of each expert.
            experts: Of this rank.
        """
        arriving = self._exchange_counts(counts)  # (ranks, experts of this rank)
        sent, received = self._splits(counts, arriving)
        group, mine = self.held.group, arriving.shape[1]
        tokens = _AllToAll.apply(x, sent, received, group)
        ids = torch.arange(mine, device=x.device).repeat(len(received))
        ids = ids.repeat_interleave(arriving.flatten(), output_size=sum(received))
        by_expert = ids.argsort(stable=True)
        out = experts(tokens[by_expert], arriving.sum(dim=0))
        returned: torch.Tensor = _AllToAll.apply(out[inverse(by_expert)], received, sent, group)
        return returned

    def _exchange_counts(self, counts: torch.Tensor) -> torch.Tensor:
        bounds = self.held.bounds
        ranks, mine = len(bounds) - 1, self.held.stop - self.held.first
        arriving = counts.new_empty(ranks * mine)
        per_rank = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
        dist.all_to_all_single(arriving, counts, [mine] * ranks, per_rank, group=self.held.group)
        return arriving.view(ranks, mine)

    def _splits(self, counts: torch.Tensor, arriving: torch.Tensor) -> tuple[list[int], list[int]]:
        """Rows to and from each rank: the one place where the device is waited for."""
        bounds = torch.tensor(self.held.bounds, device=counts.device)
        ends = torch.cat((counts.new_zeros(1), counts.cumsum(0)))[bounds]
        both = torch.stack((ends.diff(), arriving.sum(dim=1))).tolist()
        return both[0], both[1]


class _AllToAll(torch.autograd.Function):
    """Sends rows to the ranks of a group; backward sends the gradients the other way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out
