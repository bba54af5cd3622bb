"""Token data: one array of tokens, cut into a training and a validation part, read in an order that is a pure function.

Nothing is shuffled, stored or counted. The samples of a run are numbered for ever: number ``g`` is sample ``g % n``
of epoch ``g // n`` and lies at ``permute(g % n, seed, epoch)``. Step ``k`` takes the numbers from ``k * global_batch``
on, rank after rank; with a global batch of 8::

    step 3       sample    24   25   26   27   28   29   30   31
                 2 ranks   <------- 0 ------>  <------- 1 ------>
                 4 ranks   <-- 0 -->  <-- 1 ->  <-- 2 ->  <-- 3 ->

So a run resumes at step ``k`` with no state but ``k``, and at another number of ranks it goes on with the same samples
in the same batches. What must be equal on both sides ``Dataset.describe`` writes and ``Dataset.check`` compares.

Documents stand end to end and are then split: sample ``i`` of a part is its tokens ``[i*s, i*s + s]``. The last of them
is only a label, and is the next sample's first input, so an epoch predicts every token once.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import lzma
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from vescale.data.prefetch import Prefetch as Prefetch

SHIPPED = "shakespeare"
SHIPPED_FILE = Path(__file__).parents[1] / "texts" / "shakespeare.txt.xz"
IGNORED = -100  # the label that no loss counts: torch.nn.functional.cross_entropy's default ignore_index
ROUNDS = 8
ORDER = f"feistel-{ROUNDS}"  # names the order of samples; a run must not go on in another one
DTYPES = {"uint16": "<u2", "uint32": "<u4"}
# By the first int32 of a .bin's header: its version and dtype (karpathy/llm.c, dev/data/data_common.py, 16635d41).
LLMC = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
LLMC_HEADER = 1024  # bytes
# Up to WHOLE bytes are looked at whole (50 ms to hash them), a longer file in NUM_BLOCKS blocks of BLOCK bytes.
WHOLE, NUM_BLOCKS, BLOCK = 64 << 20, 64, 1 << 20


class Batch(NamedTuple):
    """Inputs and labels: ``labels[:, i]`` is the token after ``input_ids[:, i]``, or -100 where no loss is counted.

    Args:
        input_ids: (b, s) int64.
        labels: (b, s) int64, already shifted.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor


