"""Muon: momentum, orthogonalised. Its block is the matrix; an expert of a stack is a matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from optimizers.fields import check, is_rate, within
from optimizers.newton_schulz import COEFFICIENTS, newton_schulz

# Factor on the step of a logical matrix of m rows (outputs) and n columns (inputs).
ADJUST_LR: dict[str, Callable[[int, int], float]] = {
    # An orthogonal matrix has an RMS of 1 / sqrt(max(m, n)). This makes it 0.2, about AdamW's, so that one learning
    # rate serves both: arXiv 2502.16982, section 2.2.
    "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
    # kellerjordan.github.io/posts/muon, torch.optim.Muon.
    "original": lambda m, n: math.sqrt(max(1.0, m / n)),
    # Outputs change alike at every width: arXiv 2310.17813, condition 1; "spectral_norm" of microsoft/dion.
    "spectral": lambda m, n: math.sqrt(m / n),
}


@dataclass(frozen=True, kw_only=True)
class Muon:
    """Steps along the orthogonalised momentum of each matrix, with decoupled weight decay.

    ::

        prepare    M <- momentum M + (1 - momentum) G
                   U  = momentum M + (1 - momentum) G          with nesterov, else U = M
        block      O  = adjust_lr(m, n) newton_schulz(U)
        apply      W <- W (1 - lr weight_decay) - lr O

    The momentum is an average, as in torch.optim.Muon, not a sum, as in Moonlight and microsoft/dion: the direction is
    the same, the buffer ``1 / (1 - momentum)`` times smaller. The direction has no scale, so nothing corrects a bias.

    Args:
        lr: Learning rate, parameter units per step; a number, or a 0-d float32 tensor on the parameter's device.
        momentum: Decay of the momentum per step, in [0, 1).
        nesterov: Whether the gradient counts once more in what is orthogonalised.
        weight_decay: Fraction of the parameter removed per step and per unit of ``lr``, un-adjusted.
        coefficients: A key of ``newton_schulz.COEFFICIENTS``.
        adjust_lr: A key of ``ADJUST_LR``.
        ns_dtype: Dtype of the Newton-Schulz products, bfloat16 or float32.
        eps: A matrix whose ``U`` has no element above this counts as noise and fades to zero, in units of the gradient.
        wire_dtype: Payload and direction of every block are rounded to it, whether they travel or not: where a block
            lies must not show. bfloat16 or float32.

    Raises:
        ValueError: If a field is out of range; all of them are named.
    """

    # lr, momentum, nesterov and weight_decay as in torch.optim.Muon.
    lr: float | Tensor = 1e-3
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    coefficients: str = "quintic"
    adjust_lr: str = "match_rms_adamw"
    ns_dtype: torch.dtype = torch.bfloat16
    eps: float = 1e-30
    wire_dtype: torch.dtype = torch.bfloat16

    finest: ClassVar[int] = 1

    def __post_init__(self) -> None:
        dtypes = (torch.bfloat16, torch.float32)
        check(
            self,
            lr=(is_rate(self.lr), "a number >= 0 or a 0-d tensor"),
            momentum=(within(self.momentum, 0, 1), "a number in [0, 1)"),
            nesterov=(isinstance(self.nesterov, bool), "a bool"),
            weight_decay=(within(self.weight_decay, 0, math.inf), "a number >= 0"),
            coefficients=(self.coefficients in COEFFICIENTS, f"one of {sorted(COEFFICIENTS)}"),
            adjust_lr=(self.adjust_lr in ADJUST_LR, f"one of {sorted(ADJUST_LR)}"),
            ns_dtype=(self.ns_dtype in dtypes, "torch.bfloat16 or torch.float32"),
            eps=(within(self.eps, math.ulp(0.0), math.inf), "a number > 0"),
            wire_dtype=(self.wire_dtype in dtypes, "torch.bfloat16 or torch.float32"),
        )

    def block_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of one matrix: all of a 2-D parameter, one member of a 3-D stack.

        Args:
            shape: Of the whole parameter.

        Raises:
            ValueError: If the parameter is neither a matrix nor a stack of matrices.
        """
        if len(shape) == 2:
            return tuple(shape)
        if len(shape) == 3:
            return (1, *shape[1:])
        raise ValueError(f"Muon: expected a matrix (m, n) or a stack of them (E, m, n), got shape {tuple(shape)}")

    def cost(self, block: tuple[int, ...]) -> float:
        """Returns the FLOPs of one matrix: a step of Newton-Schulz is X X^T, its square, and a product with X.

        ``K (4 s^2 l + 2 s^3)`` for ``K`` steps on sides ``s <= l``.

        Args:
            block: (m, n) or (1, m, n).
        """
        short, long = sorted(block[-2:])
        return len(COEFFICIENTS[self.coefficients]) * (4.0 * short**2 * long + 2.0 * short**3)

    def element_state(self) -> dict[str, torch.dtype]:
        """Returns the momentum, of the parameter's shape."""
        return {"momentum": torch.float32}

    def prepare(
        self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], *, skip: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Updates the momentum in place; returns what is to be orthogonalised, (n,) in ``wire_dtype``, as a new tensor.

        Args:
            param: (n,) float32, a flat run; not read.
            grad: (n,) float32, left as it is.
            state: ``momentum``, (n,) float32.
            skip: None, or () float32: 1.0 writes nothing. The payload, and what comes of it, then means nothing.
        """
        momentum = state["momentum"]
        if skip is None:
            momentum.lerp_(grad, 1 - self.momentum)
        else:
            # Selected, not multiplied: NaN * 0 is NaN.
            torch.where(skip > 0, momentum, momentum.lerp(grad, 1 - self.momentum), out=momentum)
        if self.nesterov:
            return (grad.lerp(momentum, self.momentum).to(self.wire_dtype),)
        return (momentum.to(self.wire_dtype, copy=True),)

    def block(self, payloads: tuple[Tensor, ...], state: Mapping[str, Tensor]) -> Tensor:
        """Returns the directions, like the payload in shape and dtype; the step is ``lr`` times them.

        Args:
            payloads: One tensor, (B, m, n) or (B, 1, m, n) in ``wire_dtype`` with B >= 1; never written.
            state: Not read: Muon keeps nothing per block.
        """
        (payload,) = payloads
        m, n = payload.shape[-2:]
        orthogonal = partial(
            newton_schulz,
            coefficients=self.coefficients,
            dtype=self.ns_dtype,
            eps=self.eps,
            gain=ADJUST_LR[self.adjust_lr](m, n),
        )
        matrices = payload.reshape(-1, m, n)
        if payload.device.type == "cpu":
            # One at a time: CPU libraries choose the kernel, hence the bits, by the size of the batch; no time is lost.
            directions = torch.stack([orthogonal(matrix) for matrix in matrices])
        else:
            directions = orthogonal(matrices)
        return directions.to(self.wire_dtype).view(payload.shape)

    def apply(self, param: Tensor, direction: Tensor, state: Mapping[str, Tensor], *, skip: Tensor | None) -> None:
        """Decays ``param`` and steps it along ``direction``, in place.

        Args:
            param: (n,) float32, a flat run.
            direction: (n,) in ``wire_dtype``.
            state: Not read.
            skip: None, or () float32: 1.0 writes nothing.
        """
        stepped = torch.mul(param, 1 - self.lr * self.weight_decay, out=param if skip is None else None)
        # param is float32, so these sums are too, whatever the wire. In bfloat16 the vector loop of a multiply-add and
        # its tail round differently, and where a run was cut would show.
        if isinstance(self.lr, Tensor):
            stepped.addcmul_(direction, self.lr, value=-1)
        else:
            stepped.add_(direction, alpha=-self.lr)
        if skip is not None:
            torch.where(skip > 0, param, stepped, out=param)
