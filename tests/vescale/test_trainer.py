"""The trainer: same numbers however a batch is shared out, all groups on the schedule, no checkpoint of a lost run."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from waiting import free_port

from models import LlamaConfig
from models.hf import load
from optimizers import AdamW, Constant, Linear, Muon
from vescale.data import TextData, num_labels
from vescale.mesh import ParallelismConfig, pick_device, process_group
from vescale.tracking import Tracking, read_metrics
from vescale.train import describe
from vescale.trainer import RunConfig, Trainer, TrainerConfig

MODEL = LlamaConfig(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
MUON = {"pattern": "*_proj.weight", "rule": Muon(lr=0.02, ns_dtype=torch.float32, wire_dtype=torch.float32)}


def _trainer(
    run_dir: Path,
    *,
    lr: float = 0.01,
    parallelism: ParallelismConfig = ParallelismConfig(),  # noqa: B008
    **options: Any,
) -> Trainer:
    changed = {"steps": 3, "global_batch": 6, "log_every": 1, "eval_every": 2, "eval_sequences": 5, "save_every": 100}
    config = TrainerConfig(**{**changed, "schedule": Constant(), "device": "cpu", **options})
    run = RunConfig(
        name=run_dir.name,
        run_dir=run_dir,
        model=MODEL,
        optimizer={"matrices": MUON, "rest": {"pattern": "*", "rule": AdamW(lr=lr)}},
        data=TextData(seq_len=16),
        parallelism=parallelism,
        trainer=config,
        tracking=Tracking(mode="disabled"),
    )
    return Trainer(run, settings={"steps": config.steps})


def _train(run_dir: Path, **options: Any) -> float:
    trainer = _trainer(run_dir, **options)
    trainer.check(dist.get_world_size())
    return trainer.run()


def _column(run_dir: Path, key: str) -> list[float]:
    return [row[key] for row in read_metrics(run_dir / "metrics.jsonl") if key in row]


def test_the_first_step_is_logged_too(pool: Any, tmp_path: Path) -> None:
    pool(1).run(_train, tmp_path, steps=5, log_every=2, eval_every=100)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl") if "loss" in row] == [1, 2, 4]


# --- batches ---


def test_losses_do_not_depend_on_how_a_batch_is_shared_out(pool: Any, tmp_path: Path) -> None:
    shares = {"1x6": (1, None, 0), "1x2": (1, 2, 1e-6), "2x3": (2, None, 1e-5), "3x1": (3, 1, 1e-5)}
    for name, (world, micro_batch, _) in shares.items():
        pool(world).run(_train, tmp_path / name, micro_batch=micro_batch)
    whole = tmp_path / "1x6"
    for name, (_, _, tolerance) in shares.items():
        for key in ("loss", "grad_norm", "validation_loss"):
            assert _column(tmp_path / name, key) == pytest.approx(_column(whole, key), rel=tolerance), (name, key)
        assert _column(tmp_path / name, "tokens") == _column(whole, "tokens")
    assert _column(whole, "loss")[-1] < _column(whole, "loss")[0]


@pytest.mark.parametrize(
    "options", [{"dp_shard": 2}, {"zero": 0}, {"zero": 1}, {"zero": 2}, {"dp_shard": 2, "zero": 1}]
)
def test_losses_do_not_depend_on_copies_nor_on_the_stage(
    pool: Any, tmp_path: Path, one: Path, options: dict[str, int]
) -> None:
    pool(4).run(_train, tmp_path, parallelism=ParallelismConfig(**options), **EIGHT)
    for key in ("loss", "grad_norm", "validation_loss"):
        assert _column(tmp_path, key) == pytest.approx(_column(one, key), rel=1e-5)


EIGHT = {"global_batch": 8, "micro_batch": 1}


@pytest.fixture(scope="module")
def one(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank."""
    folder = tmp_path_factory.mktemp("one")
    pool(1).run(_train, folder, **EIGHT)
    return folder


