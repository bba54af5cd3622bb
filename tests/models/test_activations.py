"""What the families say that a micro-batch leaves for backward, beside the bytes that live after forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models import DeepseekV3Config, GptOssConfig, LlamaConfig, MixtralConfig, Qwen3Config, Qwen3MoeConfig
from vescale.live import LiveBytes

SIZE: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
GROUPED = {**SIZE, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2}
LATENT = {
    **SIZE, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "intermediate_size": 160,
    "moe_intermediate_size": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "first_k_dense_replace": 1,
}  # fmt: skip
DENSE = {**SIZE, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 160}
CONFIGS = {
    "Llama": LlamaConfig(**DENSE),
    "Qwen3": Qwen3Config(**DENSE),
    "Qwen3 with experts": Qwen3MoeConfig(**GROUPED, num_experts=8, moe_intermediate_size=48),
    "Mixtral": MixtralConfig(**GROUPED, num_local_experts=4, intermediate_size=80),
    "GPT-OSS": GptOssConfig(**GROUPED, num_local_experts=8, intermediate_size=64, rope_scaling=None),
    "DeepSeek-V3": DeepseekV3Config(**LATENT, q_lora_rank=48),
    "DeepSeek-V3, queries direct": DeepseekV3Config(**LATENT, q_lora_rank=None),
}


def _left(config: Any, dtype: torch.dtype, batch: int, seq_len: int) -> int:
    """Bytes that forward leaves behind the embedding, parameters and what all layers share not counted."""
    model = config.build().to(dtype)
    model.init_weights()
    ids = torch.zeros(batch, seq_len, dtype=torch.int64)
    with LiveBytes() as live:
        ids.add(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.view(-1)
            for buffer in model.buffers():
                buffer.view(-1)
        before = live.now()
        hidden, _ = model.model(ids)
        left = live.now() - before
    assert hidden.shape == (batch, seq_len, config.hidden_size)
    return left


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", CONFIGS)
def test_what_forward_leaves_is_what_the_family_says(family: str, dtype: torch.dtype) -> None:
    config, batch, seq_len = CONFIGS[family], 2, 64
    said = config.activations(batch=batch, seq_len=seq_len, itemsize=dtype.itemsize, fused=False)
    output = batch * seq_len * config.hidden_size * dtype.itemsize
    total = sum(layer.stream + layer.saved for layer in said.layers) + said.tail + output
    assert _left(config, dtype, batch, seq_len) == pytest.approx(total, rel=0.05)


@pytest.mark.parametrize("family", CONFIGS)
def test_recomputation_keeps_the_stream_and_kernels_keep_less(family: str) -> None:
    of = {fused: CONFIGS[family].activations(batch=2, seq_len=64, itemsize=2, fused=fused) for fused in (True, False)}
    assert [layer.stream for layer in of[True].layers] == [2 * 2 * 64 * 64] * 3
    for kernel, composed in zip(of[True].layers, of[False].layers, strict=True):
        assert kernel.work > 0 and kernel.stream < kernel.saved < composed.saved
