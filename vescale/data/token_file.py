"""Token files: ids end to end, read by mapping and written document by document.

::

    raw        t.bin   ids, uint16 or uint32, little endian                        t.docs   int64 edges of documents
    llm.c      t.bin   1024 bytes of header, then the ids                          t.docs   the same
    Megatron   t.bin   ids                  t.idx   lengths, places and documents of its sequences

Edges are element offsets: of n documents the n beginnings and the end. ``t.docs`` may be missing; a file that has
``t.idx`` beside it is Megatron's. One data set may be several files, named by a pattern, read as one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import struct
from array import array as flat_array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np

DTYPES = {"uint16": "<u2", "uint32": "<u4"}
FORMATS = ("raw", "llmc", "megatron")
# By the first int32 of a .bin's header: its version and dtype (karpathy/llm.c, dev/data/data_common.py, 16635d41).
LLMC = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
LLMC_HEADER = 1024  # bytes
MOST = 2**31 - 1  # tokens that llm.c's header can count, and Megatron's index of one document
# NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py: magic, version and the codes of dtypes. It has no
# uint32, so ids beyond 65535 are int32 there.
MEGATRON, MEGATRON_VERSION = b"MMIDIDX\x00\x00", 1
MEGATRON_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
# Up to WHOLE bytes are looked at whole (50 ms to hash them), a longer file in NUM_BLOCKS blocks of BLOCK bytes.
WHOLE, NUM_BLOCKS, BLOCK = 64 << 20, 64, 1 << 20


class Tokens(Protocol):
    """What reading needs of an array of ids, whole or in several files."""

    @property
    def itemsize(self) -> int:
        """Bytes of an id."""

    @property
    def nbytes(self) -> int:
        """Bytes of all ids."""

    def __len__(self) -> int:
        """Number of ids."""

    def __getitem__(self, span: slice) -> np.ndarray:
        """The ids of a span."""


class TokenFile(NamedTuple):
    """An opened file of ids.

    Args:
        tokens: (n,) integers, mapped.
        documents: (d + 1,) int64 edges of its documents; None: not known.
        dtype: Of the ids.
    """

    tokens: np.ndarray
    documents: np.ndarray | None
    dtype: str


class Joined:
    """Several arrays of ids read as one; a span inside one of them is not copied."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays, self.itemsize = list(arrays), arrays[0].itemsize
        self.edges = np.cumsum([0, *map(len, arrays)])
        self.nbytes = len(self) * self.itemsize

    def __len__(self) -> int:
        return int(self.edges[-1])

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, _ = span.indices(len(self))
        first = min(int(np.searchsorted(self.edges, start, "right")), len(self.arrays)) - 1
        parts: list[np.ndarray] = []
        for array, edge in zip(self.arrays[first:], self.edges[first:], strict=False):
            if edge >= stop and parts:
                break
            parts.append(array[max(start - edge, 0) : max(stop - edge, 0)])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def part(self, start: int, stop: int) -> Joined:
        """Returns the ids of a span, still in their files."""
        pairs = zip(self.arrays, self.edges, strict=False)
        cut = [array[max(start - edge, 0) : max(stop - edge, 0)] for array, edge in pairs]
        return Joined([array for array in cut if len(array)] or cut[:1])


def files_of(pattern: str) -> tuple[list[Path], list[str]]:
    """Returns the files that a path or a pattern of names stands for, in order, and what is wrong with them.

    Numbers in names are ordered as numbers. Where names differ in a number alone, every one in between must be there: a
    missing shard is no smaller data set.
    """
    path = Path(os.path.expanduser(pattern))
    if path.is_file() or not any(letter in path.name for letter in "*?["):
        return [path], []
    found = sorted((file for file in path.parent.glob(path.name) if file.is_file()), key=_numbered)
    if not found:
        return [], [f"path: no file is named like {pattern!r} (looked in {path.parent.absolute()})"]
    problems = []
    for file, following in pairwise(found):
        one, other = _numbered(file), _numbered(following)
        (low, high), *more = [pair for pair in zip(one, other, strict=False) if pair[0] != pair[1]] or [(0, 0)]
        if len(one) == len(other) and not more and isinstance(low, int) and high - low > 1:
            problems.append(f"path: the shard after {file} is missing: number {low + 1} of {pattern!r}")
    return found, problems


def _numbered(path: Path) -> list[Any]:
    """The name of a file as words and numbers by turns."""
    return [int(word) if word.isdecimal() else word for word in re.split(r"(\d+)", path.stem)]


def open_tokens(path: Path, *, dtype: str | None) -> tuple[TokenFile | None, list[str]]:
    """Maps a file of ids; returns it, or what is wrong with it.

    Args:
        path: A ``.bin``.
        dtype: ``uint16`` or ``uint32``; a raw file requires it, the others say it themselves.
    """
    index = path.with_suffix(".idx")
    if index.is_file():
        return _open_megatron(path, index, dtype=dtype)
    name, header, problems = _bin_format(path, dtype=dtype)
    if problems:
        return None, problems
    tokens = _map(path, DTYPES[name], header=header)
    edges, wrong = _edges(path.with_suffix(".docs"), len(tokens))
    return (None, wrong) if wrong else (TokenFile(tokens, edges, name), [])


