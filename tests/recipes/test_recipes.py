"""The YAML: every recipe is a model that exists, and every field can be set by its plain name."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import recipes
from vescale.train import compose, prepare

FOLDER = Path(recipes.__file__).parent
NAMES = sorted(path.stem for path in (FOLDER / "recipe").glob("*.yaml"))
PARAMETERS = {  # transformers' count of Llama-3.1-8B and 70B
    "llama_debug": 1_066_368,
    "llama8b": 8_030_261_248,
    "llama70b": 70_553_706_496,
}
RULES = {"muon": "Muon", "adamw": "AdamW", "adam8bit": "Adam8bit", "shampoo": "Shampoo", "soap": "SOAP"}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_the_model_it_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = prepare(compose([f"recipe={name}"]))
    parameters = dict(trainer.model.named_parameters())
    assert sum(p.numel() for p in parameters.values()) == trainer.model_config.num_parameters()
    model, _, optimizer = name.rpartition("_")
    assert trainer.model_config.num_parameters() == PARAMETERS[model]
    assert all(p.is_meta for p in parameters.values())
    rules = {type(group.rule).__name__ for group in trainer.rules.groups.values()}
    assert rules == {RULES[optimizer], "AdamW"}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_sets_nothing_below_another_choice(name: str) -> None:
    """A number below `optimizer` in a recipe would outlive `optimizer=...` on the command line."""
    keys = set(OmegaConf.load(FOLDER / "recipe" / f"{name}.yaml"))
    assert keys <= {"defaults"}


def test_large_models_train_in_bfloat16_and_reduce_in_float32() -> None:
    parallelism = prepare(compose(["recipe=llama70b_muon"])).parallelism
    assert (parallelism.param_dtype, parallelism.reduce_dtype) == (torch.bfloat16, torch.float32)


def _targets(node: Any, where: str) -> Iterator[tuple[str, str, set[str]]]:
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        yield from _targets(value, f"{where}.{key}")
    if "_target_" in node:
        yield where, node["_target_"], {*node} - {"_target_"}


@pytest.mark.parametrize("argv", [[f"recipe=llama_debug_{name}"] for name in RULES] + [["recipe=llama70b_muon"]])
def test_every_field_can_be_set_without_a_plus(argv: list[str]) -> None:
    config = compose(argv)
    seen = set()
    for where, target, keys in _targets(config, ""):
        module, _, name = target.rpartition(".")
        fields = {f.name for f in dataclasses.fields(getattr(importlib.import_module(module), name))}
        assert keys == fields, where
        seen.add(name)
    parts = {"LlamaConfig", "TextData", "ParallelismConfig", "TrainerConfig", "Tracking"}
    assert parts | {"AdamW", "WarmupCosine"} <= seen
