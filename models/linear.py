"""Linear: a projection whose weight gradient is written where it leaves from.

A wrapper that reduces gradients over ranks may give a weight two attributes; a weight without them gets its gradient
from autograd as usual::

    weight.grad_slot()            the tensor, in the weight's shape, into which the gradient is to be written
    weight.grad_slot_written      whether it holds one already: the first write replaces, later ones add

Then the product itself writes the slot, in backward, and autograd never sees the gradient: no copy. A weight that is
used several times (tied, shared, several forwards, accumulated micro-batches) adds up there.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Linear(nn.Linear):
    """``nn.Linear``, without a bias unless asked, NaN until it is initialised; gradients have ``nn.Linear``'s bits."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Fills the parameters with NaN; called by the constructor of ``nn.Linear``."""
        for parameter in self.parameters():
            nn.init.constant_(parameter, math.nan)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x`` times the transposed weight; (..., out_features), dtype of ``x``."""
        return project(x, self.weight, self.bias)


def project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns ``F.linear(x, weight, bias)``, whose backward writes the weight's gradient into its slot if it has one.

    Inside a compiled region, and where autocast would cast the weight first, it is ``F.linear``.

    Args:
        x: (..., in) floating point.
        weight: (out, in) same dtype.
        bias: (out,) same dtype, or None; its gradient goes the ordinary way.
    """
    if torch.is_autocast_enabled(x.device.type) or not has_slot(weight):
        return F.linear(x, weight, bias)
    out: torch.Tensor = _Project.apply(x, weight, bias)
    return out


def has_slot(weight: torch.Tensor) -> bool:
    """Whether a backward that is recorded now may write the weight's gradient into a slot of its own."""
    if torch.compiler.is_compiling() or not (weight.requires_grad and torch.is_grad_enabled()):
        return False
    return hasattr(weight, "grad_slot")


class _Project(torch.autograd.Function):
    """The product; backward writes the weight's gradient and returns none for it, where that is what is asked."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight  # what checkpointing gives back for a saved tensor lacks its attributes
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, inputs = grads[0].reshape(-1, weight.shape[0]), x.reshape(-1, weight.shape[1])
        grad_x = (rows @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        if not accumulates(ctx.next_functions[1][0]):
            return grad_x, rows.t() @ inputs, grad_bias
        write(ctx.weight, rows, inputs)
        return grad_x, None, grad_bias


def accumulates(node: Any) -> bool:
    """Whether this backward adds to the weight's ``.grad``.

    ``autograd.grad`` only asks for it, ``backward(inputs=...)`` may leave it out, and a graph of the backward itself
    needs it as a value.
    """
    if torch.is_grad_enabled():
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad of this very weight
        return False


def write(weight: Any, grad: torch.Tensor, x: torch.Tensor) -> None:
    """Writes ``grad.T @ x`` into the weight's slot, or adds it.

    A slot that is wider than the operands (bf16 products summed over ranks in fp32) costs one widening pass on CPU; on
    CUDA the product itself leaves fp32.

    Args:
        weight: With ``grad_slot`` and ``grad_slot_written``, see the module's text.
        grad: (rows, out) floating point.
        x: (rows, in) same dtype.
    """
    slot = weight.grad_slot()
    fresh, weight.grad_slot_written = not weight.grad_slot_written, True
    if slot.dtype == grad.dtype and fresh:
        torch.mm(grad.t(), x, out=slot)
    elif slot.dtype != grad.dtype and slot.is_cuda:
        _widening(slot, grad, x, fresh)
    elif fresh:
        slot.copy_(torch.mm(grad.t(), x))
    else:
        slot.add_(torch.mm(grad.t(), x))  # as autograd adds; addmm_ would round elsewhere


def _widening(slot: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, fresh: bool) -> None:
    """The CUDA product of bf16 operands that leaves fp32, without a pass over it."""
    if fresh:
        torch.mm(grad.t(), x, out_dtype=slot.dtype, out=slot)
    else:
        slot.add_(torch.mm(grad.t(), x, out_dtype=slot.dtype))


def write_scaled(weight: Any, grad: torch.Tensor, scale: torch.Tensor) -> None:
    """Writes ``grad * scale`` into the weight's slot, or adds it; one pass, rounded once.

    Args:
        weight: As for ``write``.
        grad: Of the weight's shape, floating point.
        scale: (1, 1) float32.
    """
    slot = weight.grad_slot()
    fresh, weight.grad_slot_written = not weight.grad_slot_written, True
    if fresh:
        torch.mul(grad, scale, out=slot)
    else:
        slot.add_(grad.mul_(scale))
