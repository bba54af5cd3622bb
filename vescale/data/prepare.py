"""prepare: turns text, JSONL or parquet into a file of token ids, in parallel; what was done survives a kill.

The inputs are cut into pieces that do not depend on the number of workers: the documents that begin in 16 MiB of a
text or JSONL file, a row group of a parquet file. Each piece is written to a file of its own beside the output, so that
the same command goes on where it was stopped, with any number of workers; in the end the pieces are joined in order,
and a ``.json`` beside the output says what is in it. Another input, tokenizer or layout is refused until the pieces are
removed.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import mmap
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vescale import whole_file
from vescale.data.samples import raise_all
from vescale.data.token_file import TokenWriter, fingerprint, open_tokens, output_problems
from vescale.data.tokenizer import ByteTokenizer, tokenizer_of

PIECE = 16 << 20  # bytes of text that are one piece of work: a quarter of a minute of a slow tokenizer
AT_ONCE = 256  # documents that a tokenizer is given together
KINDS = (".txt", ".jsonl", ".parquet")
CLAIM, LOCK = "work.json", "lock"  # files beside the pieces


@dataclass(frozen=True, kw_only=True)
class Work:
    """What to prepare.

    Args:
        inputs: ``.txt`` (form feeds between documents), ``.jsonl`` or ``.parquet`` files.
        out: The ``.bin`` to write.
        tokenizer: ``bytes``, or a tokenizer.json.
        eos: Token that ends a document; None: one of the usual that the tokenizer has.
        layout: ``raw``, ``llmc`` or ``megatron``.
        key: Of the text in a JSON object, or its column in a parquet file.
    """

    inputs: tuple[str, ...]
    out: str
    tokenizer: str = "bytes"
    eos: str | None = None
    layout: str = "raw"
    key: str = "text"

    def check(self) -> None:
        """Raises for what cannot be prepared.

        Raises:
            ValueError: In one line.
        """
        problems = [f"{name!r} is no file" for name in self.inputs if not Path(name).is_file()]
        problems += [f"{name!r}: expected {', '.join(KINDS)}" for name in self.inputs if Path(name).suffix not in KINDS]
        if not self.inputs:
            problems.append("expected at least one input")
        real = [os.path.realpath(name) for name in self.inputs]
        twice = [name for i, name in enumerate(self.inputs) if real[i] in real[:i]]
        problems += [f"{name!r} is given twice" for name in twice]
        about = Path(self.out).with_suffix(".json")
        if about.exists() and not _is_ours(about):
            problems.append(
                f"out: {str(about)!r}, which is to say what is in {self.out!r}, is a file of something else"
            )
        raise_all(problems + output_problems(Path(self.out), self.layout))
        tokenizer_of(self.tokenizer, eos=self.eos)


def _is_ours(about: Path) -> bool:
    """Whether a file is one that ``prepare`` wrote beside an output."""
    try:
        told = json.loads(about.read_text())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(told, dict) and {"tokens", "fingerprint", "layout"} <= told.keys()


@dataclass(frozen=True)
class Piece:
    """A part of an input that one worker does at a time: bytes, or row groups of a parquet file, ``[start, stop)``."""

    index: int
    path: str
    start: int
    stop: int
    nbytes: int


def pieces(work: Work) -> list[Piece]:
    """Returns the pieces of the inputs, in order.

    Raises:
        ValueError: For a parquet file that cannot be read, or has no such column.
    """
    found: list[tuple[str, int, int, int]] = []
    for name in work.inputs:
        if Path(name).suffix == ".parquet":
            sizes = _row_groups(name, work.key)
            found += [(name, group, group + 1, size) for group, size in enumerate(sizes)]
        else:
            size = Path(name).stat().st_size
            stops = [(start, min(start + PIECE, size)) for start in range(0, size, PIECE)]
            found += [(name, start, stop, stop - start) for start, stop in stops]
    return [Piece(index, *piece) for index, piece in enumerate(found)]


def documents(work: Work, piece: Piece) -> Iterator[str | bytes]:
    """Yields the documents of a piece: bytes of a text file for the byte tokenizer, else text.

    Raises:
        ValueError: For what is no text, and for a line that is no JSON object with the key.
    """
    kind = Path(piece.path).suffix
    if kind == ".parquet":
        for row, value in enumerate(_column(piece, work.key)):
            yield _checked(value, work.key, where=f"{piece.path}, row {row} of group {piece.start}")
    elif kind == ".txt":
        for at, document in _between(b"\f", piece):
            if document:
                yield document if work.tokenizer == "bytes" else _decoded(document, piece.path, at)
    else:
        for at, line in _between(b"\n", piece):
            if line.strip():
                yield _text(line, work.key, where=f"{piece.path}, byte {at}")


def _between(separator: bytes, piece: Piece) -> Iterator[tuple[int, bytes]]:
    """Yields where each stretch between separators begins, and its bytes; it is of the piece in which it begins."""
    with Path(piece.path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(separator, piece.start - 1, piece.stop - 1) + 1 if piece.start else 0
        if piece.start and not at:  # one that began before goes on to the end of the piece
            return
        while at < piece.stop:
            end = data.find(separator, at)
            end = len(data) if end < 0 else end
            yield at, data[at:end]
            at = end + 1


def _decoded(document: bytes, path: str, at: int) -> str:
    try:
        return document.decode()
    except UnicodeDecodeError as problem:
        where = f"{path}, byte {at + problem.start}"
        raise ValueError(f"{where}: expected UTF-8, got {document[problem.start : problem.end]!r}") from None


def _text(line: bytes, key: str, *, where: str) -> str:
    try:
        value = json.loads(line)[key]
    except (ValueError, KeyError, TypeError, RecursionError) as problem:  # the last, of brackets in brackets
        raise ValueError(f"{where}: expected a JSON object with the key {key!r}: {problem!r}") from None
    return _checked(value, key, where=where)


def _checked(value: Any, key: str, *, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: expected text under {key!r}, got {type(value).__name__}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as problem:  # half a character, as JSON may write it
            raise ValueError(f"{where}: expected text under {key!r}: {problem}") from None
    return value


def _parquet(name: str) -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise ValueError(f"{name}: parquet needs the package pyarrow: pip install pyarrow") from None
    try:
        return parquet.ParquetFile(name)
    except Exception as problem:  # pyarrow's own kinds
        raise ValueError(f"{name}: is no parquet file: {problem}") from None


def _column(piece: Piece, key: str) -> list[Any]:
    """Returns the column of a piece's row group."""
    try:
        return _parquet(piece.path).read_row_group(piece.start, columns=[key])[key].to_pylist()
    except Exception as problem:  # pyarrow's own kinds; some are an OSError that names no file
        raise ValueError(f"{piece.path}, row group {piece.start}: {problem}") from None


