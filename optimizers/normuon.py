"""NorMuon: Muon whose rows have equal size in the long run (arXiv 2510.05491)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from optimizers.fields import check, exact, is_beta, weight, within
from optimizers.muon import Muon


@dataclass(frozen=True, kw_only=True)
class NorMuon(Muon):
    """Muon with a second moment for each row of its orthogonal factor, which keeps its Frobenius norm.

    ::

        O  = newton_schulz(U)                      as Muon
        v <- beta2 v + (1 - beta2) mean_j O_ij^2   one number of a row i
        P  = O / (sqrt(v) + row_eps)
        D  = adjust_lr(m, n) P |O| / |P|           |.| over the whole matrix, also where ranks cut it

    Args:
        beta2: Decay of the second moment per step, in [0, 1); a number or a 0-d tensor.
        row_eps: Added to its root, in units of an orthogonal matrix's elements.

    Raises:
        ValueError: If a field is out of range, or ``split`` is given.
    """

    # microsoft/dion normuon.py
    beta2: float | Tensor = 0.95
    row_eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self,
            beta2=(is_beta(self.beta2), "a number in [0, 1) or a 0-d tensor"),
            row_eps=(within(self.row_eps, 0, 1), "a number in [0, 1)"),
            split=(self.split is None, "None: one second moment a row is kept for one matrix"),
        )

    def block_state(self, block: tuple[int, ...]) -> dict[str, Tensor]:
        """Returns the second moments of a block's rows, zeros."""
        return {"row_square": torch.zeros(block[-2])}

    def block(  # type: ignore[override]
        self, payloads: tuple[Tensor, ...], state: Mapping[str, Tensor], *, refresh: str | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the directions, like the payload, and the new second moments.

        Args:
            payloads: One tensor, (B, m, n) or (B, 1, m, n) in ``wire_dtype``; never written.
            state: ``row_square``, (B, m) float32; never written.
            refresh: Not read: nothing is computed now and then.
        """
        (payload,) = payloads
        factor = self._orthogonal(payload.reshape(-1, *payload.shape[-2:])).float()
        square = state["row_square"].lerp(factor.square().mean(-1), weight(1 - exact(self.beta2), factor))
        even = factor / (square.sqrt() + self.row_eps)[..., None]
        sizes = [torch.linalg.matrix_norm(x, keepdim=True) for x in (factor, even)]
        direction = even * torch.where(sizes[1] > 0, sizes[0] / sizes[1], 0.0)  # a zero gradient has no size to keep
        return direction.to(self.wire_dtype).view(payload.shape), {"row_square": square}
