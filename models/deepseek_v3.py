"""DeepSeek-V3: arXiv 2412.19437. Latent attention, dense layers first, a shared expert, balancing without a loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from torch import nn

from models.activations import Batch, Part, gated, latent_attention
from models.attention import LatentAttention
from models.decoder import CausalLMConfig
from models.fields import is_count
from models.layers import SwiGLU
from models.moe import Experts, MoE, Router, grouped_sigmoid, relative_error, sign_of_error
from models.rope import score_factor
from models.sparse import SparseConfig


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(SparseConfig):
    """A DeepSeek-V3 without its multi-token prediction layer, with transformers' defaults.

    Args:
        intermediate_size: Elements between the projections of a dense layer.
        moe_intermediate_size: The same of an expert.
        n_routed_experts: Experts of a layer to choose from.
        n_shared_experts: Width of the expert that every token goes through, in routed ones.
        first_k_dense_replace: Layers at the beginning that are dense.
        n_group: Groups of experts.
        topk_group: Groups that a token's experts come from.
        norm_topk_prob: Whether the weights of a token's experts are made to sum to 1 before they are scaled.
        routed_scaling_factor: Of those weights.
        router_bias_rate: Step of each expert's correction per optimizer step, in units of a score (arXiv 2412.19437,
            section 4.2: 0.001); 0 leaves it as it is.
        router_bias_step: What that multiplies: "sign", 1 for an expert with fewer tokens than the mean and -1 for one
            with more, as DeepSeek-V3, or "error", how far from the mean they are, over the mean.
        q_lora_rank: Elements of the query's latent; None: queries are projected directly.
        kv_lora_rank: Elements of the latent of keys and values.
        qk_nope_head_dim: Elements of a head of queries and keys that do not rotate.
        qk_rope_head_dim: Those that do.
        v_head_dim: Elements of a head of values.
        rope_interleave: The weights have the rotating elements as (2i, 2i + 1), as the published ones do.

    The other arguments, and what is raised, are ``SparseConfig``'s.
    """

    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 61
    num_attention_heads: int = 128
    max_position_embeddings: int = 4096
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    first_k_dense_replace: int = 3
    n_group: int = 8
    topk_group: int = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    router_bias_rate: float = 0.001
    router_bias_step: Literal["sign", "error"] = "sign"
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_interleave: bool = True

    counts: ClassVar[tuple[str, ...]] = (
        *CausalLMConfig.counts, *SparseConfig.counts, "intermediate_size", "moe_intermediate_size", "n_routed_experts",
        "n_shared_experts", "n_group", "topk_group", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
        "v_head_dim",
    )  # fmt: skip
    numbers: ClassVar[tuple[str, ...]] = (*CausalLMConfig.numbers, "routed_scaling_factor")
    nonnegative: ClassVar[tuple[str, ...]] = (*SparseConfig.nonnegative, "router_bias_rate")
    switches: ClassVar[tuple[str, ...]] = (*SparseConfig.switches, "norm_topk_prob", "rope_interleave")

    def mismatches(self) -> Iterator[str]:
        """Yields a router that cannot choose, and sizes that do not fit."""
        yield from self.router_mismatches(self.n_routed_experts)
        if self.n_routed_experts % self.n_group:
            yield f"n_group: expected a divisor of n_routed_experts = {self.n_routed_experts}, got {self.n_group}"
        elif self.topk_group * (self.n_routed_experts // self.n_group) < self.num_experts_per_tok:
            yield f"topk_group: {self.topk_group} groups have fewer than num_experts_per_tok experts"
        if self.topk_group > self.n_group:
            yield f"topk_group: expected at most n_group = {self.n_group}, got {self.topk_group}"
        dense = self.first_k_dense_replace
        if isinstance(dense, bool) or not isinstance(dense, int) or not 0 <= dense <= self.num_hidden_layers:
            yield f"first_k_dense_replace: expected 0 to {self.num_hidden_layers}, got {dense!r}"
        if self.router_bias_step not in ("sign", "error"):
            yield f"router_bias_step: expected 'sign' or 'error', got {self.router_bias_step!r}"
        if self.q_lora_rank is not None and not is_count(self.q_lora_rank):
            yield f"q_lora_rank: expected None or an integer >= 1, got {self.q_lora_rank!r}"
        if self.qk_rope_head_dim % 2:
            yield f"qk_rope_head_dim: expected an even number, got {self.qk_rope_head_dim}"

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that rotate."""
        return self.qk_rope_head_dim

    def score_dims(self) -> tuple[int, int]:
        """Returns the elements of a head's query, rotating or not, and of its value."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim, self.v_head_dim

    def num_sparse_layers(self) -> int:
        """Returns the number of layers with experts."""
        return max(self.num_hidden_layers - self.first_k_dense_replace, 1)

    def attention(self, layer: int) -> nn.Module:
        """Returns latent attention."""
        return LatentAttention(
            self.hidden_size,
            num_heads=self.num_attention_heads,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            nope_dim=self.qk_nope_head_dim,
            rope_dim=self.qk_rope_head_dim,
            v_dim=self.v_head_dim,
            eps=1e-6,  # not rms_norm_eps: transformers' and deepseek-ai's default of these two norms
            score_factor=score_factor(self.rope_scaling),
            interleaved=self.rope_interleave,
        )

    def feed_forward(self, layer: int) -> nn.Module:
        """Returns a SwiGLU in the first layers, then experts behind a sigmoid and one for every token."""
        if layer < self.first_k_dense_replace:
            return SwiGLU(self.hidden_size, self.intermediate_size)
        select = partial(
            grouped_sigmoid,
            groups=self.n_group,
            kept_groups=self.topk_group,
            renormalise=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
        )
        router = Router(
            self.hidden_size,
            self.n_routed_experts,
            select=select,
            correction_rate=self.router_bias_rate,
            correction_step=sign_of_error if self.router_bias_step == "sign" else relative_error,
            **self.router_options(),
        )
        shared = SwiGLU(self.hidden_size, self.moe_intermediate_size * self.n_shared_experts)
        return MoE(router, Experts(self.n_routed_experts, self.hidden_size, self.moe_intermediate_size), shared=shared)

    def attention_held(self, layer: int, batch: Batch) -> Part:
        """Returns the bytes of latent attention."""
        return latent_attention(
            batch,
            heads=self.num_attention_heads,
            q_lora=self.q_lora_rank,
            kv_lora=self.kv_lora_rank,
            nope=self.qk_nope_head_dim,
            rope=self.qk_rope_head_dim,
            value=self.v_head_dim,
        )

    def feed_forward_held(self, layer: int, batch: Batch) -> Part:
        """Returns the bytes of a SwiGLU in the first layers, then of experts."""
        if layer < self.first_k_dense_replace:
            return gated(batch, ffn=self.intermediate_size)
        shared = self.moe_intermediate_size * self.n_shared_experts
        return self.experts_held(
            batch, ffn=self.moe_intermediate_size, num_experts=self.n_routed_experts, shared=shared
        )
