"""Logit clip: scales attention weights after a step by what the step's largest logits were, over all ranks.

::

    forward of every micro-batch    each attention keeps the largest logit of each head in its buffer ``max_logit``
    after optimizer.step()          one all-reduce (max) of all layers' buffers, 4 bytes a head
                                    each rank scales the rows, or parts of rows, of the projections that lie on it
                                    the buffers start anew

What is scaled by how much the clip says (``optimizers.QKClip``), which rows of what the attention says
(``logit_weights``). A product with the same factor has the same bits wherever a row is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from vescale.collectives import all_reduce
from vescale.member import home_of
from vescale.ragged_tensor import RaggedTensor

IN_BACKWARD = (
    "LogitClip: expected a model that is stepped after backward, got one with step_in_backward: weights would be "
    "scaled while earlier layers' gradients still need them; call optimizer.step() after backward instead"
)


class Clip(Protocol):
    """What says how much; ``optimizers.QKClip`` is one."""

    def factors(self, max_logit: torch.Tensor) -> torch.Tensor:
        """Factors of (..., heads) float32 logits, like them."""

    def rows(self, factors: torch.Tensor, *, shared: int, pieces: Sequence[tuple[int, float]]) -> torch.Tensor:
        """The factor of each row of a projection, (rows,) float32."""


class LogitClip:
    """Scales attention weights after every step of an optimizer, until ``remove``.

    A step that is left out by ``step(skip=...)`` scales nothing. After one that is left out by not calling ``step``,
    call ``reset``: the next step is not to be scaled by its logits.

    Args:
        clip: How much.
        model: With attention modules that have ``watch_logits()``, ``max_logit`` and ``logit_weights()``; sharded or
            not, after its weights have a device.
        optimizer: Whose steps to follow; a torch one.

    Raises:
        ValueError: If the model has no such attention, an attention cannot be clipped, or the model steps in backward.
    """

    def __init__(self, clip: Clip, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        homes = [home for param in model.parameters() if (home := home_of(param)) is not None]
        if any(home.unit.after_reduce is not None for home in homes):
            raise ValueError(IN_BACKWARD)
        self.clip, self.weights = clip, clipped_weights(clip, model)
        for attention, _ in self.weights:
            attention.watch_logits()
        self._hook = optimizer.register_step_post_hook(self._after_step)

    def remove(self) -> None:
        """Scales nothing from now on; the attentions look at their logits no longer."""
        self._hook.remove()
        for attention, _ in self.weights:
            attention.max_logit = None

    @torch.no_grad()
    def reset(self) -> None:
        """Forgets the logits seen since the last step."""
        for attention, _ in self.weights:
            attention.max_logit.fill_(-torch.inf)

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        largest = torch.stack([attention.max_logit for attention, _ in self.weights])
        if dist.is_initialized():
            all_reduce(largest, group=dist.group.WORLD, op=dist.ReduceOp.MAX)  # type: ignore[arg-type]
        factors = self.clip.factors(largest)
        skip = kwargs.get("skip")
        if skip is not None:
            factors = torch.where(skip > 0, 1.0, factors)
        self.reset()
        for (_, weights), each in zip(self.weights, factors, strict=True):
            for projection, shared, pieces in weights:
                rows = self.clip.rows(each, shared=shared, pieces=pieces)
                for param in projection.parameters():  # the weight, and a bias where there is one
                    scale_rows_(param, rows)


def clipped_weights(clip: Clip, model: nn.Module) -> list[tuple[Any, Sequence[Any]]]:
    """Returns every attention of a model, also of one on the meta device, with its ``logit_weights``.

    Raises:
        ValueError: If the model has no such attention, or an attention cannot be clipped.
    """
    found: list[Any] = [module for module in model.modules() if hasattr(module, "watch_logits")]
    if not found:
        raise ValueError(f"{type(clip).__name__}: {type(model).__name__} has no attention that can watch its logits")
    return [(attention, attention.logit_weights()) for attention in found]


def watched_heads(clip: Clip, model: nn.Module) -> int:
    """Returns the heads of all attentions of a model, also of one on the meta device.

    Raises:
        ValueError: As ``clipped_weights``.
    """
    heads = 0
    for attention, _ in clipped_weights(clip, model):
        attention.watch_logits()
        heads, attention.max_logit = heads + attention.max_logit.numel(), None
    return heads


def looks_at_logits(model: nn.Module) -> bool:
    """Returns whether a ``LogitClip`` follows a model's logits."""
    return any(getattr(module, "max_logit", None) is not None for module in model.modules())


def scale_rows_(param: torch.Tensor, rows: torch.Tensor) -> None:
    """Multiplies each row of a parameter by its factor, in place, the part of it that lies on this rank.

    Args:
        param: (m, ...) floating point, sharded or not.
        rows: (m,) float32.
    """
    columns = max(param.shape[1:].numel(), 1)
    if not isinstance(param, RaggedTensor):
        param.mul_(rows.view(-1, *[1] * (param.ndim - 1)).to(param.dtype))
        return
    start, stop = param.run
    first = start // columns
    mine = rows[first : -(-stop // columns)].repeat_interleave(columns)
    param._local_tensor.view(-1).mul_(mine[start - first * columns : stop - first * columns].to(param.dtype))
