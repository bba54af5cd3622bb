"""`python -m models.hf import DIR OUT` and `export RUN OUT`: between Hugging Face folders and runs of this project.

import    Looks at every header of DIR and writes OUT/model/NAME.yaml, a model recipe that begins from DIR's weights::

              python -m models.hf import ~/Qwen3-30B-A3B mine --name qwen3_30b
              python -m vescale.train --config-dir mine model=qwen3_30b ...

          Weights are read where they are needed, by each rank what it holds, when the run begins.
export    Writes the newest whole checkpoint of a run folder as a folder that transformers opens, streamed. What is
          stored is first compared with the checkpoint's seal; if it differs, an older one is taken, saying so.

Problems are one message on stderr, with exit code 2, and leave nothing behind.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from models.decoder import CausalLMConfig
from models.files import read_json
from models.hf import check_new, check_weights, write
from models.hf_config import FAMILIES, load_config

CHUNK_BYTES = 2**30  # of a checkpoint read at a time


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line; exits with 2 after a problem."""
    options = _parser().parse_args(argv)
    try:
        options.act(options)
    except (OSError, ValueError) as problem:  # OSError: OUT is a file or lies below one, the disk is full, ...
        print(problem, file=sys.stderr)
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m models.hf", description="From and to Hugging Face folders.")
    commands = parser.add_subparsers(required=True)
    load = commands.add_parser("import", help="a model recipe that begins from a Hugging Face folder")
    load.add_argument("folder", type=Path, help="with config.json and safetensors")
    load.add_argument("out", type=Path, help="for --config-dir; gets model/NAME.yaml")
    load.add_argument("--name", help="of the recipe; the folder's name")
    load.set_defaults(act=lambda options: import_folder(options.folder, options.out, name=options.name))
    save = commands.add_parser("export", help="a Hugging Face folder from a run's newest checkpoint")
    save.add_argument("run", type=Path, help="run folder, with config.json and checkpoints")
    save.add_argument("out", type=Path, help="a new or empty folder")
    save.add_argument("--dtype", default="float32", help="of the stored parameters (float32, bfloat16)")
    save.add_argument("--like", type=Path, help="a folder to take the tokenizer from; the one the run began from")
    save.set_defaults(act=lambda o: export_run(o.run, o.out, dtype=o.dtype, like=o.like))
    return parser


def import_folder(folder: Path, out: Path, *, name: str | None = None) -> Path:
    """Writes a model recipe that begins from ``folder``; returns its path.

    Args:
        folder: With config.json and safetensors.
        out: A folder of recipes.
        name: Of the recipe; None: the folder's.

    Raises:
        ValueError: With everything that is wrong with the folder, or if there is such a recipe.
    """
    folder = folder.expanduser().resolve()
    config = load_config(folder, weights=str(folder), checkpoint="full")
    problems = check_weights(config, folder)
    if problems:
        raise ValueError("\n  ".join([f"{folder}: {len(problems)} problem(s), nothing was imported:", *problems]))
    path = out / "model" / f"{name or folder.name}.yaml"
    if path.exists():
        raise ValueError(f"{path} exists: choose another --name, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".yaml.new")
    fresh.write_text(_recipe(config))
    fresh.rename(path)
    print(f"{path}: {config.num_parameters():,} parameters from {folder}")
    return path


def _recipe(config: CausalLMConfig) -> str:
    """The fields as YAML, of which JSON values are a part."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    lines = [f"{name}: {json.dumps(value)}" for name, value in fields.items()]
    return "\n".join([f"_target_: models.{type(config).__name__}", *lines, ""])


def export_run(run: Path, out: Path, *, dtype: str = "float32", like: Path | None = None) -> None:
    """Writes the newest whole checkpoint of ``run`` as a Hugging Face folder.

    Args:
        run: With config.json and checkpoints.
        out: A new or empty folder.
        dtype: Of the stored parameters: "float32" or "bfloat16".
        like: A folder to take the tokenizer and the ids of special tokens from; None: that which the run began from.

    Raises:
        ValueError: If there is no such run, no whole checkpoint as its seal says, or it is of another model; or as
            ``models.hf.write``.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"--dtype: expected float32 or bfloat16, got {dtype}")
    config = _config_of(read_json(run / "config.json").get("model"), run)
    check_new(out)  # before the checksums, which take long
    checkpoint = _newest(run / "checkpoints")
    source = like if like is not None or config.weights is None else Path(config.weights)
    tensors = _read(checkpoint, config, _metadata(checkpoint, config), getattr(torch, dtype))
    write(out, config, tensors, like=source if source is not None and source.exists() else None)
    print(f"{out}: {config.num_parameters():,} parameters from {checkpoint}")


