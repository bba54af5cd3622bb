"""Every family is transformers': logits, gradients, names, there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

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
    "gpt_oss": (
        "GptOss",
        GROUPED
        | {
            "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "sliding_window": 5,
            "num_hidden_layers": 3, "rope_parameters": {**YARN, "rope_theta": 1000.0, "truncate": False},
            "swiglu_limit": 1.0,
        },
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
    torch.manual_seed(1)
    ids = torch.randint(0, 83, (2, 23))
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    return ids, labels


def gathered(grads: dict[str, torch.Tensor], model_type: str) -> dict[str, torch.Tensor]:
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


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_loss_and_gradients_equal_transformers_and_the_way_back_is_bit_for_bit(
    name: str, tmp_path: Path
) -> None:
    reference = theirs(name)
    reference.save_pretrained(tmp_path / "in")
    sparse = hasattr(reference.config, "num_experts_per_tok")
    model = hf.load(tmp_path / "in", loss_chunk_size=7, **({"router_aux_loss_coef": 0.0} if sparse else {}))
    ids, labels = batch()
    want_logits = reference(ids).logits
    torch.testing.assert_close(model(ids), want_logits, rtol=1e-5, atol=1e-5)

    loss = model(ids, labels)
    want = F.cross_entropy(want_logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    (loss / labels.numel()).backward()
    (want / labels.numel()).backward()
    grads = {key: p.grad for key, p in model.named_parameters()}
    want_grads = {key: p.grad for key, p in reference.named_parameters() if p.grad is not None}
    mine = gathered(grads, reference.config.model_type)  # type: ignore[arg-type]
    assert mine.keys() == want_grads.keys()
    torch.testing.assert_close(mine, want_grads, rtol=1e-5, atol=1e-5)

    hf.save(model, tmp_path / "out", shard_bytes=20_000)
    assert_opens_equal(tmp_path / "out", reference)


def assert_opens_equal(folder: Path, reference: torch.nn.Module) -> None:
    opened, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, experts_implementation="eager"
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    got, want = opened.state_dict(), reference.state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)
    torch.testing.assert_close(opened(batch()[0]).logits, reference(batch()[0]).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_written_config_says_the_same_to_transformers(name: str, tmp_path: Path) -> None:
    kind, sizes = FAMILIES[name]
    getattr(transformers, f"{kind}Config")(**sizes).save_pretrained(tmp_path / "in")
    config = hf.load_config(tmp_path / "in")
    with torch.device("meta"):
        model = config.build()
    hf.save(model.to_empty(device="cpu"), tmp_path / "out")
    assert hf.load_config(tmp_path / "out") == config
    before, after = (AutoConfig.from_pretrained(tmp_path / side).to_dict() for side in ("in", "out"))
    told = {"_name_or_path", "architectures", "dtype", "head_dim", "moe_layer_freq", "scoring_func", "topk_method"}
    same = before.keys() - told
    assert {key: after[key] for key in same} == {key: before[key] for key in same}
    four = json.loads((tmp_path / "out" / "config.json").read_text())
    assert four.keys() >= {"rope_theta", "rope_scaling", "torch_dtype"} and "rope_parameters" not in four
