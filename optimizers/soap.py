"""SOAP: Adam in the eigenbasis of Shampoo's statistics (arXiv 2409.11321)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from optimizers.descent import descend
from optimizers.fields import are_betas, check, is_count, is_rate, within
from optimizers.kronecker import adam_, correction, follow_, kronecker_block
from optimizers.matrix_root import is_finite, largest_eigenvalue


@dataclass(frozen=True, kw_only=True)
class SOAP:
    """SOAP on blocks of the logical matrix: no roots, no grafting, a QR in place of them.

    Per block, with ``t`` counting from 1; Q_L and Q_R are the eigenvectors of L and R, largest first::

        G' = Q_L^T G Q_R
        m  <- beta1 m + (1 - beta1) G'          v <- beta2 v + (1 - beta2) G'^2          kept in the eigenbasis
        D  = Q_L (m / (sqrt(v) + eps)) Q_R^T sqrt(1 - beta2^t) / (1 - beta1^t)
        L  <- factor_beta L + (1 - factor_beta) G G^T                                  R likewise with G^T G
        W  <- W (1 - lr weight_decay) - lr D

    Every ``refresh`` steps, not all blocks in the same, Q <- qr(L Q) after sorting its columns by their eigenvalues;
    v is sorted alike and m moved to the new basis. With ``statistics="kl"`` L averages G R^-1 G^T / n, R^-1 from
    its eigenvalues, and R likewise (KL-SOAP, arXiv 2509.03378).

    Args:
        lr: Learning rate, parameter units per step; a number, or a 0-d float32 tensor on the parameter's device.
        betas: Decay of the two moments per step, each in [0, 1); numbers or 0-d tensors.
        factor_beta: Decay of the statistics, in [0, 1).
        eps: Added to the root of the second moment, in units of the gradient.
        weight_decay: Fraction of the parameter removed per step and per unit of ``lr``; a number or a 0-d tensor.
        block_size: Rows and columns of a block at most.
        refresh: Steps between two changes of basis.
        statistics: "gram", or "kl".
        first_step: "step", or "skip" to only initialise, as nikhilvyas/SOAP does; it then counts one step less.
        damping: Of "kl": eigenvalues count as at least this fraction of the largest.
        wire_dtype: Gradient and direction of every block are rounded to it. bfloat16 or float32.

    Raises:
        ValueError: If a field is out of range; all of them are named.
    """

    # Defaults of nikhilvyas/SOAP soap.py, with blocks of DASH's size (arXiv 2602.02016).
    lr: float | Tensor = 3e-3
    betas: Sequence[float | Tensor] = (0.95, 0.95)
    factor_beta: float = 0.95
    eps: float = 1e-8
    weight_decay: float | Tensor = 1e-2
    block_size: int = 1024
    refresh: int = 10
    statistics: str = "gram"
    first_step: str = "step"
    damping: float = 1e-6  # below it lies the noise of float32 statistics
    wire_dtype: torch.dtype = torch.float32

    finest: ClassVar[int] = 1
    state_in_place: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "left", "right")

    def __post_init__(self) -> None:
        check(
            self,
            lr=(is_rate(self.lr), "a number >= 0 or a 0-d tensor"),
            betas=(are_betas(self.betas), "two numbers in [0, 1) or 0-d tensors"),
            factor_beta=(within(self.factor_beta, 0, 1), "a number in [0, 1)"),
            eps=(within(self.eps, 0, math.inf), "a number >= 0"),
            weight_decay=(is_rate(self.weight_decay), "a number >= 0 or a 0-d tensor"),
            block_size=(is_count(self.block_size, 1), "an integer >= 1"),
            refresh=(is_count(self.refresh, 1), "an integer >= 1"),
            statistics=(self.statistics in ("gram", "kl"), "gram or kl"),
            first_step=(self.first_step in ("step", "skip"), "step or skip"),
            damping=(within(self.damping, math.ulp(0.0), 1), "a number in (0, 1)"),
            wire_dtype=(self.wire_dtype in (torch.bfloat16, torch.float32), "torch.bfloat16 or torch.float32"),
        )

    def block_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns ``(block_size, block_size)``, with a 1 before it for a stack of matrices.

        Raises:
            ValueError: If the parameter is neither a matrix nor a stack of matrices.
        """
        return kronecker_block(self, shape, self.block_size)

    def cost(self, block: tuple[int, ...]) -> float:
        """Returns the FLOPs of a block: three pairs of products each step, a share of the refresh."""
        m, n = block[-2:]
        return 6 * m * n * (m + n) + 10 * (m**3 + n**3) / self.refresh

    def element_state(self) -> dict[str, torch.dtype]:
        """Returns nothing: the moments live in the eigenbasis, where the block is computed."""
        return {}

    def block_state(self, block: tuple[int, ...]) -> dict[str, Tensor]:
        """Returns the first values of what a block of this shape keeps."""
        m, n = block[-2:]
        return {
            "exp_avg": torch.zeros(m, n),
            "exp_avg_sq": torch.zeros(m, n),
            "left": torch.zeros(m, m),
            "right": torch.zeros(n, n),
            "left_basis": torch.eye(m),
            "right_basis": torch.eye(n),
            "failures": torch.zeros(()),
        }

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
            refresh: Whether to renew the bases: "first" by eigenvectors, before the step; "again" by QR, after it; or
                None.
        """
        grad, new = payloads[0].reshape(-1, *payloads[0].shape[-2:]).float(), {}
        if refresh == "first":
            self._follow(grad, state)
            new = _eigenbases(state)
            if self.first_step == "skip":
                return torch.zeros_like(payloads[0]), new
        left, right = (new.get(name, state[name]) for name in ("left_basis", "right_basis"))
        half = torch.bmm(left.mT, grad)
        rotated = torch.bmm(half, right)
        # Of infinitely many steps Adam corrects nothing: eps is not to be scaled along with the root.
        uncorrected = torch.full_like(state["step"], torch.inf)
        moments = state["exp_avg"], state["exp_avg_sq"]
        step = adam_(*moments, rotated, uncorrected, betas=self.betas, eps=self.eps, out=half)
        size = self._size(state["step"] + (1 if self.first_step == "step" else 0))
        direction = torch.bmm(torch.bmm(left, step, out=rotated), right.mT, out=step).mul_(size)
        if refresh != "first":
            self._follow(grad, state)
        if refresh == "again":
            new = _turned(state)
        return direction.to(self.wire_dtype).view(payloads[0].shape), new

    def _size(self, steps: Tensor) -> Tensor:
        """What a direction is multiplied by, () float32."""
        beta1, beta2 = self.betas
        return correction(beta2, steps).sqrt() / correction(beta1, steps)

    def _follow(self, grad: Tensor, state: Mapping[str, Tensor]) -> None:
        """Takes this gradient into the statistics."""
        rows, columns = grad, grad.mT
        if self.statistics == "kl":
            rows = self._whitened(grad, state["right"], state["right_basis"])
            columns = self._whitened(grad.mT, state["left"], state["left_basis"])
        follow_(state["left"], rows, self.factor_beta)
        follow_(state["right"], columns, self.factor_beta)

    def _whitened(self, grad: Tensor, factor: Tensor, basis: Tensor) -> Tensor:
        """``G Q diag(lambda)^(-1/2) / sqrt(n)``, whose Gram matrix is ``G F^-1 G^T / n`` (arXiv 2509.03378)."""
        values = _eigenvalues(basis, factor @ basis)
        top = values.amax(-1, keepdim=True)
        values = torch.where(top > 0, torch.maximum(values, self.damping * top), 1.0)
        return grad @ basis * (values * values.shape[-1]).rsqrt()[:, None, :]

    def apply(self, param: Tensor, direction: Tensor, state: Mapping[str, Tensor], *, skip: Tensor | None) -> None:
        """Decays ``param`` and steps it along ``direction``, in place; see ``descend``."""
        descend(param, direction, lr=self.lr, weight_decay=self.weight_decay, skip=skip)


def _eigenvalues(basis: Tensor, product: Tensor) -> Tensor:
    """``diag(Q^T A Q)``, (B, d), from Q and A Q."""
    return (basis * product).sum(-2)


def _eigenbases(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Eigenvectors of the statistics, largest eigenvalue first; the old basis, counted, where there are none."""
    new, failures = {}, state["failures"]
    for factor, basis in (("left", "left_basis"), ("right", "right_basis")):
        vectors, good = eigenvectors(state[factor])
        new[basis] = torch.where(good[:, None, None], vectors, state[basis])
        failures = failures + (~good).to(failures.dtype)
    return {**new, "failures": failures}


