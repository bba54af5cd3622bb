"""Llama, dense: arXiv 2407.21783 and before; also what the grouped-query families share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from models.activations import Batch, Part, gated, grouped_queries
from models.attention import Attention
from models.decoder import CausalLMConfig
from models.fields import is_count
from models.layers import SwiGLU


@dataclass(frozen=True, kw_only=True)
class GroupedQueryConfig(CausalLMConfig):
    """A family whose query heads share key and value heads.

    Args:
        num_key_value_heads: Key and value heads; None: as many as query heads.
        head_dim: Elements of a head, even; None: ``hidden_size / num_attention_heads``.

    The other arguments, and what is raised, are ``CausalLMConfig``'s.
    """

    num_key_value_heads: int = None  # type: ignore[assignment]  # None only until __post_init__
    head_dim: int = None  # type: ignore[assignment]  # None only until __post_init__

    counts: ClassVar[tuple[str, ...]] = (*CausalLMConfig.counts, "num_key_value_heads", "head_dim")

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.head_dim is None:
            known = is_count(self.hidden_size) and is_count(self.num_attention_heads)
            # 2 stands in beside a wrong hidden_size or num_attention_heads, which is then the problem to name.
            head_dim = self.hidden_size // self.num_attention_heads if known else 2
            object.__setattr__(self, "head_dim", head_dim)
        super().__post_init__()

    def mismatches(self) -> Iterator[str]:
        """Yields heads that do not divide."""
        heads = self.num_attention_heads
        if heads % self.num_key_value_heads:
            got = self.num_key_value_heads
            yield f"num_key_value_heads: expected a divisor of num_attention_heads = {heads}, got {got}"
        if self.head_dim % 2:
            yield f"head_dim: expected an even number, whose halves are rotated against each other, got {self.head_dim}"

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that rotate: all."""
        return self.head_dim

    def attention(self, layer: int) -> nn.Module:
        """Returns plain grouped-query attention."""
        return self.grouped_queries()

    def grouped_queries(
        self, *, bias: bool = False, qk_norm_eps: float | None = None, sinks: bool = False
    ) -> Attention:
        """Returns grouped-query attention of this config's sizes, with ``Attention``'s options."""
        return Attention(
            self.hidden_size,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            bias=bias,
            qk_norm_eps=qk_norm_eps,
            sinks=sinks,
        )

    def attention_held(self, layer: int, batch: Batch) -> Part:
        """Returns the bytes of plain grouped-query attention."""
        return self.grouped_queries_held(batch)

    def grouped_queries_held(self, batch: Batch, *, qk_norm: bool = False, sinks: bool = False) -> Part:
        """Returns the bytes of grouped-query attention of this config's sizes, as ``models.activations`` has it."""
        return grouped_queries(
            batch,
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            qk_norm=qk_norm,
            sinks=sinks,
        )


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(GroupedQueryConfig):
    """A Llama, with the defaults of Llama-2-7B.

    Args:
        intermediate_size: Elements between the projections of the feed-forward layer.

    The other arguments, and what is raised, are ``GroupedQueryConfig``'s; ``hidden_size`` is a multiple of
    ``num_attention_heads``.
    """

    intermediate_size: int = 11008

    counts: ClassVar[tuple[str, ...]] = (*GroupedQueryConfig.counts, "intermediate_size")

    def mismatches(self) -> Iterator[str]:
        """Yields heads that do not divide, as transformers refuses them too."""
        if self.hidden_size % self.num_attention_heads:
            heads = self.num_attention_heads
            yield f"hidden_size: expected a multiple of num_attention_heads = {heads}, got {self.hidden_size}"
        yield from super().mismatches()

    def feed_forward(self, layer: int) -> nn.Module:
        """Returns a SwiGLU."""
        return SwiGLU(self.hidden_size, self.intermediate_size)

    def feed_forward_held(self, layer: int, batch: Batch) -> Part:
        """Returns the bytes of a SwiGLU."""
        return gated(batch, ffn=self.intermediate_size)