def _bin_format(path: Path, *, dtype: str | None) -> tuple[str, int, list[str]]:
    """Returns the dtype of a ``.bin``, the bytes of its header, and what is wrong with it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        magic, version, count = struct.unpack("<3i", file.read(12).ljust(12, b"\0"))
    problems, header = [], 0
    if magic in LLMC and size >= LLMC_HEADER:
        header, (known, found) = LLMC_HEADER, LLMC[magic]
        if version != known:
            problems.append(f"path: the header of {path} is llm.c's: expected its version {known}, got {version}")
        if dtype not in (None, found):
            problems.append(f"dtype: expected {found} (the header of {path}), got {dtype}")
        if size != header + count * np.dtype(found).itemsize:
            problems.append(f"path: the header of {path} says {count} tokens of {found}, not {size} bytes in all")
        dtype = found
    elif dtype is None:
        problems.append(f"dtype: {path} has no header that says it; give {' or '.join(DTYPES)}")
    elif dtype not in DTYPES:
        problems.append(f"dtype: expected {' or '.join(DTYPES)} ({path}), got {dtype!r}")
    elif size % (width := np.dtype(dtype).itemsize):
        problems.append(f"path: {path}: expected a multiple of {width} bytes ({dtype}), got {size}")
    return dtype or "", header, problems


def _map(path: Path, dtype: str, *, header: int = 0) -> np.ndarray:
    count = (path.stat().st_size - header) // np.dtype(dtype).itemsize
    if not count:  # numpy cannot map nothing; whoever opens it says how long a file would do
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r", offset=header, shape=(count,))


def _edges(path: Path, count: int) -> tuple[np.ndarray | None, list[str]]:
    """Returns the edges of documents in a ``.docs`` file, if there is one."""
    if not path.is_file():
        return None, []
    edges = np.fromfile(path, "<i8")
    if not len(edges) or edges[0] != 0 or edges[-1] != count or (np.diff(edges) < 0).any():
        return None, [f"path: {path}: expected rising edges from 0 to {count}, the tokens of its .bin"]
    return edges, []


def _open_megatron(path: Path, index: Path, *, dtype: str | None) -> tuple[TokenFile | None, list[str]]:
    data = index.read_bytes()
    if not data.startswith(MEGATRON) or len(data) < 34:
        return None, [f"path: {index} does not begin as Megatron's: {MEGATRON!r}"]
    version, code, sequences, documents = struct.unpack_from("<QBQQ", data, len(MEGATRON))
    needed = 34 + 12 * sequences + 8 * documents
    if version != MEGATRON_VERSION or code not in MEGATRON_DTYPES or len(data) < needed:
        return None, [f"path: {index}: expected version 1, ids of integers and {needed} bytes, got version {version}, "
                      f"dtype code {code} and {len(data)} bytes"]  # fmt: skip
    lengths = np.frombuffer(data, "<i4", sequences, 34).astype(np.int64)
    places = np.frombuffer(data, "<i8", sequences, 34 + 4 * sequences)
    firsts = np.frombuffer(data, "<i8", documents, 34 + 12 * sequences)
    kind = np.dtype(MEGATRON_DTYPES[code])
    edges = np.concatenate([[0], np.cumsum(lengths)])
    if path.stat().st_size != edges[-1] * kind.itemsize or not np.array_equal(places, edges[:-1] * kind.itemsize):
        return None, [f"path: {index}: its {edges[-1]} ids of {kind} do not lie end to end in {path}"]
    steps = np.diff(np.concatenate([[0], firsts, [sequences]]))
    if (lengths < 0).any() or (steps < 0).any():
        return None, [f"path: {index}: expected documents that follow each other in its {sequences} sequences"]
    if dtype not in (None, kind.name):
        return None, [f"dtype: expected {kind.name} ({index}), got {dtype}"]
    documents_at = np.unique(np.concatenate([[0], edges[firsts], edges[-1:]]))
    return TokenFile(_map(path, MEGATRON_DTYPES[code]), documents_at, kind.name), []


def output_problems(path: Path, layout: str) -> list[str]:
    """Returns what is wrong with the name and the layout of a file that is to be written."""
    problems = [] if path.suffix == ".bin" else [f"out: expected a file that ends in .bin, got {str(path)!r}"]
    if layout not in FORMATS:
        problems.append(f"layout: expected one of {', '.join(FORMATS)}, got {layout!r}")
    return problems


class TokenWriter:
    """Writes documents to a new file, which has its name once it is whole: on ``close``, or at the end of a context.

    What had the name before stays until then.

    Args:
        path: A ``.bin``.
        layout: ``raw``, ``llmc`` or ``megatron``.
        vocab_size: Ids are below this; two bytes each where that is enough.

    Raises:
        ValueError: For another layout or another ending.
    """

    count: int  # ids written
    lengths: flat_array[int]  # of the documents: 8 bytes each, where a list would take 40

    def __init__(self, path: Path, *, layout: str = "raw", vocab_size: int) -> None:
        if problems := output_problems(path, layout):
            raise ValueError("; ".join(problems))
        self.path, self.layout, self.vocab_size, self.count, self.lengths = path, layout, vocab_size, 0, flat_array("q")
        self.dtype = "<u2" if vocab_size <= 2**16 else "<i4" if layout == "megatron" else "<u4"
        self._beside, self._other = path.with_suffix(".docs"), path.with_suffix(".idx")
        if layout == "megatron":
            self._beside, self._other = self._other, self._beside
        self._partial, self._edges = (of.with_name(of.name + ".partial") for of in (path, self._beside))
        self._file = self._partial.open("wb")
        if layout == "llmc":
            self._file.write(bytes(LLMC_HEADER))

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def add(self, ids: np.ndarray) -> None:
        """Appends a document.

        Raises:
            ValueError: An id is not in the vocabulary, or the layout cannot count so many.
        """
        self.add_many(ids, [len(ids)])

    def add_many(self, ids: np.ndarray, lengths: Sequence[int]) -> None:
        """Appends documents that lie end to end in ``ids``; raises as ``add``."""
        low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise ValueError(f"{self.path}: expected ids in [0, {self.vocab_size}), the vocabulary, got {wrong}")
        longest = {"llmc": self.count + len(ids), "megatron": max(lengths, default=0)}.get(self.layout, 0)
        if longest > MOST:
            what = "tokens in a file" if self.layout == "llmc" else "tokens in a document"
            raise ValueError(
                f"{self.path}: {self.layout} counts at most {MOST:,} {what}, got {longest:,}; raw has room"
            )
        self._file.write(np.ascontiguousarray(ids, self.dtype).data)
        self.lengths.extend(map(int, lengths))
        self.count += len(ids)

    def close(self) -> None:
        """Completes the header or index, waits for the disk and gives the files their names."""
        try:
            self._complete()
        except BaseException:
            self._abandon()
            raise
        for old in (self.path, self._beside, self._other):  # at no time is one beside another's
            old.unlink(missing_ok=True)
        self._edges.replace(self._beside)
        self._partial.replace(self.path)

    def _complete(self) -> None:
        edges = np.concatenate([[0], np.cumsum(np.array(self.lengths, np.int64))]).astype("<i8")
        if self.layout == "llmc":
            magic = next(magic for magic, (_, name) in LLMC.items() if DTYPES[name] == self.dtype)
            self._file.seek(0)
            self._file.write(struct.pack("<3i", magic, LLMC[magic][0], self.count))
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
        with self._edges.open("wb") as file:
            file.write(self._index(edges) if self.layout == "megatron" else edges.tobytes())
            file.flush()
            os.fsync(file.fileno())

    def _abandon(self) -> None:
        """Leaves nothing of what was written."""
        with contextlib.suppress(OSError):  # a full disk does not take what is still in memory
            self._file.close()
        for file in (self._partial, self._edges):
            file.unlink(missing_ok=True)

    def _index(self, edges: np.ndarray) -> bytes:
        width = np.dtype(self.dtype).itemsize
        code = next(code for code, kind in MEGATRON_DTYPES.items() if kind == self.dtype)
        head = struct.pack("<QBQQ", MEGATRON_VERSION, code, len(self.lengths), len(self.lengths) + 1)
        lengths, places = np.array(self.lengths, "<i4"), (edges[:-1] * width).astype("<i8")
        return MEGATRON + head + lengths.tobytes() + places.tobytes() + np.arange(len(edges), dtype="<i8").tobytes()


def blocks(tokens: Tokens) -> Iterator[np.ndarray]:
    """Yields all of ``tokens`` when they are few, else evenly spaced blocks, the first and the last among them."""
    block = BLOCK // tokens.itemsize
    if tokens.nbytes <= WHOLE:
        yield from (tokens[start : start + block] for start in range(0, len(tokens), block))
    else:
        starts = np.linspace(0, len(tokens) - block, NUM_BLOCKS).astype(int).tolist()
        yield from (tokens[start : start + block] for start in starts)


def fingerprint(tokens: Tokens) -> str:
    """Returns sha256 of the tokens, or of their number and the sampled blocks of many; the name says which."""
    whole = tokens.nbytes <= WHOLE
    digest = hashlib.sha256(b"" if whole else str(tokens.nbytes).encode())
    for block in blocks(tokens):
        digest.update(block.tobytes())
    return f"{'sha256' if whole else 'sampled-sha256'}:{digest.hexdigest()}"
