"""Training does not depend on the number of ranks.

The debug-sized model, five steps, the same seed and global batch.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from models import LlamaConfig
from optimizers import AdamW, Muon

MODEL = LlamaConfig(
    vocab_size=320,
    hidden_size=96,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
ADAMW = ("*", AdamW(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1))
FP32 = {"ns_dtype": torch.float32, "wire_dtype": torch.float32}
RULES = {
    "adamw": {"all": ADAMW},
    "muon, fp32 Newton-Schulz": {"matrices": ("*_proj.weight", Muon(lr=0.01, **FP32)), "rest": ADAMW},
    "muon": {"matrices": ("*_proj.weight", Muon(lr=0.01)), "rest": ADAMW},
}
# Relative bound of each step's loss. Gradients are summed in another order on another number of ranks; bfloat16
# Newton-Schulz turns the last bits of a gradient into its own rounding.
BOUNDS = {"adamw": 1e-5, "muon, fp32 Newton-Schulz": 1e-5, "muon": 3e-4}


def _five_steps(rule: str) -> list[float]:
    from vescale import Optimizer, Rules, clip_grad_norm_, fully_shard
    from vescale.data import TextData

    rank, world = dist.get_rank(), dist.get_world_size()
    rules = Rules(**RULES[rule])
    with torch.device("meta"):
        model = MODEL.build()
    mesh = init_device_mesh("cpu", (world,))
    for unit in (*model.units(), model):
        fully_shard(unit, mesh=mesh, block_of=rules.block_of)
    model.to_empty(device="cpu")
    torch.manual_seed(17)
    model.init_weights()
    optimizer = Optimizer(model.named_parameters(), rules)
    model.set_gradient_divide_factor(1.0, recurse=True)
    data = TextData(seq_len=48, val_fraction=0.05).open().train
    losses = []
    for step in range(5):
        batch = data.batch(step, rank=rank, world=world, global_batch=12)
        tokens = (batch.labels != -100).sum()
        dist.all_reduce(tokens)
        loss = model(batch.input_ids, batch.labels) / tokens
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


@pytest.mark.parametrize("rule", RULES)
def test_losses_are_those_of_one_rank(pool, rule: str) -> None:
    one = pool(1).run(_five_steps, rule)[0]
    assert one[-1] < one[0]
    for world in (2, 3, 4):
        losses = pool(world).run(_five_steps, rule)[0]
        differences = [abs(a - b) / b for a, b in zip(losses, one, strict=True)]
        print(f"{rule}, {world} ranks: " + " ".join(f"{d:.1e}" for d in differences))
        assert max(differences) <= BOUNDS[rule], f"{world} ranks: relative differences {differences}"
