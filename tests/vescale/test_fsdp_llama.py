"""An unmodified transformers Llama trains in a loop of twenty lines, and its losses are FSDP2's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def _train(shard: Callable[..., Any], make: Callable[[torch.nn.Module], Any], tied: bool) -> list[float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    for layer in model.model.layers:
        shard(layer)
    shard(model)
    optimizer = make(model)
    losses = []
    for step in range(10):
        generator = torch.Generator().manual_seed(10 * (step % 3) + dist.get_rank())
        tokens = torch.randint(0, 64, (2, 12), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


NUMBERS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


def _stock(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **NUMBERS)


def _own(model: torch.nn.Module) -> torch.optim.Optimizer:
    from optimizers import AdamW
    from vescale import Optimizer, Rules

    return Optimizer(model.named_parameters(), Rules(everything=("*", AdamW(**NUMBERS))))


def _losses(tied: bool) -> tuple[list[float], ...]:
    from torch.distributed.fsdp import fully_shard as fsdp2

    from vescale import fully_shard

    return _train(fsdp2, _stock, tied), _train(fully_shard, _stock, tied), _train(fully_shard, _own, tied)


@pytest.mark.parametrize("tied", [False, True])
def test_a_transformers_llama_has_fsdp2s_losses(pool, tied: bool) -> None:
    theirs, stock, own = map(torch.tensor, pool(2).run(_losses, tied)[0])
    assert theirs[-1] < theirs[0]
    torch.testing.assert_close(stock, theirs, rtol=1e-5, atol=0)
    torch.testing.assert_close(own, theirs, rtol=1e-5, atol=0)
