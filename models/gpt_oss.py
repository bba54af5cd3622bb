"""GPT-OSS: arXiv 2508.10925. Sinks, a sliding window in every other layer, biases, clamped SwiGLU experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from torch import nn

from models.activations import Batch, Part
from models.fields import is_count
from models.llama import GroupedQueryConfig
from models.moe import Experts, MoE, Router, clamped_swiglu, top_k_softmax
from models.sparse import SparseConfig

# openai/gpt-oss-120b, config.json.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(SparseConfig, GroupedQueryConfig):
    """A GPT-OSS, with the defaults of 120B.

    Args:
        intermediate_size: Elements between an expert's projections.
        num_local_experts: Experts of a layer.
        sliding_window: Keys that a query sees in layers 0, 2, 4, ...; None: all.
        swiglu_alpha: Steepness of the experts' sigmoid.
        swiglu_limit: Where the experts' gate and up are clamped.

    The other arguments, and what is raised, are ``SparseConfig``'s and ``GroupedQueryConfig``'s.
    """

    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    head_dim: int = 64
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    rope_scaling: Mapping[str, Any] | None = field(default_factory=lambda: dict(_YARN))
    router_aux_loss_coef: float = 0.001
    sliding_window: int | None = 128
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    counts: ClassVar[tuple[str, ...]] = (
        *GroupedQueryConfig.counts, *SparseConfig.counts, "intermediate_size", "num_local_experts",
    )  # fmt: skip
    numbers: ClassVar[tuple[str, ...]] = (*GroupedQueryConfig.numbers, "swiglu_alpha", "swiglu_limit")

    def mismatches(self) -> Iterator[str]:
        """Yields heads that do not divide, a router that cannot choose, and a window of nothing."""
        yield from super().mismatches()
        yield from self.router_mismatches(self.num_local_experts)
        if self.sliding_window is not None and not is_count(self.sliding_window):
            yield f"sliding_window: expected None or an integer >= 1, got {self.sliding_window!r}"

    @property
    def has_sinks(self) -> bool:
        """Whether the attention has sinks: yes."""
        return True

    def window(self, layer: int) -> int | None:
        """Returns the sliding window in even layers."""
        return None if layer % 2 else self.sliding_window

    def attention(self, layer: int) -> nn.Module:
        """Returns grouped-query attention with biases and sinks."""
        return self.grouped_queries(bias=True, sinks=True)

    def feed_forward(self, layer: int) -> nn.Module:
        """Returns experts with biases behind a softmax of the chosen."""
        router = Router(
            self.hidden_size, self.num_local_experts, select=top_k_softmax, bias=True, **self.router_options()
        )
        activation = partial(clamped_swiglu, alpha=self.swiglu_alpha, limit=self.swiglu_limit)
        sizes = (self.num_local_experts, self.hidden_size, self.intermediate_size)
        return MoE(router, Experts(*sizes, activation=activation, bias=True), router_name="router")

    def attention_held(self, layer: int, batch: Batch) -> Part:
        """Returns the bytes of grouped-query attention with sinks."""
        return self.grouped_queries_held(batch, sinks=True)

    def feed_forward_held(self, layer: int, batch: Batch) -> Part:
        """Returns the bytes of experts with biases and clamps."""
        return self.experts_held(batch, ffn=self.intermediate_size, num_experts=self.num_local_experts, clamped=True)
