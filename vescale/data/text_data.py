"""TextData: which tokens a run trains on, opened, checked and cut into a training and a validation part."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import json
import lzma
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vescale.data.order import ORDER
from vescale.data.samples import Samples, ids_problems, raise_all
from vescale.data.token_file import Joined, TokenFile, blocks, files_of, fingerprint, open_tokens
from vescale.data.tokenizer import ByteTokenizer

SHIPPED = "shakespeare"
SHIPPED_FILE = Path(__file__).parents[1] / "texts" / "shakespeare.txt.xz"


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
        named: Other validation sets, by name.
    """

    source: TextData
    fingerprint: str
    tokenizer: ByteTokenizer | None
    tokenizer_name: str
    train: Samples
    validation: Samples | None
    named: Mapping[str, Samples] = field(default_factory=dict)

    @property
    def validations(self) -> dict[str, tuple[Samples, float]]:
        """What to validate on: the samples of each set and its share in the mean; the data's own set is named ""."""
        own = {} if self.validation is None else {"": (self.validation, 1.0)}
        return own | {name: (samples, 0.0 if own else 1.0) for name, samples in self.named.items()}

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
            **({"documents": "apart"} if self.source.documents_apart else {}),
        }

    def check(self, saved: Mapping[str, Any]) -> None:
        """Accepts a resume whose checkpoint holds ``saved``, a ``describe()``.

        Raises:
            ValueError: The data differ from the checkpoint's; every difference is named.
        """
        check_same(self.source.path, saved, self.describe())


