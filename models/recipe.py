"""`python -m models.hf import DIR OUT`: a Hugging Face folder becomes a model recipe.

Looks at every header of DIR and writes OUT/model/NAME.yaml, which begins from DIR's weights::

    python -m models.hf import ~/Qwen3-30B-A3B mine --name qwen3_30b
    python -m vescale.train --config-dir mine model=qwen3_30b ...

Weights are read where they are needed, by each rank what it holds, when the run begins. `python -m models.hf export`
goes the other way; it is `python -m vescale.export`. Problems are one message on stderr, with exit code 2, and leave
nothing behind.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from models.decoder import CausalLMConfig
from models.fresh import write_fresh
from models.hf_config import load_config
from models.inventory import find_weights

NAME = r"\w[\w.+-]*"  # what `model=NAME` takes without quotes, unless it reads that as another value


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line; exits with 2 after a problem, with 130 after Ctrl-C."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["export"]:  # both ways under one name; a checkpoint is read by the package that wrote it
        os.execv(sys.executable, [sys.executable, "-m", "vescale.export", *words[1:]])
    options = _parser().parse_args(words)
    try:
        print(import_folder(options.folder, options.out, name=options.name))
    except KeyboardInterrupt:
        print("stopped; nothing was imported", file=sys.stderr)
        sys.exit(130)  # 128 + SIGINT, as a shell has it
    except (OSError, ValueError) as problem:  # OSError: OUT is a file or lies below one, the disk is full, ...
        print(problem, file=sys.stderr)
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m models.hf", description="From Hugging Face folders.")
    commands = parser.add_subparsers(required=True)
    commands.add_parser("export", help="a run's weights for others to open: python -m vescale.export RUN OUT")
    load = commands.add_parser("import", help="a model recipe that begins from a Hugging Face folder")
    load.add_argument("folder", type=Path, help="with config.json and safetensors")
    load.add_argument("out", type=Path, help="for --config-dir; gets model/NAME.yaml")
    load.add_argument("--name", help="of the recipe; the folder's name")
    return parser


def import_folder(folder: Path, out: Path, *, name: str | None = None) -> str:
    """Writes a model recipe that begins from ``folder``; returns a line that says where and of how many parameters.

    Args:
        folder: With config.json and safetensors.
        out: A folder of recipes.
        name: Of the recipe; None: the folder's.

    Raises:
        ValueError: With everything that is wrong with the folder, or if there is such a recipe or none can be named so.
    """
    folder = folder.expanduser().resolve()
    name = folder.name if name is None else name
    if not re.fullmatch(NAME, name) or _is_value(name):
        raise ValueError(f"--name: expected a word of letters, digits and ._+-, as `model=NAME` takes it, got {name!r}")
    path = out.expanduser() / "model" / f"{name}.yaml"
    if path.exists():
        raise ValueError(f"{path} exists: choose another --name, or remove it")
    config = load_config(folder, weights=str(folder), checkpoint="full")
    find_weights(config, folder, undone="imported")
    write_fresh(path, _recipe(config))
    return f"{path}: {config.num_parameters():,} parameters from {folder}"


def _is_value(name: str) -> bool:
    """Whether Hydra takes ``name`` for a number, a truth value or nothing."""
    try:
        float(name)
    except ValueError:
        return name.lower() in ("null", "true", "false")
    return True


def _recipe(config: CausalLMConfig) -> str:
    """The fields as YAML, of which JSON values are a part."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    lines = [f"{name}: {json.dumps(value)}" for name, value in fields.items()]
    return "\n".join([f"_target_: models.{type(config).__name__}", *lines, ""])
