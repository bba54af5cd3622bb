"""The command that plans: every recipe at every size, figures that belong together, and one line for bad input."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from composing import composed
from rich.console import Console

import recipes
from vescale import plan
from vescale.tables import show

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.stem for path in (Path(recipes.__file__).parent / "recipe").glob("*.yaml"))
# Equal layers cost alike, so recipes are planned with few of them; tests/bench/plan.py plans all of them whole, and so
# does the test below of seventy billion parameters.
LAYERS = 5  # DeepSeek-V3's first three are dense


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)


def _figures(*argv: str) -> dict[str, Any]:
    return plan.figures(composed(*argv, command="plan"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_at_every_size(recipe: str) -> None:
    config = composed(f"recipe={recipe}", f"model.num_hidden_layers={LAYERS}", command="plan")
    small = plan.figures({**config, "world_size": 8})
    sizes = [64, 1024] + [10_240] * (small["model"]["parameters"] >= 1e9)
    states = [small["memory"]["most"]["parameters"]]
    for known in (small, *(plan.figures({**config, "world_size": size}) for size in sizes)):
        assert json.loads(json.dumps(known)) == known
        _belongs_together(known)
        states.append(known["memory"]["most"]["parameters"])
    assert states[1:] == sorted(states[1:], reverse=True)  # fewer parameters a rank, the more ranks


def _belongs_together(known: dict[str, Any]) -> None:
    memory, traffic, ranks = known["memory"], known["communication"], known["model"]["ranks"]
    assert known["model"]["padding"] <= 0.01 or known["model"]["parameters"] < 1e9
    for stage in memory["stages"].values():
        assert stage["peak"] == sum(stage["parts"].values()) == memory["available"] - stage["margin"]
        assert stage["fits"] == (stage["margin"] >= 0)
    assert memory["checkpointing"][memory["configured"]] == memory["stages"]["3"]["peak"]
    assert memory["checkpointing"]["full"] <= memory["checkpointing"]["none"]
    fit = memory["batch"][memory["configured"]]
    if fit:
        assert fit["micro_batch"] * fit["accumulation"] * ranks == memory["batch"]["global_sequences"]
    assert traffic["seconds"] == pytest.approx(traffic["hidden_seconds"] + traffic["exposed_seconds"])
    assert 0 <= traffic["exposed"] <= traffic["exposed_without_overlap"] < 1
    assert 0 < traffic["model_flop_utilisation"] < 0.4  # the profile's assumption, less recomputation and waiting
    text = io.StringIO()
    show(known, Console(file=text, width=140))
    for heading in ("Model", "Memory", "Communication", "Optimizer", "Pipeline", "Advice", "Assumptions"):
        assert f"\n{heading}\n" in text.getvalue()


@pytest.fixture(scope="module")
def seventy() -> dict[str, Any]:
    """The README's plan."""
    return _figures("recipe=llama70b_muon", "world_size=64", "device_memory=80GB", "machine=h100")


def test_the_readme_shows_what_is_printed(seventy: dict[str, Any]) -> None:
    text = io.StringIO()
    show(seventy, Console(file=text, width=120))
    printed = [line.rstrip() for line in text.getvalue().splitlines()]
    excerpt = (ROOT / "README.md").read_text().split("\n## Plan before you rent\n")[1].split("```")[3].strip()
    places = [printed.index(line) for line in excerpt.splitlines()]
    assert len(places) > 10 and places == sorted(places)


def test_what_a_table_says_is_explained_below_it(seventy: dict[str, Any]) -> None:
    text = io.StringIO()
    show(seventy, Console(file=text, width=1000))
    for word in ("Adam's states:", "peak:", "gathered units:", "gradients in flight:", "block:", "owner is"):
        assert word in text.getvalue()


