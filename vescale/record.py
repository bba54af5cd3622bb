"""The record of a run: what was trained, from what, by which code, and how far, in one JSON file.

It lies in the run's folder and in every checkpoint. The checksums in it do not depend on how tensors are cut
(``vescale/checksum.py``), so runs on different machines can be compared::

    python -m vescale.record verify DIR       computes a checkpoint's checksums again and says what differs
    python -m vescale.record compare A B      says how two runs differ, from their records
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp

from vescale import checkpoint
from vescale.checkpoint import RANDOM, RECORD
from vescale.checksum import checksum
from vescale.keys import WATCHING, among, flat
from vescale.saver import checksums

PACKAGES = ("torch", "numpy", "triton", "wandb", "safetensors", "tokenizers")
# What explains two runs comes first: headings, and the parts of a record below each.
HEADINGS = {
    "weights": ("weights", "optimizer", "step", "tokens"),
    "data": ("data",),
    "configuration": ("config", "seeds"),
    "code": ("git", "versions"),
    "machine": ("mesh", "machine"),
    "measured": ("metrics",),
}
WATCHED = "configuration that changes no number"
DIGITS = 4  # of what was measured, or as many as tell two values apart


def facts(settings: Mapping[str, Any], *, data: Mapping[str, Any], world: int, device: torch.device) -> dict[str, Any]:
    """Returns what does not change during a run, in JSON's types.

    Args:
        settings: The resolved configuration.
        data: What the data say of themselves: ``Dataset.describe``.
        world: Number of ranks.
        device: Of rank 0.
    """
    config = json.dumps(settings, sort_keys=True)
    parallelism = settings.get("parallelism", {})
    return {
        "config": dict(settings),
        "config_sha256": hashlib.sha256(config.encode()).hexdigest(),
        "data": dict(data),
        "seeds": {"weights": settings.get("trainer", {}).get("seed"), "data": data.get("seed")},
        "git": git_state(Path(__file__).parent),
        "versions": {"python": platform.python_version(), **_versions()},
        "mesh": {"ranks": world, **{key: parallelism[key] for key in ("dp_shard", "zero") if key in parallelism}},
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "cores": os.cpu_count(),
        },
    }


def git_state(folder: Path) -> dict[str, Any]:
    """Returns the commit that ``folder`` is at, and a hash of what was changed since; empty outside a checkout."""

    def ask(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    commit, changes = ask("rev-parse", "HEAD"), ask("diff", "HEAD")
    if commit is None:
        return {}
    changed = hashlib.sha256(changes.encode()).hexdigest() if changes else None
    return {"commit": commit.strip(), "changed_sha256": changed}


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def drawing(model: Any) -> list[dict[str, Any]]:
    """Returns where every tensor of every segment lies, for the report's picture.

    Args:
        model: Sharded and planned.
    """
    plans = [segment.plan for unit in model.units() for segment in unit.segments]
    return [
        {
            "name": f"segment of {plan.tensors[0].name}",
            "shard_size": plan.shard_size,
            "num_ranks": plan.num_ranks,
            "tensors": [(t.name, at, at + t.numel) for t, at in zip(plan.tensors, plan.offsets, strict=True)],
        }
        for plan in plans
    ]


def segments(drawn: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a table of a ``drawing``: ranks, elements of a shard and the share of padding, by segment."""
    table = {}
    for segment in drawn:
        numel = segment["num_ranks"] * segment["shard_size"]
        padding = 1 - sum(stop - start for _, start, stop in segment["tensors"]) / numel
        kept = {key: segment[key] for key in ("num_ranks", "shard_size")}
        table[segment["name"].removeprefix("segment of ")] = {**kept, "padding": round(padding, 6)}
    return table


# --- verify ---


def verify(path: Path) -> list[str]:
    """Returns what differs between a checkpoint and its record, one line each; tensors are read one at a time.

    Args:
        path: A checkpoint, or a run's folder, whose newest one is taken.

    Raises:
        ValueError: If there is none, or its files are damaged.
    """
    folder = checkpoint_in(path)
    checkpoint.verify(folder)
    record = read(folder)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    sums: dict[str, int] = {}
    for name, stored in sorted(metadata.state_dict_metadata.items()):
        if name.startswith(RANDOM):
            continue
        value = torch.empty(stored.size, dtype=stored.properties.dtype)  # type: ignore[union-attr]
        checkpoint.read(folder, {name: value}, metadata=metadata)
        sums[name] = checksum(value, name=name)
    recorded = {key: record.get(key) for key in checksums({})}
    return [line for _, line in differences(checksums(sums), recorded, "is", "recorded")]


