"""The same bits on any number of ranks: every sum over samples follows one balanced binary tree.

A micro-batch is one sample, and sample ``i`` of a step runs on rank ``i mod W``. Micro-step ``j`` then holds the
samples ``j*W .. j*W + W - 1``, neighbours in the tree. Their gradients meet as W slots of an all-to-all and are added
pairwise; the micro-steps' sums are added like the carries of a binary counter. For 8 samples::

                 2 ranks                           1 rank                the tree, always
    step 0    s0 + s1        -> a      a          s0, s1 -> a            ((s0+s1) + (s2+s3)) + ((s4+s5) + (s6+s7))
    step 1    s2 + s3 -> b   a + b = c            s2, s3 -> b, a+b = c
    step 2    s4 + s5        -> d      c, d       ...
    step 3    s6 + s7 -> e   d + e, c + (d+e)

Losses are added in the order of samples, and the norm is a tree over pieces of 32 elements of each tensor, which no
edge of a shard cuts. What it costs: one sample at a time; a whole model's gradient on every rank, unreduced, for the
length of a micro-step; and log2 of the samples partial sums of a shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vescale import collectives
from vescale.planner import ALIGN
from vescale.rule import Rules

KNOWN = ("AdamW", "Muon")  # rules whose update of a block does not depend on the cut, and is tested to be so
PIECE = ALIGN  # elements; tensors and shards begin at multiples of it in their buffer


def check(*, rules: Rules, world: int, global_batch: int, model: Any, everything_cut: bool = True) -> None:
    """Raises for what the tree cannot do.

    Args:
        rules: Of the optimizer.
        world: Number of ranks.
        global_batch: Samples of a step.
        model: What is trained, not yet sharded.
        everything_cut: Whether all ranks share one copy of the model, at stage 3.

    Raises:
        NotImplementedError: For another number than a power of two, several copies or a lower stage, an expert model,
            or a rule that is not known to have the same bits for any cut; all of them in one line.
    """
    problems = [
        f"{name}: expected a power of two, got {count}"
        for name, count in (("ranks", world), ("trainer.global_batch", global_batch))
        if count < 1 or count & (count - 1)
    ]
    if global_batch < world:
        problems.append(f"trainer.global_batch: expected at least one sample for each of {world} ranks")
    others = sorted({type(group.rule).__name__ for group in rules.groups.values()} - {*KNOWN})
    if others:
        problems.append(f"optimizer: expected {' and '.join(KNOWN)}, got {', '.join(others)}")
    if not everything_cut:
        problems.append("parallelism: expected one copy of the model, everything cut (dp_shard=-1, zero=3)")
    if getattr(model, "expert_units", list)():
        problems.append("model: expected a dense one; experts take tokens in an order that depends on the ranks")
    if problems:
        raise NotImplementedError(f"trainer.deterministic=true: {'; '.join(problems)}")


class TreeSum:
    """Adds up what is given in order, as a balanced binary tree, holding one partial sum of each size.

    A binary counter: the number given so far is the sum of the sizes held. ``add_`` overwrites what it is given.
    """

    def __init__(self) -> None:
        self._held: dict[int, list[Tensor]] = {}

    def add_(self, terms: list[Tensor]) -> None:
        """Takes the next term: several tensors that are added one by one."""
        size = 1
        while size in self._held:
            left = self._held.pop(size)
            for a, b in zip(left, terms, strict=True):
                b.copy_(a + b)
            size *= 2
        self._held[size] = terms

    def total(self) -> list[Tensor]:
        """Returns the sum; the number of terms must have been a power of two."""
        (terms,) = self._held.values()
        self._held = {}
        return terms


def reduce_(partial: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Returns this rank's part of the sum of every rank's ``partial``, added pairwise in the order of ranks.

    Args:
        partial: (m * S,) any dtype, in the order of ranks; overwritten on one rank alone.
        group: Its m ranks, a power of two.

    Returns:
        (S,) float32.
    """
    ranks = dist.get_world_size(group)
    size = partial.numel() // ranks
    slots = torch.empty_like(partial)
    collectives.all_to_all(slots, partial, out_splits=[size] * ranks, send_splits=[size] * ranks, group=group)
    return halved(slots.float().view(ranks, size))