def _config_of(fields: Any, run: Path) -> CausalLMConfig:
    """The config that a run's settings name."""
    target = fields.get("_target_", "") if isinstance(fields, dict) else ""
    kind = next((f.config for f in FAMILIES.values() if f"models.{f.config.__name__}" == target), None)
    if kind is None:
        raise ValueError(f"{run / 'config.json'}: expected a model of this project, got {target!r}")
    unknown = fields.keys() - {"_target_", *(field.name for field in dataclasses.fields(kind))}
    if unknown:
        raise ValueError(f"{run / 'config.json'}: {kind.__name__} takes no {', '.join(sorted(unknown))}")
    return kind(**{key: value for key, value in fields.items() if key != "_target_"})


def _newest(root: Path) -> Path:
    """The newest checkpoint that is as its seal says; newer ones that are not are named on stderr."""
    paths = [path for path in root.glob("step_*") if path.name[5:].isdigit() and (path / "seal.json").is_file()]
    if not paths:
        raise ValueError(f"{root}: expected a whole checkpoint step_<number>, found none")
    wrong: list[str] = []
    for path in sorted(paths, key=lambda path: int(path.name[5:]), reverse=True):
        problem = _damage(path)
        if problem is None:
            if wrong:
                print(f"{'; '.join(wrong)}: took {path}, which is older", file=sys.stderr)
            return path
        wrong.append(f"{path} is corrupt ({problem})")
    raise ValueError(f"{root}: no checkpoint is good: {'; '.join(wrong)}")


def _damage(checkpoint: Path) -> str | None:
    """What differs from ``seal.json``, {"files": {name: [bytes, sha256]}, ...}, which the run wrote last; or None."""
    try:
        files = read_json(checkpoint / "seal.json").get("files")
        if not isinstance(files, dict) or ".metadata" not in files:
            return "seal.json lists no files of a checkpoint"
        if not all(isinstance(seal, list) and len(seal) == 2 for seal in files.values()):
            return "seal.json: expected bytes and sha256 of each file"
        lost = [name for name in files if not (checkpoint / name).is_file()]
        lost = lost or [name for name, (size, _) in files.items() if (checkpoint / name).stat().st_size != size]
        if lost:
            return f"missing or not of its length: {', '.join(lost)}"
        wrong = [name for name, (_, sha256) in files.items() if _sha256(checkpoint / name) != sha256]
        return f"checksum differs: {', '.join(wrong)}" if wrong else None
    except (OSError, ValueError) as problem:
        return str(problem)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _wanted(config: CausalLMConfig) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Parameters and buffers without storage, and which are buffers."""
    with torch.device("meta"):
        model = config.build()
    buffers = dict(model.named_buffers())
    return dict(model.named_parameters()) | buffers, set(buffers)


def _metadata(checkpoint: Path, config: CausalLMConfig) -> Any:
    """What the checkpoint says it holds, if that is the model."""
    wanted, _ = _wanted(config)
    with _unreadable(checkpoint):
        metadata = dcp.FileSystemReader(checkpoint).read_metadata()
        saved = metadata.state_dict_metadata
        lacks = [
            f"{name} {tuple(tensor.shape)}"
            for name, tensor in wanted.items()
            if tuple(getattr(saved.get(f"model.{name}"), "size", ())) != tuple(tensor.shape)
        ]
    if lacks:
        more = f" and {len(lacks) - 4} more" if len(lacks) > 4 else ""
        raise ValueError(f"{checkpoint}: of another model, lacks {', '.join(lacks[:4])}{more}")
    return metadata


def _read(
    checkpoint: Path, config: CausalLMConfig, metadata: Any, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the model's tensors, a gigabyte at a time; parameters in ``dtype``, buffers as they are stored."""
    wanted, buffers = _wanted(config)
    for names in _chunks({name: 4 * tensor.numel() for name, tensor in wanted.items()}):
        tensors = {f"model.{name}": torch.empty(wanted[name].shape) for name in names}
        with _unreadable(checkpoint):
            _fill(tensors, checkpoint, metadata)
        for name in names:
            tensor = tensors.pop(f"model.{name}")
            yield name, tensor if name in buffers else tensor.to(dtype)


@contextmanager
def _unreadable(checkpoint: Path) -> Iterator[None]:
    """Names the checkpoint in one line; its files are pickles, which raise anything when they are none."""
    try:
        yield
    except Exception as problem:
        first = next(iter(str(problem).splitlines()), "")
        raise ValueError(f"{checkpoint}: cannot be read, {type(problem).__name__}: {first}") from problem


def _fill(tensors: dict[str, Any], checkpoint: Path, metadata: Any) -> None:
    """Reads plain tensors in place, in this process alone; ``dcp.load`` would warn that it is alone."""
    reader, planner = dcp.FileSystemReader(checkpoint), dcp.DefaultLoadPlanner()
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = planner.create_global_plan([planner.create_local_plan()])[0]
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _chunks(sizes: dict[str, int]) -> Iterator[list[str]]:
    names: list[str] = []
    for name, size in sizes.items():
        if names and sum(sizes[n] for n in names) + size > CHUNK_BYTES:
            yield names
            names = []
        names.append(name)
    yield names
