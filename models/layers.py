"""The layers that are not attention, and the loss that never holds its logits whole.

No layer here draws a random number when it is built: the model's ``init_weights`` is the only initialiser, so a model
built on the meta device and filled later has the bits of one built directly. Until then the weights are NaN, and a
forgotten ``init_weights`` shows in the first loss.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from models.linear import Linear, accumulates, has_slot, project, write_scaled

IGNORE = -100  # the label of a token that has no loss; torch.nn.functional.cross_entropy's default ignore_index


class Embedding(nn.Embedding):
    """``nn.Embedding``, NaN until it is initialised."""

    def reset_parameters(self) -> None:
        """Fills the weight with NaN; called by the constructor of ``nn.Embedding``."""
        nn.init.constant_(self.weight, math.nan)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dim (arXiv 1910.07467, equation 4).

    ``F.rms_norm`` computes in fp32 whatever the input's dtype, as Hugging Face's does, and rounds once, after the
    weight; Hugging Face's rounds before it as well. On CUDA it is one kernel that saves its input and one number per
    row.
    """

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x`` divided by its root mean square and multiplied by the weight; (..., size), dtype of ``x``."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class SwiGLU(nn.Module):
    """The gated feed-forward layer ``down(silu(gate(x)) * up(x))`` (arXiv 2002.05202, equation 6)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output; (..., hidden_size), dtype of ``x``."""
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Head(Linear):
    """The last projection: logits, or straight to the loss.

    The loss is computed inside this module's call, not beside it with a borrowed weight, so that a wrapper which
    materialises a module's weight around its call finds every use of it.
    """

    def __init__(self, hidden_size: int, vocab_size: int, *, chunk_size: int) -> None:
        super().__init__(hidden_size, vocab_size)
        self.chunk_size = chunk_size

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Returns logits of shape (..., vocab) and the dtype of ``hidden``, or with labels the sum of the token losses.

        Args:
            hidden: (..., hidden) floating point.
            labels: (...) int64, or None. -100 marks a token without a loss.
        """
        if labels is None:
            return project(hidden, self.weight)
        return linear_cross_entropy(hidden.flatten(0, -2), self.weight, labels.flatten(), chunk_size=self.chunk_size)


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, chunk_size: int
) -> torch.Tensor:
    """Returns ``cross_entropy(linear(hidden, weight).float(), labels, reduction="sum")``, chunk by chunk; 0-d float32.

    When a gradient will be wanted it is computed at once, chunk by chunk, while the chunk's logits are there: three
    matrix products instead of the four of recomputing the logits in backward, and backward does not read ``weight`` any
    more. The gradients are held until backward, but that begins with them, so the peak is the same. On one CPU core,
    2048 tokens, 512 hidden, 32,000 vocabulary, fp32, chunks of 256, median seconds of forward and backward: 3.1 this
    way, 4.2 recomputing in a Function, 4.6 with ``torch.utils.checkpoint`` around each chunk (which also adds up whole
    gradients of the weight), 3.4 unchunked.

    The gradient of ``weight`` is added up in its own dtype by the products themselves, so each chunk rounds the sum
    once. For bf16 and 2048 tokens its relative error is 0.0017 in one chunk, 0.0047 in 16, 0.0080 in 64; an fp32 sum
    would keep it at the first, for three times the memory and a pass over the weight per chunk.

    Args:
        hidden: (tokens, hidden) floating point.
        weight: (vocab, hidden) same dtype.
        labels: (tokens,) int64; -100 marks a token without a loss.
        chunk_size: Tokens whose logits exist at a time.
    """
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        loss: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, labels, chunk_size, has_slot(weight))
        return loss
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for h, y in zip(hidden.split(chunk_size), labels.split(chunk_size), strict=True):
        total += F.cross_entropy(F.linear(h, weight).float(), y, ignore_index=IGNORE, reduction="sum")
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    """``linear_cross_entropy`` with the gradient of the sum computed in forward and scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk_size: int, slotted: bool
    ) -> torch.Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight: torch.Tensor | None = None
        for start in range(0, hidden.shape[0], chunk_size):
            rows = slice(start, start + chunk_size)
            # Ignored tokens are struck out of what goes into the products and of what comes out, (chunk, hidden), and
            # not of the logits' gradient: that is (chunk, vocab), a costly pass.
            ignored = labels[rows].eq(IGNORE)[:, None]
            h = hidden[rows].masked_fill(ignored, 0)
            loss, grad_logits = _chunk(h, weight, labels[rows], ignored)
            total += loss
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[rows]).masked_fill_(ignored, 0)
            if wants_weight:
                grad_weight = grad_logits.t() @ h if grad_weight is None else grad_weight.addmm_(grad_logits.t(), h)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight = weight if slotted else None
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Two dims: a 0-d factor would first be rounded to a bf16 gradient's dtype, an error common to every element. In
        # place: the weight's gradient is the largest tensor of the step. They were saved through ctx, so a second
        # backward raises instead of scaling twice.
        scale = grad_output.reshape(1, 1)
        hidden, weight = ctx.saved_tensors
        if ctx.weight is not None and weight is not None and accumulates(ctx.next_functions[1][0]):
            write_scaled(ctx.weight, weight, scale)
            weight = None
        grads = [None if grad is None else grad.mul_(scale) for grad in (hidden, weight)]
        return *grads, None, None, None


def _chunk(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, ignored: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a chunk's summed loss and its gradient to the logits, in which ignored rows mean nothing.

    Args:
        hidden: (chunk, hidden) floating point.
        weight: (vocab, hidden) same dtype.
        labels: (chunk,) int64.
        ignored: (chunk, 1) bool.

    Returns:
        0-d float32; (chunk, vocab) dtype of ``weight``.
    """
    target = labels[:, None].masked_fill(ignored, 0)  # of -100 only: another label out of range fails in the gather
    logits = F.linear(hidden, weight).float()  # rounded to the weight's dtype before that, as whole logits are
    log_probs = torch.log_softmax(logits, dim=-1)
    del logits
    picked = log_probs.gather(1, target)
    loss = -picked.masked_fill(ignored, 0).sum()
    # Softmax minus one-hot. The target's entry is expm1 of its log-probability: exact where p - 1 would cancel, and p
    # is rounded only once.
    return loss, log_probs.exp_().to(weight.dtype).scatter_(1, target, picked.expm1().to(weight.dtype))
