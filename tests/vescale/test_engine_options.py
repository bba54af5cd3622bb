"""Engine options of a command line: the same losses with shared blocks, state in host memory, steps in backward."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from optimizers import Muon
from vescale import train
from vescale.stop import Stopped
from vescale.tracking import read_metrics
from vescale.trainer import Trainer

SHORT = (
    *("model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=2", "data.seq_len=16"),
    *("trainer.steps=3", "trainer.log_every=1", "trainer.eval_sequences=4", "trainer.global_batch=4"),
    *("trainer.device=cpu", "trainer.max_grad_norm=null", "tracking.mode=disabled"),
)


def _ran(argv: list[str]) -> dict[str, Any]:
    """What the command's own trainer was made of, and what its steps did on this rank."""
    found: dict[str, Any] = {"blocks": 0, "gradients": []}
    step, block = Trainer.train_step, Muon.block

    def stepped(self: Trainer) -> Any:
        stop = self.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: _see(self, found))
        try:
            return step(self)
        finally:
            stop.remove()

    def counted(self: Muon, payloads: Any, state: Any) -> Any:
        found["blocks"] += len(payloads[0])
        return block(self, payloads, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", stepped)
        patch.setattr(Muon, "block", counted)
        assert train.main(argv) == 0
    return found


def _see(trainer: Trainer, found: dict[str, Any]) -> None:
    """Before a step: gradient shards that live, and whether state is fetched for each step."""
    found["gradients"].append(sum(s.grad is not None for unit in trainer.model.units() for s in unit.segments))
    found["offloaded"] = all(run.offloaded for run in trainer.optimizer.runs)


def _column(run_dir: Path, key: str) -> list[float]:
    return [row[key] for row in read_metrics(run_dir / "metrics.jsonl") if key in row]


def _losses(run_dir: Path) -> list[float]:
    return _column(run_dir, "loss") + _column(run_dir, "validation_loss")


def test_state_in_host_memory_and_steps_in_backward_are_the_same_training(pool: Any, tmp_path: Path) -> None:
    options = {"plain": [], "host": ["optimizer.offload_state=true"], "early": ["trainer.step_in_backward=true"]}
    found = {
        name: pool(2).run(_ran, [*SHORT, *words, f"run_dir={tmp_path / name}"])[0] for name, words in options.items()
    }
    for name in ("host", "early"):
        assert _losses(tmp_path / name) == _losses(tmp_path / "plain")
        assert _column(tmp_path / name, "grad_norm") == pytest.approx(_column(tmp_path / "plain", "grad_norm"))
    assert {name: one["offloaded"] for name, one in found.items()} == {"plain": False, "host": True, "early": False}
    all_of_them = max(found["plain"]["gradients"])
    assert set(found["plain"]["gradients"]) == {all_of_them} == {3}, "two layers and the rest"
    steps = found["early"]["gradients"]
    assert len(steps) == 3 * 4 and 0 < max(steps) < all_of_them and steps[-1] == 0, "one or two units' at a time"


def test_micro_batches_add_up_before_a_step_in_backward(pool: Any, tmp_path: Path) -> None:
    for name, words in (("plain", []), ("early", ["trainer.step_in_backward=true"])):
        pool(2).run(_ran, [*SHORT, "trainer.micro_batch=1", *words, f"run_dir={tmp_path / name}"])
    for key in ("loss", "grad_norm", "validation_loss"):
        assert _column(tmp_path / "early", key) == pytest.approx(_column(tmp_path / "plain", key), rel=1e-5)


def test_shared_blocks_are_computed_once_and_losses_stay(pool: Any, tmp_path: Path) -> None:
    found = {}
    for share in ("false", "true"):
        argv = [*SHORT, "parallelism.dp_shard=2", f"optimizer.share_replicas={share}", f"run_dir={tmp_path / share}"]
        found[share] = pool(4).run(_ran, argv)
    assert _losses(tmp_path / "true") == _losses(tmp_path / "false")
    blocks = {share: sum(rank["blocks"] for rank in ranks) for share, ranks in found.items()}
    assert blocks["false"] == 2 * blocks["true"] == 2 * 3 * 14  # 3 steps, 2 layers of 7 matrices


def _lost(argv: list[str]) -> str:
    trainer = train.prepare(train.compose(argv))
    trainer.check(dist.get_world_size())
    with pytest.raises(Stopped) as caught:
        trainer.run()
    return str(caught.value)


def test_a_step_in_backward_that_was_not_finite_ends_the_run_unsaved(pool: Any, tmp_path: Path) -> None:
    words = ["trainer.step_in_backward=true", "optimizer.matrices.rule.lr=1e30", "trainer.save_every=1"]
    for line in pool(2).run(_lost, [*SHORT, *words, f"run_dir={tmp_path}"]):
        assert line.startswith("step 2: expected finite loss and gradient norm, got ") and line.endswith("; not saved")
        assert "only trainer.step_in_backward=false can name the first bad tensor" in line
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


WAITS = "each waits for every gradient, when units have been stepped"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["trainer.step_in_backward=true", "trainer.max_grad_norm=1.0"],
            "trainer: step_in_backward: expected max_grad_norm=null, skip_non_finite=0, spike=null, "
            f"deterministic=false, got max_grad_norm=1.0: {WAITS}",
        ),
        (
            ["trainer.step_in_backward=true", "trainer.skip_non_finite=2", "trainer.spike=3"],
            f"got skip_non_finite=2, spike=3.0: {WAITS}",
        ),
        (
            ["trainer.step_in_backward=true", "optimizer=muonclip"],
            f"trainer.step_in_backward: expected optimizer.qk_clip=null, got a clip of logits: {WAITS}",
        ),
        (["optimizer.share_replicas=true"], "share_replicas: expected copies of parameters .* got one copy"),
        (
            ["optimizer.share_replicas=true", "optimizer=adamw", "parallelism.zero=0"],
            "share_replicas: expected copies of parameters whose rule has blocks",
        ),
        (
            ["optimizer.share_replicas=true", "optimizer=soap", "parallelism.zero=0"],
            "share_replicas: SOAP of group matrices keeps state where a block is computed",
        ),
        (["optimizer.offload_state=1"], "optimizer.offload_state: expected true or false, got 1"),
    ],
)
def test_what_cannot_be_had_is_one_line_before_anything_starts(
    argv: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.chdir(tmp_path)
    assert train.main([*SHORT, *argv]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and re.search(line, printed.err), printed.err
    assert not dist.is_initialized() and list(tmp_path.iterdir()) == []
