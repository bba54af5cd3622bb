"""Files of a Hugging Face folder: safetensors in one piece or several with their index, read by header and streamed.

model.safetensors                      one file of weights; or
model-00001-of-00002.safetensors ...   several, and
model.safetensors.index.json           which of them holds each tensor
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Stored(NamedTuple):
    """A tensor in a file, known from the file's header."""

    path: Path
    name: str  # in that file
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it, "BF16"


class Contents(NamedTuple):
    """What the files of weights in a folder hold, as far as they can be read."""

    tensors: dict[str, Stored]
    lost: set[str]  # names that an index puts into files that cannot be read
    problems: list[str]  # what is wrong with the files, a line each


def read_headers(folder: Path) -> Contents:
    """Returns what the folder's files of weights hold; reads their headers only."""
    names_of, problems = _files(folder)
    found = Contents({}, set(), problems)
    for path, names in names_of.items():
        try:
            here = _header(path)
        except (OSError, SafetensorError) as error:
            held = f"; it would hold {_some(names)}" if names else ""
            problems.append(f"{path.name}: cannot be read, {_reason(path, error)}{held}")
            found.lost.update(names)
            continue
        problems += [f"{path.name}: lacks {name}, which {INDEX} says it holds" for name in names if name not in here]
        twice = here.keys() & found.tensors.keys()
        problems += [f"{path.name}: {name} is in {found.tensors[name].path.name} too" for name in sorted(twice)]
        found.tensors.update(here)
    found.lost.difference_update(found.tensors)
    return found


def _header(path: Path) -> dict[str, Stored]:
    with path.open("rb"):  # says why it cannot be opened, where safetensors says that it is not there
        pass
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  a handle, not a mapping
    return {name: Stored(path, name, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}


def _reason(path: Path, error: Exception) -> str:
    if path.is_symlink() and not path.exists():
        return f"a link to {path.readlink()}, where there is nothing"
    if isinstance(error, SafetensorError) and _is_pointer(path):
        return "a pointer of Git LFS: `git lfs pull` fetches the file itself"
    return str(getattr(error, "strerror", None) or error)


def _some(names: list[str], *, most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def no_weights(folder: Path) -> str | None:
    """Returns why there are no weights to read in ``folder``; None: there are."""
    if not folder.is_dir():
        return absence(folder)
    if any(os.path.lexists(folder / name) for name in (SINGLE, INDEX)):
        return None
    pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    why = f"; {pickled[0]} is a pickle, which may run anything: convert it to safetensors" if pickled else ""
    return f"{SINGLE}: not in the folder, and no {INDEX} either{why}"


def absence(folder: Path) -> str:
    """Returns what stands in place of a folder."""
    return f"{folder}: expected a folder, {'got a file' if folder.exists() else 'there is none'}"


def _is_pointer(path: Path) -> bool:
    """Whether a file is what a clone without Git LFS leaves in place of one (git-lfs/git-lfs, docs/spec.md)."""
    mark = b"version https://git-lfs.github.com/spec/"
    with path.open("rb") as file:
        return file.read(len(mark)) == mark


def _files(folder: Path) -> tuple[dict[Path, list[str]], list[str]]:
    """Returns each file of weights with the names that an index says it holds, and what is wrong with the index."""
    if os.path.lexists(folder / SINGLE):  # as transformers, which then looks at no index
        return {folder / SINGLE: []}, []
    try:
        names_of: dict[Path, list[str]] = {}
        for name, file in read_json(folder / INDEX)["weight_map"].items():
            names_of.setdefault(folder / file, []).append(name)
        return names_of, []
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        return {}, [f"{INDEX}: expected a weight_map of names to files, {type(error).__name__}: {error}"]


def write_weights(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, shard_bytes: int) -> torch.dtype:
    """Writes the tensors to one file, or to several and their index, holding one file's worth at a time.

    Args:
        folder: Exists.
        tensors: Under the names to store them by; taken one by one.
        shard_bytes: Most bytes of tensors in one file.

    Returns:
        The dtype of the first.

    Raises:
        ValueError: If there is none.
    """
    files: list[dict[str, int]] = []  # of each file, the bytes of each tensor
    pending: dict[str, torch.Tensor] = {}
    dtype: torch.dtype | None = None
    for name, tensor in tensors:
        dtype = dtype or tensor.dtype
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > shard_bytes:
            files.append(_write_file(folder / f"{len(files)}.partial", pending))
            pending = {}
        pending[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if dtype is None:
        raise ValueError("tensors: expected at least one, got none")
    files.append(_write_file(folder / f"{len(files)}.partial", pending))
    _name_files(folder, files)
    return dtype


def _write_file(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Writes one file; returns the bytes of each of its tensors."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})  # transformers 4 refuses a file without it
    except SafetensorError as error:  # a full disk, for one
        raise OSError(f"{path}: cannot be written, {error}") from error
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def _name_files(folder: Path, files: list[dict[str, int]]) -> None:
    """Gives the files their final names, which contain their number, and writes the index if there are several."""
    if len(files) == 1:
        (folder / "0.partial").rename(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i, sizes in enumerate(files):
        final = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"{i}.partial").rename(folder / final)
        weight_map |= dict.fromkeys(sizes, final)
    total = sum(sum(sizes.values()) for sizes in files)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
        ValueError: If it or its folder is not there, or it is no JSON object.
    """
    if not path.parent.is_dir():
        raise ValueError(absence(path.parent))
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: expected a JSON file, {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # the last, of brackets in brackets
        raise ValueError(f"{path}: expected a JSON file, {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON object."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
