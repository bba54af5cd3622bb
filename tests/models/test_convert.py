"""The commands: a folder becomes a recipe that begins from it, a run becomes a folder; problems leave nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import DeepseekV3Config, hf
from models.convert import main
from models.decoder import CausalLM
from vescale.train import compose, prepare

CONFIG = DeepseekV3Config(
    vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
    moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1, n_group=2,
    topk_group=1, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    max_position_embeddings=64,
)  # fmt: skip


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
