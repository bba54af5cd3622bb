"""Evaluation: the loss per token of validation sequences, the same ones for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale import deterministic
from vescale.data import Batch, Samples, num_labels
from vescale.feed import Feed


class Evaluation:
    """Takes validation sequences through a model, this rank's share of them.

    Args:
        model: ``model(input_ids, labels)`` is the sum of token losses.
        feed: Which sequences this rank reads.
        device: To compute on.
        sequences: Of a look at one set; None: all.
        in_order: Add losses in the order of samples, one at a time; see ``vescale.deterministic``.
    """

    def __init__(
        self, model: nn.Module, feed: Feed, *, device: torch.device, sequences: int | None, in_order: bool
    ) -> None:
        self.model, self.feed, self.device, self.sequences, self.in_order = model, feed, device, sequences, in_order

    @torch.no_grad()
    def losses(self, sets: Mapping[str, tuple[Samples, float]]) -> dict[str, float]:
        """Returns the loss of each set, in nats per token; their mean is ``validation_loss``.

        Args:
            sets: By name, "" for one that has none: the samples, and their share in the mean.
        """
        found, mean, shares = {}, 0.0, 0.0
        for name, (samples, share) in sets.items():
            loss = self._loss(samples)
            if share:  # a set that has none may be of any loss
                mean, shares = mean + share * loss, shares + share
            if name:
                found[f"validation_loss/{name}"] = loss
        return {"validation_loss": mean / shares, **found}

    def _loss(self, samples: Samples) -> float:
        losses, counts = [], []
        for batch in self.feed.validation(samples, self.sequences):
            input_ids, labels = to_device(batch, self.device)
            losses.append(self.model(input_ids, labels))
            counts.append(num_labels(labels))
        tokens = int(sum_over_ranks(torch.stack(counts).sum(), self.device)) or math.nan  # of documents of one token
        if self.in_order:
            world = dist.get_world_size()
            places = range(dist.get_rank(), len(losses) * world, world)
            return float(deterministic.in_order(losses, places, count=len(losses) * world)) / tokens
        return float(sum_over_ranks(torch.stack(losses).double().sum(), self.device)) / tokens


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Returns a batch where it is computed on; its copy does not wait."""
    return Batch(*(tensor.to(device, non_blocking=True) for tensor in batch))


def sum_over_ranks(value: Any, device: torch.device) -> Tensor:
    """Returns the sum of every rank's ``value``, a number or a tensor, on ``device``."""
    total = torch.as_tensor(value, device=device).clone()
    dist.all_reduce(total)
    return total
