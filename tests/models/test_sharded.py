"""Two ranks read a folder into shards and dealt experts, and write it again, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from models import DeepseekV3Config, GptOssConfig, LlamaConfig, MixtralConfig, Qwen3MoeConfig, hf
from models.decoder import CausalLMConfig
from models.expert_parallel import held
from vescale import fully_shard
from vescale.mesh import make_expert_mesh

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.2,
}  # fmt: skip
CONFIGS: dict[str, CausalLMConfig] = {
    "llama tied": LlamaConfig(**SIZES, intermediate_size=40, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=15),
    "mixtral": MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, intermediate_size=24),
    "gpt_oss": GptOssConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, intermediate_size=24, num_local_experts=3, num_experts_per_tok=2
    ),
    "deepseek_v3": DeepseekV3Config(
        **SIZES, intermediate_size=48, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        first_k_dense_replace=1, topk_group=1, q_lora_rank=12, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
        v_head_dim=8,
    ),
}  # fmt: skip


def batch() -> torch.Tensor:
    return torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(1))


def read_and_write(source: str, target: str, ep: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Reads a folder into a sharded model, takes its loss and gradients, both summed over ranks, and writes it."""
    with torch.device("meta"):
        model = hf.load_config(source).build()
    if ep > 1:
        mesh = make_expert_mesh(torch.device("cpu"), ep)
        model.deal_experts(mesh["ep"].get_group())
        for unit in model.expert_units():
            fully_shard(unit, mesh=mesh["efsdp"])
    for unit in (*model.units(), model):
        fully_shard(unit)
    model.to_empty(device="cpu")
    hf.load_weights(model, source)
    model.set_gradient_divide_factor(1.0, recurse=True)
    loss = model(batch()[:, :-1], batch()[:, 1:])
    loss.backward()
    hf.save(model, target, shard_bytes=20_000)
    dist.barrier()
    return float(loss.detach()), {name: hf.whole(p.grad, held(p)) for name, p in model.named_parameters()}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


@pytest.mark.parametrize(("name", "ep"), [(name, 1) for name in CONFIGS] + [("qwen3_moe", 2), ("gpt_oss", 2)])
def test_two_ranks_read_and_write_what_one_process_wrote(name: str, ep: int, tmp_path: Path, pool: Any) -> None:
    model = CONFIGS[name].build()
    torch.manual_seed(0)
    model.init_weights()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(torch.randn(tensor.shape), alpha=0.1)
    hf.save(model, tmp_path / "in")
    want = model(batch()[:, :-1], batch()[:, 1:])
    want.backward()
    for loss, grads in pool(2).run(read_and_write, str(tmp_path / "in"), str(tmp_path / "out"), ep):
        assert loss == pytest.approx(float(want.detach()), rel=1e-5)
        for name, parameter in model.named_parameters():  # both ranks have the same tokens
            torch.testing.assert_close(grads[name], 2 * parameter.grad, rtol=1e-5, atol=1e-4)
    before, after = tensors(tmp_path / "in"), tensors(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def write_into_a_full_folder(folder: str) -> str:
    """The message on this rank."""
    model = CONFIGS["llama tied"].build()
    model.init_weights()
    fully_shard(model)
    with pytest.raises(ValueError) as refused:
        hf.save(model, folder)
    return str(refused.value)


def test_a_refusal_is_every_ranks(tmp_path: Path, pool: Any) -> None:
    (tmp_path / "something").write_text("else")
    messages = pool(2).run(write_into_a_full_folder, str(tmp_path))
    assert all("expected a new or empty folder" in message for message in messages)