def test_seventy_billion_parameters_on_64_cards(seventy: dict[str, Any]) -> None:
    known = seventy
    assert known["model"]["parameters"] == 70_553_706_496
    assert known["model"]["flops_per_token"] == pytest.approx(481.4e9, rel=1e-3)
    # 1129 / 295 / 156 / 17.6 GB of Adam's states (arXiv 1910.02054); Muon keeps one moment instead of two.
    books = [stage["textbook_states"] / 1e9 for stage in known["memory"]["stages"].values()]
    assert books == pytest.approx([1128.9, 295.4, 156.5, 17.6], abs=0.1)
    states = known["memory"]["most"]
    assert states["parameters"] + states["gradients"] + states["optimizer state"] == pytest.approx(13.4e9, rel=0.01)
    assert known["memory"]["stages"]["3"]["fits"] and not known["memory"]["stages"]["2"]["fits"]
    owner, kept, gathered = known["optimizer"]["ways"]
    assert [way["way"] for way in known["optimizer"]["ways"]] == [
        "cut blocks to an owner",
        "no block cut",
        "gather every block",
    ]
    # Everybody computing every matrix is 64 times the work; keeping each whole is 16 times the memory.
    assert gathered["flops_per_rank"] == pytest.approx(64 / known["optimizer"]["balance"] * owner["flops_per_rank"])
    assert known["optimizer"]["balance"] < 1.1 and "1607.5% padding" in kept["note"]
    bubbles = {(row["name"], row["micro_batches"]): f"{row['bubble']:.1%}" for row in known["pipeline"]}
    assert (bubbles["1F1B", 8], bubbles["1F1B", 64]) == ("46.7%", "9.9%")
    verdicts = [advice["verdict"] for advice in known["advice"]["decisions"]]
    assert verdicts == [*["not enough"] * 3, "as configured", "as configured", "no", "no", "no", "no"]
    assert known["advice"]["conclusion"].startswith(
        "it fits, and nothing is to change: the worst moment holds 50.97 GB"
    )


def test_a_model_that_fits_on_one_card_is_told_so() -> None:
    known = _figures("recipe=llama_debug_adamw", "world_size=2", "machine=a100")
    first, *others = known["advice"]["decisions"]
    assert (first["verdict"], first["change"]) == ("yes", "parallelism.zero=0")
    assert {advice["verdict"] for advice in others} == {"no"}
    told = _figures("recipe=llama_debug_adamw", "world_size=2", "machine=a100", "parallelism.zero=0")["advice"]
    assert told["conclusion"].startswith("it fits, and nothing is to change")
    assert (told["decisions"][0]["verdict"], told["decisions"][0]["change"]) == ("as configured", "")


def test_a_layer_too_large_for_a_card_is_told_to_be_split() -> None:
    known = _figures("recipe=llama70b_muon", "world_size=8", "device_memory=8GB")
    decisions, conclusion = known["advice"]["decisions"], known["advice"]["conclusion"]
    assert not [advice for advice in decisions if advice["change"]]
    missing = [advice["question"] for advice in decisions if advice["verdict"].endswith("vescale cannot do it yet")]
    assert missing == ["tensor parallel"] and "it would take tensor parallel, or larger devices" in conclusion
    assert known["memory"]["batch"]["full"] is None and known["memory"]["stages"]["3"]["margin"] < 0


def test_copies_of_the_model_are_reduced_over_too() -> None:
    """HSDP: 64 ranks as 8 copies on 8 ranks each; a copy lies in a node, gradients are summed between nodes."""
    one, eight = (_figures("recipe=llama8b_muon", "world_size=64", f"parallelism.dp_shard={n}") for n in (-1, 8))
    lines = [{line["what"]: line for line in known["communication"]["lines"]} for known in (one, eight)]
    assert eight["memory"]["most"]["parameters"] == pytest.approx(8 * one["memory"]["most"]["parameters"], rel=0.01)
    assert lines[1]["parameters, forward"]["seconds"] < lines[0]["parameters, forward"]["seconds"]
    copies = lines[1]["gradients, over copies"]
    assert "gradients, over copies" not in lines[0] and copies["collective"] == "all_reduce"
    assert copies["nbytes"] == pytest.approx(lines[1]["gradients"]["nbytes"] / 8)


def test_stage_0_sums_gradients_and_gathers_nothing() -> None:
    known = _figures("recipe=llama_debug_adamw", "world_size=8", "parallelism.zero=0")
    lines = {line["what"]: line for line in known["communication"]["lines"]}
    assert lines["gradients, over copies"]["nbytes"] == pytest.approx(4 * known["model"]["parameters"], rel=0.002)
    assert "parameters, forward" not in lines and lines["gradients"]["seconds"] == 0.0
    assert known["memory"]["most"]["optimizer state"] == pytest.approx(8 * known["model"]["parameters"], rel=0.002)


