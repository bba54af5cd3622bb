"""Causal attention: grouped queries (Llama, Qwen3, Mixtral, GPT-OSS) and multi-head latent attention (DeepSeek-V3).

Which keys a query sees is one ``mask`` per forward, shared by all layers with the same window; None where it is plainly
causal. Kernels, chosen by what is asked: PyTorch's fused attention for plain causal; FlexAttention on CUDA for packed
documents, windows and sinks; elsewhere a written-out mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from models.layers import RMSNorm
from models.linear import Linear
from models.rope import rotate

Mask = torch.Tensor | BlockMask | None


class Attention(nn.Module):
    """Self-attention; ``num_heads / num_kv_heads`` query heads share a key and a value head (arXiv 2305.13245).

    Args:
        hidden_size: Elements of the residual stream.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Elements of a head.
        bias: Whether the projections have biases.
        qk_norm_eps: Normalise each head's query and key before rotating (arXiv 2505.09388, section 2); None: not.
        sinks: A learned score per head that takes part in the softmax and gathers nothing (arXiv 2508.10925, 2.1.2).
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool = False,
        qk_norm_eps: float | None = None,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.k_proj = Linear(hidden_size, num_kv_heads * head_dim, bias=bias)
        self.v_proj = Linear(hidden_size, num_kv_heads * head_dim, bias=bias)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, bias=bias)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps)
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if sinks else None
        self.num_heads, self.group = num_heads, num_heads // num_kv_heads
        self.register_buffer("max_logit", None, persistent=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: Mask = None) -> torch.Tensor:
        """Returns what each token gathers from those up to itself.

        Args:
            x: (b, s, hidden) floating point.
            cos: (s, 1, head_dim) same dtype, from ``rotary_table``.
            sin: (s, 1, head_dim) same dtype, likewise.
            mask: From ``causal_mask``.

        Returns:
            (b, s, hidden), dtype of ``x``.
        """
        heads = (-1, self.head_dim)
        query, key = self.q_proj(x).unflatten(-1, heads), self.k_proj(x).unflatten(-1, heads)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        value = self.v_proj(x).unflatten(-1, heads)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        keep_largest_(self.max_logit, query, key, mask=mask)
        out = attend(query, key, value, mask=mask, sinks=self.sinks)
        projected: torch.Tensor = self.o_proj(out.flatten(2))
        return projected

    def watch_logits(self) -> None:
        """Begins to keep the largest logit of each head in ``max_logit``; see ``keep_largest_``."""
        self.max_logit = torch.full((self.num_heads,), -torch.inf, device=self.q_proj.weight.device)

    def logit_weights(self) -> list[tuple[nn.Module, int, tuple[tuple[int, float], ...]]]:
        """Returns the projections whose scale is that of the logits.

        For each, how many neighbouring heads share its rows, and how many rows of one of them take which power of a
        factor on the logits: half on both sides of the product.

        Raises:
            ValueError: If queries and keys are normalised, which takes away whatever scale their weights have.
        """
        if self.q_norm is not None:
            raise ValueError("a clip of logits needs attention without q_norm and k_norm, which undo any scale of W_q")
        return [(self.q_proj, 1, ((self.head_dim, 0.5),)), (self.k_proj, self.group, ((self.head_dim, 0.5),))]


