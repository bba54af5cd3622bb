"""prepare: turns text, JSONL or parquet into a file of token ids, in parallel; what was done survives a kill.

The inputs are cut into pieces that do not depend on the number of workers: the documents that begin in 16 MiB of a
text or JSONL file, a row group of a parquet file. Each piece is written to a file of its own beside the output, so that
the same command goes on where it was stopped; in the end the pieces are joined in order, and a ``.json`` beside the
output says what is in it. Another input, tokenizer or layout is refused until the pieces are removed.
"""

from __future__ import annotations

import itertools
import json
import mmap
import multiprocessing
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vescale.data.samples import raise_all
from vescale.data.token_file import TokenWriter, fingerprint, open_tokens, output_problems
from vescale.data.tokenizer import ByteTokenizer, tokenizer_of

PIECE = 16 << 20  # bytes of text that are one piece of work: a quarter of a minute of a slow tokenizer
AT_ONCE = 256  # documents that a tokenizer is given together
KINDS = (".txt", ".jsonl", ".parquet")


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
        raise_all(problems + output_problems(Path(self.out), self.layout))
        tokenizer_of(self.tokenizer, eos=self.eos)


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
        column = _parquet(piece.path).read_row_group(piece.start, columns=[work.key])[work.key].to_pylist()
        for row, value in enumerate(column):
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
        at = data.find(separator, piece.start - 1) + 1 if piece.start else 0
        if piece.start and not at:  # one that began before goes on to the end
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
    except (ValueError, KeyError, TypeError) as problem:
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
        ValueError: For input that cannot be prepared, or pieces of other work.
    """
    work.check()
    if workers < 1:
        raise ValueError(f"workers: expected a number > 0, got {workers}")
    out = Path(work.out)
    folder = out.with_name(out.name + ".pieces")
    todo, done = pieces(work), 0
    _claim(folder, work)
    total = sum(piece.nbytes for piece in todo)
    for nbytes in _done(work, todo, str(folder), workers=min(workers, len(todo))):
        done += nbytes
        advance(done, total)
    facts = _join(work, folder, todo)
    shutil.rmtree(folder)
    return facts


def _done(work: Work, todo: Sequence[Piece], folder: str, *, workers: int) -> Iterator[int]:
    """Does the pieces, in this process where one is enough; yields the bytes of each when it is done."""
    if workers <= 1:
        yield from (_do(work, piece, folder) for piece in todo)
        return
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_mute) as pool:
        try:
            for future in as_completed([pool.submit(_do, work, piece, folder) for piece in todo]):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # the first problem is said without doing the rest
            raise


def _mute() -> None:
    """Lets Ctrl-C end a worker at once, without a traceback; what it was writing has no name yet."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _claim(folder: Path, work: Work) -> None:
    """Makes the folder of pieces, or accepts one of the same work on the same inputs."""
    tokenizer = tokenizer_of(work.tokenizer, eos=work.eos).name
    inputs = [[name, Path(name).stat().st_size, Path(name).stat().st_mtime_ns] for name in work.inputs]
    claim = json.dumps({**asdict(work), "inputs": inputs, "tokenizer": tokenizer, "piece": PIECE}, sort_keys=True)
    folder.mkdir(parents=True, exist_ok=True)
    there = folder / "work.json"
    if there.is_file() and there.read_text() != claim:
        raise ValueError(f"{folder} holds pieces of other inputs or another tokenizer; remove it to begin anew")
    fresh = folder / "work.json.new"
    fresh.write_text(claim)
    fresh.replace(there)


def _join(work: Work, folder: Path, todo: Sequence[Piece]) -> dict[str, Any]:
    """Joins the pieces into the output, and says in a file beside it what it is."""
    tokenizer, out = tokenizer_of(work.tokenizer, eos=work.eos), Path(work.out)
    if not any((folder / f"{piece.index:06}.bin").stat().st_size for piece in todo):
        shutil.rmtree(folder)
        raise ValueError(f"no document in {', '.join(work.inputs)}; nothing was written")
    kind, about = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32", out.with_suffix(".json")
    about.unlink(missing_ok=True)  # of what had this name before
    with TokenWriter(out, layout=work.layout, vocab_size=tokenizer.vocab_size) as writer:
        for piece in todo:
            file, problems = open_tokens(folder / f"{piece.index:06}.bin", dtype=kind)
            raise_all(problems)
            assert file is not None and file.documents is not None
            writer.add_many(np.asarray(file.tokens), np.diff(file.documents).tolist())
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
    about.write_text(json.dumps(facts, indent=1) + "\n")
    return facts