def test_more_ranks_than_sequences_is_an_assumption_that_is_listed() -> None:
    known = _figures("recipe=llama_debug_adamw", "world_size=64")
    assert "global_batch=8 is less than a sequence for each of 64 ranks" in known["assumptions"][0]
    assert known["memory"]["batch"]["global_sequences"] == 64


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["data.seq_len=0"], "data.seq_len: expected at least 1, got 0"),
        (["world_size=2", "rank=2"], r"rank: expected a number in \[0, 2\), got 2"),
        (["world_size=0"], "world_size: expected null or a number > 0, got 0"),
        (["world_size=8", "parallelism.dp_shard=3"], "parallelism.dp_shard=3 does not divide 8 ranks"),
        (["world_size=3"], "trainer.global_batch=8 does not divide over 3 ranks"),
        (
            ["machine=h1000"],
            "unknown machine 'h1000': choose from a100, b200, ethernet, h100, h200 -- did you mean h100?",
        ),
        (["machine.bandwidth=1"], "unknown key 'machine.bandwidth': choose from .*bandwidth_inside"),
        (["machine.devices=0"], "machine: devices: expected a number > 0, got 0"),
        (["device_memory=80XB"], "device_memory: expected a size such as 80GB or 80GiB, got '80XB'"),
        (["reserve=2"], "reserve: expected a fraction"),
        (["format=xml"], "format: expected .*table.*json.*, got 'xml'"),
        (["simulate=true", "rank=9", "world_size=8"], r"rank: expected a number in \[0, 8\), got 9"),
        (["recipe=nope"], "unknown recipe 'nope': choose from .*llama70b_muon"),
        (["memory=80GB"], "unknown key 'memory': choose from .*device_memory"),
        (["world_size=-8"], "world_size: expected null or a number > 0, got -8"),
        (["world_size=many"], "world_size: expected .*, got 'many'"),
        (["world_size=8", "parallelism.dp_shard=-2"], "dp_shard: expected -1 or a number of ranks, got -2"),
        (["parallelism.zero=4"], "zero: expected 0, 1, 2 or 3, got 4"),
        (["device_memory=80GX"], "device_memory: expected a size such as 80GB or 80GiB, got '80GX'"),
        (
            ["recipe=moe_debug_muon", "world_size=24", "parallelism.ep=24"],
            "ep=24 does not divide 16 experts",
        ),
        (["recipe=moe_debug_muon", "world_size=4", "parallelism.ep=2", "simulate=true"], "ep=2 values decide how many"),
        (
            ["recipe=moe_debug_muon", "world_size=2", "parallelism.ep=2", "capacity=[1,2]"],
            "planned with ep=2; use ep=1",
        ),
        (["recipe=moe_debug_muon", "simulate=true"], "simulate: torch's made-up grouped products are of bf16"),
        (
            ["recipe=llama_debug_shampoo", "simulate=true", "world_size=2", "model.num_hidden_layers=1"],
            "simulate: made-up tensors have no values, .*Shampoo.block",
        ),
        (["-m", "machine=h100,a100"], "expected one configuration, got 2"),
        (["world_size=4", "capacity=[1,2]"], "capacity: expected one for each of 4 ranks, got 2"),
        (["world_size=2", "capacity=[1,0]"], "capacity: rank 1: expected a positive integer or Fraction, got 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv: list[str], line: str, capsys: Any, tmp_path: Path) -> None:
    assert plan.main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("vescale.plan: ") and printed.err.count("\n") == 1
    assert re.search(line, printed.err), printed.err
    assert list(tmp_path.iterdir()) == []


def test_unequal_ranks_hold_what_their_memories_are_to_each_other() -> None:
    known = _figures("world_size=4", "capacity=[1,1,2,4]")["unequal ranks"]
    first, second, third, fourth = known["elements"]
    assert first == second and third == 2 * first and fourth == 4 * first
    assert sum(known["elements"]) == pytest.approx(1_066_368 * (1 + known["padding"]))
    assert known["padding"] < 0.01


def test_a_number_of_ranks_may_be_written_as_a_power_of_ten() -> None:
    assert _figures("world_size=1e1")["model"]["ranks"] == 10


def test_a_step_takes_the_optimizers_time_too() -> None:
    known = _figures("recipe=llama70b_muon", "model.num_hidden_layers=2", "world_size=64")
    times, owner = known["communication"], known["optimizer"]["ways"][0]
    parts = times["compute_seconds"] + times["exposed_seconds"] + times["optimizer_seconds"]
    assert times["step_seconds"] == pytest.approx(parts)
    assert times["optimizer_seconds"] == pytest.approx(
        owner["compute_seconds"] + known["optimizer"]["elementwise_seconds"]
    )


def test_the_command_from_any_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "vescale.plan", "world_size=4", "format=json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["ranks"] == 4 and list(tmp_path.iterdir()) == []
