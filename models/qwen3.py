"""Qwen3, dense and with experts: arXiv 2505.09388. Queries and keys are normalised per head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import nn

from models.activations import Batch, Part, gated
from models.layers import SwiGLU
from models.llama import GroupedQueryConfig
from models.moe import Experts, MoE, Router, softmax_top_k
from models.sparse import SparseConfig


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(GroupedQueryConfig):
    """A dense Qwen3, with transformers' defaults.

    Args:
        intermediate_size: Elements between the projections of the feed-forward layer.

    The other arguments, and what is raised, are ``GroupedQueryConfig``'s.
    """

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int = 32
    max_position_embeddings: int = 32768
    head_dim: int = 128

    counts: ClassVar[tuple[str, ...]] = (*GroupedQueryConfig.counts, "intermediate_size")

    def attention(self, layer: int) -> nn.Module:
        """Returns grouped-query attention with normalised queries and keys."""
        return self.grouped_queries(qk_norm_eps=self.rms_norm_eps)

    def feed_forward(self, layer: int) -> nn.Module:
        """Returns a SwiGLU."""
        return SwiGLU(self.hidden_size, self.intermediate_size)

    def attention_held(self, layer: int, batch: Batch) -> Part:
        """Returns the bytes of grouped-query attention with normalised queries and keys."""
        return self.grouped_queries_held(batch, qk_norm=True)

    def feed_forward_held(self, layer: int, batch: Batch) -> Part:
        """Returns the bytes of a SwiGLU."""
        return gated(batch, ffn=self.intermediate_size)


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(SparseConfig, GroupedQueryConfig):
    """A Qwen3 with experts in every layer, with transformers' defaults.

    Args:
        num_experts: Experts of a layer.
        moe_intermediate_size: Elements between an expert's projections.
        norm_topk_prob: Whether the weights of a token's experts sum to 1.

    The other arguments, and what is raised, are ``SparseConfig``'s and ``GroupedQueryConfig``'s.
    """

    vocab_size: int = 151936
    hidden_size: int = 2048
    num_hidden_layers: int = 24
    num_key_value_heads: int = 4
    max_position_embeddings: int = 32768
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    router_aux_loss_coef: float = 0.001

    counts: ClassVar[tuple[str, ...]] = (
        *GroupedQueryConfig.counts, *SparseConfig.counts, "moe_intermediate_size", "num_experts",
    )  # fmt: skip
    switches: ClassVar[tuple[str, ...]] = (*SparseConfig.switches, "norm_topk_prob")

    def mismatches(self) -> Iterator[str]:
        """Yields heads that do not divide and a router that cannot choose."""
        yield from super().mismatches()
        yield from self.router_mismatches(self.num_experts)

    def attention(self, layer: int) -> nn.Module:
        """Returns grouped-query attention with normalised queries and keys."""
        return self.grouped_queries(qk_norm_eps=self.rms_norm_eps)

    def feed_forward(self, layer: int) -> nn.Module:
        """Returns experts behind a softmax."""
        select = partial(softmax_top_k, renormalise=self.norm_topk_prob)
        router = Router(self.hidden_size, self.num_experts, select=select, **self.router_options())
        return MoE(router, Experts(self.num_experts, self.hidden_size, self.moe_intermediate_size))

    def attention_held(self, layer: int, batch: Batch) -> Part:
        """Returns the bytes of grouped-query attention with normalised queries and keys."""
        return self.grouped_queries_held(batch, qk_norm=True)

    def feed_forward_held(self, layer: int, batch: Batch) -> Part:
        """Returns the bytes of experts."""
        return self.experts_held(batch, ffn=self.moe_intermediate_size, num_experts=self.num_experts)