def _first_losses(run_dir: Path, text: str, documents_apart: bool) -> dict[str, tuple[float, float]]:
    """Of an untrained model: what the trainer says, and the definition on one process."""
    trainer = _trainer(run_dir)
    trainer.data_config = TextData(path=text, seq_len=16, documents_apart=documents_apart, validation={"again": text})
    trainer.check(dist.get_world_size())
    trainer._start()
    torch.manual_seed(0)
    model = MODEL.build()
    model.init_weights()
    validation = float(_loss_per_token(model, trainer.data.validation.read(0, 5)).detach())
    named = float(_loss_per_token(model, trainer.data.named["again"].read(0, 5)).detach())
    loss = _loss_per_token(model, trainer.data.train.read(0, 6))
    loss.backward()
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
    evaluated = trainer.evaluate()
    stepped, clipped = trainer.train_step()
    return {
        "validation": (evaluated["validation_loss"], validation),
        "named validation": (evaluated["validation_loss/again"], named),
        "loss": (float(stepped), float(loss.detach())),
        "norm": (float(clipped), float(norm)),
    }


def _loss_per_token(model: Any, batch: Any) -> torch.Tensor:
    return model(batch.input_ids, batch.labels) / num_labels(batch.labels)


@pytest.mark.parametrize("world", [1, 2, 3])  # 5 validation sequences: 5, or 3 and 2, or 2 and 2 and 1
@pytest.mark.parametrize("documents_apart", [False, True])
def test_a_loss_is_the_sum_over_the_labels_that_count(
    pool: Any, tmp_path: Path, world: int, documents_apart: bool
) -> None:
    text = tmp_path / "short.txt"  # a document's first token is no label: the ranks have different numbers of labels
    text.write_text("".join("abcdefgh"[: 1 + i % 5] * (i % 7) + "\f" for i in range(500)))
    for found in pool(world).run(_first_losses, tmp_path / "run", str(text), documents_apart):
        for name, (got, expected) in found.items():
            assert got == pytest.approx(expected, rel=2e-6), name


@pytest.mark.parametrize(
    ("world", "micro_batch", "expected"), [(1, None, (1, 12)), (4, None, (1, 3)), (3, 2, (2, 2)), (12, 1, (1, 1))]
)
def test_a_batch_is_shared_out_evenly(world: int, micro_batch: int | None, expected: tuple[int, int]) -> None:
    config = TrainerConfig(steps=1, global_batch=12, micro_batch=micro_batch, schedule=Constant())
    assert config.micro_batches(world) == expected


def test_what_does_not_divide_is_refused() -> None:
    config = TrainerConfig(steps=1, global_batch=12, micro_batch=4, schedule=Constant())
    with pytest.raises(ValueError, match="global_batch=12 does not divide over 5 ranks"):
        config.micro_batches(5)
    with pytest.raises(ValueError, match=r"micro_batch=4 does not divide the 6 sequences of a rank \(global_batch=12"):
        config.micro_batches(2)
    with pytest.raises(ValueError, match="steps: .* got 0; keep: .* got -1; max_grad_norm: expected null .* got 0.0"):
        TrainerConfig(steps=0, global_batch=1, keep=-1, max_grad_norm=0.0, schedule=Constant())


# --- the schedule ---


def test_every_group_follows_the_schedule_from_its_own_rate(pool: Any, tmp_path: Path) -> None:
    pool(1).run(_train, tmp_path, schedule=Linear(total_steps=3))
    scales = [Linear(total_steps=3).scale(step) for step in range(3)]
    assert _column(tmp_path, "lr/matrices") == pytest.approx([0.02 * scale for scale in scales])
    assert _column(tmp_path, "lr/rest") == pytest.approx([0.01 * scale for scale in scales])


@pytest.mark.parametrize(("world", "options"), [(1, {}), (2, {"zero": 1}), (3, {"zero": 0}), (8, {"dp_shard": 4})])
def test_a_run_of_four_ranks_goes_on_with_the_same_losses_on_any_ranks_stage_and_copies(
    pool: Any, tmp_path: Path, four: tuple[Path, list[float], list[float]], world: int, options: dict[str, int]
) -> None:
    folder, losses, rates = four
    shutil.copytree(folder, tmp_path / "run")
    pool(world).run(_train, tmp_path / "run", parallelism=ParallelismConfig(**options), **TEN)
    found = _column(tmp_path / "run", "loss")
    assert len(found) == 10 and found[:4] == losses[:4] and found[4] == pytest.approx(losses[4], rel=1e-5)
    assert found == pytest.approx(losses, rel=1e-3) and _column(tmp_path / "run", "lr/rest") == rates


