"""The command: `python -m vescale.data prepare texts/*.jsonl --out tokens.bin --tokenizer tokenizer.json`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool

from vescale.data.prepare import Work, prepare
from vescale.data.token_file import FORMATS


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 2 for input that was refused with one line, 1 for a failure, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m vescale.data", description="Turns text into token ids.")
    commands = parser.add_subparsers(dest="command", required=True)
    words = commands.add_parser("prepare", help="text, JSONL or parquet into a .bin to train on")
    words.add_argument(
        "inputs", nargs="+", help=".jsonl or .parquet files, or .txt with a form feed (\\f) between documents"
    )
    words.add_argument("--out", required=True, help="the .bin to write")
    words.add_argument("--tokenizer", default="bytes", help="bytes, or a tokenizer.json (default: bytes)")
    words.add_argument("--eos", help="token that ends a document (default: one of the usual)")
    words.add_argument("--format", dest="layout", default="raw", choices=FORMATS, help="of the output (default: raw)")
    words.add_argument("--key", default="text", help="of the text in JSON and parquet (default: text)")
    words.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: the cores)")
    options = vars(parser.parse_args(argv))
    options.pop("command")
    workers = options.pop("workers")
    try:
        with _bar() as advance:
            facts = prepare(Work(**{**options, "inputs": tuple(options["inputs"])}), workers=workers, advance=advance)
    except (ValueError, OSError) as problem:
        nameless = isinstance(problem, OSError) and problem.filename is None  # of a write, to a full disk say
        return _fail(f"{options['out']}: {problem}" if nameless else str(problem), 2)
    except BrokenProcessPool:
        return _fail("a worker was killed, perhaps for memory; the same command goes on, with fewer --workers", 1)
    except KeyboardInterrupt:
        return _fail("stopped; the same command goes on from the pieces that are done", 130)
    print(f"{options['out']}: {facts['documents']:,} documents, {facts['tokens']:,} tokens of {facts['dtype']}")
    print(f"{facts['fingerprint']}\ntrain on it: data.path={options['out']}")
    return 0


def _fail(line: str, code: int) -> int:
    print(f"vescale.data: {' '.join(line.split())}", file=sys.stderr)
    return code


class _bar:
    """A progress bar of bytes on stderr, where that is a terminal."""

    def __enter__(self) -> _bar:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("preparing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
        self._progress.start()
        self._task = self._progress.add_task("preparing", total=None)
        return self

    def __call__(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


if __name__ == "__main__":
    raise SystemExit(main())
