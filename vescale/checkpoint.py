"""Checkpoints: torch's distributed checkpoint of a run, whole or not there, loadable on any number of ranks.

::

    checkpoints/
      step_00000100/          whole: it has its seal
        __0_0.distcp ...      one or more files per rank, torch's format
        .metadata             which tensor lies where
        record.json           what was trained: see vescale/record.py
        seal.json             extra values, size and sha256 of every other file, and a sha256 of both; written last
      step_00000200.5e1f0a.partial/   being written, or left by a kill: never read, removed by the next run

The names in it are the parameters' plain names: ``model.<name>`` and ``optimizer.<name>.<state>``. They do not depend
on the number of ranks, on units or on plans. ``vescale/saver.py`` writes them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from vescale import whole_file
from vescale.optimizer import Optimizer
from vescale.rows import rows_of

SEAL, RECORD = "seal.json", "record.json"
PARTIAL = ".partial"
GO_ON = "remove the folder to go on from an older one"
# Types of the extra values that a trainer goes on from; others may be of any.
EXTRA = {"step": int, "tokens": int, "data": dict, "health": dict, "tracking_id": str}
RANDOM = "random."  # begins the names of random states, which belong to a rank

T = TypeVar("T")


def newest(root: Path) -> Path | None:
    """Returns the newest whole checkpoint below ``root``, as rank 0 sees it, or None."""
    best = next(reversed(whole(root)), None)
    return from_rank_0(best) if dist.is_initialized() else best


def whole(root: Path) -> list[Path]:
    """Returns the whole checkpoints below ``root``, by step."""
    found = [path for path in root.glob("step_*") if path.name[5:].isdecimal() and (path / SEAL).is_file()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """Returns the step of a checkpoint's folder."""
    return int(path.name[5:])


def newest_good(
    root: Path, paths: Sequence[Path], check: Callable[[Path], T]
) -> tuple[Path | None, T | None, list[str]]:
    """Returns the newest of ``paths`` that ``check`` finds good, what it returned, and what is wrong with newer ones.

    Args:
        root: Holds the checkpoints; for the message.
        paths: Whole checkpoints, by step.
        check: Raises ValueError for a bad one.

    Raises:
        ValueError: If there are checkpoints but none is good: nothing begins anew over somebody's work.
    """
    wrong: list[str] = []
    for path in reversed(paths):
        try:
            return path, check(path), wrong
        except ValueError as problem:
            wrong.append(str(problem))
    if wrong:
        raise ValueError(f"no checkpoint in {root} is good: {'; '.join(wrong)}")
    return None, None, []


def read_extra(path: Path) -> dict[str, Any]:
    """Returns the extra values that were saved, after comparing the sizes of the files with the seal; reads no tensors.

    Raises:
        ValueError: If the seal cannot be read, or a file is missing or not of its length.
    """
    seal = _read_seal(path)
    wrong = [name for name, (size, _) in seal["files"].items() if _size(path / name) != size]
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
    wrong = [name for name, value in share if list(fingerprint(path / name)) != list(value)]
    if wrong:
        raise ValueError(f"checkpoint {path} is corrupt: checksum of {', '.join(wrong)} differs; {GO_ON}")
    return extra


def load(path: Path, *, model: nn.Module, optimizer: Optimizer, verified: bool = False) -> dict[str, Any]:
    """Loads a checkpoint into the tensors of ``model`` and ``optimizer``, in place; returns its extra values.

    The number of ranks may differ from the one that saved. The random state is restored where this rank's was saved.
    Every rank reads what it holds; nothing is communicated but whether all could.

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
    extra = together(lambda: read_extra(path) if verified else verify(path, **share))
    state, random = tensors(model, optimizer), random_state()
    metadata = together(lambda: _compared(path, state))
    random = {name: value for name, value in random.items() if name in metadata.state_dict_metadata}
    together(lambda: read(path, {**state, **random}, metadata=metadata))
    _restore(random)
    optimizer.state_was_loaded()
    return extra


def read(path: Path, state: dict[str, torch.Tensor], *, metadata: Any = None) -> None:
    """Reads this rank's part of every tensor of ``state`` into it; no communication.

    Args:
        path: A whole checkpoint.
        state: Plain or sharded tensors under their names in the checkpoint.
        metadata: Of the checkpoint, where it was read already.
    """
    reader, planner = dcp.FileSystemReader(path), dcp.DefaultLoadPlanner()
    metadata = metadata or reader.read_metadata()
    planner.set_up_planner(state, metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()


# --- what is in it ---


def tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Returns every tensor of the run under its name; tied parameters once, under their first name."""
    seen: set[int] = set()
    found: dict[str, torch.Tensor] = {}
    parts: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            parts[name] = getattr(value, "part_of", None)
            found[f"model.{name}"] = rows_of(value.detach(), parts[name])
    rows = optimizer.rows_of_one()
    for name, value in optimizer.named_state().items():
        found[f"optimizer.{name}"] = rows_of(value, parts.get(name.rpartition(".")[0]), each=rows[name])
    return found


