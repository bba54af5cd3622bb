"""Adam8bit: AdamW whose moments are bytes, in blocks of 256 elements (arXiv 2110.02861)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from optimizers.adamw import AdamW
from optimizers.fields import are_betas, check, is_count, is_rate, within
from optimizers.kernels.adam8bit import Moments, adam8bit_
from optimizers.quantize import BLOCK


@dataclass(frozen=True, kw_only=True)
class Adam8bit:
    """Adam with decoupled weight decay and 2.03 bytes of state per element instead of 8.

    With ``t`` counting from 1, and both moments read from bytes before and written to bytes after::

        m <- beta1 m + (1 - beta1) g          mhat = m / (1 - beta1^t)
        v <- beta2 v + (1 - beta2) g^2        vhat = v / (1 - beta2^t)
        w <- w (1 - lr weight_decay) - lr mhat / (sqrt(vhat) + eps)

    The step uses the moments before they are rounded. What is kept is m and sqrt(v): the published scheme keeps v,
    whose map ends at 1.6e-7 of a block's largest; an element with a gradient 1e-4 of its neighbours' then has v = 0 and
    m > 0, and steps of up to 60 where Adam's are at most about 1. With sqrt(v), never rounded to 0, they stay below 3.
    ``compat="bnb"`` keeps the published scheme.

    Parameters that are no matrices, and those of fewer than ``min_numel`` elements in all, are stepped by ``AdamW``, by
    their global size, so that the number of ranks does not matter. Give embeddings and the head to an ``AdamW`` of
    their own (arXiv 2110.02861, section 2.3): a rule does not see what a parameter is for.

    Args:
        lr: Learning rate, parameter units per step; a number, or a 0-d float32 tensor on the parameter's device.
        betas: Decay of the two moments per step, each in [0, 1); numbers or 0-d tensors.
        eps: Added to the root of the second moment, in units of the gradient.
        weight_decay: Fraction of the parameter removed per step and per unit of ``lr``; a number or a 0-d tensor.
        min_numel: Elements of the smallest parameter whose moments are bytes.
        compat: "none", or "bnb" for the format of bitsandbytes and torchao.

    Raises:
        ValueError: If a field is out of range; all of them are named.
    """

    # Defaults are those of torch.optim.AdamW; min_numel is min_8bit_size of bitsandbytes.
    lr: float | Tensor = 1e-3
    betas: Sequence[float | Tensor] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float | Tensor = 1e-2
    min_numel: int = 4096
    compat: str = "none"

    finest: ClassVar[int] = BLOCK

    def __post_init__(self) -> None:
        check(
            self,
            lr=(is_rate(self.lr), "a number >= 0 or a 0-d tensor"),
            betas=(are_betas(self.betas), "two numbers in [0, 1) or 0-d tensors"),
            eps=(within(self.eps, 0, math.inf), "a number >= 0"),
            weight_decay=(is_rate(self.weight_decay), "a number >= 0 or a 0-d tensor"),
            min_numel=(is_count(self.min_numel, 0), "an integer >= 0"),
            compat=(self.compat in ("none", "bnb"), "none or bnb"),
        )

    def for_shape(self, shape: tuple[int, ...]) -> Adam8bit | AdamW:
        """Returns the rule that steps a parameter of this global shape: itself, or AdamW with the same numbers."""
        if len(shape) >= 2 and math.prod(shape) >= self.min_numel:
            return self
        return AdamW(lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)

    def block_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns ``(256,)``: that many consecutive elements share a scale."""
        return (BLOCK,)

    def element_state(self) -> dict[str, torch.dtype]:
        """Returns the codes of both moments, each of the parameter's shape; their names say what they are codes of."""
        return {"exp_avg": torch.uint8, self._second: torch.uint8}

    def chunk_state(self) -> dict[str, torch.dtype]:
        """Returns the scales of both moments, one for each 256 elements."""
        return {"exp_avg_scale": torch.float32, f"{self._second}_scale": torch.float32}

    @property
    def _second(self) -> str:
        """Of the second moment, or its root: so that no checkpoint of the one is taken for the other."""
        return "exp_avg_sq" if self.compat == "bnb" else "exp_avg_sq_root"

    def prepare(
        self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], *, skip: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Steps ``param`` and both moments in place; returns no payload.

        Args:
            param: (n,) float32, a run that begins at a multiple of 256 elements of its parameter.
            grad: (n,) float32, left as it is.
            state: The codes, (n,) uint8, their scales, (ceil(n / 256),) float32, and ``step``, () float32: the steps
                completed before this one.
            skip: None, or () float32: 1.0 writes nothing.
        """
        names = (name.replace("exp_avg_sq", self._second) for name in Moments._fields)
        moments = Moments(*(state[name] for name in names))
        adam8bit_(
            param,
            grad,
            moments,
            state["step"],
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            compat=self.compat,
            skip=skip,
        )
        return ()
