"""Mixtral: arXiv 2401.04088. Two of eight experts in every layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import nn

from models.activations import Batch, Part
from models.llama import GroupedQueryConfig
from models.moe import Experts, MoE, Router, softmax_top_k
from models.sparse import SparseConfig


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(SparseConfig, GroupedQueryConfig):
    """A Mixtral, with the defaults of 8x7B.

    Args:
        intermediate_size: Elements between an expert's projections.
        num_local_experts: Experts of a layer.

    The other arguments, and what is raised, are ``SparseConfig``'s and ``GroupedQueryConfig``'s.
    """

    num_key_value_heads: int = 8
    intermediate_size: int = 14336
    num_local_experts: int = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    router_aux_loss_coef: float = 0.001

    counts: ClassVar[tuple[str, ...]] = (
        *GroupedQueryConfig.counts, *SparseConfig.counts, "intermediate_size", "num_local_experts",
    )  # fmt: skip

    def mismatches(self) -> Iterator[str]:
        """Yields heads that do not divide and a router that cannot choose."""
        yield from super().mismatches()
        yield from self.router_mismatches(self.num_local_experts)

    def feed_forward(self, layer: int) -> nn.Module:
        """Returns experts behind a softmax of the chosen."""
        select = partial(softmax_top_k, renormalise=True)
        router = Router(self.hidden_size, self.num_local_experts, select=select, **self.router_options())
        return MoE(router, Experts(self.num_local_experts, self.hidden_size, self.intermediate_size))

    def feed_forward_held(self, layer: int, batch: Batch) -> Part:
        """Returns the bytes of experts."""
        return self.experts_held(batch, ffn=self.intermediate_size, num_experts=self.num_local_experts)
