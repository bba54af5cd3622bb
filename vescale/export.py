"""The command that exports: `python -m vescale.export runs/NAME out` writes a run's weights for others to open.

The newest checkpoint that is as its seal says is read a gigabyte at a time, without ranks, and handed tensor by tensor
to the model that the run's config.json names; the shipped ones write a folder that transformers opens. Problems are one
line on stderr, with exit code 2, and leave nothing behind; so do Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from vescale import checkpoint
from vescale.job import ModelConfig
from vescale.resolve import resolve

CHUNK_BYTES = 2**30  # of a checkpoint read at a time
ATTEMPTS = 3  # a run that goes on may remove the checkpoint that is being read; the next try has a newer one
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 2 for input that was refused with one line, 130 for a signal."""
    parser = argparse.ArgumentParser(prog="python -m vescale.export", description="Writes a run's weights.")
    parser.add_argument("run", type=Path, help="run folder, with config.json and checkpoints")
    parser.add_argument("out", type=Path, help="a new or empty folder")
    parser.add_argument("--dtype", default="float32", help=f"of the parameters: {' or '.join(DTYPES)}")
    parser.add_argument("--like", type=Path, help="a folder to take the tokenizer from; the one the run began from")
    options = parser.parse_args(argv)
    try:
        with _term_as_interrupt():
            print(export(options.run, options.out, dtype=options.dtype, like=options.like))
    except KeyboardInterrupt:
        return _say("stopped; nothing was exported", 130)  # 128 + SIGINT, as a shell has it
    except (ValueError, OSError) as problem:
        return _say(" ".join(str(problem).split()), 2)
    return 0


def export(run: Path, out: Path, *, dtype: str = "float32", like: Path | None = None) -> str:
    """Writes the newest good checkpoint of ``run``; returns a line that says what was written.

    Args:
        run: With config.json and checkpoints.
        out: A new or empty folder.
        dtype: Of the written parameters: "float32" or "bfloat16"; buffers stay as they are.
        like: A folder to take the tokenizer and the ids of special tokens from; None: that which the run began from.

    Raises:
        ValueError: If there is no such run, no good checkpoint, or it is of another model; or as the model's
            ``export``, which looks at ``out`` and ``like`` before anything is read.
    """
    if dtype not in DTYPES:
        raise ValueError(f"--dtype: expected {' or '.join(DTYPES)}, got {dtype}")
    config = _model_of(run)
    with torch.device("meta"):
        model: Any = config.build()
    if not hasattr(model, "export"):
        raise ValueError(f"{run}: {type(model).__name__} has no export, which writes it for others")
    path = _written(model, out, run / "checkpoints", dtype=DTYPES[dtype], like=like)
    return f"{out}: {config.num_parameters():,} parameters from {path}"


def _written(model: Any, out: Path, root: Path, *, dtype: torch.dtype, like: Path | None) -> Path:
    """Writes the newest good checkpoint in ``root``, read when the model asks for it, and returns which that was."""
    read: list[Path] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        read.append(_newest(root))
        yield from _read(read[-1], model, dtype)

    for left in reversed(range(ATTEMPTS)):
        there = checkpoint.whole(root)
        try:
            model.export(out, tensors=tensors(), like=like)
            break
        except (ValueError, OSError):
            removed = [str(path) for path in there if not (path / checkpoint.SEAL).is_file()]
            if not removed or not left:
                raise
            _say(f"passed over: {', '.join(removed)}, which the run has removed meanwhile", 0)
    return read[-1]


def _model_of(run: Path) -> ModelConfig:
    """Returns the model's configuration, from the settings of a run."""
    file = run / "config.json"
    if not run.is_dir():
        raise ValueError(f"{run}: expected the folder of a run, {'got a file' if run.exists() else 'there is none'}")
    if not file.is_file():
        raise ValueError(f"{run}: expected the folder of a run, but it has no config.json")
    try:
        settings = json.loads(file.read_text())
    except (ValueError, RecursionError) as problem:  # the last, of brackets in brackets
        raise ValueError(f"{file} is damaged: {problem}") from None
    node = settings.get("model") if isinstance(settings, dict) else None
    try:
        config = resolve(node, "model")
    except ValueError as problem:
        raise ValueError(f"{file}: {problem}") from None
    if not isinstance(config, ModelConfig):
        raise ValueError(f"{file}: model: expected a model's configuration, got {type(config).__name__}")
    return config


def _newest(root: Path) -> Path:
    """Returns the newest checkpoint that is as its seal says; newer ones that are not are named on stderr."""
    path, _, wrong = checkpoint.newest_good(root, checkpoint.whole(root), checkpoint.verify)
    if path is None:
        raise ValueError(f"{root}: expected a whole checkpoint step_<number>, found none")
    for line in wrong:
        _say(f"passed over: {line}", 0)
    return path


def _read(path: Path, model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that ``model`` saves, a gigabyte at a time; parameters in ``dtype``, buffers as they are.

    Args:
        path: A whole checkpoint.
        model: On meta.
        dtype: Of the parameters.
    """
    parameters, saved = dict(model.named_parameters()), model.state_dict(keep_vars=True).keys()
    wanted = parameters | {name: buffer for name, buffer in model.named_buffers() if name in saved}
    metadata = _metadata(path, wanted)
    for names in _chunks({name: tensor.nbytes for name, tensor in wanted.items()}):
        tensors = {f"model.{name}": torch.empty_like(wanted[name], device="cpu") for name in names}
        with _unreadable(path):
            checkpoint.read(path, tensors, metadata=metadata)
        for name in names:
            tensor = tensors.pop(f"model.{name}")
            yield name, tensor.to(dtype) if name in parameters else tensor


def _metadata(path: Path, wanted: Mapping[str, torch.Tensor]) -> Any:
    """Returns what the checkpoint says it holds, if that is the model."""
    with _unreadable(path):
        metadata = dcp.FileSystemReader(path).read_metadata()
        saved = metadata.state_dict_metadata
        lacks = [
            f"{name} {tuple(tensor.shape)}"
            for name, tensor in wanted.items()
            if tuple(getattr(saved.get(f"model.{name}"), "size", ())) != tuple(tensor.shape)
        ]
    if lacks:
        more = f" and {len(lacks) - 4} more" if len(lacks) > 4 else ""
        raise ValueError(f"checkpoint {path} is of another model: it lacks {', '.join(lacks[:4])}{more}")
    return metadata


@contextmanager
def _unreadable(path: Path) -> Iterator[None]:
    """Names the checkpoint in one line; its files are pickles, which raise anything when they are none."""
    try:
        yield
    except Exception as problem:
        first = next(iter(str(problem).splitlines()), "")
        raise ValueError(f"checkpoint {path} cannot be read, {type(problem).__name__}: {first}") from problem


def _chunks(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yields names, as many at a time as hold ``CHUNK_BYTES`` together, or one."""
    names: list[str] = []
    for name, size in sizes.items():
        if names and sum(sizes[n] for n in names) + size > CHUNK_BYTES:
            yield names
            names = []
        names.append(name)
    yield names


@contextmanager
def _term_as_interrupt() -> Iterator[None]:
    """As a context, SIGTERM is Ctrl-C: what was begun is removed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(line: str, code: int) -> int:
    print(f"vescale.export: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