def check_same(name: str, saved: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Raises unless two descriptions of data are the same.

    Raises:
        ValueError: With every difference.
    """
    was, now = ({key: repr(value) for key, value in values.items()} for values in (saved, facts))
    differences = [
        f"{key}: expected {was.get(key, 'nothing')} (checkpoint), got {now.get(key, 'nothing')}"
        for key in sorted({*was, *now})
        if was.get(key) != now.get(key)
    ]
    if differences:
        raise ValueError(
            f"data: {name!r} is not what the checkpoint was trained on: {'; '.join(differences)}. "
            "Open the same data to continue the run, or start a new run from its weights"
        )


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Which tokens to train on; ``open()`` reads them.

    Args:
        path: ``shakespeare`` (42 works, 5.06 MB, shipped: texts/README.md); a ``.txt`` file, whose bytes are the
            tokens, a form feed between documents; a ``.bin`` of token ids, raw, llm.c's or Megatron's
            (``vescale/data/token_file.py``); or a pattern of several files of one kind (``shard_*.bin``).
        seq_len: Tokens a sample feeds to the model.
        val_fraction: The share of the tokens, at the end, that is held out for validation; 0 holds out none.
        seed: Chooses the order of the samples.
        dtype: ``uint16`` or ``uint32``. A raw ``.bin`` requires it; only a ``.bin`` takes it.
        vocab_size: For a ``.bin``: ids must be below this. None: what its ``.json`` says, else what ``open`` is told.
        ignored: For a ``.bin``: an id that is never counted as a label, such as padding. In text it is the token that
            begins a document, which follows from nothing before it.
        documents_apart: Tokens see only their own document, and positions begin at 0 in each. A ``.bin`` needs the
            edges of its documents for it, in a ``.docs`` or ``.idx`` beside it.
        validation: Further sets to validate on, by name: paths as above, all of which is held out.
    """

    path: str = SHIPPED
    seq_len: int = 256
    val_fraction: float = 0.05
    seed: int = 0
    dtype: str | None = None
    vocab_size: int | None = None
    ignored: int | None = None
    documents_apart: bool = False
    validation: Mapping[str, str] = field(default_factory=dict)

    def open(self, *, vocab_size: int | None = None) -> Dataset:
        """Returns the two parts of the data; a ``.bin`` is mapped, text lies in memory.

        Args:
            vocab_size: Of the model that is to read the data: ids of a ``.bin`` that does not say how many it has must
                be below this. None: they are not checked then.

        Raises:
            ValueError: Options or file are unusable; every problem is named in one line.
        """
        found = self._open_path(self.path, cut=True, limit=vocab_size)
        others = {name: self._open_path(path, cut=False, limit=vocab_size) for name, path in self.validation.items()}
        return dataclasses.replace(found, named={name: other.train for name, other in others.items()})

    def _open_path(self, name: str, *, cut: bool, limit: int | None) -> Dataset:
        paths, problems = ([SHIPPED_FILE], []) if name == SHIPPED else files_of(name)
        kinds = sorted({path.suffix for path in paths})
        binary = ".bin" in kinds or name.endswith(".bin")
        problems = [
            *self._option_problems(binary=binary),
            *problems,
            *(p for path in paths for p in _path_problems(path)),
        ]
        if len(kinds) > 1:
            problems.append(f"path: expected files of one kind, got {name!r}, which names {', '.join(kinds)}")
        if not binary or len(kinds) != 1 or not all(path.is_file() for path in paths):
            raise_all(problems)
            return self._open_text(name, paths, cut=cut)
        told, wrong = _manifest(paths, dtype=self.dtype)
        opened = [open_tokens(path, dtype=self.dtype or told.get("dtype")) for path in paths]
        raise_all(problems + wrong + [problem for _, wrong in opened for problem in wrong])
        files = [file for file, _ in opened if file is not None]
        return self._open_bin(name, files, {"vocab_size": limit} | told, cut=cut)

    def _option_problems(self, *, binary: bool) -> list[str]:
        problems = []
        if self.seq_len < 1:
            problems.append(f"seq_len: expected >= 1, got {self.seq_len}")
        if not 0 <= self.val_fraction < 1:
            problems.append(f"val_fraction: expected 0 <= val_fraction < 1, got {self.val_fraction}")
        if self.vocab_size is not None and self.vocab_size < 1:
            problems.append(f"vocab_size: expected >= 1, got {self.vocab_size}")
        if "" in self.validation:
            problems.append("validation: expected sets that have names, got one without")
        if not binary:
            only = {"dtype": self.dtype, "vocab_size": self.vocab_size, "ignored": self.ignored}
            problems += [
                f"{name}: only a .bin takes it, got {value!r}" for name, value in only.items() if value is not None
            ]
        return problems

    def _open_text(self, name: str, paths: list[Path], *, cut: bool) -> Dataset:
        text = _shipped() if paths == [SHIPPED_FILE] else b"\f".join(path.read_bytes() for path in paths)
        tokenizer = ByteTokenizer()
        tokens = tokenizer.documents(text)
        return self._cut(
            name,
            tokens,
            cut=cut,
            edges=np.append(np.flatnonzero(tokens == tokenizer.bos), len(tokens)),
            ignored=tokenizer.bos,
            vocab_size=tokenizer.vocab_size,
            fingerprint=f"sha256:{hashlib.sha256(text).hexdigest()}",
            tokenizer=tokenizer,
            tokenizer_name=tokenizer.name,
        )

    def _open_bin(self, name: str, files: list[TokenFile], told: Mapping[str, Any], *, cut: bool) -> Dataset:
        kinds = sorted({file.dtype for file in files})
        if len(kinds) > 1:
            raise ValueError(f"data: {name}: expected files of one dtype, got {', '.join(kinds)}")
        tokens: Any = files[0].tokens if len(files) == 1 else Joined([file.tokens for file in files])
        vocab_size = self.vocab_size or told.get("vocab_size")
        if vocab_size is not None:
            ends = [(int(block.min()), int(block.max())) for block in blocks(tokens) if len(block)]
            raise_all(ids_problems(ends, vocab_size, where=f"{name} ({kinds[0]}): "))
        return self._cut(
            name,
            tokens,
            cut=cut,
            edges=_join_edges(files),
            ignored=self.ignored if self.ignored is not None else told.get("ignored"),
            vocab_size=vocab_size,
            fingerprint=fingerprint(tokens),
            tokenizer=None,
            tokenizer_name=told.get("tokenizer", f"ids-{kinds[0]}"),
        )

    def _cut(
        self,
        name: str,
        tokens: Any,
        *,
        cut: bool,
        edges: np.ndarray | None,
        ignored: int | None,
        vocab_size: int | None,
        **about: Any,
    ) -> Dataset:
        """Returns the data set of ``tokens``, cut into its two parts, both long enough for one sample."""
        fraction = self.val_fraction if cut else 0.0

        def edge(count: int) -> int:
            return count - int(count * fraction)

        def fits(count: int) -> bool:
            parts = (edge(count), count - edge(count)) if fraction else (count,)
            return min(parts) > self.seq_len

        here = edge(len(tokens))
        if not fits(len(tokens)):
            needed = bisect.bisect_left(range(2**62), True, key=fits)  # where a length fits, every longer one does
            wish = f"at least {needed} tokens for seq_len={self.seq_len} and val_fraction={fraction}"
            raise ValueError(f"data: {name}: expected {wish}, got {len(tokens)}")
        if self.documents_apart and edges is None:
            raise ValueError(f"data: documents_apart: {name} has no .docs or .idx that says where documents begin")
        options: dict[str, Any] = dict(seq_len=self.seq_len, seed=self.seed, ignored=ignored, vocab_size=vocab_size)
        parts = []
        for start, stop in ((0, here), (here, len(tokens))):
            inside = None if edges is None or not self.documents_apart else np.clip(edges, start, stop) - start
            span = tokens.part(start, stop) if isinstance(tokens, Joined) else tokens[start:stop]
            parts.append(Samples(tokens=span, documents=inside, **options))
        return Dataset(source=self, train=parts[0], validation=parts[1] if fraction else None, **about)


def _join_edges(files: list[TokenFile]) -> np.ndarray | None:
    """The edges of documents in files that are read as one; None unless all know theirs."""
    found, base = [np.zeros(1, np.int64)], 0
    for file in files:
        if file.documents is None:
            return None
        found.append(file.documents[1:] + base)
        base += len(file.tokens)
    return np.concatenate(found)


TOLD = {"dtype": str, "vocab_size": int, "tokenizer": str, "ignored": int}  # what is read of a manifest


def _manifest(paths: list[Path], *, dtype: str | None) -> tuple[dict[str, Any], list[str]]:
    """What ``prepare`` said of files of ids, if it said the same of all, and what is wrong with it."""
    said = [_told(path.with_suffix(".json")) for path in paths]
    problems = [
        f"dtype: expected {told['dtype']} ({path.with_suffix('.json')}), got {dtype}"
        for path, told in zip(paths, said, strict=True)
        if dtype is not None and told.get("dtype", dtype) != dtype
    ]
    for path, told in zip(paths, said, strict=True):
        for key in TOLD if said[0] and told else ():
            if told.get(key) != said[0].get(key):
                first = f"{said[0].get(key)} ({paths[0].with_suffix('.json')})"
                problems.append(f"path: expected {key} {first}, got {told.get(key)} ({path.with_suffix('.json')})")
    return said[0] if all(said) else {}, problems


def _told(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    told = told if isinstance(told, dict) else {}
    return {key: told[key] for key, kind in TOLD.items() if type(told.get(key)) is kind}


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
