"""prepare: turns text, JSONL or parquet into a file of token ids, in parallel; what was done survives a kill.

The inputs are cut into pieces that do not depend on the number of workers: a text file, 64 MiB of lines of a JSONL
file, a row group of a parquet file. Each piece is written to a file of its own beside the output, so that the same
command goes on where it was stopped; in the end the pieces are joined in order, and a ``.json`` beside the output says
what is in it. Another input, tokenizer or layout is refused until the pieces are removed.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vescale.data.samples import raise_all
from vescale.data.token_file import FORMATS, TokenWriter, fingerprint, open_tokens
from vescale.data.tokenizer import ByteTokenizer, tokenizer_of

PIECE = 64 << 20  # bytes of a JSONL file that are one piece of work: a minute of a slow tokenizer
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
        if self.layout not in FORMATS or Path(self.out).suffix != ".bin":
            problems.append(
                f"expected an output .bin and a layout of {', '.join(FORMATS)}, got {self.out} {self.layout}"
            )
        raise_all(problems)
        tokenizer_of(self.tokenizer, eos=self.eos)


@dataclass(frozen=True)
class Piece:
    """A part of an input that one worker does at a time: bytes, or row groups of a parquet file, ``[start, stop)``."""

    index: int
    path: str
    start: int
    stop: int


def pieces(work: Work) -> list[Piece]:
    """Returns the pieces of the inputs, in order."""
    found: list[tuple[str, int, int]] = []
    for name in work.inputs:
        size, kind = Path(name).stat().st_size, Path(name).suffix
        if kind == ".parquet":
            found += [(name, group, group + 1) for group in range(_parquet(name).num_row_groups)]
        elif kind == ".jsonl":
            found += [(name, start, min(start + PIECE, size)) for start in range(0, size, PIECE)]
        else:
            found.append((name, 0, size))
    return [Piece(index, *piece) for index, piece in enumerate(found)]


def documents(work: Work, piece: Piece) -> Iterator[str | bytes]:
    """Yields the documents of a piece; a line belongs to the piece in which it begins.

    Raises:
        ValueError: For a line that is no JSON object with the key.
    """
    kind = Path(piece.path).suffix
    if kind == ".parquet":
        yield from _parquet(piece.path).read_row_group(piece.start, columns=[work.key])[work.key].to_pylist()
    elif kind == ".txt":
        yield from filter(None, Path(piece.path).read_bytes().split(b"\f"))
    else:
        with Path(piece.path).open("rb") as file:
            file.seek(max(piece.start - 1, 0))
            if piece.start:
                file.readline()  # the end of the line that begins in the piece before
            while (at := file.tell()) < piece.stop and (line := file.readline()):
                if line.strip():
                    yield _text(line, work.key, where=f"{piece.path}, byte {at}")


def _text(line: bytes, key: str, *, where: str) -> str:
    try:
        value = json.loads(line)[key]
    except (ValueError, KeyError, TypeError) as problem:
        raise ValueError(f"{where}: expected a JSON object with the key {key!r}: {problem!r}") from None
    if not isinstance(value, str):
        raise ValueError(f"{where}: expected text under {key!r}, got {type(value).__name__}")
    return value


def _parquet(name: str) -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise ValueError(f"{name}: parquet needs the package pyarrow: pip install pyarrow") from None
    return parquet.ParquetFile(name)


def _do(work: Work, piece: Piece, folder: str) -> int:
    """Tokenizes a piece into a file of its own, unless that is there; returns the bytes of input it stands for."""
    path = Path(folder) / f"{piece.index:06}.bin"
    if not path.is_file():
        tokenizer = tokenizer_of(work.tokenizer, eos=work.eos)
        writer = TokenWriter(path, vocab_size=tokenizer.vocab_size)
        batch: list[Any] = []
        for document in documents(work, piece):
            batch.append(document)
            if len(batch) == AT_ONCE:
                _add(writer, tokenizer, batch)
                batch = []
        _add(writer, tokenizer, batch)
        writer.close()
    return piece.stop - piece.start


def _add(writer: TokenWriter, tokenizer: Any, batch: list[Any]) -> None:
    if isinstance(tokenizer, ByteTokenizer):  # bytes that are no text are tokens too
        for document in batch:
            writer.add(np.array(tokenizer.encode(document, bos=True, eos=True), np.uint16))
    else:
        texts = [text.decode() if isinstance(text, bytes) else text for text in batch]
        for ids in tokenizer.encode_documents(texts) if texts else []:
            writer.add(ids)


def prepare(
    work: Work, *, workers: int, advance: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """Writes the output and returns what is in it: counts, fingerprint, tokenizer.

    Args:
        work: What to do.
        workers: Processes, > 0.
        advance: Called with the bytes done and their total, as pieces are done.

    Raises:
        ValueError: For input that cannot be prepared, or pieces of other work.
    """
    work.check()
    out = Path(work.out)
    folder = out.with_name(out.name + ".pieces")
    _claim(folder, work)
    todo, done = pieces(work), 0
    total = sum(piece.stop - piece.start for piece in todo)
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(min(workers, max(len(todo), 1)), mp_context=context) as pool:
        for future in as_completed([pool.submit(_do, work, piece, str(folder)) for piece in todo]):
            done += future.result()
            advance(done, total)
    facts = _join(work, folder, todo)
    shutil.rmtree(folder)
    return facts


def _claim(folder: Path, work: Work) -> None:
    """Makes the folder of pieces, or accepts one of the same work on the same inputs."""
    tokenizer = tokenizer_of(work.tokenizer, eos=work.eos).name
    inputs = [[name, Path(name).stat().st_size, Path(name).stat().st_mtime_ns] for name in work.inputs]
    claim = json.dumps({**asdict(work), "inputs": inputs, "tokenizer": tokenizer}, sort_keys=True)
    folder.mkdir(parents=True, exist_ok=True)
    there = folder / "work.json"
    if there.is_file() and there.read_text() != claim:
        raise ValueError(f"{folder} holds pieces of other inputs or another tokenizer; remove it to begin anew")
    there.write_text(claim)


def _join(work: Work, folder: Path, todo: Sequence[Piece]) -> dict[str, Any]:
    """Joins the pieces into the output, and says in a file beside it what it is."""
    tokenizer, out = tokenizer_of(work.tokenizer, eos=work.eos), Path(work.out)
    writer = TokenWriter(out, layout=work.layout, vocab_size=tokenizer.vocab_size)
    kind = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    for piece in todo:
        file, problems = open_tokens(folder / f"{piece.index:06}.bin", dtype=kind)
        raise_all(problems)
        assert file is not None and file.documents is not None
        writer.add_many(np.asarray(file.tokens), np.diff(file.documents).tolist())
    writer.close()
    file, problems = open_tokens(out, dtype=kind if work.layout == "raw" else None)
    raise_all(problems)
    assert file is not None
    facts = {
        "documents": len(writer.lengths),
        "tokens": writer.count,
        "fingerprint": fingerprint(file.tokens) if writer.count else f"sha256:{hashlib.sha256(b'').hexdigest()}",
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "ignored": tokenizer.bos if isinstance(tokenizer, ByteTokenizer) else None,
        "dtype": file.dtype,
        "layout": work.layout,
        "inputs": list(work.inputs),
    }
    out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    return facts