def eigenvectors(a: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the eigenvectors of each symmetric matrix as columns, largest eigenvalue first, and which are to be used.

    Args:
        a: (B, d, d) float32.

    Returns:
        (B, d, d) float32 and (B,) bool.
    """
    # eigh of NaN need not raise: it may return numbers (torch 2.13 on the CPU), so the input is what is looked at.
    finite = is_finite(a)
    safe = torch.where(finite[:, None, None], a, 0.0)
    top = torch.where((scale := largest_eigenvalue(safe)) > 0, scale, 1.0)[:, None, None]
    safe = safe / top  # LAPACK fails on denormal numbers more often than on others
    try:
        vectors = torch.linalg.eigh(safe)[1]
    except RuntimeError:  # torch.linalg.LinAlgError: no convergence
        try:
            vectors = torch.linalg.eigh(safe.double())[1].to(a.dtype)
        except RuntimeError:
            return torch.zeros_like(a), torch.zeros_like(finite)
    return vectors.flip(-1), finite & is_finite(vectors)


def _turned(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One power step of both bases; the moments move along (nikhilvyas/SOAP, get_orthogonal_matrix_QR)."""
    square, failures = state["exp_avg_sq"], state["failures"]
    new: dict[str, Tensor] = {}
    for factor, name, dim in (("left", "left_basis", -2), ("right", "right_basis", -1)):
        basis = state[name]
        rows = basis.mT @ state[factor]  # factor @ basis, transposed: sorting rows is cheap, LAPACK takes columns
        order = (basis.mT * rows).sum(-1).argsort(dim=-1, descending=True, stable=True)
        finite = is_finite(rows)
        sorted_ = _in_order(torch.where(finite[:, None, None], rows, basis.mT), order, -2)
        turned = torch.linalg.householder_product(*torch.geqrf(sorted_.mT))  # torch.linalg.qr without R
        good = finite & is_finite(turned)
        new[name] = torch.where(good[:, None, None], turned, basis)
        square = torch.where(good[:, None, None], _in_order(square, order, dim), square)
        failures = failures + (~good).to(failures.dtype)
    left, right = (torch.bmm(new[name].mT, state[name]) for name in ("left_basis", "right_basis"))
    torch.bmm(torch.bmm(left, state["exp_avg"]), right.mT, out=state["exp_avg"])
    state["exp_avg_sq"].copy_(square)
    return {**new, "failures": failures}


def _in_order(blocks: Tensor, order: Tensor, dim: int) -> Tensor:
    """Rows (dim -2) or columns (dim -1) of each block in its order, (B, d)."""
    if len(blocks) == 1:  # the same, ten times as fast on a CPU
        return blocks.index_select(dim, order[0])
    return torch.take_along_dim(blocks, order[:, :, None] if dim == -2 else order[:, None, :], dim)
