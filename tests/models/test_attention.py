"""Rotary tables and attention against transformers' and against a written-out product."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import LlamaConfig as HFConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from models.attention import Attention, causal_mask, keep_largest_
from models.rope import inverse_frequencies, rope_problems, rotary_table, rotate

CPU = torch.device("cpu")
LLAMA31: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def theirs(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> LlamaRotaryEmbedding:
    rope = {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
    return LlamaRotaryEmbedding(HFConfig(head_dim=head_dim, rope_parameters=rope, max_position_embeddings=131072))


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}, LLAMA31, {**LLAMA31, "factor": 32.0}])
def test_inverse_frequencies_have_transformers_bits(head_dim: int, scaling: dict[str, Any] | None) -> None:
    mine = inverse_frequencies(head_dim, theta=500000.0, scaling=scaling, device=CPU)
    assert torch.equal(mine, theirs(head_dim, 500000.0, scaling).inv_freq)


def test_llama3_scaling_keeps_fast_planes_and_slows_the_slowest_by_the_factor() -> None:
    plain = inverse_frequencies(128, theta=500000.0, scaling=None, device=CPU)
    scaled = inverse_frequencies(128, theta=500000.0, scaling=LLAMA31, device=CPU)
    turns = 8192 * plain / (2 * math.pi)
    assert torch.equal(scaled[turns > 4.01], plain[turns > 4.01])
    assert torch.equal(scaled[turns < 0.99], plain[turns < 0.99] / 8)
    between = (turns > 1.01) & (turns < 3.99)
    assert between.any() and ((scaled < plain) & (scaled > plain / 8))[between].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 33, 3, 16).to(dtype)
    cos, sin = rotary_table(torch.arange(33), 16, theta=10000.0, scaling=None, dtype=dtype)
    their_cos, their_sin = theirs(16, 10000.0, None)(x, torch.arange(33)[None])
    want, _ = apply_rotary_pos_emb(x, x, their_cos, their_sin, unsqueeze_dim=2)
    assert torch.equal(cos[:, 0], their_cos[0]) and torch.equal(sin[:, 0].abs(), their_sin[0].abs())
    # One rounding fewer: the second product goes into the sum unrounded.
    torch.testing.assert_close(rotate(x, cos, sin), want, rtol=0, atol=1e-6 if dtype == torch.float32 else 2**-6)


def test_rotated_products_depend_on_the_distance_of_positions_only() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8).double()
    cos, sin = rotary_table(torch.arange(20), 8, theta=10000.0, scaling=None, dtype=torch.float64)

    def product(i: int, j: int) -> torch.Tensor:
        turned = rotate(query, cos[i : i + 1], sin[i : i + 1]), rotate(key, cos[j : j + 1], sin[j : j + 1])
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(3, 1), product(19, 17), rtol=1e-5, atol=1e-6)  # the angles are fp32


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 8), (4, 2, 8), (6, 1, 4)])
def test_attention_equals_a_written_out_masked_softmax(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    torch.manual_seed(0)
    attention = Attention(24, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x = torch.randn(2, 7, 24)
    cos, sin = rotary_table(torch.arange(7), head_dim, theta=10000.0, scaling=None, dtype=x.dtype)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    query, key, value = (projection(x).unflatten(-1, (-1, head_dim)) for projection in projections)
    query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    key, value = (t.repeat_interleave(num_heads // num_kv_heads, dim=2) for t in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / head_dim**0.5
    weights = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf).softmax(-1)
    want = attention.o_proj(torch.einsum("bhqk,bkhd->bqhd", weights, value).flatten(2))
    torch.testing.assert_close(attention(x, cos, sin), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("scaling", "wrong"),
    [
        (None, []),
        ({"rope_type": "default"}, []),
        (LLAMA31, []),
        ("llama3", ["rope_scaling: expected None or a mapping"]),
        ({"type": "llama3"}, ["rope_scaling.rope_type: expected one of default, llama3, yarn, got None"]),
        ({"rope_type": "ntk"}, ["rope_scaling.rope_type: expected one of default, llama3, yarn, got 'ntk'"]),
        ({"rope_type": "default", "factor": 2.0}, ["rope_scaling.factor: not a key"]),
        (
            {"rope_type": "llama3", "factor": 0, "low_freq_factor": 1, "speed": 3},
            ["speed: not a key", "rope_scaling.factor: ", "high_freq_factor: ", "original_max_position_embeddings: "],
        ),
        ({**LLAMA31, "low_freq_factor": 5}, ["low_freq_factor: expected less than high_freq_factor = 4.0, got 5"]),
    ],
)
def test_every_problem_of_a_rope_scaling_is_named(scaling: object, wrong: list[str]) -> None:
    problems = list(rope_problems(scaling))
    assert len(problems) == len(wrong)
    assert all(piece in problem for piece, problem in zip(wrong, problems, strict=True))


@pytest.mark.parametrize("kind", ["causal", "window", "documents", "block mask"])
def test_the_largest_logit_is_that_of_the_written_out_product(kind: str) -> None:
    """Over more queries than are looked at at once, with keys that heads share; a NaN is no logit."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 200, 4, 8, requires_grad=True), torch.randn(2, 200, 2, 8)
    documents = torch.arange(200) // 70 if kind == "documents" else None
    mask = causal_mask(200, documents=documents, window=9 if kind == "window" else None, sinks=False, device=CPU)
    seen = torch.ones(200, 200, dtype=torch.bool).tril() if mask is None else mask
    if kind == "block mask":
        mask = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 9), None, None, 200, 200, device="cpu")
        seen = torch.ones(200, 200, dtype=torch.bool).tril().triu(-8)
    with torch.no_grad():
        scores = query.transpose(1, 2) @ key.repeat_interleave(2, dim=2).permute(0, 2, 3, 1) / 8**0.5
    largest = torch.full((4,), -torch.inf)
    keep_largest_(largest, query, key, mask=mask)
    torch.testing.assert_close(largest, scores.masked_fill(~seen, -torch.inf).amax((0, 2, 3)))
    before = largest.clone()
    keep_largest_(largest, query * torch.nan, key, mask=mask)
    keep_largest_(largest, query.detach() * 9, key, mask=mask)  # no gradient: evaluation
    assert torch.equal(largest, before)
