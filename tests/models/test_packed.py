"""Documents packed into one batch are as far apart as in batches of their own."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from models import DeepseekV3Config, GptOssConfig, LlamaConfig, MixtralConfig, Qwen3Config, Qwen3MoeConfig
from models.attention import _flex, attend, causal_mask
from models.decoder import CausalLMConfig

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.2,
    "max_position_embeddings": 16,
}  # fmt: skip
CONFIGS: dict[str, CausalLMConfig] = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=48),
    "qwen3 recomputed": Qwen3Config(**SIZES, num_key_value_heads=4, intermediate_size=48, checkpoint="full"),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, num_key_value_heads=2, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=16,
        router_aux_loss_coef=0.5,
    ),
    "mixtral recomputed": MixtralConfig(
        **SIZES, num_key_value_heads=4, num_local_experts=3, intermediate_size=16, router_aux_loss_coef=0.5,
        checkpoint="full",
    ),
    "gpt_oss": GptOssConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, intermediate_size=16, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=3, router_aux_loss_coef=0.5,
    ),
    "deepseek_v3": DeepseekV3Config(
        **SIZES, intermediate_size=48, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
        first_k_dense_replace=1, n_group=2, topk_group=1, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=8, router_aux_loss_coef=0.5,
    ),
}  # fmt: skip
LENGTHS = (5, 1, 16, 8)


def documents() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(1)
    ids = [torch.randint(0, 61, (length,)) for length in LENGTHS]
    labels = [document.roll(-1) for document in ids]
    for label in labels:
        label[-1] = -100
    return ids, labels


def jagged(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_gradients_do_not_depend_on_packing(name: str) -> None:
    model = CONFIGS[name].build()
    torch.manual_seed(0)
    model.init_weights()
    ids, labels = documents()
    apart = [model(i[None], y[None]) for i, y in zip(ids, labels, strict=True)]
    want = torch.autograd.grad(sum(apart) / sum(LENGTHS), list(model.parameters()))
    packed = model(jagged(ids), jagged(labels))
    got = torch.autograd.grad(packed / sum(LENGTHS), list(model.parameters()))
    torch.testing.assert_close(packed, sum(apart), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    logits = model(jagged(ids))
    assert logits.is_nested and logits.shape[0] == len(LENGTHS)
    for part, i in zip(logits.unbind(), ids, strict=True):
        torch.testing.assert_close(part, model(i[None])[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_documents_of_one_token_and_of_none_are_documents(name: str) -> None:
    model = CONFIGS[name].build()
    torch.manual_seed(0)
    model.init_weights()
    ids = [torch.tensor([17, 3, 44])[:length] for length in (0, 1, 1, 0, 3, 0)]
    got = model(jagged(ids)).unbind()
    assert [len(part) for part in got] == [0, 1, 1, 0, 3, 0]
    for part, i in zip(got, ids, strict=True):
        if len(i):
            torch.testing.assert_close(part, model(i[None])[0], rtol=1e-5, atol=1e-5)


def test_nothing_is_padded() -> None:
    """The stream is as long as the documents together."""
    model = CONFIGS["llama"].build()
    model.init_weights()
    seen: list[torch.Size] = []
    for layer in model.units():
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    model(jagged(documents()[0]))
    assert seen == [(1, sum(LENGTHS), 32)] * 2


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_flex_attention_is_the_written_out_mask(packed: bool, window: int | None, sinks: bool) -> None:
    """The path of a GPU, uncompiled, forward: it has no backward on a CPU."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 9, 4, 16), torch.randn(1, 9, 2, 16), torch.randn(1, 9, 2, 8)
    sink = torch.randn(4) if sinks else None
    ends = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2]) if packed else None
    mask = causal_mask(9, documents=ends, window=window, sinks=sinks, device=torch.device("cpu"))
    index = torch.arange(9)
    allowed = mask if isinstance(mask, torch.Tensor) else index[:, None] >= index
    block = create_block_mask(lambda b, h, i, j: allowed[i, j], None, None, 9, 9, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        turned = (tensor.transpose(1, 2) for tensor in (query, key, value))
        options = {"scale": None, "enable_gqa": True}
        out = _flex(*turned, block, sink, options, kernel=flex_attention).transpose(1, 2)
    want = attend(query, key, value, mask=mask, sinks=sink)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_wrong_documents_are_refused() -> None:
    model = replace(CONFIGS["llama"], max_position_embeddings=15).build()
    ids, labels = documents()
    with pytest.raises(ValueError, match="documents of at most max_position_embeddings = 15 tokens, got 16"):
        model(jagged(ids), jagged(labels))
    with pytest.raises(ValueError, match="labels: expected a jagged tensor with the documents of input_ids"):
        model(jagged(ids[:2]), jagged(labels))
    with pytest.raises(ValueError, match="labels: expected a jagged tensor with the documents of input_ids"):
        model(jagged(ids[:2]), jagged(labels[:2][::-1]))  # as many tokens, in other documents
    with pytest.raises(ValueError, match="expected at least one token, got 2 documents without"):
        model(jagged([ids[0][:0]] * 2))
    holes = torch.nested.nested_tensor_from_jagged(ids[2], torch.tensor([0, 8, 16]), torch.tensor([3, 8]))
    with pytest.raises(ValueError, match="documents that lie end to end, got a jagged tensor with holes"):
        model(holes)
    short = torch.nested.nested_tensor_from_jagged(ids[2], torch.tensor([0, 8, 15]))
    with pytest.raises(ValueError, match="expected offsets from 0 to 16 tokens, got 0 to 15"):
        model(short)