class LatentAttention(nn.Module):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1): keys and values are expanded from one small vector.

    ::

        x --q_a--> (q_lora)  --norm, q_b-->  heads x (nope + rope)                    query
        x --kv_a-> (kv_lora) --norm, kv_b--> heads x (nope + v)                       key without position, value
                   (rope)    --------------> the same for every head                  key's position

    Args:
        hidden_size: Elements of the residual stream.
        num_heads: Heads.
        q_lora_rank: Elements of the query's latent; None: queries are projected directly.
        kv_lora_rank: Elements of the latent of key and value.
        nope_dim: Elements of a head of query and key that do not rotate.
        rope_dim: Those that do.
        v_dim: Elements of a head of the value.
        eps: Of the norms of the latents.
        score_factor: Of the scores, beside ``1 / sqrt(nope_dim + rope_dim)``.
        interleaved: The rotating elements lie as (2i, 2i + 1) in the weights and are sorted into halves here.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        nope_dim: int,
        rope_dim: int,
        v_dim: int,
        eps: float,
        score_factor: float,
        interleaved: bool,
    ) -> None:
        super().__init__()
        self.num_heads, self.nope_dim, self.rope_dim, self.v_dim = num_heads, nope_dim, rope_dim, v_dim
        self.kv_lora_rank, self.interleaved = kv_lora_rank, interleaved
        self.scale = (nope_dim + rope_dim) ** -0.5 * score_factor
        if q_lora_rank is None:
            self.q_proj = Linear(hidden_size, num_heads * (nope_dim + rope_dim))
        else:
            self.q_a_proj = Linear(hidden_size, q_lora_rank)
            self.q_a_layernorm = RMSNorm(q_lora_rank, eps=eps)
            self.q_b_proj = Linear(q_lora_rank, num_heads * (nope_dim + rope_dim))
        self.kv_a_proj_with_mqa = Linear(hidden_size, kv_lora_rank + rope_dim)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, eps=eps)
        self.kv_b_proj = Linear(kv_lora_rank, num_heads * (nope_dim + v_dim))
        self.o_proj = Linear(num_heads * v_dim, hidden_size)
        self.full_rank_query = q_lora_rank is None
        self.register_buffer("max_logit", None, persistent=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: Mask = None) -> torch.Tensor:
        """Returns what each token gathers from those up to itself; as ``Attention.forward``, tables of ``rope_dim``."""
        split = (self.nope_dim, self.rope_dim)
        query = self.q_proj(x) if self.full_rank_query else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        query_nope, query_rope = query.unflatten(-1, (self.num_heads, -1)).split(split, dim=-1)
        latent, key_rope = self.kv_a_proj_with_mqa(x).split((self.kv_lora_rank, self.rope_dim), dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.num_heads, -1))
        key_nope, value = expanded.split((self.nope_dim, self.v_dim), dim=-1)
        query_rope = rotate(self._halves(query_rope), cos, sin)
        key_rope = rotate(self._halves(key_rope[:, :, None]), cos, sin).expand(-1, -1, self.num_heads, -1)
        query, key = torch.cat((query_nope, query_rope), dim=-1), torch.cat((key_nope, key_rope), dim=-1)
        keep_largest_(self.max_logit, query, key, mask=mask, scale=self.scale)
        out = attend(query, key, value, mask=mask, sinks=None, scale=self.scale)
        projected: torch.Tensor = self.o_proj(out.flatten(2))
        return projected

    def watch_logits(self) -> None:
        """Begins to keep the largest logit of each head in ``max_logit``; see ``keep_largest_``."""
        self.max_logit = torch.full((self.num_heads,), -torch.inf, device=self.kv_b_proj.weight.device)

    def logit_weights(self) -> list[tuple[nn.Module, int, tuple[tuple[int, float], ...]]]:
        """Returns the projections whose scale is that of the logits, as ``Attention.logit_weights``.

        The rotating part of the key is one for all heads and left as it is; that of the query takes the whole factor.
        """
        query = self.q_proj if self.full_rank_query else self.q_b_proj
        return [
            (query, 1, ((self.nope_dim, 0.5), (self.rope_dim, 1.0))),
            (self.kv_b_proj, 1, ((self.nope_dim, 0.5), (self.v_dim, 0.0))),
        ]

    def _halves(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self.interleaved else x


def causal_mask(
    num_tokens: int, *, documents: torch.Tensor | None, window: int | None, sinks: bool, device: torch.device
) -> Mask:
    """Returns which keys each query sees; None when that is every key up to itself and a kernel knows it by a flag.

    Args:
        num_tokens: Of each row.
        documents: (num_tokens,) integers, the document of each token: others are not seen. None: one document.
        window: Keys that a query sees, itself included; None: all.
        sinks: Whether the attention has sinks, which the fused kernel does not know.
        device: Of the tokens.

    Returns:
        None, a ``BlockMask`` on CUDA, or elsewhere (num_tokens, num_tokens) bool, True where query (row) sees key.
    """
    if window is not None and window >= num_tokens:
        window = None
    if documents is None and window is None and not sinks:
        return None

    def sees(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = query >= key
        if window is not None:
            seen = seen & (query - key < window)
        if documents is not None:
            seen = seen & (documents[query] == documents[key])
        return seen

    if device.type == "cuda":
        return create_block_mask(sees, None, None, num_tokens, num_tokens, device=device)
    index = torch.arange(num_tokens, device=device)
    return sees(None, None, index[:, None], index[None, :])


# Queries whose logits exist at once while the largest is looked for: b heads * 128 * s numbers.
LOOKED_AT = 128


@torch.no_grad()
def keep_largest_(
    largest: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, *, mask: Mask, scale: float | None = None
) -> None:
    """Raises each head's entry of ``largest`` to its largest logit of a seen key.

    Nothing happens where it is None, in evaluation (gradients are off), or for a logit that is NaN. Fused kernels do
    not give the logits away, so their product is computed once more, the causal half of it, in pieces of 128 queries:
    a third of attention's forward, a tenth of its forward and backward, and no s x s matrix. Recomputed activations are
    looked at twice, which changes nothing.

    Args:
        largest: (heads,) float32, or None.
        query: (b, s, heads, head_dim) floating point, rotated.
        key: (b, s, kv_heads, head_dim) same dtype.
        mask: From ``causal_mask``.
        scale: Of the scores; None: ``1 / sqrt(head_dim)``.
    """
    if largest is None or not query.requires_grad:
        return
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    num_tokens, heads, kv_heads = *query.shape[1:3], key.shape[2]
    index = torch.arange(num_tokens, device=query.device)
    for first in range(0, num_tokens, LOOKED_AT):
        stop = min(first + LOOKED_AT, num_tokens)
        # Heads that share a key are rows of one product.
        rows = query[:, first:stop].transpose(1, 2).reshape(len(query), kv_heads, -1, query.shape[-1])
        scores = (rows @ key[:, :stop].permute(0, 2, 3, 1)).view(len(query), heads, stop - first, stop)
        unseen = ~_sees(mask, index[first:stop], index[:stop], first)
        top = scores.masked_fill(unseen, -torch.inf).amax((0, 2, 3)).float() * factor
        torch.fmax(largest, top, out=largest)


def _sees(mask: Mask, queries: torch.Tensor, keys: torch.Tensor, first: int) -> torch.Tensor:
    """Which of ``keys`` each of ``queries``, from the ``first`` on, sees; (queries, keys) bool, of any ``Mask``."""
    if isinstance(mask, BlockMask):
        seen: torch.Tensor = mask.mask_mod(queries[:1], queries[:1], queries[:, None], keys[None, :])
        return seen
    if mask is not None:
        return mask[first : first + len(queries), : len(keys)]
    return queries[:, None] >= keys[None, :]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: Mask,
    sinks: torch.Tensor | None,
    scale: float | None = None,
) -> torch.Tensor:
    """Returns each query's mean of the values it sees, weighted by the softmax of its scores; (b, s, heads, v_dim).

    Args:
        query: (b, s, heads, head_dim) floating point.
        key: (b, s, kv_heads, head_dim) same dtype; ``heads`` is a multiple of ``kv_heads``.
        value: (b, s, kv_heads, v_dim) same dtype.
        mask: From ``causal_mask``.
        sinks: (heads,) floating point, or None.
        scale: Of the scores; None: ``1 / sqrt(head_dim)``.
    """
    # Rotated as (b, s, heads, head_dim), where the projections left them contiguous; the kernels take the transposed
    # strides.
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    # Some kernels refuse enable_gqa even where it changes nothing.
    options: dict[str, Any] = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    if isinstance(mask, BlockMask):
        out = _flex(query, key, value, mask, sinks, options, kernel=_compiled_flex())
    elif sinks is not None:
        assert mask is not None
        out = _with_sinks(query, key, value, mask, sinks, scale)
    elif mask is not None:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
    else:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    return out.transpose(1, 2)


def _flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: BlockMask,
    sinks: torch.Tensor | None,
    options: dict[str, Any],
    *,
    kernel: Callable[..., Any],
) -> torch.Tensor:
    """FlexAttention; a sink adds ``exp(sink)`` to the softmax's sum, so the rest shrinks by ``sigmoid(lse - sink)``."""
    if sinks is None:
        out: torch.Tensor = kernel(query, key, value, block_mask=mask, **options)
        return out
    out, aux = kernel(query, key, value, block_mask=mask, return_aux=AuxRequest(lse=True), **options)
    kept = torch.sigmoid(aux.lse - sinks.float()[:, None])
    return out * kept[..., None].to(out.dtype)


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def _with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """The softmax written out, in fp32, with the sink as one more column that gathers nothing."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = (query @ key.mT).float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~mask, -torch.inf)
    sink = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
    return weights.to(value.dtype) @ value
