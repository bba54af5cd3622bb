"""FLOPs of a token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models import DeepseekV3Config, GptOssConfig, LlamaConfig, MixtralConfig, Qwen3Config, Qwen3MoeConfig
from models.decoder import CausalLMConfig

SIZES = {"vocab_size": 128256, "num_key_value_heads": 8}


@pytest.mark.parametrize(
    ("config", "giga"),
    [
        (LlamaConfig(intermediate_size=14336, **SIZES), 57.9),
        (
            LlamaConfig(
                hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, **SIZES
            ),
            481.4,
        ),
        (
            LlamaConfig(
                hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128, **SIZES
            ),
            2625,
        ),
    ],
    ids=["8B", "70B", "405B"],
)
def test_published_models_cost_what_palms_convention_says(config: LlamaConfig, giga: float) -> None:
    assert config.flops_per_token(8192) / 1e9 == pytest.approx(giga, rel=1e-3)


SMALL: dict[str, Any] = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 6}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
FAMILIES: dict[str, CausalLMConfig] = {
    "llama": LlamaConfig(**GROUPED, intermediate_size=40),
    "llama tied": LlamaConfig(**GROUPED, intermediate_size=40, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**GROUPED, intermediate_size=40),
    "qwen3_moe": Qwen3MoeConfig(**GROUPED, **EXPERTS, num_experts=6, moe_intermediate_size=9),
    "mixtral": MixtralConfig(**GROUPED, **EXPERTS, num_local_experts=4, intermediate_size=9),
    "gpt_oss": GptOssConfig(**GROUPED, **EXPERTS, num_local_experts=4, intermediate_size=9, sliding_window=None),
    "deepseek_v3": DeepseekV3Config(
        **SMALL, **EXPERTS, intermediate_size=40, moe_intermediate_size=9, n_routed_experts=4, n_group=1, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_the_products_of_a_step_are_those_that_torch_counts(name: str) -> None:
    """Experts of 9 columns go through plain products, which torch counts; grouped ones are the same products."""
    config = FAMILIES[name]
    model = config.build()
    model.init_weights()
    tokens = torch.randint(0, 48, (2, 10))
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    counted = sum(flops for op, flops in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    query, value = config.score_dims()
    scores = 6 * config.num_hidden_layers * config.num_attention_heads * (query + value) * 10
    # Beside the matrices, where they are counted at all: scores that are written out, and the weighted sum of experts.
    written_out = scores if name in ("gpt_oss", "deepseek_v3") else 0
    layers = getattr(config, "num_sparse_layers", lambda: 0)()
    mixing = 6 * config.hidden_size * getattr(config, "num_experts_per_tok", 0) * layers
    assert counted == tokens.numel() * (config.flops_per_token(10) - scores + written_out + mixing)


def test_a_window_counts_as_a_shorter_sequence() -> None:
    config = GptOssConfig(**GROUPED, **EXPERTS, num_local_experts=4, intermediate_size=9, sliding_window=4)
    per_key = 12 * config.num_attention_heads * config.head_dim
    whole = 6 * config.num_matrix_parameters() + per_key * 3 * 64
    assert config.flops_per_token(64) == whole - per_key * 2 * (64 - 4)
    kept = sum(min(i + 1, 4) for i in range(64)) / 64
    full = sum(i + 1 for i in range(64)) / 64
    causal = 6 * config.num_matrix_parameters() + per_key * (2 * kept + full)
    assert config.flops_per_token(64, causal=True) == pytest.approx(causal)


def test_causal_counts_only_the_scores_that_are_not_masked() -> None:
    config = LlamaConfig()
    per_score = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    kept = sum(i + 1 for i in range(64)) / 64
    assert config.flops_per_token(64) - config.flops_per_token(64, causal=True) == per_score * (64 - kept)
