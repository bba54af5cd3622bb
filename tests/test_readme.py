"""The README's code runs, and its drawing has the planner's numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

README = Path(__file__).parents[1] / "README.md"


def _code(heading: str, *, language: str = "python") -> list[str]:
    section = README.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, flags=re.S)


def _loop() -> float:
    from models import LlamaConfig
    from vescale.data import TextData

    scope: dict[str, Any] = {}
    exec(_code("In your own loop")[0], scope)
    torch.manual_seed(0)
    model = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    ).build()
    model.init_weights()
    data = TextData(seq_len=32).open().train
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = [data.batch(0, rank=rank, world=world, global_batch=4)] * 6
    first = scope["train"](model, model.units(), batches[:1])
    return first


def test_the_loop_runs(pool) -> None:
    losses = pool(2).run(_loop)
    assert all(4 < loss < 8 for loss in losses)


def _placements() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    weight = torch.randn(8, 4)
    scope: dict[str, Any] = {"weight": weight, "mesh": init_device_mesh("cpu", (3,))}
    exec(_code("In your own loop")[1], scope)
    assert torch.equal(scope["sharded"].full_tensor(), weight)
    assert scope["owner"].to_local().numel() == (weight.numel() if dist.get_rank() == 1 else 0)


def test_the_placements_run(pool) -> None:
    torch.manual_seed(0)
    pool(3).run(_placements)


def _lion() -> dict[str, torch.Tensor]:
    from torch import nn

    from vescale import Optimizer, Rules, fully_shard

    scope: dict[str, Any] = {}
    exec(_code("Write a rule")[0], scope)
    rules = Rules(all=("*", scope["Lion"](lr=1e-3)))
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(7, 19), nn.Linear(19, 3)), block_of=rules.block_of)
    optimizer = Optimizer(model.named_parameters(), rules)
    for step in range(3):
        x = torch.randn(6, 7, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.full_tensor() for name, p in model.named_parameters()}


def test_the_rule_of_the_readme_is_lion_on_any_number_of_ranks(pool) -> None:
    results = {world: pool(world).run(_lion)[0] for world in (1, 2, 3)}
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 19), torch.nn.Linear(19, 3))
    averages = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(3):
        model(torch.randn(6, 7, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        with torch.no_grad():
            for p, m in zip(model.parameters(), averages, strict=True):
                p.mul_(1 - 1e-3 * 0.1).sub_((0.9 * m + 0.1 * p.grad).sign(), alpha=1e-3)
                m.mul_(0.99).add_(p.grad, alpha=0.01)
                p.grad = None
    for params in results.values():
        for name, p in model.named_parameters():
            torch.testing.assert_close(params[name], p.detach(), rtol=1e-5, atol=1e-6)


def test_the_drawing_has_the_planners_numbers() -> None:
    from vescale.planner import TensorSpec, plan_segment

    drawing = README.read_text().split("## One idea")[1].split("```")[1]
    plan = plan_segment([TensorSpec(name, 600, 600) for name in "qkv"], num_ranks=3)
    numbers = re.findall(r"\d+", drawing.splitlines()[1].removeprefix(" element"))
    assert [int(n) for n in numbers] == [edge for i in range(3) for edge in plan.interval(i)] + [plan.numel]
    assert f"shards of {plan.shard_size}:" in drawing


def test_experts_were_balanced_as_the_table_says() -> None:
    """In every step of the last half of each run, whose loads are kept, and by the numbers shown."""
    table = README.read_text().split("`python tests/bench/experts.py`")[1].split("`python tests/bench/planner.py`")[0]
    runs = json.loads((README.parent / "tests" / "bench" / "experts.json").read_text())["runs"]
    loads = {run["seed"]: run["loads"] for run in runs if run["model"] == "experts"}
    assert loads
    for seed, steps in loads.items():
        assert len(steps) == 250 and max(steps[125:]) <= 2
        (row,) = [line.split("|") for line in table.splitlines() if line.startswith(f"| {seed} ")]
        assert [float(cell) for cell in row[4:6]] == [round(max(steps[at:]), 2) for at in (125, 187)]


def test_the_recipe_composes(tmp_path: Path) -> None:
    from vescale.train import compose

    recipe = _code("Add a recipe", language="yaml")[0]
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(recipe)
    config = compose(["--config-dir", str(tmp_path), "recipe=mine"])
    assert config["trainer"]["steps"] == 100 and "matrices" not in config["optimizer"]


def test_a_rule_of_ones_own_composes(tmp_path: Path) -> None:
    from vescale.train import compose

    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "lion.yaml").write_text(_code("Write a rule", language="yaml")[0])
    config = compose(["--config-dir", str(tmp_path), "optimizer=lion"])
    assert config["optimizer"]["all"]["rule"] == {"_target_": "lion.Lion", "lr": 3e-4}


def test_the_mixture_trains_on_both_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vescale.resolve import resolve
    from vescale.train import compose

    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mixed.yaml").write_text(_code("Data", language="yaml")[0])
    for name in ("web", "code"):
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 9000)
    config = compose(["--config-dir", str(tmp_path), "data=mixed"])["data"]
    data = resolve(config).open()
    assert set(data.validations) == {"web", "code"} and data.train.read(0, 8).labels.shape == (8, 256)
    del config["parts"]["web"]["_target_"]
    with pytest.raises(ValueError, match=r"parts: expected Part, by _target_: vescale\.data\.mixture\.Part, got"):
        resolve(config)


def test_the_map_has_every_file() -> None:
    drawn = README.read_text().split("## Where things are")[1].split("\n## ")[0]
    packages = ("vescale", "optimizers", "models")
    files = {path.stem for name in packages for path in (README.parent / name).glob("*.py")} - {"__init__"}
    assert not {name for name in files if not re.search(rf"\b{name}\b", drawn)}
