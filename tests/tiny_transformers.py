"""Tiny random models of transformers, one and more of every family, which ours are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from models import hf

SMALL: dict[str, Any] = {
    "vocab_size": 83,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0}
DEEPSEEK = {
    **SMALL, "num_key_value_heads": 4, "num_hidden_layers": 3, "first_k_dense_replace": 1, "intermediate_size": 48,
    "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": (
        "Llama",
        GROUPED
        | {
            "intermediate_size": 56,
            "rope_parameters": {
                "rope_theta": 500.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 12, "intermediate_size": 56}),
    "qwen3 tied": ("Qwen3", GROUPED | {"intermediate_size": 56, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3Moe",
        GROUPED
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    ),
    "qwen3_moe odd": (
        "Qwen3Moe",
        GROUPED | {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 15, "norm_topk_prob": False},
    ),
    "mixtral": ("Mixtral", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}),
    "mixtral tied, every expert": (
        "Mixtral",
        GROUPED | {"num_local_experts": 3, "num_experts_per_tok": 3, "intermediate_size": 24,
                   "tie_word_embeddings": True},
    ),
    "gpt_oss": (
        "GptOss",
        GROUPED
        | {
            "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "sliding_window": 5,
            "num_hidden_layers": 3, "rope_parameters": {**YARN, "rope_theta": 1000.0, "truncate": False},
            "swiglu_limit": 1.0,
        },
    ),
    "gpt_oss odd": (
        "GptOss",
        SMALL
        | {
            "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6, "num_local_experts": 5,
            "num_experts_per_tok": 3, "intermediate_size": 15, "sliding_window": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "gpt_oss without windows": (
        "GptOss",
        GROUPED
        | {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 8, "num_hidden_layers": 2,
           "layer_types": ["full_attention"] * 2, "sliding_window": 64,
           "rope_parameters": {**YARN, "rope_theta": 1000.0, "truncate": True}},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        DEEPSEEK | {"rope_parameters": {**YARN, "rope_theta": 100.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek_v3 without latent query": (
        "DeepseekV3",
        DEEPSEEK | {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "n_group": 1,
                    "topk_group": 1},
    ),
}  # fmt: skip


def theirs(name: str) -> torch.nn.Module:
    """A tiny random model of transformers, in which nothing is zero or one by construction."""
    import transformers  # takes seconds, and ranks that load a test have no need of it

    kind, sizes = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in key:
                tensor.uniform_(0.5, 1.5)
            elif "bias" in key or "sinks" in key or "gate.weight" in key or "router.weight" in key:
                tensor.normal_(std=0.5)
            elif "inv_freq" not in key:
                tensor.normal_(std=0.2)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Two sequences of 23 tokens and what should follow each; nothing follows the last."""
    torch.manual_seed(1)
    ids = torch.randint(0, 83, (2, 23))
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    return ids, labels


def gathered(grads: Mapping[str, torch.Tensor], model_type: str) -> dict[str, torch.Tensor]:
    """Our gradients under transformers' names in memory: gate and up of the experts in one."""
    out = dict(hf.stored(model_type, grads.items()))
    if model_type == "gpt_oss":
        return out
    merged: dict[str, torch.Tensor] = {}
    for name, grad in grads.items():
        if ".experts." not in name:
            merged[name] = grad
        elif "gate_proj" in name:
            up = grads[name.replace("gate_proj", "up_proj")]
            merged[name.replace("gate_proj.weight", "gate_up_proj")] = torch.cat((grad, up), dim=1)
        elif "down_proj" in name:
            merged[name.removesuffix(".weight")] = grad
    return merged
