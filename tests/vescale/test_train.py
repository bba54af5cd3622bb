"""The command: what it composes, where a run lives, how it refuses, and that a killed run goes on bit for bit."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from waiting import wait_for

import recipes
from vescale import train
from vescale.tracking import read_metrics

ROOT = Path(__file__).parents[2]
TINY = [
    *("model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=2", "data.seq_len=16"),
    *("trainer.log_every=1", "trainer.eval_every=8", "trainer.eval_sequences=5", "trainer.save_every=8"),
    *("trainer.steps=24", "trainer.device=cpu", "tracking.mode=disabled"),
]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs in an empty folder, as no rank of any job."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "VESCALE_RUN_ID", "WANDB_NAME", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


# --- composition ---


def _rates(argv: list[str]) -> dict[str, float]:
    groups = train.compose(argv)["optimizer"]
    return {name: group["rule"]["lr"] for name, group in groups.items() if isinstance(group, dict)}


def test_another_optimizer_brings_its_own_numbers() -> None:
    adamw = _rates(["recipe=llama_debug_muon", "optimizer=adamw"])
    assert "matrices" not in adamw and adamw == _rates(["recipe=llama_debug_adamw"])
    assert _rates(["recipe=llama70b_muon"])["matrices"] == 1.5e-4  # tuned for the model, not for the debug one
    assert _rates(["recipe=llama70b_muon", "model=llama8b", "optimizer=adamw"])["rest"] == 3e-4


def test_the_command_line_wins_over_the_recipe() -> None:
    config = train.compose(["recipe=llama70b_muon", "optimizer.rest.rule.lr=0.5", "trainer.steps=3"])
    assert config["optimizer"]["rest"]["rule"]["lr"] == config["optimizer"]["norms"]["rule"]["lr"] == 0.5
    assert config["trainer"]["steps"] == config["trainer"]["schedule"]["total_steps"] == 3
    assert config["trainer"]["schedule"]["warmup_steps"] == 0  # a part of the steps: a short run has no long warm-up


def _user_folder(lr: str) -> str:
    Path("mine/recipe").mkdir(parents=True)
    Path("mine/model").mkdir()
    Path("mine/model/small.yaml").write_text("defaults: [llama_debug, _self_]\nnum_hidden_layers: 1\n")
    Path("mine/recipe/mine.yaml").write_text(
        "# @package _global_\ndefaults: [llama_debug_muon, override /model: small, _self_]\n"
        f"{lr}trainer: {{steps: 7}}\n"
    )
    return "--config-dir=mine"


def test_a_users_recipe_extends_ours() -> None:
    lr = "optimizer: {matrices: {rule: {lr: 0.1}}, rest: {rule: {lr: 0.2}}}\n"
    config = train.compose([_user_folder(lr), "recipe=mine"])
    assert (config["model"]["num_hidden_layers"], config["model"]["hidden_size"]) == (1, 128)
    assert (config["trainer"]["steps"], config["name"]) == (7, "mine")


@pytest.mark.parametrize("folder", [["--config-dir=mine"], ["--config-dir", "mine"]])
def test_a_recipe_without_its_first_line_is_told_so(folder: list[str]) -> None:
    _user_folder("")
    Path("mine/recipe/mine.yaml").write_text("defaults: [llama_debug_muon]\ntrainer: {steps: 7}\n")
    with pytest.raises(ValueError, match="^mine/recipe/mine.yaml: expected a first line `# @package _global_`"):
        train.compose([*folder, "recipe=mine"])


def test_a_file_that_a_shipped_one_hides_is_told_so() -> None:
    """Hydra takes the first it finds: a user's llama8b, imported with its weights, would train from random ones."""
    folder = _user_folder("")
    ours = Path(recipes.__file__).parent / "model" / "llama8b.yaml"
    Path("mine/model/llama8b.yaml").write_text(ours.read_text())
    train.compose([folder, "model=llama8b"])  # the same file
    Path("mine/model/llama8b.yaml").write_text("defaults: [llama_debug, _self_]\n")
    with pytest.raises(ValueError, match="^mine/model/llama8b.yaml: a shipped file has this name, and hides it"):
        train.compose([folder, "model=llama8b"])


