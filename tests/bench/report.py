"""What every bench prints and writes: rows of one quantity, ours beside the peer's, with the raw samples."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

FOLDER = str(Path(__file__).parent)
if FOLDER in sys.path:  # optimizers.py beside this file must not hide the package from what a bench imports next
    sys.path.remove(FOLDER)
    sys.path.append(FOLDER)


class Row(NamedTuple):
    """One line of a bench.

    Args:
        name: What was measured, and where.
        ours: Median of our samples.
        peer: Median of the peer's, None where there is none.
        unit: Of both.
        samples: Raw samples by system, in the order they were taken.
    """

    name: str
    ours: float
    peer: float | None
    unit: str
    samples: dict[str, list[float]]


def row(name: str, unit: str, ours: list[float], peer: list[float] | None = None) -> Row:
    """Returns a row of medians."""
    samples = {"ours": ours} | ({"peer": peer} if peer else {})
    return Row(name, statistics.median(ours), statistics.median(peer) if peer else None, unit, samples)


def arguments(description: str) -> argparse.ArgumentParser:
    """Returns a parser that knows ``--json FILE``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="also write the rows there, with raw samples")
    return parser


def machine() -> str:
    """Returns where this ran, in words."""
    return f"{os.cpu_count()} {platform.machine()} cores, torch {torch.__version__}, Python {platform.python_version()}"


def publish(title: str, rows: list[Row], file: Path | None) -> None:
    """Prints the rows as a table and writes them as JSON where asked."""
    table = Table(title=f"{title} ({machine()})")
    for column in ("", "ours", "peer", "unit", "peer / ours"):
        table.add_column(column, justify="left" if column in ("", "unit") else "right")
    for line in rows:
        ratio = "" if line.peer is None or not line.ours else f"{line.peer / line.ours:.3f}"
        table.add_row(line.name, f"{line.ours:.4g}", "" if line.peer is None else f"{line.peer:.4g}", line.unit, ratio)
    Console(width=120).print(table)
    if file is not None:
        write(title, rows, file)


def write(title: str, rows: list[Row], file: Path) -> None:
    """Writes the rows as JSON."""
    file.write_text(
        json.dumps({"title": title, "machine": machine(), "rows": [line._asdict() for line in rows]}, indent=1)
    )
