"""Reads what W&B has kept of an offline run, as its own server would after ``wandb sync``."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

PROTO: Any = import_module("wandb.proto.wandb_internal_pb2")  # before any test hides wandb


class Kept(NamedTuple):
    """What is in a ``.wandb`` file."""

    run: Any  # project, run_group, tags, run_id, ...
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    axes: set[tuple[str, str]]  # metrics (a glob), and over which other metric they are drawn
    exit_codes: list[int]


def kept(path: Path) -> Kept:
    """Returns the contents of a file."""
    found: dict[str, list[Any]] = {}
    for record in _records(path):
        kind = record.WhichOneof("record_type")
        found.setdefault(kind, []).append(getattr(record, kind))
    (run,) = found["run"]
    rows = [
        {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in row.item}
        for row in found.get("history", [])
    ]
    return Kept(
        run,
        {item.key: json.loads(item.value_json) for item in run.config.update},
        [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows],
        {(metric.glob_name or metric.name, metric.step_metric) for metric in found.get("metric", [])},
        [end.exit_code for end in found.get("exit", [])],
    )


def ended(path: Path) -> bool:
    """Whether the end of the run is in a file: a process of W&B's own writes it, and may be behind."""
    try:
        return any(record.WhichOneof("record_type") == "exit" for record in _records(path))
    except DecodeError:  # half a record
        return False


def _records(path: Path) -> Iterator[Any]:
    """Yields the records of a file: a header of 7 bytes, then pieces that do not cross blocks of 32 KiB."""
    data, at, whole = path.read_bytes(), 7, b""
    if not data:  # nothing is written yet
        return
    assert struct.unpack("<4sHB", data[:7]) == (b":W&B", 0xBEE1, 0)
    while at + 7 <= len(data):
        room = -at % 32768 or 32768
        if room < 7:  # a block's end too short for a piece's header
            at += room
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, or last; 2 and 3 are first and middle
            record = PROTO.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""