def test_options_may_stand_anywhere() -> None:
    folder = _user_folder("optimizer: {matrices: {rule: {lr: 0.1}}, rest: {rule: {lr: 0.2}}}\n")
    config = train.compose(["recipe=mine", "trainer.seed=1", folder, "data.seed=2"])
    assert (config["trainer"]["seed"], config["data"]["seed"]) == (1, 2)
    assert config["name"] == "mine-data.seed_2-trainer.seed_1"
    with pytest.raises(ValueError, match="unknown recipe 'nope': choose from .*llama_debug_muon, .*mine"):
        train.compose(["recipe=nope", "--config-dir", "mine"])


def test_a_model_without_a_tuned_number_asks_for_one() -> None:
    with pytest.raises(
        ValueError, match=r"optimizer.matrices.rule.lr: no number tuned for model=small \(tuned for: ll"
    ):
        train.compose([_user_folder(""), "recipe=mine"])


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["recipe=llama_debug_moun"],
            "unknown recipe 'llama_debug_moun': choose from .*llama70b_muon, .* did you mean ll",
        ),
        (["optimizer=sgd"], "unknown optimizer 'sgd': choose from .*adamw, .*muon"),
        (["optimizer=lyon"], "[(]your own optimizer/lyon.yaml is found with --config-dir FOLDER[)]$"),
        (
            ["trainer.lr=1"],
            "unknown key 'trainer.lr': choose from .*there is optimizer.matrices.rule.lr, optimizer.norms",
        ),
        (["data.validation.a=b"], r"unknown key .*: nothing is there yet; \+data.validation.a=... adds it"),
        (["optimzer=adamw"], "unknown key 'optimzer': choose from .*did you mean optimizer?"),
        (
            ["optimizer.matrices.rule.lrr=1"],
            "unknown key 'optimizer.matrices.rule.lrr': choose from .*momentum.*mean lr?",
        ),
        (["trainer.steps"], "cannot read 'trainer.steps': expected key=value"),
        (["--config-dir=nowhere"], "nowhere' not found"),
        (["data.path=${data.pth}"], "data.path: Interpolation key 'data.pth' not found"),
        (["-m", "seed=1,2"], "unknown key 'seed'"),
        (["-m", "trainer.seed=1,2"], "expected one configuration, got 2"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_right_ones(argv: list[str], line: str) -> None:
    with pytest.raises(ValueError, match=line) as caught:
        train.compose(argv)
    assert "\n" not in str(caught.value)


def test_looking_at_a_configuration_needs_no_torch_and_leaves_no_file(tmp_path: Path) -> None:
    code = (
        "import sys; from vescale.train import main; codes = [main(['--cfg', 'job']), main(['recipe=nope'])]; "
        "assert codes == [0, 2], codes; assert not {'torch', 'wandb'} & {*sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_environment())
    assert done.returncode == 0, done.stderr
    assert "hidden_size: 128" in done.stdout and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


# --- sweeps ---


def test_each_point_of_a_sweep_is_a_process_with_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    codes = iter((3, 0))
    monkeypatch.setattr(subprocess, "call", lambda command: started.append(command) or next(codes))
    argv = [_user_folder(""), "-m", "recipe=llama_debug_muon", "optimizer=adamw", "optimizer.rest.rule.lr=1,2"]
    assert train.main(argv) == 3  # the worst: the second point ran all the same
    assert [command[:3] for command in started] == [[sys.executable, "-m", "vescale.train"]] * 2
    names = [train.compose(command[3:])["name"] for command in started]
    assert names == [f"llama_debug_muon-optimizer.rest.rule.lr_{lr}-optimizer_adamw" for lr in (1, 2)]
    assert all(f"--config-dir={Path('mine').absolute()}" in command for command in started)


def test_a_sweep_leaves_a_run_of_each_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "call", lambda command: train.main(command[3:]))  # saves starting the processes
    assert train.main(["-m", *TINY, "trainer.steps=2", "optimizer=adamw,muon"]) == 0
    runs = list((tmp_path / "runs").iterdir())
    groups = [[key for key in next(read_metrics(run / "metrics.jsonl")) if key.startswith("lr/")] for run in runs]
    assert sorted(groups, key=len) == [["lr/norms", "lr/rest"], ["lr/matrices", "lr/norms", "lr/rest"]]
    assert all((run / "checkpoints" / "step_00000002" / "seal.json").is_file() for run in runs)


def test_a_sweep_is_refused_under_torchrun_and_in_one_folder(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert train.main(["-m", "trainer.seed=1,2", "name=same"]) == 2
    assert "the points of a sweep would share the folder runs/same" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    assert train.main(["-m", "trainer.seed=1,2"]) == 2
    assert "-m cannot run under torchrun" in capsys.readouterr().err


# --- the run's folder ---


def test_a_run_is_named_by_what_changes_its_numbers() -> None:
    name = train.default_name("r", ["+b.c=1", "recipe=r", "a=x/y", "tracking.mode=disabled", "trainer.log_every=1"])
    assert name == "r-a_x_y-b.c_1"
    assert name == train.default_name("r", ["a=x/y", "b.c=1"])
    odd = train.default_name("r", ["a=[0.9,0.95]", "b='*_proj $x;{y}'", "c=-1e-3"])
    assert odd == "r-a_0.9_0.95_-b__proj_x_y_-c_-1e-3"  # nothing that a shell or Hydra would read as more than a name
    long = [train.default_name("r", [f"data.path={'x' * 300}{end}"]) for end in "ab"]
    assert len({*long}) == 2 and all(len(n) == train.LONGEST_NAME for n in long)


def test_a_name_may_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert train.compose(["trainer.seed=3"])["run_dir"] == "runs/llama_debug_muon-trainer.seed_3"
    monkeypatch.setenv("VESCALE_RUN_ID", "job-17")
    assert train.compose(["trainer.seed=3"])["run_dir"] == "runs/job-17"
    config = train.compose(["name=mine"])
    assert (config["run_dir"], config["tracking"]["name"]) == ("runs/mine", "mine")
    assert train.compose(["run_dir=/x/y", "tracking.name=shown"])["tracking"]["name"] == "shown"


def test_a_folder_keeps_to_one_configuration() -> None:
    config = train.compose(["name=a"])
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.json").write_text(json.dumps(config))
    train.check_same_run(train.compose(["name=a", "trainer.seed=9"]))  # there is nothing yet to go on from
    Path("runs/a/checkpoints/step_00000001").mkdir(parents=True)
    Path("runs/a/checkpoints/step_00000001/seal.json").touch()
    train.check_same_run(
        train.compose(["name=a", "trainer.log_every=3", "tracking.mode=disabled", "parallelism.zero=2"])
    )
    train.check_same_run(train.compose(["name=a", "parallelism.ep=2"]))  # a checkpoint holds every expert
    train.check_same_run(train.compose(["name=a", "data.path=/moved/here.txt"]))  # it knows itself what the data are
    with pytest.raises(ValueError, match="lr was 0.01, now 0.5; trainer.seed was 0, now 9; give this run its own name"):
        train.check_same_run(train.compose(["name=a", "optimizer.matrices.rule.lr=0.5", "trainer.seed=9"]))
    why = "total_steps was 250, now 500; give .*, or keep its schedule: trainer.schedule.total_steps=250$"
    with pytest.raises(ValueError, match=why):  # it moves every later lr
        train.check_same_run(train.compose(["name=a", "trainer.steps=500", "trainer.schedule.warmup_steps=10"]))
    train.check_same_run(
        train.compose(
            ["name=a", "trainer.steps=500", "trainer.schedule.total_steps=250", "trainer.schedule.warmup_steps=10"]
        )
    )


# --- from YAML to objects ---


def test_values_become_what_the_fields_say() -> None:
    muon = train.resolve({"_target_": "optimizers.Muon", "lr": 1, "ns_dtype": "float32"})
    adamw = train.resolve([{"_target_": "optimizers.AdamW", "betas": [0, 0.5]}])[0]
    assert (muon.lr, muon.ns_dtype, adamw.betas) == (1, torch.float32, (0.0, 0.5))
    config = train.resolve(train.compose([])["trainer"], "trainer")
    assert config.schedule.scale(10) == 1.0 and config.micro_batch is None


def test_every_wrong_value_is_named_at_once() -> None:
    rule = {"_target_": "optimizers.Muon", "lrr": 1, "ns_dtype": "float33", "nesterov": 1}
    trainer = {"_target_": "vescale.trainer.TrainerConfig", "steps": "many", "global_batch": 8}
    with pytest.raises(ValueError) as caught:
        train.resolve(
            {"a": rule, "trainer": trainer, "b": {"_target_": "optimizers.Moun"}, "c": {"_target_": "no.Such"}}
        )
    for part in (
        "unknown key 'a.lrr': Muon: choose from",
        "a.ns_dtype: expected dtype, got 'float33'",
        "a.nesterov: expected bool, got 1",
        "missing key 'trainer.schedule': TrainerConfig: it has no default",
        "trainer.steps: expected int, got 'many'",
        "b._target_: no dataclass 'Moun' in optimizers: choose from ",
        "did you mean Muon?",
        "c._target_: no module 'no' to take 'no.Such' from; is it on PYTHONPATH?",
    ):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="x.y: Muon: momentum: expected a number in"):
        train.resolve({"y": {"_target_": "optimizers.Muon", "momentum": 2.0}}, "x")


# --- refusals of the command ---


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["recipe=nope"], "unknown recipe 'nope': choose from .*llama70b_muon, .*llama8b_muon"),
        (["model.hiden_size=1"], "unknown key 'model.hiden_size': choose from .* did you mean hidden_size?"),
        (["+seed=3"], "unknown key 'seed': choose from data, dry_run, model, name"),
        (["~optimizer"], "optimizer: expected a group at least: a name with pattern and rule"),
        (["--nope"], "unrecognized arguments: --nope"),
        (["hydra.run.dir=zzz"], "hydra.run.dir=zzz: Hydra only composes here and makes no folder"),
        (["name=a/../../b"], "name: expected the name of a folder in runs/, got 'a/../../b'; run_dir=... takes a path"),
        (["name=.."], "name: expected the name of a folder in runs/"),
        (
            ["trainer.profile=[3,1]"],
            "profile: expected .* with 1 <= first <= last <= 250, the steps, got .3, 1.",
        ),
        (["trainer.memory_snapshot=3", "trainer.device=cpu"], "memory_snapshot: expected null on a cpu: CUDA alone"),
        (["trainer.steps=abc"], "vescale.train: trainer.steps: expected int, got 'abc'$"),
        (
            ["trainer.steps=-5"],
            "total_steps: expected .* got -5 [(]trainer.schedule.total_steps follows trainer.steps[)]$",
        ),
        (["model.vocab_size=many"], "vescale.train: model.vocab_size: expected int, got 'many'$"),
        (["optimizer.rest.rule.lr=many"], "vescale.train: optimizer.rest.rule.lr: expected float.*, got 'many'$"),
        (["trainer.skip_non_finite=-1"], "skip_non_finite: expected a number of steps >= 0, got -1"),
        (["dry_run=maybe"], "dry_run: expected bool, got 'maybe'"),
        (["world_size=4"], "world_size: only dry_run=true takes it"),
        (["dry_run=true", "world_size=0"], "world_size: expected null or a number > 0, got 0"),
        (["trainer.schedule=null"], "trainer.schedule: expected Schedule, got None$"),
        (["~data._target_"], "data: expected .*TextData.*Mixture, got {'path'"),
        (["trainer.steps=5", "trainer.schedule.warmup_steps=9"], "trainer.schedule: .*warmup_steps: .* of 5 steps"),
        (["optimizer.rest.pattern=3"], "optimizer.rest: expected pattern [(]one glob or several[)] and rule"),
        (["run_dir=/dev/null/run"], "run_dir: /dev/null/run cannot be made: /dev/null is no folder"),
        (["trainer.global_batch=7"], "trainer.global_batch=7 does not divide over 2 ranks"),
        (["trainer.micro_batch=3"], "trainer.micro_batch=3 does not divide the 4 sequences of a rank"),
        (["data.path=missing.txt"], "data: path: 'missing.txt' is no file"),
        (
            ["optimizer.matrices.pattern=*_porj.weight"],
            "pattern '[*]_porj.weight' of group matrices matches no parameter",
        ),
        (["+optimizer.extra.pattern=x"], "optimizer.extra: expected pattern .* and rule, got {'pattern': 'x'}"),
        (["model.hidden_size=30"], "hidden_size: expected a multiple of num_attention_heads = 4, got 30"),
        (["model.vocab_size=100"], "model.vocab_size=100, but the data have 320 ids"),
        (["data.seq_len=2048"], "data.seq_len=2048 exceeds model.max_position_embeddings=1024"),
        (["parallelism.dp_shard=3"], "parallelism.dp_shard=3 does not divide 2 ranks"),
        (["recipe=llama70b_muon", "trainer.device=cpu"], "at least [0-9.,]+ GiB on each of 2 ranks for weights, grad"),
        (["trainer.device=tpu"], "trainer.device: expected auto, cpu or cuda, got 'tpu'"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2_before_anything_starts(
    argv: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("vescale.train: ") and printed.err.count("\n") == 1
    assert re.search(line, printed.err), printed.err
    assert not dist.is_initialized() and list(tmp_path.iterdir()) == []


def test_tasks_of_srun_that_know_no_ranks_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert train.main([]) == 2
    assert "sbatch launch/slurm.sbatch" in capsys.readouterr().err


def test_rank_0_speaks_first(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    for rank in ("0", "3"):
        monkeypatch.setenv("RANK", rank)
        assert train.main(["recipe=nope"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("vescale.train: unknown recipe") and second.startswith("vescale.train: rank 3: unknown")
    assert waited == [5]  # long enough for torchrun to end the others after rank 0


@pytest.mark.parametrize(("world", "ranks"), [(64, "64 ranks x 13,369,600"), (1024, "1,024 ranks x 835,648")])
def test_a_dry_run_plans_70b_without_its_weights(world: int, ranks: str, capsys: Any, tmp_path: Path) -> None:
    before, began = _peak_memory(), time.process_time()
    assert train.main(["recipe=llama70b_muon", "dry_run=true", f"world_size={world}"]) == 0
    printed = capsys.readouterr().out
    assert "70,553,706,496 parameters" in printed and "matrices  Muon   560" in printed
    assert "80 x unit like model.layers.0" in printed and ranks in printed
    assert _peak_memory() - before < 2**29  # bytes; the weights are 282e9
    assert time.process_time() - began < 30  # seconds, whatever else this machine does
    assert list(tmp_path.iterdir()) == []


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- a run ---


def _run(argv: list[str]) -> None:
    assert train.main(argv) == 0


def _rows(folder: Path) -> list[dict[str, Any]]:
    measured = ("tokens_per_second", "memory_gib", "tflops_per_device", "step_seconds", "data_wait")
    return [{k: v for k, v in row.items() if k not in measured} for row in read_metrics(folder / "metrics.jsonl")]


def test_a_killed_run_goes_on_bit_for_bit(pool: Any, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    pool(2).run(_run, [*TINY, f"run_dir={whole}"])
    ranks = Pool(2, may_die=True)
    try:
        died, other = ranks.run(_killed, [*TINY, f"run_dir={killed}"])
    finally:
        ranks.stop()
    assert died == -signal.SIGKILL
    assert other == (1, "", f"vescale.train: rank 1: another rank has ended; {AGAIN}\n")
    assert 8 <= _rows(killed)[-1]["step"] < 24
    (code, out, err), other = pool(2).run(_said, [*TINY, f"run_dir={killed}"])
    assert (code, err) == (0, "") and other == (0, "", "")  # only rank 0 speaks
    assert re.search(r"^continuing \S+killed/checkpoints/step_00000008$", out, flags=re.M), out
    assert _rows(killed) == _rows(whole)
    assert [row["step"] for row in _rows(whole) if "validation_loss" in row] == [8, 16, 24]
    assert sorted(path.name for path in (killed / "checkpoints").iterdir()) == ["step_00000016", "step_00000024"]


AGAIN = "the same command goes on from the newest checkpoint"


def _killed(argv: list[str]) -> tuple[int, str, str]:
    """Rank 0 is killed in step 13, once the checkpoint of step 8 is written; what the other does then."""
    from vescale import checkpoint
    from vescale.trainer import Trainer

    step = Trainer.train_step

    def dies(trainer: Trainer) -> Any:
        if trainer.step == 12 and dist.get_rank() == 0:
            wait_for(lambda: checkpoint.whole(trainer.checkpoints))
            os.kill(os.getpid(), signal.SIGKILL)
        return step(trainer)

    Trainer.train_step = dies  # type: ignore[method-assign]
    return _said(argv)


def _said(argv: list[str]) -> tuple[int, str, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        return train.main(argv), out.getvalue(), err.getvalue()


def test_a_finished_run_is_left_alone_and_a_damaged_one_is_refused(pool: Any, tmp_path: Path, capsys: Any) -> None:
    argv = [*TINY, "trainer.steps=6", "trainer.save_every=3", f"run_dir={tmp_path / 'run'}"]
    checkpoints = tmp_path / "run" / "checkpoints"
    pool(2).run(_run, argv)
    before = _rows(tmp_path / "run")
    pool(2).run(_run, argv)  # nothing is left to do, and nothing is written
    assert _rows(tmp_path / "run") == before
    _refuses([*argv, "trainer.seed=9"], "holds a run of another configuration: trainer.seed was 0, now 9", capsys)
    _refuses([*argv, "data.seed=9"], "another configuration: data.seed was 0, now 9", capsys)
    _damage(checkpoints / "step_00000006")
    pool(2).run(_run, argv)  # the one before goes on, to the same end
    assert _rows(tmp_path / "run") == before
    for step in (3, 6):
        _damage(checkpoints / f"step_0000000{step}", shorten=True)
    _refuses(argv, "no checkpoint in .*run/checkpoints is good: .*missing or not of its length; remove the", capsys)
    _restore(checkpoints)
    # Without its seal it is no checkpoint: the one before goes on, to the same end.
    (checkpoints / "step_00000006" / "seal.json").unlink()
    pool(2).run(_run, argv)
    assert _rows(tmp_path / "run") == before
    assert sorted(path.parent.name for path in checkpoints.glob("*/seal.json")) == ["step_00000003", "step_00000006"]
    (tmp_path / "run" / "config.json").write_text("{")
    _refuses(argv, "config.json is damaged: .*; give this run its own name=", capsys)


def _damage(path: Path, *, shorten: bool = False) -> None:
    file = next(path.glob("*.distcp"))
    data = file.read_bytes()
    at = len(data) // 2
    file.with_name("kept").write_bytes(data)
    file.write_bytes(data[:-1] if shorten else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def _restore(checkpoints: Path) -> None:
    for kept in checkpoints.glob("*/kept"):
        kept.rename(next(kept.parent.glob("*.distcp")))


def _refuses(argv: list[str], line: str, capsys: Any) -> None:
    run_dir = Path(argv[-1].partition("=")[2]) if argv[-1].startswith("run_dir=") else None
    files = sorted(run_dir.rglob("*")) if run_dir else None
    capsys.readouterr()
    assert train.main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and re.search(line, printed.err), printed.err
    assert not dist.is_initialized() and (run_dir is None or sorted(run_dir.rglob("*")) == files)


def test_a_run_that_is_stopped_says_so_and_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from vescale.tracking import Tracker
    from vescale.trainer import Trainer

    ends: list[int] = []
    finish, step = Tracker.finish, Trainer.train_step

    def interrupted(trainer: Trainer) -> Any:
        if trainer.step == 3:
            raise KeyboardInterrupt
        return step(trainer)

    def ended(tracker: Tracker, exit_code: int = 0) -> None:
        ends.append(exit_code)
        finish(tracker, exit_code)

    monkeypatch.setattr(Tracker, "finish", ended)
    argv = [*TINY, "trainer.steps=4", "trainer.save_every=2", "run_dir=run"]
    monkeypatch.setattr(Trainer, "train_step", interrupted)
    assert train.main(argv) == 130
    assert capsys.readouterr().err == "vescale.train: stopped; the same command goes on from the newest checkpoint\n"
    assert ends == [1] and not dist.is_initialized()
    monkeypatch.setattr(Trainer, "train_step", step)
    _refused_beside_another(tmp_path / "run", argv, capsys)
    monkeypatch.setattr(fcntl, "flock", _no_locks)
    assert train.main(argv) == 0
    assert ends == [1, 0] and not dist.is_initialized()
    assert [row["step"] for row in _rows(tmp_path / "run") if "loss" in row] == [1, 2, 3, 4]


def _refused_beside_another(folder: Path, argv: list[str], capsys: Any) -> None:
    for thread in threading.enumerate():
        if thread.name == "checkpoint":  # what the interrupted run was writing
            thread.join()
    left = folder / "checkpoints" / "step_00000004.partial"
    left.mkdir()  # what the other is writing
    files = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    capsys.readouterr()
    with (folder / "lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert train.main([*argv, "dry_run=true"]) == 0
        assert capsys.readouterr().err == ""
        assert train.main(argv) == 2
    said = rf"vescale.train: run_dir: a run is going on in run [(]process {os.getpid()} on \S+[)]; wait .*name=...\n"
    printed = capsys.readouterr()
    assert printed.out == "" and re.fullmatch(said, printed.err), printed
    assert files == {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def _no_locks(*_: Any) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_the_tracker_is_told_the_configuration_the_record_and_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vescale.tracking import Tracking

    told: list[dict[str, Any]] = []
    real = Tracking.open

    def opened(tracking: Tracking, folder: Path, **options: Any) -> Any:
        told.append(options["config"])
        return real(tracking, folder, **options)

    monkeypatch.setattr(Tracking, "open", opened)
    assert train.main([*TINY, "trainer.steps=1", "run_dir=run"]) == 0
    (config,) = told
    assert config["model"]["hidden_size"] == 32 and json.loads(json.dumps(config)) == config
    assert {"config_sha256", "data", "seeds", "git", "versions", "mesh", "machine"} == {*config["record"]}
    assert any("Muon" in line for line in config["plan"]["optimizer"])
    (layer,) = [value for name, value in config["plan"]["segments"].items() if "layers.1" in name]
    assert layer["num_ranks"] == 1 and 0 <= layer["padding"] < 0.1