def checkpoint_in(path: Path) -> Path:
    """Returns ``path`` if it is a checkpoint, else the newest one of the run whose folder it is.

    Raises:
        ValueError: If there is none.
    """
    if (path / checkpoint.SEAL).is_file():
        return path
    found = checkpoint.newest(path / "checkpoints") or checkpoint.newest(path)
    if found is None:
        raise ValueError(f"{path} is no checkpoint, and no folder of a run that has one")
    return found


def read(path: Path) -> dict[str, Any]:
    """Returns the record in a run's folder, in a checkpoint, or in the file itself.

    Raises:
        ValueError: If there is none, or it cannot be read.
    """
    file = path / RECORD if path.is_dir() else path
    try:
        record = json.loads(file.read_text())
    except (OSError, ValueError) as problem:
        raise ValueError(f"{path} has no record that can be read: {problem}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{file} holds no record")
    return record


# --- compare ---


class Explanation(NamedTuple):
    """How two records differ.

    Args:
        verdict: What the differences mean together.
        lines: Of every key that differs, below its heading, in the order of ``HEADINGS``.
    """

    verdict: str
    lines: dict[str, list[str]]


def differences(a: Mapping[str, Any], b: Mapping[str, Any], in_a: str, in_b: str) -> Iterator[tuple[str, str]]:
    """Yields the dotted keys whose values differ, each with a line; ``in_a`` and ``in_b`` name the two sides."""
    left, right, nothing = flat(a), flat(b), "nothing"
    for key in sorted({*left, *right}):
        one, other = left.get(key, nothing), right.get(key, nothing)
        if one != other and not _both_nan(one, other):
            if among(key, HEADINGS["measured"]):
                one, other = _rounded(one, other)
            yield key, f"{key}: {in_a} {one}, {in_b} {other}"


def _both_nan(one: Any, other: Any) -> bool:
    return all(isinstance(value, float) and math.isnan(value) for value in (one, other))


def _rounded(*values: Any) -> Sequence[Any]:
    """Floats to ``DIGITS`` significant digits, or to the first more at which they differ."""
    if not all(isinstance(value, float) for value in values):
        return values
    exact = sys.float_info.dig + 2
    for digits in range(DIGITS, exact + 1):
        texts = [f"{float(f'{value:.{digits}g}'):,.{max(digits, sys.float_info.dig)}g}" for value in values]
        if len({*texts}) == len(values):
            break
    return texts


def explain(a: Mapping[str, Any], b: Mapping[str, Any]) -> Explanation:
    """Returns how two records differ; checksums of single tensors are left to the weights' one."""
    hidden = ("tensors", "config_sha256")
    one, other = ({key: value for key, value in record.items() if key not in hidden} for record in (a, b))
    lines: dict[str, list[str]] = {heading: [] for heading in (*HEADINGS, WATCHED, "other")}
    for key, line in differences(one, other, "A", "B"):
        lines[_heading(key)].append(line)
    return Explanation(_verdict(a, b), {heading: found for heading, found in lines.items() if found})


def _heading(key: str) -> str:
    if among(key.removeprefix("config."), WATCHING) and key.startswith("config."):
        return WATCHED
    return next((heading for heading, parts in HEADINGS.items() if among(key, parts)), "other")


def _verdict(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    same = {key: a.get(key) == b.get(key) for key in ("weights", "optimizer", "data", "git", "step")}
    same["config"] = _numbers(a) == _numbers(b)
    if same["weights"] and same["optimizer"]:
        return "the weights and the optimizer's state are bit for bit the same"
    if not same["step"]:
        return f"they are at different steps: {a.get('step')} and {b.get('step')}"
    causes = [word for key, word in (("config", "configuration"), ("data", "data"), ("git", "code")) if not same[key]]
    if causes:
        return f"other weights, from another {' and '.join(causes)}"
    return "the same configuration, data and code, yet other weights: the ranks, the machine or the versions differ"


def _numbers(record: Mapping[str, Any]) -> Any:
    """The settings that change numbers: two runs differ in their names and folders at least."""
    if "config" not in record:
        return record.get("config_sha256")
    return {key: value for key, value in flat(record["config"]).items() if not among(key, WATCHING)}


# --- the command ---


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0 when all agrees, 1 when something differs, 2 for input that cannot be read."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        if len(words) == 2 and words[0] == "verify":
            found = verify(Path(words[1]))
            lines = [f"  {line}" for line in found]
            print(f"{checkpoint_in(Path(words[1]))}: {'differs' if found else 'all checksums agree'}")
        elif len(words) == 3 and words[0] == "compare":
            verdict, below = explain(read(Path(words[1])), read(Path(words[2])))
            lines = [text for heading, of in below.items() for text in (heading, *(f"  {line}" for line in of))]
            print(verdict)
        else:
            raise ValueError("expected: verify DIR, or compare A B")
    except (ValueError, OSError) as problem:
        print(f"vescale.record: {' '.join(str(problem).split())}", file=sys.stderr)
        return 2
    print("\n".join(lines) or "  nothing differs")
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
