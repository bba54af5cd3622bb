"""Shampoo: the gradient of each block between inverse fourth roots of its row and column statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from optimizers.descent import descend
from optimizers.fields import are_betas, check, exact, is_count, is_key, is_rate, weight, within
from optimizers.kronecker import adam_, correction, follow_, kronecker_block, size_of
from optimizers.matrix_root import ROOTS, inverse_root


@dataclass(frozen=True, kw_only=True)
class Shampoo:
    """Shampoo (arXiv 1802.09568) on blocks of the logical matrix, with the step size of Adam per block.

    Per block, with ``t`` counting from 1 and the roots renewed every ``refresh`` steps, not all blocks in the same::

        L <- factor_beta L + (1 - factor_beta) G G^T       R likewise with G^T G
        m <- beta1 m + (1 - beta1) G                       v <- beta2 v + (1 - beta2) G^2
        D  = L^(-1/4) m R^(-1/4)
        D <- D |a| / |D|     with a = mhat / (sqrt(vhat) + eps)      with graft="adam"
        W <- W (1 - lr weight_decay) - lr D

    Blocks follow the parameter, never a rank's part of it. A root that fails (in float32, then in float64 by
    eigenvalues) is counted in ``failures`` and the last one is kept.

    Args:
        lr: Learning rate, parameter units per step; a number, or a 0-d float32 tensor on the parameter's device.
        betas: Decay of the two moments per step, each in [0, 1); numbers or 0-d tensors.
        factor_beta: Decay of the statistics, in [0, 1]; 1 sums them up, as in the paper.
        eps: Added to the root of the second moment, in units of the gradient.
        weight_decay: Fraction of the parameter removed per step and per unit of ``lr``; a number or a 0-d tensor.
        block_size: Rows and columns of a block at most.
        refresh: Steps between two computations of a root.
        damping: Added to the statistics' diagonals, as a fraction of their largest eigenvalue.
        graft: "adam", or "none": D as it is.
        root: How roots are computed, a key of ``matrix_root.ROOTS``: "newton" or "eigen".
        wire_dtype: Gradient and direction of every block are rounded to it. bfloat16 or float32.

    Raises:
        ValueError: If a field is out of range; all of them are named.
    """

    # betas, factor_beta, block_size and refresh of DASH (arXiv 2602.02016, ista-daslab-optimizers), lr and decay of
    # torch.optim.AdamW, whose steps these have.
    lr: float | Tensor = 1e-3
    betas: Sequence[float | Tensor] = (0.9, 0.95)
    factor_beta: float = 0.95
    eps: float = 1e-8
    weight_decay: float | Tensor = 1e-2
    block_size: int = 1024
    refresh: int = 10
    # Below 1e-6 of the largest eigenvalue lies float32's noise: the root's error is then of order one.
    damping: float = 1e-6
    graft: str = "adam"
    root: str = "newton"
    wire_dtype: torch.dtype = torch.float32

    finest: ClassVar[int] = 1
    state_in_place: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "left", "right")

    def __post_init__(self) -> None:
        check(
            self,
            lr=(is_rate(self.lr), "a number >= 0 or a 0-d tensor"),
            betas=(are_betas(self.betas), "two numbers in [0, 1) or 0-d tensors"),
            factor_beta=(within(self.factor_beta, 0, 1) or self.factor_beta == 1, "a number in [0, 1]"),
            eps=(within(self.eps, 0, math.inf), "a number >= 0"),
            weight_decay=(is_rate(self.weight_decay), "a number >= 0 or a 0-d tensor"),
            block_size=(is_count(self.block_size, 1), "an integer >= 1"),
            refresh=(is_count(self.refresh, 1), "an integer >= 1"),
            damping=(within(self.damping, math.ulp(0.0), 1), "a number in (0, 1)"),
            root=(is_key(self.root, ROOTS), "newton or eigen"),
            graft=(self.graft in ("adam", "none"), "adam or none"),
            wire_dtype=(self.wire_dtype in (torch.bfloat16, torch.float32), "torch.bfloat16 or torch.float32"),
        )

    def block_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns ``(block_size, block_size)``, with a 1 before it for a stack of matrices.

        Raises:
            ValueError: If the parameter is neither a matrix nor a stack of matrices.
        """
        return kronecker_block(self, shape, self.block_size)

    def cost(self, block: tuple[int, ...]) -> float:
        """Returns the FLOPs of a block: statistics and direction each step, a share of the roots.

        A root is about 15 steps of four products.
        """
        m, n = block[-2:]
        return 4 * m * n * (m + n) + 2 * 60 * (m**3 + n**3) / self.refresh

    def element_state(self) -> dict[str, torch.dtype]:
        """Returns nothing: the moments are block state, so that one gradient travels instead of three tensors."""
        return {}

    def block_state(self, block: tuple[int, ...]) -> dict[str, Tensor]:
        """Returns the first values of what a block of this shape keeps."""
        m, n = block[-2:]
        factors = {"left": torch.zeros(m, m), "right": torch.zeros(n, n)}
        roots = {"left_root": torch.eye(m), "right_root": torch.eye(n)}
        moments = {"exp_avg": torch.zeros(m, n)} | ({"exp_avg_sq": torch.zeros(m, n)} if self.graft == "adam" else {})
        return {**moments, **factors, **roots, "failures": torch.zeros(())}

    def prepare(
        self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], *, skip: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Returns the gradient, (n,) in ``wire_dtype``; in float32 the gradient itself."""
        return (grad.to(self.wire_dtype),)

    def block(
        self, payloads: tuple[Tensor, ...], state: Mapping[str, Tensor], *, refresh: str | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the directions, like the payload, and what is new of the state that is not written in place.

        Args:
            payloads: The gradients, (B, m, n) or (B, 1, m, n) in ``wire_dtype``; never written.
            state: The names of ``block_state``, (B, ...) each, those of ``state_in_place`` written; and ``step``, ()
                float32: the steps completed before this one.
            refresh: Whether to compute roots: "first", "again", or None.
        """
        grad, new = payloads[0].reshape(-1, *payloads[0].shape[-2:]).float(), {}
        steps, moment, room = state["step"] + 1, state["exp_avg"], torch.empty_like(grad)
        follow_(state["left"], grad, self.factor_beta)
        follow_(state["right"], grad.mT, self.factor_beta)
        if self.graft == "adam":
            step = adam_(moment, state["exp_avg_sq"], grad, state["step"], betas=self.betas, eps=self.eps, out=room)
            wanted = size_of(step)
        else:
            moment.lerp_(grad, weight(1 - exact(self.betas[0]), moment))
        if refresh is not None:
            scale = correction(self.factor_beta, steps)
            new = self._roots(state["left"] / scale, state["right"] / scale, state)
        left, right = (new.get(name, state[name]) for name in ("left_root", "right_root"))
        direction = torch.bmm(torch.bmm(left, moment, out=room), right)
        if self.graft == "adam":
            size = size_of(direction)
            direction *= torch.where(size > 0, wanted / size, 0.0)
        else:
            direction /= correction(self.betas[0], steps)
        return direction.to(self.wire_dtype).view(payloads[0].shape), new

    def _roots(self, left: Tensor, right: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """New roots, the last ones where they fail, and how many have failed."""
        new, failures = {}, state["failures"]
        for name, factor in (("left_root", left), ("right_root", right)):
            root, good = inverse_root(factor, 4, damping=self.damping, method=self.root)
            new[name] = torch.where(good[:, None, None], root, state[name])
            failures = failures + (~good).to(failures.dtype)
        return {**new, "failures": failures}

    def apply(self, param: Tensor, direction: Tensor, state: Mapping[str, Tensor], *, skip: Tensor | None) -> None:
        """Decays ``param`` and steps it along ``direction``, in place; see ``descend``."""
        descend(param, direction, lr=self.lr, weight_decay=self.weight_decay, skip=skip)