def _row_groups(name: str, key: str) -> list[int]:
    """Returns the bytes of each row group."""
    file = _parquet(name)
    columns = file.schema_arrow.names
    if key not in columns:
        raise ValueError(f"{name}: has no column {key!r} (--key), but {', '.join(columns)}")
    return [file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups)]


def _do(work: Work, piece: Piece, folder: str) -> int:
    """Tokenizes a piece into a file of its own, unless that is there; returns the bytes of input that it is."""
    path = Path(folder) / f"{piece.index:06}.bin"
    if not path.is_file():
        tokenizer = tokenizer_of(work.tokenizer, eos=work.eos)
        found = documents(work, piece)
        with TokenWriter(path, vocab_size=tokenizer.vocab_size) as writer:
            while batch := [*itertools.islice(found, AT_ONCE)]:
                for ids in tokenizer.encode_documents(batch):
                    writer.add(ids)
    return piece.nbytes


def prepare(
    work: Work, *, workers: int, advance: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """Writes the output and returns what is in it: counts, fingerprint, tokenizer.

    Args:
        work: What to do.
        workers: Processes, > 0; 1: this one alone.
        advance: Called with the bytes done and their total, as pieces are done.

    Raises:
        ValueError: For input that cannot be prepared, pieces of other work, or work that is going on already.
    """
    work.check()
    if workers < 1:
        raise ValueError(f"workers: expected a number > 0, got {workers}")
    out = Path(work.out)
    folder = out.with_name(out.name + ".pieces")
    todo, done = pieces(work), 0
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        _claim(folder, work)
        total = sum(piece.nbytes for piece in todo)
        for nbytes in _done(work, todo, str(folder), workers=min(workers, len(todo))):
            done += nbytes
            advance(done, total)
        facts = _join(work, folder, todo)
        shutil.rmtree(folder)
    return facts


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """As a context, holds the folder's lock, which the kernel lets go of however the process ends."""
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder}: another process is at this work; wait for its end") from None
        except OSError:  # a file system without locks
            pass
        yield