TEN: dict[str, Any] = {"steps": 10, "global_batch": 24, "schedule": Linear(total_steps=10), "eval_every": 100}


@pytest.fixture(scope="module")
def four(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], list[float]]:
    """A run of four steps on four ranks; losses and learning rates of one that went on to the tenth."""
    folder = tmp_path_factory.mktemp("four")
    pool(4).run(_train, folder / "whole", **TEN)
    pool(4).run(_train, folder / "begun", **TEN | {"steps": 4})
    return folder / "begun", _column(folder / "whole", "loss"), _column(folder / "whole", "lr/rest")


# --- when things go wrong ---


def _lost_run(run_dir: Path) -> str:
    with pytest.raises(RuntimeError) as caught:
        _train(run_dir, lr=1e30, max_grad_norm=None, log_every=100, eval_every=100, save_every=1)
    return str(caught.value)


def test_a_run_whose_loss_is_lost_stops_and_keeps_its_good_checkpoints(pool: Any, tmp_path: Path) -> None:
    messages = pool(2).run(_lost_run, tmp_path)
    assert messages[0].startswith("step 2: expected finite loss and gradient norm, got ")
    assert re.search(
        "nan; the gradient of model.layers.1.mlp.gate_proj.weight is the first that is not finite", messages[0]
    )
    assert messages[0] == messages[1]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


def _different_settings(run_dir: Path) -> list[str]:
    """What a rank says of other settings than another's, and of other data in the same place."""
    said = []
    for kind in ("settings", "data"):
        trainer = _trainer(run_dir)
        trainer.check(dist.get_world_size())
        if kind == "settings":
            trainer.settings["steps"] = dist.get_rank()
        else:
            trainer.data = TextData(seq_len=16, seed=dist.get_rank()).open()
        with pytest.raises(RuntimeError) as caught:
            trainer._start()
        said.append(str(caught.value))
    return said


def test_ranks_with_different_configurations_or_data_do_not_start(pool: Any, tmp_path: Path) -> None:
    for settings, data in pool(2).run(_different_settings, tmp_path):
        assert settings.startswith("the configuration differs between ranks (rank 0: ")
        assert data.startswith("what lies at shakespeare differs between ranks (rank 0: ")


def test_input_that_cannot_work_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for options, line in (({"val_fraction": 0}, "nothing to validate on"), ({"path": "no.txt"}, "'no.txt' is no file")):
        trainer = _trainer(tmp_path / "run")
        trainer.data_config = TextData(seq_len=16, **options)
        with pytest.raises(ValueError, match=line):
            trainer.check(1)
    with pytest.raises(ValueError, match="global_batch=6 does not divide over 4 ranks"):
        _trainer(tmp_path / "run").check(4)
    assert all(parameter.is_meta for parameter in trainer.model.parameters())
    assert not (tmp_path / "run").exists() and not dist.is_initialized()


def test_parallelism_names_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="dp_shard: .* got 0; zero: .* got 4; max_padding: .* got -1.0"):
        ParallelismConfig(dp_shard=0, zero=4, max_padding=-1.0)
    with pytest.raises(ValueError, match="dp_shard=3 does not divide 8 ranks"):
        ParallelismConfig(dp_shard=3).check(8)
    with pytest.raises(NotImplementedError, match="ep=2 with dp_shard=4 of 8 ranks: experts are dealt in one copy"):
        ParallelismConfig(dp_shard=4, ep=2).check(8)
    with pytest.raises(ValueError, match="expected auto, cpu or cuda, got 'gpu'"):
        pick_device("gpu")


# --- the dry run ---


def _planned(run_dir: Path) -> tuple[str, str]:
    dry = describe(_trainer(run_dir), dist.get_world_size())
    trainer = _trainer(run_dir)
    trainer.check(dist.get_world_size())
    trainer._start()
    return dry, "\n".join(str(segment.plan) for unit in trainer.model.units() for segment in unit.segments)


