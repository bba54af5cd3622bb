"""`python -m models.hf import DIR OUT` and `export RUN OUT`: between Hugging Face folders and runs of this project.

import    Looks at every header of DIR and writes OUT/model/NAME.yaml, a model recipe that begins from DIR's weights::

              python -m models.hf import ~/Qwen3-30B-A3B mine --name qwen3_30b
              python -m vescale.train --config-dir mine model=qwen3_30b ...

          Weights are read where they are needed, by each rank what it holds, when the run begins.
export    Writes the newest whole checkpoint of a run folder as a folder that transformers opens, streamed.

Problems are one message on stderr, with exit code 2, and leave nothing behind.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import models
from models.decoder import CausalLMConfig
from models.files import read_json
from models.hf import check_weights, write
from models.hf_config import load_config

CHUNK_BYTES = 2**30  # of a checkpoint read at a time


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line; exits with 2 after a problem."""
    options = _parser().parse_args(argv)
    try:
        options.act(options)
    except ValueError as problem:
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
        ValueError: If there is no such run, no whole checkpoint, or it is of another model; or as ``models.hf.write``.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"--dtype: expected float32 or bfloat16, got {dtype}")
    config = _config_of(read_json(run / "config.json").get("model"), run)
    checkpoint = _newest(run / "checkpoints")
    source = like if like is not None or config.weights is None else Path(config.weights)
    tensors = _read(checkpoint, config, getattr(torch, dtype))
    write(out, config, tensors, like=source if source is not None and source.exists() else None)
    print(f"{out}: {config.num_parameters():,} parameters from {checkpoint}")


def _config_of(fields: Any, run: Path) -> CausalLMConfig:
    """The config that a run's settings name."""
    target = fields.get("_target_", "") if isinstance(fields, dict) else ""
    kind = getattr(models, str(target).removeprefix("models."), None)
    if not (isinstance(kind, type) and issubclass(kind, CausalLMConfig)):
        raise ValueError(f"{run / 'config.json'}: expected a model of this project, got {target!r}")
    return kind(**{key: value for key, value in fields.items() if key != "_target_"})


def _newest(root: Path) -> Path:
    """The newest checkpoint that has its seal, which is written last."""
    whole = [path for path in root.glob("step_*") if path.name[5:].isdigit() and (path / "seal.json").is_file()]
    if not whole:
        raise ValueError(f"{root}: expected a whole checkpoint step_<number>, found none")
    return max(whole, key=lambda path: int(path.name[5:]))


def _read(checkpoint: Path, config: CausalLMConfig, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the model's tensors, a gigabyte at a time; parameters in ``dtype``, buffers as they are stored."""
    with torch.device("meta"):
        model = config.build()
    buffers = dict(model.named_buffers())
    wanted = dict(model.named_parameters()) | buffers
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    saved = metadata.state_dict_metadata
    problems = [
        f"{name} {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if tuple(getattr(saved.get(f"model.{name}"), "size", ())) != tuple(tensor.shape)
    ]
    if problems:
        raise ValueError(f"{checkpoint}: of another model, lacks {', '.join(problems)}")
    for names in _chunks({name: 4 * tensor.numel() for name, tensor in wanted.items()}):
        tensors = {f"model.{name}": torch.empty(wanted[name].shape) for name in names}
        _fill(tensors, checkpoint, metadata)
        for name in names:
            tensor = tensors.pop(f"model.{name}")
            yield name, tensor if name in buffers else tensor.to(dtype)


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