def _done(work: Work, todo: Sequence[Piece], folder: str, *, workers: int) -> Iterator[int]:
    """Does the pieces, in this process where one is enough; yields the bytes of each when it is done."""
    if workers <= 1:
        yield from (_do(work, piece, folder) for piece in todo)
        return
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin) as pool:
        try:
            for future in as_completed([pool.submit(_do, work, piece, folder) for piece in todo]):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # the first problem is said without doing the rest
            raise


def _begin() -> None:
    """Prepares a worker: Ctrl-C ends it at once, without a traceback, and so does the end of who started it.

    What it was writing has no name yet.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers are what is parallel
    starter = multiprocessing.parent_process()
    if starter is not None:
        threading.Thread(target=_end_with, args=(starter.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    """Waits for a process to end, and ends this one: a pool's worker waits for work of a dead starter for ever."""
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def _claim(folder: Path, work: Work) -> None:
    """Takes the folder of pieces: a new one, one of the same work on the same inputs, or one in which none is done."""
    inputs = {name: [Path(name).stat().st_size, Path(name).stat().st_mtime_ns] for name in work.inputs}
    tokenizer = tokenizer_of(work.tokenizer, eos=work.eos).name
    now = {**asdict(work), "inputs": list(work.inputs), "files": inputs, "tokenizer": tokenizer, "piece": PIECE}
    there, claim = folder / CLAIM, json.dumps(now, sort_keys=True)
    if there.is_file() and there.read_text() != claim and any(folder.glob("*.bin")):
        changed = _changes(_json(there), json.loads(claim))
        raise ValueError(f"{folder} holds pieces of other work: {changed}; remove it to begin anew")
    whole_file.replace(there, claim.encode())


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs between two claims, in words."""
    if was.get("inputs") != now["inputs"]:
        return "of other inputs"
    files = was.get("files", {})
    found = [f"{name} was changed" for name, facts in now["files"].items() if files.get(name) != facts]
    words = {key: value for key, value in now.items() if key not in ("inputs", "files")}
    found += [f"{key} was {was.get(key)}, now {value}" for key, value in words.items() if was.get(key) != value]
    return ", ".join(found) or "an unknown one"


def _join(work: Work, folder: Path, todo: Sequence[Piece]) -> dict[str, Any]:
    """Joins the pieces into the output, and says in a file beside it what it is."""
    tokenizer, out = tokenizer_of(work.tokenizer, eos=work.eos), Path(work.out)
    if not any((folder / f"{piece.index:06}.bin").stat().st_size for piece in todo):
        shutil.rmtree(folder)
        raise ValueError(f"no document in {', '.join(work.inputs)}; nothing was written")
    kind, about = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32", out.with_suffix(".json")
    with TokenWriter(out, layout=work.layout, vocab_size=tokenizer.vocab_size) as writer:
        for piece in todo:
            file, problems = open_tokens(folder / f"{piece.index:06}.bin", dtype=kind)
            raise_all(problems)
            assert file is not None and file.documents is not None
            writer.add_many(np.asarray(file.tokens), np.diff(file.documents).tolist())
        about.unlink(missing_ok=True)  # of what had this name before, and is replaced now
    file, problems = open_tokens(out, dtype=kind if work.layout == "raw" else None)
    raise_all(problems)
    assert file is not None
    facts = {
        "documents": len(writer.lengths),
        "tokens": writer.count,
        "fingerprint": fingerprint(file.tokens),
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "ignored": tokenizer.bos if isinstance(tokenizer, ByteTokenizer) else None,
        "dtype": file.dtype,
        "layout": work.layout,
        "inputs": list(work.inputs),
    }
    whole_file.replace(about, (json.dumps(facts, indent=1) + "\n").encode())
    return facts
