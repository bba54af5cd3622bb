"""A simulated rank does what the plan says: collectives and state to the byte, the peak within a tenth."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from composing import composed

from vescale.plan import figures
from vescale.simulate import simulate
from vescale.train import prepare


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)


def _compared(*argv: str) -> dict[str, Any]:
    compared = figures(composed(*argv, "simulate=true", command="plan"))["simulation"]
    assert not dist.is_initialized()
    return compared


# Matrices of a layer exceed a shard from 8 ranks on, so that blocks travel; two layers keep it quick.
SMALL = ("model.num_hidden_layers=2", "data.seq_len=128", "trainer.micro_batch=1")
CASES = {
    "blocks travel": ("recipe=llama_debug_muon", "world_size=16", "trainer.global_batch=16", "rank=11"),
    "two micro-batches": ("recipe=llama_debug_muon", "world_size=2", "trainer.global_batch=6", "rank=1"),
    "one rank": ("recipe=llama_debug_muon", "world_size=1", "trainer.global_batch=1"),
    "kept after forward": ("recipe=llama_debug_adamw", "world_size=4", "parallelism.reshard_after_forward=false"),
    "the root kept": ("recipe=llama_debug_adamw", "world_size=4", "parallelism.reshard_after_forward=null", "rank=3"),
    "bf16, recomputed, tied": (
        "recipe=llama_debug_muon", "world_size=5", "trainer.global_batch=10", "parallelism=zero3_bf16",
        "model.checkpoint=full", "model.tie_word_embeddings=true", "rank=2",
    ),
    "ZeRO 0": ("recipe=llama_debug_muon", "world_size=4", "parallelism.zero=0", "trainer.global_batch=8"),
    "ZeRO 1": (
        "recipe=llama_debug_muon", "world_size=4", "parallelism=zero3_bf16", "parallelism.zero=1",
        "trainer.global_batch=8",
    ),
    "ZeRO 2": ("recipe=llama_debug_muon", "world_size=4", "parallelism.zero=2", "trainer.global_batch=8", "rank=1"),
    "copies": (
        "recipe=llama_debug_muon", "world_size=8", "parallelism.dp_shard=4", "trainer.global_batch=16", "rank=6",
    ),
    "copies that share blocks": (
        "recipe=llama_debug_muon", "world_size=8", "parallelism.dp_shard=4", "trainer.global_batch=16", "rank=6",
        "optimizer.share_replicas=true",
    ),
    "ZeRO 0, shared blocks": (
        "recipe=llama_debug_muon", "world_size=4", "parallelism.zero=0", "trainer.global_batch=8", "rank=2",
        "optimizer.share_replicas=true",
    ),
    "SOAP": ("recipe=llama_debug_soap", "world_size=8", "rank=5"),
    "experts": ("recipe=moe_debug_muon", "world_size=4", "parallelism=zero3_bf16", "rank=3"),
    "bfloat16 masters": ("recipe=llama_debug_muon", "optimizer=adamw_bf16", "world_size=4", "rank=3"),
    "bfloat16 masters of one rank": ("recipe=llama_debug_muon", "optimizer=adamw_bf16", "parallelism=zero3_bf16"),
    "clipped logits": ("recipe=llama_debug_muon", "optimizer=muonclip", "world_size=4", "rank=1"),
    "clipped logits, latent": (
        "recipe=moe_debug_muon", "optimizer=muonclip", "world_size=4", "parallelism=zero3_bf16", "rank=3",
    ),
    "steps in backward": (
        "recipe=llama_debug_muon", "world_size=16", "trainer.global_batch=32", "trainer.step_in_backward=true",
        "trainer.max_grad_norm=null", "rank=11",
    ),
    "steps in backward, of which those of two layers are never under way at a time": (
        "recipe=llama_debug_muon", "parallelism.zero=0", "data.seq_len=16", "trainer.step_in_backward=true",
        "trainer.max_grad_norm=null",
    ),
    "state in host memory": ("recipe=llama_debug_muon", "world_size=4", "optimizer.offload_state=true"),
    "8-bit Adam": ("recipe=llama_debug_adam8bit", "world_size=4", "rank=2"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_rank_does_what_the_plan_says(case: str) -> None:
    compared = _compared(*SMALL, *CASES[case])
    for what in ("parameters", "optimizer_state", "collectives", "peak"):
        assert compared[what]["agrees"], (what, compared[what])
    names = [row["collective"] for row in compared["collectives"]["seen"]]
    assert "all_to_all" in names or case != "blocks travel"


def test_seventy_billion_parameters_on_a_thousand_ranks() -> None:
    """Of 70B's 80 layers three, which are like the others; ``tests/bench/plan.py`` runs all of them."""
    compared = _compared("recipe=llama70b_muon", "world_size=1024", "model.num_hidden_layers=3", "rank=777")
    assert all(compared[what]["agrees"] for what in ("parameters", "optimizer_state", "collectives", "peak")), compared
    calls = {(row["collective"], row["bytes"]): row["count"] for row in compared["collectives"]["seen"]}
    assert calls["reduce_scatter", 4 * 855_703_552] == 3  # a layer of 855.65 M parameters and its padding


def test_no_such_rank_and_a_process_that_has_a_group(pool: Any) -> None:
    with pytest.raises(ValueError, match=r"rank: expected a number in \[0, 8\), got 8"):
        simulate(_trainer(), rank=8, num_ranks=8, micro_batch=1, micro_batches=1)
    assert pool(2).run(_refused) == ["simulate: this process has a process group; simulate in a process of its own"] * 2


def _trainer() -> Any:
    return prepare(composed("recipe=llama_debug_muon"))


def _refused() -> str:
    with pytest.raises(ValueError) as caught:
        simulate(_trainer(), rank=0, num_ranks=8, micro_batch=1, micro_batches=1)
    return str(caught.value)
