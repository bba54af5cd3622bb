"""A folder becomes a recipe that begins from it; problems are one message and leave nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import DeepseekV3Config, LlamaConfig, hf, recipe
from models.decoder import CausalLM
from models.recipe import main
from vescale.export import export
from vescale.train import compose, prepare

CONFIG = DeepseekV3Config(
    vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
    moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1, n_group=2,
    topk_group=1, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    max_position_embeddings=64,
)  # fmt: skip

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
}  # fmt: skip
LLAMA = LlamaConfig(**SMALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = CONFIG.build()
    torch.manual_seed(0)
    model.init_weights()
    with torch.no_grad():
        model.model.layers[1].mlp.gate.e_score_correction_bias.normal_()
    hf.save(model, tmp_path / "source", shard_bytes=30_000)
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    return tmp_path / "source"


def train(where: str, run_dir: str, steps: int) -> None:
    """Trains from an imported folder, its experts dealt, or goes on."""
    trainer = prepare(compose(words(where, run_dir, steps)))
    trainer.check(2)
    trainer.run()


def words(where: str, run_dir: str, steps: int) -> list[str]:
    """The command line."""
    out = ["--config-dir", where, "model=mine", "model.checkpoint=none", "optimizer=muon", f"run_dir={run_dir}"]
    out += ["optimizer.matrices.rule.lr=1e-4", "optimizer.rest.rule.lr=1e-4", "data.seq_len=16", "parallelism.ep=2"]
    out += [f"trainer.steps={steps}", "trainer.global_batch=4", "trainer.eval_sequences=4", "trainer.device=cpu"]
    return [*out, "tracking.mode=disabled"]


def test_a_folder_is_trained_on_and_exported(folder: Path, tmp_path: Path, pool: Any) -> None:
    main(["import", str(folder), str(tmp_path / "recipes"), "--name", "mine"])
    recipes, run = str(tmp_path / "recipes"), str(tmp_path / "run")
    pool(2).run(train, recipes, run, 1)
    folder.rename(tmp_path / "moved")
    pool(2).run(train, recipes, run, 2)  # a run that goes on has its own weights
    with pytest.raises(ValueError, match="source: 1 problem.*nothing was loaded:\n.*expected a folder, there is none"):
        prepare(compose(words(recipes, str(tmp_path / "other"), 1))).check(2)
    (tmp_path / "moved").rename(folder)
    export(tmp_path / "run", tmp_path / "out")
    export(tmp_path / "run", tmp_path / "half", dtype="bfloat16")
    before, after, half = (hf.load(path) for path in (folder, tmp_path / "out", tmp_path / "half"))
    moved = distance(before, after)
    assert 0 < moved < 0.1  # two steps from where it began, and not from anywhere else
    assert distance(after, half) < 0.01
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def distance(one: CausalLM, other: CausalLM) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float(((a - b).norm() / a.norm()).detach()) for a, b in pairs)


def refusal(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 2) -> str:
    """What a command that is refused says: one line, and indented ones if there are several problems."""
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    said = capsys.readouterr().err
    assert stopped.value.code == code and said.count("\n") == 1 + said.count("\n  ")
    return said


def test_all_problems_of_a_folder_are_one_message_and_nothing_is_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = sorted(folder.glob("*.safetensors"))
    tensors = load_file(shards[1])
    lost, renamed = list(tensors)[:2]
    tensors.pop(lost)
    tensors["surprise"] = tensors.pop(renamed)
    save_file(tensors, shards[1], metadata={"format": "pt"})
    shards[-1].write_bytes(shards[-1].read_bytes()[:-7])
    said = refusal(capsys, "import", folder, tmp_path / "recipes")
    assert "nothing was imported" in said
    for piece in (f"missing: {lost}", f"missing: {renamed}", "unexpected: surprise", f"{shards[-1].name}: cannot be"):
        assert piece in said
    assert not (tmp_path / "recipes").exists()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    hf.save(LLAMA.build(), tmp_path / "small")
    return tmp_path / "small"


def test_a_folder_that_is_none_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "gemma"}')
    wrong = {
        "absent": f"{tmp_path / 'absent'}: expected a folder, there is none",
        "file": f"{tmp_path / 'file'}: expected a folder, got a file",
        "empty": "config.json: expected a JSON file, No such file or directory",
        "other": "model_type: expected one of llama, ",
    }
    for name, line in wrong.items():
        said = refusal(capsys, "import", tmp_path / name, tmp_path / "mine")
        assert line in said and said.count("\n") == 1
    assert not (tmp_path / "mine").exists()


def test_a_folder_without_weights_is_one_problem(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (small / "model.safetensors").rename(small / "pytorch_model.bin")
    said = refusal(capsys, "import", small, tmp_path / "mine")
    assert "1 problem(s)" in said and "pytorch_model.bin is a pickle" in said and "missing" not in said


@pytest.mark.parametrize(
    "name", ["", ".", "a/b", "../up", "two words", "a=b", "-m", "a,b", "123", "1e5", "null", "True"]
)
def test_a_name_that_a_command_line_cannot_take_is_refused(
    name: str, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--name: expected" in refusal(capsys, "import", small, tmp_path / "mine", f"--name={name}")
    assert not (tmp_path / "mine").exists()


def test_a_recipe_that_exists_stays(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["import", str(small), str(tmp_path / "mine"), "--name", "Llama-3.1_8B"])
    path = tmp_path / "mine" / "model" / "Llama-3.1_8B.yaml"
    assert compose(["--config-dir", str(tmp_path / "mine"), "model=Llama-3.1_8B", "optimizer.matrices.rule.lr=1",
                    "optimizer.rest.rule.lr=1"])["model"]["weights"] == str(small)  # fmt: skip
    path.write_text("mine")
    said = refusal(capsys, "import", small, tmp_path / "mine", "--name", "Llama-3.1_8B")
    assert f"{path} exists" in said and path.read_text() == "mine"


@pytest.mark.parametrize("below", ["", "deep/er"])
def test_an_out_that_is_a_file_or_below_one_is_one_line(
    below: str, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    assert str(tmp_path / "file") in refusal(capsys, "import", small, tmp_path / "file" / below)
    assert (tmp_path / "file").read_text() == "mine"


def test_ctrl_c_leaves_nothing(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe, "find_weights", stopped)
    assert "nothing was imported" in refusal(capsys, "import", small, tmp_path / "mine", code=130)
    assert not (tmp_path / "mine").exists()


def test_export_is_the_command_of_the_package_that_wrote_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    class Replaced(Exception):
        """By another program: nothing after it runs."""

    def execv(program: str, words: list[str]) -> None:
        raise Replaced(program, words)

    monkeypatch.setattr(recipe.os, "execv", execv)
    with pytest.raises(Replaced) as found:
        main(["export", "runs/a", "out", "--dtype", "bfloat16"])
    words = [sys.executable, "-m", "vescale.export", "runs/a", "out", "--dtype", "bfloat16"]
    assert found.value.args == (sys.executable, words)
