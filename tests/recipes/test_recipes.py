"""The YAML: every recipe is a model that exists, and every field can be set by its plain name."""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from composing import composed
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM

import recipes
from models.hf_config import config_json
from vescale.tracking import read_metrics
from vescale.train import describe, prepare, resolve

FOLDER = Path(recipes.__file__).parent
NAMES = sorted(path.stem for path in (FOLDER / "recipe").glob("*.yaml"))
PARAMETERS = {  # transformers' count of every published model; of DeepSeek-V3 without its prediction layer
    "llama_debug": 1_066_368,
    "llama8b": 8_030_261_248,
    "llama70b": 70_553_706_496,
    "llama405b": 405_853_388_800,
    "qwen3_30b_a3b": 30_532_122_624,
    "mixtral_8x7b": 46_702_792_704,
    "gptoss_120b": 116_829_156_672,
    "deepseek_v3": 671_026_404_352,
    "moe_debug": 3_858_112,
}
RULES = {"muon": "Muon", "adamw": "AdamW", "adam8bit": "Adam8bit", "shampoo": "Shampoo", "soap": "SOAP"}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_the_model_it_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = prepare(composed(f"recipe={name}"))
    parameters = dict(trainer.model.named_parameters())
    model, _, optimizer = name.rpartition("_")
    assert sum(p.numel() for p in parameters.values()) == PARAMETERS[model]
    assert all(p.is_meta for p in parameters.values())
    rules = {type(group.rule).__name__ for group in trainer.rules.groups.values()}
    assert rules == {RULES[optimizer], "AdamW"}


@pytest.mark.parametrize("model", [model for model in PARAMETERS if "debug" not in model])
def test_a_model_is_as_large_as_transformers(model: str, tmp_path: Path) -> None:
    """Built on meta by both, from the config.json that is written for it."""
    config = resolve(composed(f"model={model}", "optimizer=muon")["model"])
    assert config.num_parameters() == PARAMETERS[model]
    written = config_json(config, torch.bfloat16, {})
    theirs = AutoConfig.for_model(**{key: value for key, value in written.items() if key != "architectures"})
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(theirs)
    assert sum(parameter.numel() for parameter in built.parameters()) == PARAMETERS[model]


# Published, in billions: the model cards and papers that recipes/model/*.yaml name.
PUBLISHED = {
    "llama405b": (405, 405),
    "qwen3_30b_a3b": (30.5, 3.3),
    "mixtral_8x7b": (47, 13),
    "gptoss_120b": (116.8, 5.1 + 0.6),  # counted there without the embedding
    "deepseek_v3": (671, 37),
}


@pytest.mark.parametrize("name", [name for name in NAMES if name.rpartition("_")[0] in PUBLISHED])
def test_published_models_have_as_many_active_parameters(name: str) -> None:
    config = resolve(composed(f"recipe={name}")["model"])
    total, active = PUBLISHED[name.rpartition("_")[0]]
    # As published, in units of its last digit.
    assert math.floor(config.num_parameters() / 1e8) / 10 == pytest.approx(total, abs=0.95)
    assert config.num_active_parameters() / 1e9 == pytest.approx(active, abs=0.95)


# What is small of a model: every field that a recipe has.
TINY = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "sliding_window": 5, "loss_chunk_size": 16,
}  # fmt: skip


def _tiny(name: str, run_dir: str) -> list[str]:
    """The recipe's command line for two steps of a tiny copy of its model."""
    model = composed(f"recipe={name}")["model"]
    words = [f"model.{key}={value}" for key, value in TINY.items() if key in model]
    words += ["data=shakespeare", "data.seq_len=16", "trainer=debug", "trainer.steps=2", "trainer.global_batch=4"]
    words += ["trainer.eval_sequences=4", "trainer.log_every=1", "trainer.device=cpu", "tracking.mode=disabled"]
    sparse = ["parallelism.ep=2"] if "num_experts_per_tok" in model else []
    return [f"recipe={name}", f"run_dir={run_dir}", *words, *sparse]


def _train_tiny(config: dict[str, Any]) -> float:
    trainer = prepare(config)
    trainer.check(2)
    return trainer.run()


@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_copy_trains_on_two_ranks_with_its_experts_dealt(name: str, tmp_path: Path, pool: Any) -> None:
    first, second = pool(2).run(_train_tiny, composed(*_tiny(name, str(tmp_path / "run"))))
    assert first == second and 0 < first < 6.5  # log(320) is 5.77
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    loads = [value for row in rows for key, value in row.items() if key.startswith("expert_load/")]
    sparse = "num_experts_per_tok" in composed(f"recipe={name}")["model"]
    assert bool(loads) == sparse and all(1 <= load <= 8 for load in loads)


