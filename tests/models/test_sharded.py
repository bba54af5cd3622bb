"""Two ranks that hold a model in shards, and perhaps its experts dealt, are transformers' in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from closeness import worst
from safetensors.torch import load_file
from tiny_transformers import FAMILIES, batch, gathered, theirs

from models import LlamaConfig, hf
from models.expert_parallel import held
from vescale import fully_shard
from vescale.mesh import make_expert_mesh

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
DEALT = ("qwen3_moe", "qwen3_moe odd", "mixtral", "gpt_oss odd", "deepseek_v3")


def read_and_write(source: str, target: str, ep: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Reads a folder into shards, takes logits and loss of this rank's sequence and whole gradients, and writes it."""
    config = hf.load_config(source)
    with torch.device("meta"):
        model = hf.load_config(source, **{"router_aux_loss_coef": 0.0} if sparse(config) else {}).build()
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
    ids, labels = (tensor[dist.get_rank() :][:1] for tensor in batch())
    logits = model(ids).detach()
    loss = model(ids, labels)
    (loss / batch()[1].numel()).backward()
    hf.save(model, target, shard_bytes=20_000)
    dist.barrier()
    return logits, loss.detach(), {name: hf.whole(p.grad, held(p)) for name, p in model.named_parameters()}


def sparse(config: Any) -> bool:
    return hasattr(config, "router_aux_loss_coef")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


@pytest.mark.parametrize(("name", "ep"), [(name, 1) for name in FAMILIES] + [(name, 2) for name in DEALT])
def test_logits_loss_gradients_and_what_is_written_are_transformers(
    name: str, ep: int, tmp_path: Path, pool: Any
) -> None:
    """Within 1e-5 of each element, and of the largest element of each gradient."""
    reference = theirs(name)
    reference.save_pretrained(tmp_path / "in")
    ids, labels = batch()
    want = reference(ids).logits
    losses = F.cross_entropy(want.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape).sum(dim=1)
    (losses.sum() / labels.numel()).backward()
    want_grads = {key: p.grad for key, p in reference.named_parameters() if p.grad is not None}
    results = pool(2).run(read_and_write, str(tmp_path / "in"), str(tmp_path / "out"), ep)
    for rank, (logits, loss, grads) in enumerate(results):
        torch.testing.assert_close(logits[0], want[rank], **CLOSE)
        torch.testing.assert_close(loss, losses[rank], **CLOSE)
        mine = gathered(grads, reference.config.model_type)
        assert mine.keys() == want_grads.keys()
        torch.testing.assert_close(mine, want_grads, **CLOSE)
        far = {key: worst(mine[key], grad) for key, grad in want_grads.items()}
        assert max(far.values()) <= 1e-5, far
    before, after = tensors(tmp_path / "in"), tensors(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def write_into_a_full_folder(folder: str) -> str:
    """The message on this rank."""
    model = LlamaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4).build()
    model.init_weights()
    fully_shard(model)
    with pytest.raises(ValueError) as refused:
        hf.save(model, folder)
    return str(refused.value)


def test_a_refusal_is_every_ranks(tmp_path: Path, pool: Any) -> None:
    (tmp_path / "something").write_text("else")
    messages = pool(2).run(write_into_a_full_folder, str(tmp_path))
    assert all("expected a new or empty folder" in message for message in messages)
