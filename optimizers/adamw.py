"""AdamW (arXiv 1711.05101, algorithm 2): element-wise, so it runs wherever the parameter lies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from optimizers.fields import are_betas, check, is_rate, within
from optimizers.kernels.adamw import adamw_, adamw_each_


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay: one fused pass over parameter, gradient and both moments.

    The block is one element, so there is no ``block``, no ``apply`` and nothing on a wire. With ``t`` counting from 1::

        m <- beta1 m + (1 - beta1) g          mhat = m / (1 - beta1^t)
        v <- beta2 v + (1 - beta2) g^2        vhat = v / (1 - beta2^t)
        w <- w (1 - lr weight_decay) - lr mhat / (sqrt(vhat) + eps)

    Args:
        lr: Learning rate, parameter units per step; a number, or a 0-d float32 tensor on the parameter's device.
        betas: Decay of the two moments per step, each in [0, 1); numbers or 0-d tensors.
        eps: Added to the root of the second moment, in units of the gradient.
        weight_decay: Fraction of the parameter removed per step and per unit of ``lr``; a number or a 0-d tensor.

    Raises:
        ValueError: If a field is out of range; all of them are named.
    """

    # Defaults are those of torch.optim.AdamW.
    lr: float | Tensor = 1e-3
    betas: Sequence[float | Tensor] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float | Tensor = 1e-2

    # The fused kernel's vector loop and its tail round differently: runs start and end at multiples of 8 elements or
    # more, and then where they are cut does not show. Buffers are aligned to 32.
    finest: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check(
            self,
            lr=(is_rate(self.lr), "a number >= 0 or a 0-d tensor"),
            betas=(are_betas(self.betas), "two numbers in [0, 1) or 0-d tensors"),
            eps=(within(self.eps, 0, math.inf), "a number >= 0"),
            weight_decay=(is_rate(self.weight_decay), "a number >= 0 or a 0-d tensor"),
        )

    def block_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns ``()``: the update of an element needs no other element."""
        return ()

    def element_state(self) -> dict[str, torch.dtype]:
        """Returns the two moments, each of the parameter's shape."""
        return {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}

    def prepare(
        self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], *, skip: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Steps ``param`` and both moments in place; returns no payload.

        Args:
            param: (n,) float32, a flat run.
            grad: (n,) float32, left as it is.
            state: ``exp_avg`` and ``exp_avg_sq``, (n,) float32, and ``step``, () float32: the steps completed before
                this one, left as it is.
            skip: None, or () float32: 1.0 writes nothing.
        """
        adamw_(
            param,
            grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            state["step"],
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            skip=skip,
        )
        return ()

    def prepare_runs(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        states: list[dict[str, Tensor]],
        *,
        skip: Tensor | None,
    ) -> None:
        """``prepare`` of several runs, in as few launches as may be."""
        adamw_each_(
            params,
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["step"] for state in states],
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            skip=skip,
        )
