"""What the families with experts have in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from models.activations import Batch, Part, experts
from models.decoder import CausalLMConfig


@dataclass(frozen=True, kw_only=True)
class SparseConfig(CausalLMConfig):
    """A family whose tokens choose experts.

    Args:
        num_experts_per_tok: Experts that a token goes through.
        router_aux_loss_coef: Weight of the balancing loss, the mean over the layers of ``E sum_e f_e P_e`` (arXiv
            2101.03961, equations 4-6) of each sequence, beside a token's loss; 0: none.
        force_balance: Deal the tokens out evenly instead of routing them, for measuring speed.

    The other arguments, and what is raised, are ``CausalLMConfig``'s.
    """

    num_experts_per_tok: int = 2
    router_aux_loss_coef: float = 0.0
    force_balance: bool = False

    counts: ClassVar[tuple[str, ...]] = ("num_experts_per_tok",)
    nonnegative: ClassVar[tuple[str, ...]] = ("router_aux_loss_coef",)
    switches: ClassVar[tuple[str, ...]] = (*CausalLMConfig.switches, "force_balance")

    def router_options(self) -> dict[str, Any]:
        """Returns what every router of the model is built with."""
        aux = self.router_aux_loss_coef / self.num_sparse_layers()
        return {"k": self.num_experts_per_tok, "aux_coef": aux, "force_balance": self.force_balance}

    def experts_held(self, batch: Batch, *, ffn: int, num_experts: int, shared: int = 0, clamped: bool = False) -> Part:
        """Returns the bytes of this family's experts, as ``models.activations.experts`` has it."""
        return experts(
            batch,
            hidden=self.hidden_size,
            ffn=ffn,
            k=self.num_experts_per_tok,
            num_experts=num_experts,
            shared=shared,
            clamped=clamped,
            balanced=self.router_aux_loss_coef > 0,
        )

    def num_sparse_layers(self) -> int:
        """Returns the number of layers with experts."""
        return self.num_hidden_layers

    def router_mismatches(self, num_experts: int) -> Iterator[str]:
        """Yields a number of experts per token that there are not."""
        if self.num_experts_per_tok > num_experts:
            yield f"num_experts_per_tok: expected at most {num_experts} experts, got {self.num_experts_per_tok}"