def halved(rows: Tensor) -> Tensor:
    """Returns the sum over the first dim, a power of two, of neighbours, then of neighbours of those, and so on."""
    while rows.shape[0] > 1:
        rows = rows[0::2] + rows[1::2]
    return rows[0]


class Gradient:
    """Takes the gradient of each micro-step out of the model, and puts the sum back at the end of a step.

    Args:
        model: Sharded; its own reductions are switched off.
    """

    def __init__(self, model: Any) -> None:
        model.set_requires_gradient_sync(False, recurse=True)
        self.model = model
        self.pairs = [(unit, s) for unit in model.units() for s in unit.segments if s.trainable]
        self.segments = [segment for _, segment in self.pairs]
        self.sum = TreeSum()

    def take(self) -> None:
        """Adds the gradients that backward has left, unreduced, to the tree."""
        terms = []
        for unit, segment in self.pairs:
            full = unit.take_partial(segment)
            terms.append(reduce_(full.local, group=full.group))
        self.sum.add_(terms)

    def put(self) -> None:
        """Makes the sum the gradient of the sharded parameters."""
        for segment, total in zip(self.segments, self.sum.total(), strict=True):
            segment.grad = segment.master.sibling(segment.master.placement, total)
            for index, param in enumerate(segment.sharded):
                param.grad = segment.grad.tensor(index) if param.requires_grad else None

    def clip_(self, max_norm: float) -> Tensor:
        """Scales the gradients to a joint norm of at most ``max_norm``; returns the norm before, () float32."""
        squares = []
        for segment in self.segments:
            pieces = torch.zeros(segment.plan.numel // PIECE, dtype=torch.float32, device=segment.grad.local.device)
            own, rank = segment.grad.local.square().view(-1, PIECE), segment.master.rank
            each = halved(own.t().contiguous())
            pieces[rank * len(each) : (rank + 1) * len(each)] = each
            collectives.all_reduce(pieces, group=segment.master.group)  # every element is one rank's: no sum is rounded
            starts = segment.plan.offsets
            for member, start in zip(segment.members, starts, strict=True):
                count = -(-member.param.numel() // PIECE)
                squares.append((member.name, pieces[start // PIECE : start // PIECE + count]))
        totals = [tree(pieces) for _, pieces in sorted(squares, key=lambda pair: pair[0])]
        norm = tree(torch.stack(totals)).sqrt()
        if not math.isinf(max_norm):
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as vescale.clip_grad_norm_
            for segment in self.segments:
                segment.grad.local.mul_(scale)
        return norm


def tree(values: Tensor) -> Tensor:
    """Returns the sum of (n,) float32 as a balanced tree, filled up with zeros to a power of two."""
    size = 1 << max(values.numel() - 1, 0).bit_length()
    return halved(torch.cat([values, values.new_zeros(size - values.numel())]))


def in_order(
    values: Sequence[Tensor], places: Sequence[int], count: int, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Returns the sum of ``count`` numbers in the order of their places, of which this rank has some.

    Args:
        values: () float32 each.
        places: Of each value, below ``count``; every place is one rank's.
        count: Of all ranks together.
        group: The ranks; None: all.
    """
    row = torch.zeros(count, dtype=torch.float32)
    row[list(places)] = torch.stack(list(values)).cpu().float() if len(values) else row[:0]
    dist.all_reduce(row)
    return tree(row)


def costs(gradient: Gradient, *, global_batch: int) -> str:
    """Returns what determinism costs each rank, in one line."""
    whole = sum(segment.plan.numel for segment in gradient.segments) * 4 / 2**20
    shards = sum(segment.plan.shard_size for segment in gradient.segments) * 4 / 2**20 * global_batch.bit_length()
    return f"deterministic: a sample at a time; {whole:,.1f} MiB of unreduced gradient, {shards:,.1f} of partial sums"
