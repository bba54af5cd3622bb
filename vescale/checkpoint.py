"""Checkpoints: torch's distributed checkpoint of a run, written beside, sealed, renamed; loadable on any number of
ranks.

::

    checkpoints/
      step_00000100/          whole: it has its seal
        __0_0.distcp ...      one or more files per rank, torch's format
        .metadata             which tensor lies where
        seal.json             extra values, and size and sha256 of every other file; written last
      step_00000200.partial/  being written, or left by a run that was killed: never read, removed by the next save

The names in it are the parameters' plain names: ``model.<name>`` and ``optimizer.<name>.<state>``. They do not depend
on the number of ranks, on units or on plans.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from vescale.optimizer import Optimizer
from vescale.rows import rows_of

SEAL = "seal.json"
PARTIAL = ".partial"
GO_ON = "remove the folder to go on from an older one"


def save(folder: Path, *, model: nn.Module, optimizer: Optimizer, extra: dict[str, Any], keep: int) -> None:
    """Writes a checkpoint; it is at ``folder`` whole, or not at all.

    Args:
        folder: Where it will be; its parent holds the run's other checkpoints.
        model: Parameters and persistent buffers are saved under ``model.``.
        optimizer: Every state is saved under ``optimizer.``.
        extra: JSON values of rank 0, returned by ``load``.
        keep: Checkpoints that stay in the parent folder, > 0; older ones are removed once this one is whole.

    Raises:
        ValueError: Unless the folder is called ``step_`` and a number, and ``keep`` is > 0.
        OSError: On every rank, if one cannot write.
    """
    if not (folder.name.startswith("step_") and folder.name[5:].isdigit()) or keep < 1:
        raise ValueError(f"checkpoint.save: expected a folder step_<number> and keep > 0, got {folder.name} and {keep}")
    partial = folder.with_name(folder.name + PARTIAL)
    _together(lambda: _clear(partial) if dist.get_rank() == 0 else None)
    tensors = _tensors(model, optimizer)
    tensors[f"random.{dist.get_rank()}"] = torch.get_rng_state()
    _together(lambda: _write(tensors, partial))
    own = sorted(file for i, file in enumerate(_files(partial)) if i % dist.get_world_size() == dist.get_rank())
    seals = _gather({file.name: _fingerprint(file) for file in own})
    _together(lambda: _finish(partial, folder, extra, seals, keep) if dist.get_rank() == 0 else None)


def newest(root: Path) -> Path | None:
    """Returns the newest whole checkpoint below ``root``, as rank 0 sees it, or None."""
    best = next(reversed(_whole(root)), None)
    return _from_rank_0(best) if dist.is_initialized() else best


def read_extra(path: Path) -> dict[str, Any]:
    """Returns what ``save`` was given as ``extra``, after comparing the sizes of the files with the seal; reads no
    tensors.

    Raises:
        ValueError: If the seal cannot be read, or a file is missing or not of its length.
    """
    seal = _read_seal(path)
    wrong = [
        name
        for name, (size, _) in seal["files"].items()
        if not (path / name).is_file() or (path / name).stat().st_size != size
    ]
    if wrong:
        raise ValueError(f"checkpoint {path} is corrupt: {', '.join(wrong)} missing or not of its length; {GO_ON}")
    return seal["extra"]


def verify(path: Path, *, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """Compares the checksums of ``rank``'s share of the files with the seal; needs no process group.

    Args:
        path: A whole checkpoint.
        rank: Which share of the files.
        world: Number of shares.

    Returns:
        The extra values.

    Raises:
        ValueError: If a file is missing or differs.
    """
    extra = read_extra(path)
    share = sorted(_read_seal(path)["files"].items())[rank::world]
    wrong = [name for name, value in share if list(_fingerprint(path / name)) != list(value)]
    if wrong:
        raise ValueError(f"checkpoint {path} is corrupt: checksum of {', '.join(wrong)} differs; {GO_ON}")
    return extra


def load(path: Path, *, model: nn.Module, optimizer: Optimizer, verified: bool = False) -> dict[str, Any]:
    """Loads a checkpoint into the tensors of ``model`` and ``optimizer``, in place; returns its extra values.

    The number of ranks may differ from the one that saved. The random state is restored where this rank's was saved.

    Args:
        path: A whole checkpoint, as ``newest`` returns it.
        model: Built and sharded.
        optimizer: Over the model's parameters.
        verified: Checksums were compared already, by ``verify``.

    Raises:
        ValueError: On every rank, before anything is written into: a damaged file, or tensors that are missing or of
            another shape.
    """
    share = {"rank": dist.get_rank(), "world": dist.get_world_size()}
    extra = _together(lambda: read_extra(path) if verified else verify(path, **share))
    tensors = _tensors(model, optimizer)
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    _compare(path, tensors, metadata)
    random = f"random.{dist.get_rank()}"
    if random in metadata:
        tensors[random] = torch.get_rng_state()
    dcp.load(tensors, checkpoint_id=path)
    if random in metadata:
        torch.set_rng_state(tensors[random])
    optimizer.state_was_loaded()
    return extra


# --- what is in it ---


def _tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor of the run under its name; tied parameters once, under their first name."""
    seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    parts: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            parts[name] = getattr(value, "part_of", None)
            tensors[f"model.{name}"] = rows_of(value.detach(), parts[name])
    for name, value in optimizer.named_state().items():
        tensors[f"optimizer.{name}"] = rows_of(value, parts.get(name.rpartition(".")[0]))
    return tensors


