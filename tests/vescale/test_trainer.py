"""The trainer: same numbers however a batch is shared out, all groups on the schedule, no checkpoint of a lost run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from models import LlamaConfig
from optimizers import AdamW, Constant, Linear, Muon
from vescale.data import TextData
from vescale.mesh import ParallelismConfig, pick_device
from vescale.rule import Rules
from vescale.tracking import Tracking, read_metrics
from vescale.trainer import Trainer, TrainerConfig

MODEL = LlamaConfig(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
MUON = ("*_proj.weight", Muon(lr=0.02, ns_dtype=torch.float32, wire_dtype=torch.float32))


def _trainer(run_dir: Path, *, lr: float = 0.01, **options: Any) -> Trainer:
    changed = {"steps": 3, "global_batch": 6, "log_every": 1, "eval_every": 2, "eval_sequences": 5, "save_every": 100}
    config = TrainerConfig(**{**changed, "schedule": Constant(), "device": "cpu", **options})
    return Trainer(
        model=MODEL,
        rules=Rules(matrices=MUON, rest=("*", AdamW(lr=lr))),
        data=TextData(seq_len=16),
        parallelism=ParallelismConfig(),
        trainer=config,
        tracking=Tracking(mode="disabled"),
        run_dir=run_dir,
        settings={"steps": config.steps},
    )


def _train(run_dir: Path, **options: Any) -> float:
    trainer = _trainer(run_dir, **options)
    trainer.check(dist.get_world_size())
    return trainer.run()


def _column(run_dir: Path, key: str) -> list[float]:
    return [row[key] for row in read_metrics(run_dir / "metrics.jsonl") if key in row]


# --- batches ---


def test_losses_do_not_depend_on_how_a_batch_is_shared_out(pool: Any, tmp_path: Path) -> None:
    shares = {"1x6": (1, None), "1x2": (1, 2), "2x3": (2, None), "3x1": (3, 1)}
    for name, (world, micro_batch) in shares.items():
        pool(world).run(_train, tmp_path / name, micro_batch=micro_batch)
    whole = tmp_path / "1x6"
    for name in shares:
        for key in ("loss", "grad_norm", "validation_loss"):
            assert _column(tmp_path / name, key) == pytest.approx(_column(whole, key), rel=1e-5), (name, key)
        assert _column(tmp_path / name, "tokens") == _column(whole, "tokens")
    assert _column(whole, "loss")[-1] < _column(whole, "loss")[0]


def _validation_of_an_untrained_model(run_dir: Path) -> tuple[float, int]:
    """From the trainer, and from its definition on one process."""
    trainer = _trainer(run_dir)
    trainer.check(dist.get_world_size())
    trainer._start()
    batch = trainer.data.validation.read(0, 5)
    torch.manual_seed(0)
    model = MODEL.build()
    model.init_weights()
    with torch.no_grad():
        expected = model(batch.input_ids, batch.labels) / (batch.labels != -100).sum()
    return trainer.evaluate(), float(expected)


def test_validation_counts_each_sequence_once(pool: Any, tmp_path: Path) -> None:
    for world in (1, 2):  # 5 sequences: on 2 ranks the last batch is cut short and one is empty
        for loss, expected in pool(world).run(_validation_of_an_untrained_model, tmp_path):
            assert loss == pytest.approx(expected, rel=1e-6)


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


def test_a_resumed_run_on_other_ranks_goes_on_with_the_same_losses(pool: Any, tmp_path: Path) -> None:
    schedule = Linear(total_steps=6)
    for folder, world, steps in (("whole", 1, 6), ("parts", 2, 3), ("parts", 3, 6)):
        pool(world).run(_train, tmp_path / folder, steps=steps, schedule=schedule, eval_every=100)
    whole, parts = (_column(tmp_path / folder, "loss") for folder in ("whole", "parts"))
    assert len(whole) == 6 and parts == pytest.approx(whole, rel=1e-5)
    assert _column(tmp_path / "parts", "lr/rest") == _column(tmp_path / "whole", "lr/rest")


# --- when things go wrong ---


def _lost_run(run_dir: Path) -> str:
    with pytest.raises(RuntimeError) as caught:
        _train(run_dir, lr=1e30, max_grad_norm=None, log_every=100, eval_every=100, save_every=1)
    return str(caught.value)


def test_a_run_whose_loss_is_lost_stops_and_keeps_its_good_checkpoints(pool: Any, tmp_path: Path) -> None:
    messages = pool(2).run(_lost_run, tmp_path)
    assert messages[0].startswith("step 2: expected finite loss and gradient norm, got ")
    assert messages[0].endswith("nan; not saved")
    assert messages[0] == messages[1]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


def _different_settings(run_dir: Path) -> str:
    trainer = _trainer(run_dir)
    trainer.settings["steps"] = dist.get_rank()
    with pytest.raises(RuntimeError) as caught:
        trainer._start()
    return str(caught.value)


def test_ranks_with_different_configurations_do_not_start(pool: Any, tmp_path: Path) -> None:
    for message in pool(2).run(_different_settings, tmp_path):
        assert message.startswith("the configuration differs between ranks (rank 0: ")


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
    with pytest.raises(NotImplementedError, match="several copies of the model are not built"):
        ParallelismConfig(dp_shard=4).check(8)
    with pytest.raises(ValueError, match="expected auto, cpu or cuda, got 'gpu'"):
        pick_device("gpu")


# --- the dry run ---


def _planned(run_dir: Path) -> tuple[str, str]:
    dry = _trainer(run_dir).describe(dist.get_world_size())
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


def test_the_end_of_a_run_says_where_it_is_and_what_to_try(pool: Any, tmp_path: Path) -> None:
    printed = pool(2).run(_output_of_a_run, tmp_path)
    lines = printed[0].splitlines()
    assert lines[-5].startswith("validation loss ") and lines[-5].endswith(f"run folder {tmp_path}")
    assert lines[-4] == "next:" and all(" -m vescale.train " in line for line in lines[-3:])
    assert sum(line.startswith("step ") and "tokens/s" in line for line in lines) == 3
    assert printed[1] == ""  # only rank 0 speaks
    loss = float(lines[-5].split()[2])
    assert 0 < loss < math.log(320) + 0.5


def _output_of_a_run(run_dir: Path) -> str:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        _train(run_dir)
    return out.getvalue()
