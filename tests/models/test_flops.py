"""FLOPs of a token, and the peaks they are divided by."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models import LlamaConfig
from models.flops import PEAKS, peak_flops

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


@pytest.mark.parametrize("tied", [False, True])
def test_the_products_of_a_step_are_those_that_torch_counts(tied: bool) -> None:
    config = LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, tie_word_embeddings=tied,
    )  # fmt: skip
    model = config.build()
    model.init_weights()
    tokens = torch.randint(0, 48, (2, 10))
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    counted = sum(flops for op, flops in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * 10
    assert counted == tokens.numel() * (config.flops_per_token(10) - attention)


def test_causal_counts_only_the_scores_that_are_not_masked() -> None:
    config = LlamaConfig()
    per_score = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    kept = sum(i + 1 for i in range(64)) / 64
    assert config.flops_per_token(64) - config.flops_per_token(64, causal=True) == per_score * (64 - kept)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_a_devices_peak_is_found_by_the_drivers_name(name: str, tera: float) -> None:
    assert peak_flops(name) == tera * 1e12


@pytest.mark.parametrize(
    "name", ["", "cpu", "NVIDIA RTX A1000 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "AMD Instinct MI300A"]
)
def test_an_unknown_device_has_no_peak(name: str) -> None:
    assert peak_flops(name) is None


def test_every_peak_says_where_it_is_from() -> None:
    assert all(peak.source and peak.flops > 1e14 for peak in PEAKS)
