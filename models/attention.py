"""Causal grouped-query attention with rotary positions in Hugging Face's half-split layout.

A head's vector is rotated in planes (i, i + head_dim / 2), not (2i, 2i + 1) as in Meta's own files, so Hugging Face's
weights are used as they lie, without a permutation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from models.linear import Linear

_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class Attention(nn.Module):
    """Self-attention; ``num_heads / num_kv_heads`` query heads share a key and a value head (arXiv 2305.13245)."""

    def __init__(self, hidden_size: int, *, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.grouped = num_heads != num_kv_heads  # some kernels refuse enable_gqa even where it changes nothing
        self.q_proj = Linear(hidden_size, num_heads * head_dim)
        self.k_proj = Linear(hidden_size, num_kv_heads * head_dim)
        self.v_proj = Linear(hidden_size, num_kv_heads * head_dim)
        self.o_proj = Linear(num_heads * head_dim, hidden_size)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Returns what each token gathers from those up to itself.

        Args:
            x: (b, s, hidden) floating point.
            cos: (s, 1, head_dim) same dtype, from ``rotary_table``.
            sin: (s, 1, head_dim) same dtype, likewise.

        Returns:
            (b, s, hidden), dtype of ``x``.
        """
        heads = (-1, self.head_dim)
        query = rotate(self.q_proj(x).unflatten(-1, heads), cos, sin)
        key = rotate(self.k_proj(x).unflatten(-1, heads), cos, sin)
        value = self.v_proj(x).unflatten(-1, heads)
        # Rotated as (b, s, heads, head_dim), where the projections left them contiguous; the kernels take the
        # transposed strides.
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        projected: torch.Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns ``x`` turned by each position's angles; (b, s, heads, head_dim), dtype of ``x``.

    Rolling by half a head swaps its halves, and ``sin`` carries the sign: ``(x1 cos - x2 sin, x2 cos + x1 sin)``
    without negating or concatenating anything of the size of ``x``.

    Args:
        x: (b, s, heads, head_dim) floating point.
        cos: (s, 1, head_dim) same dtype.
        sin: (s, 1, head_dim) same dtype, first half negated.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def rotary_table(
    seq_len: int,
    head_dim: int,
    *,
    theta: float,
    scaling: Mapping[str, Any] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the cosines and signed sines of positions 0 to ``seq_len - 1``; each (seq_len, 1, head_dim) ``dtype``.

    Angles are fp32. Computed at each forward rather than kept in a buffer: it costs a dozen kernels on few numbers, and
    there is nothing that a ``.to(bfloat16)`` could round or a ``to_empty`` leave unset.

    Args:
        seq_len: Number of positions.
        head_dim: Elements of one head, even.
        theta: Base of the wavelengths, in ``2 pi theta**(2 i / head_dim)`` positions.
        scaling: Hugging Face's ``rope_scaling``, or None.
        dtype: Of the result.
        device: Of the result.
    """
    positions = torch.arange(seq_len, dtype=torch.float32, device=device)
    angles = torch.outer(positions, inverse_frequencies(head_dim, theta=theta, scaling=scaling, device=device))
    cos, sin = angles.cos(), angles.sin()
    table = torch.cat((cos, cos, -sin, sin), dim=-1).to(dtype)[:, None]
    return table[..., :head_dim], table[..., head_dim:]


def inverse_frequencies(
    head_dim: int, *, theta: float, scaling: Mapping[str, Any] | None, device: torch.device
) -> torch.Tensor:
    """Returns the angle per position of each plane of a head, in radians; (head_dim / 2,) float32.

    ``theta**(-2 i / head_dim)`` (arXiv 2104.09864, section 3.2.2). With ``rope_type`` "llama3" planes that turn fewer
    than ``low_freq_factor`` times within ``original_max_position_embeddings`` are slowed by ``factor``, those that turn
    more than ``high_freq_factor`` times are left, and those between are interpolated (meta-llama/llama-models,
    ``apply_scaling`` in models/llama3/model.py; in the order of huggingface/transformers modeling_rope_utils.py, for
    the same bits).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None or scaling["rope_type"] == "default":
        return frequencies
    factor, low, high, original = (scaling[key] for key in _LLAMA3_KEYS)
    turns = original / (2 * math.pi / frequencies)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / factor + kept * frequencies


def rope_problems(scaling: object) -> Iterator[str]:
    """Yields what is wrong with a ``rope_scaling``, one line each; nothing when ``rotary_table`` will take it."""
    if scaling is None:
        return
    if not isinstance(scaling, Mapping):
        yield f"rope_scaling: expected None or a mapping with rope_type, got {scaling!r}"
        return
    rope_type = scaling.get("rope_type")
    if rope_type not in ("default", "llama3"):
        yield f"rope_scaling.rope_type: expected 'default' or 'llama3', got {rope_type!r}"
        return
    wanted = _LLAMA3_KEYS if rope_type == "llama3" else ()
    for key in sorted(scaling.keys() - {"rope_type", *wanted}):
        yield f"rope_scaling.{key}: not a key of rope_type {rope_type!r}, which takes {', '.join(wanted) or 'none'}"
    bad = [key for key in wanted if not is_positive(scaling.get(key))]
    for key in bad:
        yield f"rope_scaling.{key}: expected a number > 0, got {scaling.get(key)!r}"
    if wanted and not bad and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        yield f"rope_scaling.low_freq_factor: expected less than high_freq_factor = {high}, got {low}"


def is_positive(value: object) -> bool:
    """Returns whether ``value`` is a finite number above zero; a bool is not a number here."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