class ByteTokenizer:
    """The 256 bytes, and three ids that stand for no byte: where a document begins, where it ends, and padding.

    The vocabulary is padded to a multiple of 64, so that it divides over ranks and fills the tiles of a matrix product.
    """

    name: ClassVar[str] = "bytes-320"
    bos: ClassVar[int] = 256
    eos: ClassVar[int] = 257
    pad: ClassVar[int] = 258
    vocab_size: ClassVar[int] = 320

    def encode(self, text: str | bytes, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Returns the bytes of ``text`` (UTF-8) as ids, with a document's beginning and end where asked."""
        data = text.encode() if isinstance(text, str) else text
        return [self.bos] * bos + list(data) + [self.eos] * eos

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Returns the bytes of ``ids``; ids from 256 on stand for no byte and are left out."""
        return bytes(i for i in map(int, ids) if i < 256)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ``ids``; a sampled sequence that is no UTF-8 shows U+FFFD there instead of failing."""
        return self.decode_bytes(ids).decode(errors="replace")

    def documents(self, text: bytes) -> np.ndarray:
        """Returns ``(n,) uint16``: bos, the bytes and eos of every document; a form feed stands between documents."""
        bos, eos = np.array([self.bos], np.uint16), np.array([self.eos], np.uint16)
        parts: list[np.ndarray] = [np.empty(0, np.uint16)]
        for document in filter(None, text.split(b"\f")):
            parts += [bos, np.frombuffer(document, np.uint8), eos]
        return np.concatenate(parts)


def permute(index: np.ndarray, *, size: int, seed: int, epoch: np.ndarray) -> np.ndarray:
    """Returns where each ``index`` goes in the permutation of ``range(size)`` that belongs to (seed, epoch).

    No table is made. A Feistel network permutes the smallest ``2**(2*half) >= size``, and what falls outside ``size``
    walks on until it falls inside: less than four times on average (Black and Rogaway 2002, "cycle walking"). Four
    rounds make a pseudo-random permutation (Luby and Rackoff 1988); with the one or two bits a side of a tiny ``size``
    four show a bias that eight do not.

    Args:
        index: (n,) integers in [0, size).
        size: Samples of an epoch.
        seed: Any integer.
        epoch: (n,) integers >= 0, the epoch of each index.

    Returns:
        (n,) int64 in [0, size).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    start = _mix(np.array([seed % 2**64], np.uint64))
    keys = [_mix(_mix(start + epoch.astype(np.uint64)) + np.uint64(number)) for number in range(ROUNDS)]
    place = _feistel(index.astype(np.uint64), keys, half=half)
    while (outside := place >= size).any():
        place = np.where(outside, _feistel(place, keys, half=half), place)
    return place.astype(np.int64)


def _feistel(place: np.ndarray, keys: list[np.ndarray], *, half: int) -> np.ndarray:
    """Returns ``place`` permuted within ``range(2**(2*half))``, by one key per round and index."""
    mask = np.uint64((1 << half) - 1)
    left, right = place >> np.uint64(half), place & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << np.uint64(half)) | right


def _mix(word: np.ndarray) -> np.ndarray:
    """Returns splitmix64 of each word (Steele, Lea, Flood 2014; constants: prng.di.unimi.it/splitmix64.c)."""
    word = word + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """One part of the tokens, read in samples; a sample shares one token, its last label, with the next.

    Args:
        tokens: (n,) uint16 or uint32, in memory or mapped.
        seq_len: Tokens a sample feeds to the model.
        seed: Chooses the order of every epoch.
        ignored: The id that is never counted as a label, or None.
        vocab_size: Ids are below this, or None when it is not known.
    """

    tokens: np.ndarray
    seq_len: int
    seed: int
    ignored: int | None = None
    vocab_size: int | None = None

    @property
    def num_samples(self) -> int:
        """Samples of an epoch; up to ``seq_len - 1`` tokens at the end are in none."""
        return (len(self.tokens) - 1) // self.seq_len

    def places(self, first: int, count: int) -> np.ndarray:
        """Returns ``(count,) int64``: where the samples number ``first``, ``first + 1``, ... lie, in samples."""
        epoch, index = np.divmod(np.arange(first, first + count), self.num_samples)
        return permute(index, size=self.num_samples, seed=self.seed, epoch=epoch)

    def read(self, first: int, count: int) -> Batch:
        """Returns the samples number ``first`` to ``first + count - 1``; epochs follow each other without a seam.

        Args:
            first: 0-based number in the run; those below ``num_samples`` are the first epoch, each sample once.
            count: Samples to read.

        Raises:
            ValueError: A token is not in the vocabulary.
        """
        starts = self.places(first, count) * self.seq_len
        rows = np.stack([self.tokens[start : start + self.seq_len + 1] for start in starts.tolist()]).astype(np.int64)
        if self.vocab_size is not None and rows.max() >= self.vocab_size:
            raise ValueError(f"data: expected token ids below vocab_size={self.vocab_size}, got {rows.max()}")
        labels = rows[:, 1:].copy()
        if self.ignored is not None:
            labels[labels == self.ignored] = IGNORED
        return Batch(torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(labels))

    def batch(self, step: int, *, rank: int = 0, world: int = 1, global_batch: int) -> Batch:
        """Returns ``rank``'s samples of ``step``: ``b = global_batch / world`` from ``step*global_batch + rank*b`` on.

        The batches of the ranks laid end to end are the same tensor for every ``world``.

        Args:
            step: 0-based.
            rank: This rank's index among ``world``.
            world: Ranks with different data; peers that share it (tensor, pipeline, context parallel) share a ``rank``.
            global_batch: Samples of a step, over all ranks.

        Raises:
            ValueError: An argument is out of range, or ``global_batch`` does not divide; or as ``read``.
        """
        problems = [] if step >= 0 else [f"step: expected >= 0, got {step}"]
        if not 0 <= rank < world:
            problems.append(f"rank: expected 0 <= rank < world, got rank {rank} of world {world}")
        if global_batch < 1 or global_batch % max(world, 1):
            problems.append(f"global_batch: expected a positive multiple of the {world} ranks, got {global_batch}")
        _raise_all(problems)
        share = global_batch // world
        return self.read(step * global_batch + rank * share, share)


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """An opened ``TextData``: its two parts, which share no token, and what a checkpoint must remember of it.

    Args:
        source: What it was opened from.
        fingerprint: sha256 of the contents; of the size and 64 blocks when the file is longer than 64 MiB.
        tokenizer: Turns text into ids and back; None for a ``.bin``, whose ids somebody else made.
        tokenizer_name: What ``describe`` says of the ids.
        train: The first ``1 - val_fraction`` of the tokens.
        validation: The rest, or None when ``val_fraction`` is 0. Its first samples are a draw from all of it, the same
            at every evaluation.
    """

    source: TextData
    fingerprint: str
    tokenizer: ByteTokenizer | None
    tokenizer_name: str
    train: Samples
    validation: Samples | None

    @property
    def vocab_size(self) -> int | None:
        """Ids are below this; the model's vocabulary must be at least as large. None when a ``.bin`` did not say."""
        return self.train.vocab_size

    def describe(self) -> dict[str, Any]:
        """Returns, in JSON's types, all that decides which tokens a step sees, but the step and the global batch."""
        return {
            "fingerprint": self.fingerprint,
            "tokenizer": self.tokenizer_name,
            "seq_len": self.source.seq_len,
            "seed": self.source.seed,
            "val_fraction": self.source.val_fraction,
            "ignored": self.train.ignored,
            "order": ORDER,
        }

    def check(self, saved: Mapping[str, Any]) -> None:
        """Accepts a resume whose checkpoint holds ``saved``, a ``describe()``.

        Raises:
            ValueError: The data differ from the checkpoint's; every difference is named.
        """
        was, now = ({key: repr(value) for key, value in facts.items()} for facts in (saved, self.describe()))
        differences = [
            f"{key}: expected {was.get(key, 'nothing')} (checkpoint), got {now.get(key, 'nothing')}"
            for key in sorted({*was, *now})
            if was.get(key) != now.get(key)
        ]
        if differences:
            raise ValueError(
                f"data: {self.source.path!r} is not what the checkpoint was trained on: {'; '.join(differences)}. "
                "Open the same data to continue the run, or start a new run from its weights"
            )


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Which tokens to train on; ``open()`` reads them.

    Args:
        path: ``shakespeare`` (42 works, 5.06 MB, shipped: texts/README.md); a ``.txt`` file, whose bytes are the
            tokens, a form feed between documents; or a ``.bin`` of token ids end to end, little endian, raw or with the
            header of llm.c.
        seq_len: Tokens a sample feeds to the model.
        val_fraction: The share of the tokens, at the end, that is held out for validation; 0 holds out none.
        seed: Chooses the order of the samples.
        dtype: ``uint16`` or ``uint32``. A raw ``.bin`` requires it; only a ``.bin`` takes it.
        vocab_size: For a ``.bin``: ids must be below this. None: not checked.
        ignored: For a ``.bin``: an id that is never counted as a label, such as padding. In text it is the token that
            begins a document, which follows from nothing before it.
    """

    path: str = SHIPPED
    seq_len: int = 256
    val_fraction: float = 0.05
    seed: int = 0
    dtype: str | None = None
    vocab_size: int | None = None
    ignored: int | None = None

    def open(self) -> Dataset:
        """Returns the two parts of the data; a ``.bin`` is mapped, text lies in memory.

        Raises:
            ValueError: Options or file are unusable; every problem is named in one line.
        """
        path = SHIPPED_FILE if self.path == SHIPPED else Path(self.path).expanduser()
        problems = [*self._option_problems(binary=path.suffix == ".bin"), *_path_problems(path)]
        if path.suffix != ".bin" or not path.is_file():
            _raise_all(problems)
            return self._open_text(path)
        dtype, header, unfit = _bin_format(path, dtype=self.dtype)
        _raise_all(problems + unfit)
        return self._open_bin(path, dtype=dtype, header=header)

    def _option_problems(self, *, binary: bool) -> list[str]:
        problems = []
        if self.seq_len < 1:
            problems.append(f"seq_len: expected >= 1, got {self.seq_len}")
        if not 0 <= self.val_fraction < 1:
            problems.append(f"val_fraction: expected 0 <= val_fraction < 1, got {self.val_fraction}")
        if self.dtype is not None and self.dtype not in DTYPES:
            problems.append(f"dtype: expected {' or '.join(DTYPES)}, got {self.dtype!r}")
        if self.vocab_size is not None and self.vocab_size < 1:
            problems.append(f"vocab_size: expected >= 1, got {self.vocab_size}")
        if not binary:
            only = {"dtype": self.dtype, "vocab_size": self.vocab_size, "ignored": self.ignored}
            problems += [
                f"{name}: only a .bin takes it, got {value!r}" for name, value in only.items() if value is not None
            ]
        return problems

    def _open_text(self, path: Path) -> Dataset:
        text = _shipped() if path == SHIPPED_FILE else path.read_bytes()
        tokenizer = ByteTokenizer()
        return self._cut(
            tokenizer.documents(text),
            ignored=tokenizer.bos,
            vocab_size=tokenizer.vocab_size,
            fingerprint=f"sha256:{hashlib.sha256(text).hexdigest()}",
            tokenizer=tokenizer,
            tokenizer_name=tokenizer.name,
        )

    def _open_bin(self, path: Path, *, dtype: str, header: int) -> Dataset:
        count = (path.stat().st_size - header) // np.dtype(DTYPES[dtype]).itemsize
        # numpy cannot map nothing; an empty file is refused in _cut, which says how long a file would do
        mapped = np.memmap(path, DTYPES[dtype], "r", offset=header, shape=(count,)) if count else None
        tokens = np.empty(0, DTYPES[dtype]) if mapped is None else mapped
        if self.vocab_size is not None:
            largest = max((int(block.max()) for block in _blocks(tokens)), default=-1)
            if largest >= self.vocab_size:
                raise ValueError(
                    f"data: {path}: expected ids below vocab_size={self.vocab_size}, got {largest} ({dtype})"
                )
        return self._cut(
            tokens,
            ignored=self.ignored,
            vocab_size=self.vocab_size,
            fingerprint=_fingerprint(tokens),
            tokenizer=None,
            tokenizer_name=f"ids-{dtype}",
        )

    def _cut(self, tokens: np.ndarray, *, ignored: int | None, vocab_size: int | None, **about: Any) -> Dataset:
        """Returns the data set of ``tokens``, cut into its two parts, both long enough for one sample."""

        def edge(count: int) -> int:
            return count - int(count * self.val_fraction)

        def fits(count: int) -> bool:
            parts = (edge(count), count - edge(count)) if self.val_fraction else (count,)
            return min(parts) > self.seq_len

        here = edge(len(tokens))
        if not fits(len(tokens)):
            needed = bisect.bisect_left(range(2**62), True, key=fits)  # where a length fits, every longer one does
            wish = f"at least {needed} tokens for seq_len={self.seq_len} and val_fraction={self.val_fraction}"
            raise ValueError(f"data: {self.path}: expected {wish}, got {len(tokens)}")
        options: dict[str, Any] = dict(seq_len=self.seq_len, seed=self.seed, ignored=ignored, vocab_size=vocab_size)
        train, validation = Samples(tokens=tokens[:here], **options), Samples(tokens=tokens[here:], **options)
        return Dataset(source=self, train=train, validation=validation if self.val_fraction else None, **about)


def _raise_all(problems: list[str]) -> None:
    if problems:
        raise ValueError(f"data: {'; '.join(problems)}")


def _path_problems(path: Path) -> list[str]:
    """Returns what keeps ``path`` from being read, and what would do instead."""
    accepted = f"give {SHIPPED!r} (shipped), a .txt file, or a .bin of uint16 or uint32 token ids"
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "no file"
        return [f"path: {str(path)!r} is {kind} (looked at {path.absolute()}); {accepted}"]
    if path.suffix not in (".txt", ".bin") and path != SHIPPED_FILE:
        return [f"path: {str(path)!r} has the unknown ending {path.suffix!r}; {accepted}"]
    return []


@functools.cache
def _shipped() -> bytes:
    """Returns the shipped text, decompressed once per process (0.1 s) and never written to disk."""
    return lzma.decompress(SHIPPED_FILE.read_bytes())


def _bin_format(path: Path, *, dtype: str | None) -> tuple[str, int, list[str]]:
    """Returns the dtype of a ``.bin``, the bytes of its header, and what is wrong with it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        magic, version, count = struct.unpack("<3i", file.read(12).ljust(12, b"\0"))
    problems, header = [], 0
    if magic in LLMC and LLMC[magic][0] == version and size >= LLMC_HEADER:
        header, found = LLMC_HEADER, LLMC[magic][1]
        if dtype not in (None, found):
            problems.append(f"dtype: expected {found} (the header of {path}), got {dtype}")
        if size != header + count * np.dtype(found).itemsize:
            problems.append(f"path: the header of {path} says {count} tokens of {found}, not {size} bytes in all")
        dtype = found
    elif dtype is None:
        problems.append(f"dtype: {path} has no header that says it; give uint16 or uint32")
    elif dtype in DTYPES and size % (width := np.dtype(dtype).itemsize):
        problems.append(f"path: {path}: expected a multiple of {width} bytes ({dtype}), got {size}")
    return dtype or "", header, problems


def _blocks(tokens: np.ndarray) -> Iterator[np.ndarray]:
    """Yields all of ``tokens`` when they are few, else evenly spaced blocks, the first and the last among them."""
    block = BLOCK // tokens.itemsize
    if tokens.nbytes <= WHOLE:
        yield from (tokens[start : start + block] for start in range(0, len(tokens), block))
    else:
        starts = np.linspace(0, len(tokens) - block, NUM_BLOCKS).astype(int).tolist()
        yield from (tokens[start : start + block] for start in starts)


def _fingerprint(tokens: np.ndarray) -> str:
    """Returns sha256 of the tokens, or of their number and the sampled blocks of many; the name says which."""
    whole = tokens.nbytes <= WHOLE
    digest = hashlib.sha256(b"" if whole else str(tokens.nbytes).encode())
    for block in _blocks(tokens):
        digest.update(block.tobytes())
    return f"{'sha256' if whole else 'sampled-sha256'}:{digest.hexdigest()}"
