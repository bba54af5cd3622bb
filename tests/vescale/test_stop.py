"""A run that is asked to stop saves and leaves with a code to run it again; torchrun adds nothing to its line."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from pool import Pool

from vescale import checkpoint, torchrun, train
from vescale.stop import REQUEUE, Stopped, StopSignals
from vescale.tracking import read_metrics

ARGV = [
    *("model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=1", "data.seq_len=16"),
    *("trainer.log_every=1", "trainer.eval_every=100", "trainer.eval_sequences=2", "trainer.save_every=100"),
    *("trainer.steps=6", "trainer.device=cpu", "tracking.mode=disabled"),
]


def test_signals_are_noted_and_handlers_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    with StopSignals() as signals:
        assert signals.received == 0
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.received == signal.SIGUSR1
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before


def test_a_stop_keeps_its_code_between_processes() -> None:
    twin = pickle.loads(pickle.dumps(Stopped("why", code=75)))
    assert (str(twin), twin.code) == ("why", 75)


def _asked(argv: list[str], number: int) -> tuple[int, str]:
    """Rank 1 alone gets the signal, during its third step."""
    import contextlib
    import io

    from vescale.trainer import Trainer

    step = Trainer.train_step

    def signalled(trainer: Trainer) -> Any:
        if trainer.step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), number)
        return step(trainer)

    Trainer.train_step = signalled  # type: ignore[method-assign]
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            return train.main(argv), said.getvalue()
    finally:
        Trainer.train_step = step  # type: ignore[method-assign]


def _run(argv: list[str]) -> None:
    assert train.main(argv) == 0


def _losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_on_one_rank_saves_on_all_and_the_same_command_goes_on(
    pool: Any, tmp_path: Path, number: signal.Signals
) -> None:
    argv = [*ARGV, f"run_dir={tmp_path / 'asked'}"]
    (code, said), other = pool(2).run(_asked, argv, number)
    assert code == REQUEUE and other == (REQUEUE, "")
    line = f"vescale.train: {number.name} after step 4: saved; the same command goes on from there\n"
    assert said in (line, line.replace("step 4", "step 3"))  # it may be seen before or after the ranks ask each other
    assert checkpoint.newest(tmp_path / "asked" / "checkpoints") is not None
    pool(2).run(_run, argv)
    pool(2).run(_run, [*ARGV, f"run_dir={tmp_path / 'whole'}"])
    assert _losses(tmp_path / "asked") == _losses(tmp_path / "whole") and len(_losses(tmp_path / "whole")) == 6


RANK = "import os, signal, sys; r = int(os.environ['RANK']); {}"


@pytest.mark.parametrize(
    ("does", "code", "says"),
    [
        ("sys.exit(0)", 0, ""),
        ("r == 0 and print('why', file=sys.stderr); sys.exit(75)", 75, "why\n"),
        ("r == 1 and os.kill(os.getpid(), 9)", 137, "vescale.torchrun: killed: rank 1 by SIGKILL; the same command"),
    ],
)
def test_torchrun_leaves_the_last_word_to_the_ranks(
    agent: Pool, tmp_path: Path, does: str, code: int, says: str
) -> None:
    script, said = tmp_path / "rank.py", tmp_path / "said"
    script.write_text(RANK.format(does))
    words = ["--standalone", "--nproc-per-node", "2", str(script)]
    assert agent.run(_torchrun, words, said) == [code], said.read_text()
    assert said.read_text().startswith(says) and said.read_text().count("\n") == (says != "")


@pytest.fixture(scope="module")
def agent() -> Iterator[Pool]:
    """A process of its own: torchrun turns logging off and keeps the signals."""
    started = Pool(1)
    yield started
    started.stop()


def _torchrun(words: list[str], said: Path) -> int:
    """Runs the command, and writes what it and the ranks say on stderr to a file."""
    with said.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    return torchrun.main(words)


def test_torchrun_takes_a_rank_s_code_before_that_of_one_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    failures = {0: SimpleNamespace(exitcode=-15), 1: SimpleNamespace(exitcode=2)}
    assert torchrun._code(SimpleNamespace(failures=failures)) == 2


def test_torchrun_without_what_it_was_asked_for_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def refuse(argv: list[str]) -> None:
        raise ValueError("Cuda is not available.")

    monkeypatch.setattr("torch.distributed.run.main", refuse)
    for name in ("logging.disable", "signal.signal"):  # what is set there holds for the whole process
        monkeypatch.setattr(name, lambda *args: None)
    assert torchrun.main(["--nproc-per-node", "gpu", "-m", "vescale.train"]) == 2
    line = "vescale.torchrun: Cuda is not available; --nproc-per-node takes a number\n"
    assert capsys.readouterr().err == line