def test_a_dry_run_prints_the_plans_of_the_run(pool: Any, tmp_path: Path) -> None:
    dry, plans = pool(3).run(_planned, tmp_path)[0]
    tables = plans.split("segment of ")[1:]
    first_layer = next(table for table in tables if "layers.0." in table)
    assert first_layer.strip() in dry and "2 x unit like model.layers.0" in dry and "1 x unit like the root" in dry
    assert f"{MODEL.num_parameters():,} parameters" in dry


LINE = (
    r"step (\d)/3  loss \d\.\d{4}  norm \d+\.\d{3}  lr 0\.02/0\.01  [\d,]+ tok/s  \S+ TFLOP/s  MFU n/a  "
    r"\d+\.\d\d GiB  data \d+\.\d%"
)


def test_a_run_says_what_it_does_and_where_it_is(pool: Any, tmp_path: Path) -> None:
    printed = pool(2).run(_output_of_a_run, tmp_path)
    lines = printed[0].splitlines()
    assert lines[-1].startswith("validation loss ") and lines[-1].endswith(f"after 3 steps; run folder {tmp_path}")
    assert [match[1] for match in map(re.compile(LINE).fullmatch, lines) if match] == ["1", "2", "3"]
    assert any(line.startswith("step 2/3  validation loss ") for line in lines)
    assert f"metrics: {tmp_path / 'metrics.jsonl'}; metrics.jsonl only" in lines
    assert printed[1] == ""  # only rank 0 speaks
    assert 0 < float(lines[-1].split()[2]) < math.log(320) + 0.5


def test_a_row_has_every_number_of_its_step(pool: Any, tmp_path: Path) -> None:
    pool(2).run(_train, tmp_path)
    rows = list(read_metrics(tmp_path / "metrics.jsonl"))
    speeds = ["tokens_per_second", "memory_gib", "tflops_per_device", "step_seconds", "data_wait"]
    measured = ["loss", "grad_norm", *speeds, "lr/matrices", "lr/rest"]
    assert [list(row) for row in rows if "loss" in row] == [["step", "tokens", *measured]] * 3
    looks = [row for row in rows if "loss" not in row]
    assert [list(row) for row in looks] == [["step", "tokens", "validation_loss"]] * 2
    assert [row["step"] for row in looks] == [2, 3]
    assert json.loads((tmp_path / "config.json").read_text()) == {"steps": 3}


def _output_of_a_run(run_dir: Path) -> str:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        _train(run_dir)
    return out.getvalue()


# --- ranks ---


def _one_rank_fails(port: int) -> str:
    """In a group of its own: rank 1 raises while rank 0 waits for it; returns how rank 0 learnt of it."""
    rank, device = dist.get_rank(), torch.device("cpu")
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    with pytest.raises(RuntimeError) as caught, process_group(device):
        if rank == 1:
            raise RuntimeError("the data are gone")
        dist.all_reduce(torch.ones(1))
    assert not dist.is_initialized()
    return str(caught.value)


def test_a_rank_that_fails_ends_the_others(pool: Any) -> None:
    ranks = Pool(2)  # one of its own, since the group that it had is gone
    try:
        began = time.monotonic()
        messages = ranks.run(_one_rank_fails, free_port())
        assert messages[1] == "the data are gone" and "onnection" in messages[0]  # gloo: closed, or reset by peer
        assert time.monotonic() - began < 30  # seconds; left alone, rank 0 would wait for half an hour
    finally:
        ranks.stop()


def test_the_weights_are_exported_at_the_end_once(pool: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pool(2).run(_train, tmp_path / "run", export=str(out))
    found = load(out, dtype=torch.float32)
    assert sum(p.numel() for p in found.parameters()) == MODEL.num_parameters()
    assert all(p.isfinite().all() for p in found.parameters())
    pool(2).run(_train, tmp_path / "run", export=str(out))  # complete: it goes on from nothing, and leaves the folder
    with pytest.raises(ValueError, match="trainer.export: expected a new or empty folder, got .*out, which exists"):
        _trainer(tmp_path / "other", export=str(out)).check(2)
