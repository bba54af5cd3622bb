"""The commands: a folder becomes a recipe that begins from it, a run becomes a folder; problems leave nothing."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from models import DeepseekV3Config, LlamaConfig, hf
from models.convert import main
from models.decoder import CausalLM
from vescale.checkpoint import fingerprint
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


def train(where: str, run_dir: str) -> None:
    """Two steps from an imported folder, its experts dealt."""
    words = ["model=mine", "model.checkpoint=none", "optimizer=muon", "optimizer.matrices.rule.lr=1e-4"]
    words += ["optimizer.rest.rule.lr=1e-4", "data.seq_len=16", "trainer.steps=2", "trainer.global_batch=4"]
    words += ["trainer.eval_sequences=4", "trainer.device=cpu", "tracking.mode=disabled", "parallelism.ep=2"]
    trainer = prepare(compose(["--config-dir", where, *words, f"run_dir={run_dir}"]))
    trainer.check(2)
    trainer.run()


def test_a_folder_is_trained_on_and_exported(folder: Path, tmp_path: Path, pool: Any) -> None:
    main(["import", str(folder), str(tmp_path / "recipes"), "--name", "mine"])
    pool(2).run(train, str(tmp_path / "recipes"), str(tmp_path / "run"))
    main(["export", str(tmp_path / "run"), str(tmp_path / "out")])
    main(["export", str(tmp_path / "run"), str(tmp_path / "half"), "--dtype", "bfloat16"])
    before, after, half = (hf.load(path) for path in (folder, tmp_path / "out", tmp_path / "half"))
    moved = distance(before, after)
    assert 0 < moved < 0.1  # two steps from where it began, and not from anywhere else
    assert distance(after, half) < 0.01
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def distance(one: CausalLM, other: CausalLM) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float(((a - b).norm() / a.norm()).detach()) for a, b in pairs)


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
    with pytest.raises(SystemExit) as stopped:
        main(["import", str(folder), str(tmp_path / "recipes")])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and "nothing was imported" in said
    for piece in (f"missing: {lost}", f"missing: {renamed}", "unexpected: surprise", f"{shards[-1].name}: cannot be"):
        assert piece in said
    assert not (tmp_path / "recipes").exists()


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        (None, "expected a JSON file"),
        ('{"model": {"_target_": "os.system"}}', "expected a model of this project, got 'os.system'"),
        ('{"model": {"_target_": "models.LlamaConfig"}}', "expected a whole checkpoint"),
    ],
)
def test_what_is_no_run_is_not_exported(
    settings: str | None, wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    if settings is not None:
        (tmp_path / "run" / "config.json").write_text(settings)
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "run"), str(tmp_path / "out")])
    assert wrong in capsys.readouterr().err and not (tmp_path / "out").exists()


def checkpoint(run: Path, step: int, value: float) -> Path:
    """A whole checkpoint of a small Llama, the weight of its head all ``value``."""
    model = LLAMA.build()
    torch.nn.init.constant_(model.lm_head.weight, value)
    path = run / "checkpoints" / f"step_{step:08d}"
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=path)
    (run / "config.json").write_text(json.dumps({"model": {"_target_": "models.LlamaConfig", **SMALL}}))
    seal(path)
    return path


def seal(path: Path) -> None:
    files = {file.name: list(fingerprint(file)) for file in path.iterdir() if file.name != "seal.json"}
    (path / "seal.json").write_text(json.dumps({"extra": {}, "files": files}))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def refusal(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """What a command that is refused says: one line, and indented ones if there are several problems."""
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1 + said.count("\n  ")
    return said


DAMAGES: dict[str, Callable[[Path], object]] = {
    "checksum differs: __0_0.distcp": lambda path: flip(path / "__0_0.distcp"),
    "checksum differs: .metadata": lambda path: flip(path / ".metadata"),
    "not of its length: .metadata": lambda path: os.truncate(path / ".metadata", 40),
    "not of its length: __0_0.distcp": lambda path: (path / "__0_0.distcp").unlink(),
    "expected a JSON file": lambda path: (path / "seal.json").write_text("{"),
    "expected a JSON object": lambda path: (path / "seal.json").write_text("[]"),
    "lists no files": lambda path: (path / "seal.json").write_text('{"extra": {}, "files": {}}'),
    "expected bytes and sha256": lambda path: (path / "seal.json").write_text('{"files": {".metadata": 7}}'),
}


@pytest.mark.parametrize("wrong", DAMAGES)
def test_a_checkpoint_that_is_not_as_its_seal_says_is_not_exported(
    wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "below" / "out"
    newer = checkpoint(run, 2, 2.0)
    DAMAGES[wrong](newer)
    said = refusal(capsys, "export", run, out)
    assert "no checkpoint is good" in said and wrong in said and not out.parent.exists()
    older = checkpoint(run, 1, 1.0)
    main(["export", str(run), str(out)])
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{newer} is corrupt" in said and wrong in said and f"took {older}" in said
    assert hf.load(out).lm_head.weight.unique().tolist() == [1.0]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("content", [b"garbage", pickle.dumps(7), b"", None])
def test_a_checkpoint_that_was_sealed_broken_is_one_line(
    name: str, content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint(tmp_path / "run", 1, 1.0)
    (path / name).unlink() if content is None else (path / name).write_bytes(content)
    seal(path)
    said = refusal(capsys, "export", tmp_path / "run", tmp_path / "out")
    assert "cannot be read" in said or "lists no files" in said
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"surprise": 1}, "LlamaConfig takes no surprise"),
        ({"weights": 7}, "weights: expected None or the path of a folder, got 7"),
        ({"_target_": "models.CausalLMConfig"}, "expected a model of this project"),
        ({"_target_": ["models.LlamaConfig"]}, "expected a model of this project"),
        ({"hidden_size": 16}, "of another model, lacks model.embed_tokens.weight (64, 16), "),
    ],
)
def test_a_run_of_another_model_is_one_line(
    change: dict[str, Any], wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(tmp_path, 1, 1.0)
    fields = {"_target_": "models.LlamaConfig", **SMALL, **change}
    (tmp_path / "config.json").write_text(json.dumps({"model": fields}))
    assert wrong in refusal(capsys, "export", tmp_path, tmp_path / "out")


@pytest.mark.parametrize("below", ["", "deep/er"])
def test_an_out_that_is_a_file_or_below_one_is_one_line(
    below: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "file" / below
    (tmp_path / "file").write_text("mine")
    hf.save(LLAMA.build(), tmp_path / "source")
    checkpoint(tmp_path / "run", 1, 1.0)
    assert str(tmp_path / "file") in refusal(capsys, "import", tmp_path / "source", out)
    assert str(tmp_path / "file") in refusal(capsys, "export", tmp_path / "run", out)
    assert (tmp_path / "file").read_text() == "mine"