def random_state() -> dict[str, torch.Tensor]:
    """Returns the states of this rank's random generators, under names that end with the rank."""
    states = {f"{RANDOM}{dist.get_rank()}": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states[f"{RANDOM}cuda.{dist.get_rank()}"] = torch.cuda.get_rng_state()
    return states


def _restore(random: Mapping[str, torch.Tensor]) -> None:
    for name, value in random.items():
        torch.cuda.set_rng_state(value) if name.startswith(f"{RANDOM}cuda.") else torch.set_rng_state(value)


def _compared(path: Path, state: Mapping[str, torch.Tensor]) -> Any:
    """Returns the checkpoint's metadata if it holds exactly the tensors of ``state``, and random states."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    stored: dict[str, Any] = metadata.state_dict_metadata
    there = {name: of for name, of in stored.items() if not name.startswith(RANDOM)}
    missing, surplus = sorted(state.keys() - there.keys()), sorted(there.keys() - state.keys())
    shapes = [
        f"{name} has shape {tuple(there[name].size)}, expected {tuple(state[name].shape)}"
        for name in sorted(there.keys() & state.keys())
        if tuple(there[name].size) != tuple(state[name].shape)
    ]
    problems = [f"lacks {_few(missing)}"] * bool(missing) + [f"also holds {_few(surplus)}"] * bool(surplus) + shapes[:8]
    if problems:
        raise ValueError(f"checkpoint {path} is of another model or optimizer: it {'; '.join(problems)}")
    return metadata


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# --- files ---


def fingerprint(file: Path) -> tuple[int, str]:
    """Returns the bytes and the sha256 of a file."""
    with file.open("rb") as stream:
        return file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest()


def remove(path: Path) -> None:
    """Removes a checkpoint: it stops being one at once, and its files go after that."""
    gone = path if path.name.endswith(PARTIAL) else path.with_name(f"{path.name}.old{PARTIAL}")
    if gone != path:
        if gone.exists():  # left by a kill
            shutil.rmtree(gone)
        path.rename(gone)
    shutil.rmtree(gone) if gone.is_dir() and not gone.is_symlink() else gone.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON, whole or not at all."""
    whole_file.replace(path, json.dumps(value, indent=1).encode())


def seal_of(extra: Mapping[str, Any], files: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a seal holds: extra values, fingerprints of files, and the sha256 of both."""
    held = {"extra": extra, "files": files}
    return {**held, "sha256": hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()}


def _read_seal(path: Path) -> dict[str, Any]:
    try:
        seal = json.loads((path / SEAL).read_text())
    except (OSError, ValueError, RecursionError) as problem:  # the last, of brackets in brackets
        raise ValueError(f"checkpoint {path} is corrupt: {SEAL}: {problem}; {GO_ON}") from None
    if not (isinstance(seal, dict) and isinstance(seal.get("extra"), dict) and isinstance(seal.get("files"), dict)):
        raise ValueError(f"checkpoint {path} is corrupt: {SEAL} lacks its entries; {GO_ON}")
    if "sha256" in seal and seal != seal_of(seal["extra"], seal["files"]):
        raise ValueError(f"checkpoint {path} is corrupt: {SEAL} is not what was written; {GO_ON}")
    wrong = [f"files.{name}" for name, value in seal["files"].items() if not _is_fingerprint(value)]
    extra = seal["extra"]
    wrong += [f"extra.{name}" for name, kind in EXTRA.items() if name in extra and type(extra[name]) is not kind]
    if wrong:
        raise ValueError(f"checkpoint {path} is corrupt: {SEAL}: {', '.join(wrong)} of another type; {GO_ON}")
    return seal


def _size(file: Path) -> int | None:
    """Bytes of a file; None where there is none, or cannot be one of that name."""
    try:
        return file.stat().st_size if file.is_file() else None
    except OSError:
        return None


def _is_fingerprint(value: Any) -> bool:
    return isinstance(value, list) and [type(part) for part in value] == [int, str]


# --- ranks ---


def gather(value: T) -> list[T]:
    """Returns every rank's value, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_rank_0(value: T) -> T:
    """Returns rank 0's value, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def together(act: Callable[[], T]) -> T:
    """Runs ``act`` on every rank.

    If it fails anywhere, the first failure is raised everywhere, so that no rank waits for another.
    """
    result, problem = None, None
    try:
        result = act()
    except Exception as caught:  # whatever it is, the other ranks must not wait for this one
        problem = caught
    first = next((p for p in gather(problem) if p is not None), None)
    if first is not None:
        raise first
    return result  # type: ignore[return-value]
