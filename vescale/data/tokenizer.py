"""Tokenizers: bytes, or any tokenizer.json; what turns a text into ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np


class Tokenizer(Protocol):
    """What ``prepare`` needs."""

    @property
    def name(self) -> str:
        """Equal names give equal ids."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""

    def encode_documents(self, texts: Sequence[Any]) -> list[np.ndarray]:
        """Returns the ids of each text, as a document: with whatever stands at its beginning and its end."""


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

    def encode_documents(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """Returns ``(n,) uint16`` for each text: bos, its bytes and eos; bytes that are no text are tokens too."""
        bos, eos = np.array([self.bos], np.uint16), np.array([self.eos], np.uint16)
        found = [np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8) for text in texts]
        return [np.concatenate([bos, ids, eos]) for ids in found]


class JsonTokenizer:
    """A tokenizer.json of Hugging Face's ``tokenizers``, an extra of this project.

    Args:
        path: The file.
        eos: The token that ends every document; None: the first of the usual ones that it has, else none.

    Raises:
        ValueError: If the package or the token is missing, or the file is no tokenizer.
    """

    USUAL: ClassVar[tuple[str, ...]] = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")

    def __init__(self, path: str | Path, *, eos: str | None = None) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ValueError("a tokenizer.json needs the package tokenizers: pip install tokenizers") from None
        data = Path(path).read_bytes() if Path(path).is_file() else b""
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_buffer(data)
        except Exception as problem:  # whatever it raises, of an unnamed kind
            raise ValueError(f"tokenizer: {str(path)!r} is no tokenizer.json: {problem}") from None
        self._tokenizer.no_truncation()  # a file may cut texts to a model's length, and fill them up to one
        self._tokenizer.no_padding()
        self.name = f"tokenizer-sha256:{hashlib.sha256(data).hexdigest()}"
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        known = [token for token in ([eos] if eos else self.USUAL) if self._tokenizer.token_to_id(token) is not None]
        if eos and not known:
            raise ValueError(f"tokenizer: {str(path)!r} has no token {eos!r} to end documents with")
        self.eos = self._tokenizer.token_to_id(known[0]) if known else None

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns ``(n,) uint32`` for each text, its end marked by ``eos``."""
        end = [] if self.eos is None else [self.eos]
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array([*encoding.ids, *end], np.uint32) for encoding in found]


def tokenizer_of(name: str, *, eos: str | None = None) -> Tokenizer:
    """Returns the byte tokenizer for ``bytes``, else that of the tokenizer.json at ``name``.

    Raises:
        ValueError: As ``JsonTokenizer``, and for an ``eos`` of bytes, whose documents have an end of their own.
    """
    if name == "bytes" and eos is not None:
        raise ValueError(f"eos: only a tokenizer.json takes it; bytes end a document with {ByteTokenizer.eos}")
    return ByteTokenizer() if name == "bytes" else JsonTokenizer(name, eos=eos)