def _compare(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> None:
    saved = {name for name in metadata if not name.startswith("random.")}
    missing, surplus = sorted(tensors.keys() - saved), sorted(saved - tensors.keys())
    shapes = [
        f"{name} has shape {tuple(metadata[name].size)}, expected {tuple(tensors[name].shape)}"
        for name in sorted(saved & tensors.keys())
        if tuple(metadata[name].size) != tuple(tensors[name].shape)
    ]
    problems = [f"lacks {_few(missing)}"] * bool(missing) + [f"also holds {_few(surplus)}"] * bool(surplus) + shapes[:8]
    if problems:
        raise ValueError(f"checkpoint {path} is of another model or optimizer: it {'; '.join(problems)}")


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# --- files ---


def _clear(partial: Path) -> None:
    """Removes what a killed run left, and makes the folder."""
    for left in partial.parent.glob(f"*{PARTIAL}"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    partial.mkdir(parents=True)


def _write(tensors: dict[str, torch.Tensor], partial: Path) -> None:
    try:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(partial, overwrite=True))
    except dcp.api.CheckpointException as problem:  # torch gathers what went wrong on each rank
        first = next(iter(problem.failures.values()))[0]
        raise OSError(f"cannot write checkpoint {partial}: {first}") from problem


def _finish(partial: Path, folder: Path, extra: dict[str, Any], seals: list[dict[str, Any]], keep: int) -> None:
    """Seals the folder, gives it its name, and removes the oldest ones."""
    files = {name: value for seal in seals for name, value in seal.items()}
    with (partial / SEAL).open("w") as file:
        json.dump({"extra": extra, "files": files}, file)
        file.flush()
        os.fsync(file.fileno())
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    for old in _whole(folder.parent)[:-keep]:
        if old != folder:
            shutil.rmtree(old)


def _whole(root: Path) -> list[Path]:
    """The whole checkpoints below ``root``, by step."""
    found = [path for path in root.glob("step_*") if path.name[5:].isdigit() and (path / SEAL).is_file()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name != SEAL)


def _fingerprint(file: Path) -> tuple[int, str]:
    with file.open("rb") as stream:
        return file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest()


def _read_seal(path: Path) -> dict[str, Any]:
    try:
        seal = json.loads((path / SEAL).read_text())
    except (OSError, ValueError) as problem:
        raise ValueError(f"checkpoint {path} is corrupt: {SEAL}: {problem}; {GO_ON}") from None
    if not (isinstance(seal, dict) and isinstance(seal.get("extra"), dict) and isinstance(seal.get("files"), dict)):
        raise ValueError(f"checkpoint {path} is corrupt: {SEAL} lacks its entries; {GO_ON}")
    return seal


# --- ranks ---


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _from_rank_0(value: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _together(act: Any) -> Any:
    """Runs ``act`` on every rank.

    If it fails anywhere, the first failure is raised everywhere, so that no rank waits for another.
    """
    result, problem = None, None
    try:
        result = act()
    except Exception as caught:  # whatever it is, the other ranks must not wait for this one
        problem = caught
    first = next((p for p in _gather(problem) if p is not None), None)
    if first is not None:
        raise first
    return result