# The others are trained by a recipe of their own.
@pytest.mark.parametrize("optimizer", ["adamw_bf16", "muon8bit", "muonclip", "normuon"])
def test_any_optimizer_may_be_swapped_into_a_recipe(optimizer: str, tmp_path: Path, pool: Any) -> None:
    words = [*_tiny("llama_debug_muon", str(tmp_path / "run")), f"optimizer={optimizer}"]
    losses = pool(2).run(_train_tiny, composed(*words))
    assert losses[0] == losses[1] and 0 < losses[0] < 6.5
    own = {path.stem.rpartition("_")[2] for path in (FOLDER / "recipe").glob("llama_debug_*.yaml")}
    others = {path.stem for path in (FOLDER / "optimizer").glob("*.yaml")} - own - {"adam8bit_biases", "muon_router"}
    assert others == {"adamw_bf16", "muon8bit", "muonclip", "normuon"}


def test_every_optimizer_has_its_numbers_for_every_model() -> None:
    """So that any may be swapped into any recipe, without the time to compose all pairs of them."""
    for path in {*(FOLDER / "optimizer").glob("*.yaml")} - {FOLDER / "optimizer" / "muon_router.yaml"}:
        for table in re.findall(r"by_model:\{(.*?)\}", path.read_text()):
            assert sorted(re.findall(r"(\w+):", table)) == MODELS, path.name


@pytest.mark.parametrize("optimizer", RULES)
def test_a_recipe_of_a_rule_is_the_swap_of_its_name(optimizer: str) -> None:
    """So what trains as ``recipe=llama_debug_soap`` is what ``optimizer=soap`` makes of another recipe."""
    own = composed(f"recipe=llama_debug_{optimizer}", "run_dir=x", "name=x")
    assert own == composed("recipe=llama_debug_muon", f"optimizer={optimizer}", "run_dir=x", "name=x")


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("llama_debug")])
def test_a_dry_run_describes_a_recipe(name: str) -> None:
    """Every kind of layer once: as many layers as the dense ones and one more; the rest have the same plans.

    At other sizes the same plans are made by tests/vescale/test_plan.py.
    """
    layers = {"deepseek_v3_muon": 4, "moe_debug_muon": 2}.get(name, 1)
    words = [f"recipe={name}", f"model.num_hidden_layers={layers}", "trainer.global_batch=1024"]
    text = describe(prepare(composed(*words)), 64)
    assert "64 ranks" in text and "padding" in text


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_sets_nothing_below_another_choice(name: str) -> None:
    """A number below `optimizer` in a recipe would outlive `optimizer=...` on the command line."""
    keys = set(OmegaConf.load(FOLDER / "recipe" / f"{name}.yaml"))
    assert keys <= {"defaults"}


@pytest.mark.parametrize("optimizer", [name for name in RULES if name != "adamw"])
def test_embeddings_and_the_head_have_adams_float32_moments_and_their_own_rate(optimizer: str) -> None:
    trainer = prepare(composed("recipe=llama_debug_muon", f"optimizer={optimizer}"))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        group = trainer.rules.groups[trainer.rules.group_of(name)]
        assert type(group.rule).__name__ == "AdamW" and group.rule.lr > 0
    assert trainer.rules.group_of("model.norm.weight") == "norms"


def test_large_models_train_in_bfloat16_and_reduce_in_float32() -> None:
    parallelism = prepare(composed("recipe=llama70b_muon")).parallelism
    assert (parallelism.param_dtype, parallelism.reduce_dtype) == (torch.bfloat16, torch.float32)


def _targets(node: Any, where: str) -> Iterator[tuple[str, str, set[str]]]:
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        yield from _targets(value, f"{where}.{key}")
    if "_target_" in node:
        yield where, node["_target_"], {*node} - {"_target_"}


MODELS = sorted(path.stem for path in (FOLDER / "model").glob("*.yaml"))
CHOICES = [f"recipe=llama_debug_{name}" for name in RULES] + [f"model={name}" for name in MODELS]


@pytest.mark.parametrize("choice", CHOICES)
def test_every_field_can_be_set_without_a_plus(choice: str) -> None:
    config = composed(choice)
    seen = set()
    for where, target, keys in _targets(config, ""):
        module, _, name = target.rpartition(".")
        fields = {f.name for f in dataclasses.fields(getattr(importlib.import_module(module), name))}
        assert keys == fields, where
        seen.add(name)
    parts = {"TextData", "ParallelismConfig", "TrainerConfig", "Tracking"}
    assert parts | {"AdamW", "WarmupCosine"} <= seen
