"""Mixture: several data sets in one run, each with a weight; which sample is whose is a pure function too.

Sample ``g`` of the run lies in block ``g // 1024``. Each block holds the same number of samples of each part, its share
of 1024, in an order that (seed, block) permutes. So the sample's number in its own part is a count within one block::

    weights 3 : 1       block 0                        block 1
    samples             a a b a a a b a ...            a b a a a a a b ...
    number in its part  0 1 0 2 3 4 1 5 ...            768 256 769 ...
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vescale.data.order import permute
from vescale.data.samples import Batch, Samples, raise_all
from vescale.data.text_data import Dataset, TextData, check_same

BLOCK = 1024  # samples; weights are kept to a thousandth, and any two steps of this many samples mix alike


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of a mixture's data sets.

    Args:
        weight: > 0 and finite; its share of the samples is this over the sum of all.
        data: What it is; all parts have one ``seq_len``.
    """

    weight: float
    data: TextData


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Which data sets to train on; ``open()`` reads them.

    Args:
        parts: By name; each is also a validation set of that name.
        seed: Chooses which sample is whose.
    """

    parts: Mapping[str, Part]
    seed: int = 0

    @property
    def seq_len(self) -> int:
        """Tokens a sample feeds to the model."""
        return next(iter(self.parts.values())).data.seq_len if self.parts else 0

    @property
    def path(self) -> str:
        """Names of the parts, for messages."""
        return " + ".join(self.parts)

    def open(self, *, vocab_size: int | None = None) -> Mixed:
        """Returns the parts, opened.

        Args:
            vocab_size: As of ``TextData.open``.

        Raises:
            ValueError: As each part, and for weights or lengths that do not fit together.
        """
        weights = {name: part.weight for name, part in self.parts.items()}
        problems = [
            f"parts.{name}.weight: expected a number > 0, got {weight}"
            for name, weight in weights.items()
            if not 0 < weight < math.inf
        ]
        if not problems and math.isinf(sum(weights.values())):
            problems.append("parts: expected weights that have a sum, got numbers too large for one")
        if len(weights) > BLOCK:
            problems.append(f"parts: expected at most {BLOCK}, got {len(weights)}")
        lengths = sorted({part.data.seq_len for part in self.parts.values()})
        if len(lengths) != 1:
            problems.append(f"parts: expected at least one, all of one seq_len, got {lengths}")
        raise_all(problems)
        opened = {name: part.data.open(vocab_size=vocab_size) for name, part in self.parts.items()}
        return Mixed(source=self, parts=opened, train=MixedSamples(opened, quotas([*weights.values()]), self.seed))


def quotas(weights: list[float]) -> list[int]:
    """Returns whole numbers that add up to BLOCK in the proportion of ``weights``, by largest remainder, each >= 1."""
    exact = [weight / sum(weights) * BLOCK for weight in weights]
    whole = [max(1, int(share)) for share in exact]
    order = sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])
    for i in order[: max(0, BLOCK - sum(whole))]:
        whole[i] += 1
    whole[int(np.argmax(whole))] -= sum(whole) - BLOCK
    return whole


class MixedSamples:
    """The training samples of a mixture, read like those of one data set."""

    def __init__(self, parts: Mapping[str, Dataset], shares: list[int], seed: int) -> None:
        self.parts, self.shares, self.seed = list(parts.values()), shares, seed
        self.owner = np.repeat(np.arange(len(shares)), shares)
        sizes = [part.vocab_size for part in self.parts]
        self.vocab_size = None if None in sizes else max(size for size in sizes if size is not None)
        self.num_samples = sum(part.train.num_samples for part in self.parts)
        self.ignored = None
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # the one that was asked for last

    def whose(self, first: int, count: int) -> list[tuple[int, int]]:
        """Returns part and number in it of the samples number ``first`` to ``first + count - 1``."""
        found = []
        for number in range(first, first + count):
            block, at = divmod(number, BLOCK)
            owners, before = self._block(block)
            part = int(owners[at])
            found.append((part, block * self.shares[part] + int(before[at])))
        return found

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the part of each sample of a block, and how many of the samples before it there are of that part."""
        found = self._blocks.get(block)
        if found is None:
            order = permute(np.arange(BLOCK), size=BLOCK, seed=self.seed, epoch=np.full(BLOCK, block))
            owners = self.owner[order]
            seen = np.cumsum(owners[:, None] == np.arange(len(self.shares)), axis=0)
            found = owners, seen[np.arange(BLOCK), owners] - 1
            self._blocks = {block: found}
        return found

    def read(self, first: int, count: int, *, counted: int | None = None) -> Batch:
        """As ``Samples.read``."""
        read = []
        for row, (part, number) in enumerate(self.whose(first, count)):
            read.append(self.parts[part].train.read(number, 1, counted=None if counted is None else counted - row))
        if not any(batch.input_ids.is_nested for batch in read):
            return Batch(*(torch.cat(rows) for rows in zip(*read, strict=True)))
        documents = [[part for batch in read for part in _documents(batch[i])] for i in (0, 1)]
        return Batch(*(torch.nested.nested_tensor(parts, layout=torch.jagged) for parts in documents))


def _documents(ids: torch.Tensor) -> list[torch.Tensor]:
    return list(ids.unbind())


@dataclass(frozen=True, kw_only=True, eq=False)
class Mixed:
    """An opened ``Mixture``, as a trainer sees it: like a ``Dataset``."""

    source: Mixture
    parts: Mapping[str, Dataset]
    train: MixedSamples

    @property
    def vocab_size(self) -> int | None:
        """Ids of every part are below this."""
        return self.train.vocab_size

    @property
    def validations(self) -> dict[str, tuple[Samples, float]]:
        """What to validate on, and the share of each in the mean: its part's share of the samples.

        A part's own set has the part's name, one that the part names is ``part/name``.
        """
        return {
            "/".join(filter(None, (name, of))): (samples, weight * share / BLOCK)
            for (name, part), share in zip(self.parts.items(), self.train.shares, strict=True)
            for of, (samples, weight) in part.validations.items()
        }

    def describe(self) -> dict[str, Any]:
        """Returns, in JSON's types, all that decides which tokens a step sees, but the step and the global batch."""
        parts = {f"{name}.{key}": value for name, part in self.parts.items() for key, value in part.describe().items()}
        return {**parts, "shares": self.train.shares, "seed": self.source.seed}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Accepts a resume whose checkpoint holds ``saved``, a ``describe()``.

        Raises:
            ValueError: With every difference.
        """
        check_same(self.source.path, saved, self.describe())
