"""A run becomes a folder that transformers opens; whatever is wrong is one line and leaves nothing."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from models import LlamaConfig, hf
from vescale import checkpoint
from vescale import export as command
from vescale.export import main

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
}  # fmt: skip
LLAMA = LlamaConfig(**SMALL)
SETTINGS = {"_target_": "models.LlamaConfig", **SMALL}


def saved(run: Path, step: int = 1, value: float = 1.0, *, tied: bool = False, **settings: Any) -> Path:
    """A whole checkpoint of a small Llama, the weight of its head all ``value``."""
    model = replace(LLAMA, tie_word_embeddings=tied).build()
    torch.nn.init.constant_(model.lm_head.weight, value)
    path = run / "checkpoints" / f"step_{step:08d}"
    state = {f"model.{name}": tensor for name, tensor in model.named_parameters()}  # tied ones once, as runs save them
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=path)
    (run / "config.json").write_text(json.dumps({"model": SETTINGS | settings}))
    seal(path)
    return path


def seal(path: Path) -> None:
    files = {file.name: list(checkpoint.fingerprint(file)) for file in path.iterdir() if file.name != "seal.json"}
    (path / "seal.json").write_text(json.dumps({"extra": {}, "files": files}))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def refusal(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 2) -> str:
    """The one line that a command is refused with."""
    assert main([str(word) for word in words]) == code
    said = capsys.readouterr().err
    assert said.startswith("vescale.export: ") and said.count("\n") == 1
    return said


@pytest.mark.parametrize("chunk", [1, 2**30])
def test_the_newest_checkpoint_is_written_a_chunk_at_a_time(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, 9, 9.0)
    newest = saved(tmp_path, 10, 10.0)
    monkeypatch.setattr(command, "CHUNK_BYTES", chunk)
    assert main([str(tmp_path), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: {LLAMA.num_parameters():,} parameters from {newest}\n"
    model = hf.load(tmp_path / "out", dtype=torch.bfloat16)
    assert model.lm_head.weight.unique().tolist() == [10.0]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    saved(tmp_path, value=3.0, tied=True, tie_word_embeddings=True)
    assert main([str(tmp_path), str(tmp_path / "out")]) == 0
    model = hf.load(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.lm_head.weight.unique().tolist() == [3.0]


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        (None, "but it has no config.json"),
        ("{", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ("[]", "expected a model's configuration, got NoneType"),
        ('{"model": {"_target_": "os.system"}}', "no dataclass 'system' in os"),
        ('{"model": {"_target_": ["models.LlamaConfig"]}}', "no module"),
        ('{"model": {"_target_": "optimizers.AdamW", "rate": 1}}', "unknown key 'model.rate'"),
        ('{"model": {"_target_": "vescale.data.TextData"}}', "expected a model's configuration, got TextData"),
        ('{"model": {"_target_": "models.LlamaConfig"}}', "expected a whole checkpoint step_<number>, found none"),
    ],
)
def test_what_is_no_run_is_not_exported(
    settings: str | None, wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    if settings is not None:
        (run / "config.json").write_text(settings)
    assert wrong in refusal(capsys, run, tmp_path / "deep" / "out")
    assert list(tmp_path.iterdir()) == [run]


def test_a_run_that_is_not_there_or_a_file_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    for name, got in (("absent", "there is none"), ("file", "got a file")):
        said = refusal(capsys, tmp_path / name, tmp_path / "out")
        assert f"{tmp_path / name}: expected the folder of a run, {got}" in said


DAMAGES: dict[str, Callable[[Path], object]] = {
    "checksum of __0_0.distcp differs": lambda path: flip(path / "__0_0.distcp"),
    "checksum of .metadata differs": lambda path: flip(path / ".metadata"),
    ".metadata missing or not of its length": lambda path: os.truncate(path / ".metadata", 40),
    "__0_0.distcp missing or not of its length": lambda path: (path / "__0_0.distcp").unlink(),
    "seal.json": lambda path: (path / "seal.json").write_text("{"),
    "seal.json lacks its entries": lambda path: (path / "seal.json").write_text("[]"),
    "files..metadata of another type": lambda path: (path / "seal.json").write_text(
        '{"extra": {}, "files": {".metadata": 7}}'
    ),
}


@pytest.mark.parametrize("wrong", DAMAGES)
def test_a_checkpoint_that_is_not_as_its_seal_says_is_not_exported(
    wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "below" / "out"
    newer = saved(run, 2, 2.0)
    DAMAGES[wrong](newer)
    said = refusal(capsys, run, out)
    assert "is good" in said and wrong in said and not out.parent.exists()
    saved(run, 1, 1.0)
    assert main([str(run), str(out)]) == 0
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"passed over: checkpoint {newer} is corrupt" in said and wrong in said
    assert hf.load(out).lm_head.weight.unique().tolist() == [1.0]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("content", [b"garbage", pickle.dumps(7), b"", None])
def test_a_checkpoint_that_was_sealed_broken_is_one_line(
    name: str, content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "run")
    (path / name).unlink() if content is None else (path / name).write_bytes(content)
    seal(path)
    assert f"checkpoint {path} cannot be read" in refusal(capsys, tmp_path / "run", tmp_path / "out")
    assert [found.name for found in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"surprise": 1}, "unknown key 'model.surprise'"),
        ({"weights": 7}, "model.weights: expected str | None, got 7"),
        ({"hidden_size": 16}, "is of another model: it lacks model.embed_tokens.weight (64, 16), "),
        ({"num_attention_heads": 3}, "num_attention_heads"),
    ],
)
def test_a_run_of_another_model_is_one_line(
    change: dict[str, Any], wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "run", **change)
    assert wrong in refusal(capsys, tmp_path / "run", tmp_path / "out")
    assert [found.name for found in tmp_path.iterdir()] == ["run"]


def test_an_out_that_cannot_be_is_said_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "run")
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(command.checkpoint, "verify", lambda path: pytest.fail("read"))
    for out in (tmp_path / "file", tmp_path / "file" / "deep" / "er", tmp_path / "run"):
        said = refusal(capsys, tmp_path / "run", out)
        assert "expected a new or empty folder to save to" in said and str(out) in said
    assert (tmp_path / "file").read_text() == "mine" and len(list(tmp_path.iterdir())) == 2


def test_dtypes_and_tokenizer_folders_are_checked_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(command.checkpoint, "verify", lambda path: pytest.fail("read"))
    wrong = {
        ("--dtype", "float16"): "--dtype: expected float32 or bfloat16, got float16",
        ("--like", str(tmp_path / "absent")): f"{tmp_path / 'absent'}: expected a folder, there is none",
        ("--like", str(tmp_path / "file")): f"{tmp_path / 'file'}: expected a folder, got a file",
        ("--like", str(tmp_path / "empty")): "config.json: expected a JSON file, No such file or directory",
    }
    for words, line in wrong.items():
        assert line in refusal(capsys, tmp_path / "run", tmp_path / "out", *words)
    assert not [found for found in tmp_path.iterdir() if "out" in found.name]


def test_a_tokenizer_comes_from_where_the_run_began_and_its_absence_is_said(tmp_path: Path) -> None:
    hf.save(LLAMA.build(), tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    saved(tmp_path / "run", weights=str(tmp_path / "source"))
    assert main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    (tmp_path / "source").rename(tmp_path / "moved")
    (tmp_path / "source").mkdir()  # emptied, as good as gone
    with pytest.warns(UserWarning, match="source, where this model began, is gone"):
        assert main([str(tmp_path / "run"), str(tmp_path / "bare")]) == 0
    assert not (tmp_path / "bare" / "tokenizer.json").exists()


@pytest.mark.parametrize("when", ["fingerprint", "read"])
def test_a_checkpoint_that_the_run_removes_meanwhile_is_passed_over_for_a_newer_one(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    older, plain = saved(tmp_path / "run", 1, 1.0), getattr(checkpoint, when)

    def pruned(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(checkpoint, when, plain)
        saved(tmp_path / "run", 2, 2.0)
        shutil.rmtree(older)
        return plain(*args, **options)

    monkeypatch.setattr(checkpoint, when, pruned)
    assert main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert f"passed over: {older}, which the run has removed meanwhile" in capsys.readouterr().err
    assert hf.load(tmp_path / "out").lm_head.weight.unique().tolist() == [2.0]
    assert sorted(found.name for found in tmp_path.iterdir()) == ["out", "run"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "run")
    plain, before = checkpoint.read, signal.getsignal(signal.SIGTERM)
    was = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored, behind `&`

    def killed(*args: Any, **options: Any) -> None:
        plain(*args, **options)
        assert (tmp_path / "deep" / ".out.partial").is_dir()
        os.kill(os.getpid(), number)

    monkeypatch.setattr(command.checkpoint, "read", killed)
    assert "stopped; nothing was exported" in refusal(capsys, tmp_path / "run", tmp_path / "deep" / "out", code=130)
    signal.signal(signal.SIGINT, was)
    assert [found.name for found in tmp_path.iterdir()] == ["run"]
    assert signal.getsignal(signal.SIGTERM) == before
