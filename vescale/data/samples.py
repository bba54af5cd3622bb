"""Samples: a stretch of tokens read in samples of one length, in an order that is a pure function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vescale.data.order import permute
from vescale.data.token_file import Tokens

IGNORED = -100  # the label that no loss counts: torch.nn.functional.cross_entropy's default ignore_index


class Batch(NamedTuple):
    """Inputs and labels: ``labels[:, i]`` is the token after ``input_ids[:, i]``, or -100 where no loss is counted.

    Args:
        input_ids: (b, s) int64; where documents are kept apart, jagged (documents, j), of the same ``b * s`` tokens.
        labels: Like ``input_ids``, already shifted.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """One part of the tokens, read in samples; a sample shares one token, its last label, with the next.

    Args:
        tokens: (n,) integers, in memory or mapped, in one or several files.
        seq_len: Tokens a sample feeds to the model.
        seed: Chooses the order of every epoch.
        ignored: The id that is never counted as a label, or None.
        vocab_size: Ids are below this, or None when it is not known.
        documents: (d + 1,) int64 edges of the documents that are to be kept apart; None: they are read on end to end.
    """

    tokens: Tokens
    seq_len: int
    seed: int
    ignored: int | None = None
    vocab_size: int | None = None
    documents: np.ndarray | None = None

    @property
    def num_samples(self) -> int:
        """Samples of an epoch; up to ``seq_len - 1`` tokens at the end are in none."""
        return (len(self.tokens) - 1) // self.seq_len

    def places(self, first: int, count: int) -> np.ndarray:
        """Returns ``(count,) int64``: where the samples number ``first``, ``first + 1``, ... lie, in samples."""
        epoch, index = np.divmod(np.arange(first, first + count), self.num_samples)
        return permute(index, size=self.num_samples, seed=self.seed, epoch=epoch)

    def read(self, first: int, count: int, *, counted: int | None = None) -> Batch:
        """Returns the samples number ``first`` to ``first + count - 1``; epochs follow each other without a seam.

        Args:
            first: 0-based number in the run; those below ``num_samples`` are the first epoch, each sample once.
            count: Samples to read.
            counted: Only the first so many count in a loss; None: all.

        Raises:
            ValueError: A token is not in the vocabulary.
        """
        starts = (self.places(first, count) * self.seq_len).tolist()
        rows = np.stack([self.tokens[start : start + self.seq_len + 1] for start in starts]).astype(np.int64)
        if self.vocab_size is not None:
            raise_all(ids_problems([(int(rows.min()), int(rows.max()))], self.vocab_size))
        labels = rows[:, 1:].copy()
        if self.ignored is not None:
            labels[labels == self.ignored] = IGNORED
        if counted is not None:
            labels[max(counted, 0) :] = IGNORED
        if self.documents is not None:
            return self._apart(rows[:, :-1], labels, starts)
        return Batch(torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(labels))

    def _apart(self, inputs: np.ndarray, labels: np.ndarray, starts: list[int]) -> Batch:
        """Cuts the samples at the edges of documents; the last token of one does not foretell the first of the next."""
        assert self.documents is not None
        offsets = [0]
        for row, start in enumerate(starts):
            low, high = np.searchsorted(self.documents, [start, start + self.seq_len], side="right")
            inside = np.unique(self.documents[low:high]) - start
            labels[row, inside[inside > 0] - 1] = IGNORED
            cuts = [int(edge) for edge in inside if 0 < edge < self.seq_len]
            offsets += [row * self.seq_len + edge for edge in (*cuts, self.seq_len)]
        edges = torch.tensor(offsets)
        values = (torch.from_numpy(np.ascontiguousarray(array)).reshape(-1) for array in (inputs, labels))
        return Batch(*(torch.nested.nested_tensor_from_jagged(value, edges) for value in values))

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
        raise_all(problems)
        share = global_batch // world
        return self.read(step * global_batch + rank * share, share)


def ids_problems(ends: list[tuple[int, int]], vocab_size: int, *, where: str = "") -> list[str]:
    """Returns what is wrong with ids of which the lowest and the highest of some stretches are known."""
    low, high = min((low for low, _ in ends), default=0), max((high for _, high in ends), default=-1)
    problems = [f"{where}expected token ids >= 0, got {low}"] if low < 0 else []
    if high >= vocab_size:
        problems.append(f"{where}expected token ids below vocab_size={vocab_size}, got {high}")
    return problems


def raise_all(problems: list[str]) -> None:
    """Raises ValueError if there are any problems, with all of them in one line."""
    if problems:
        raise ValueError(f"data: {'; '.join(problems)}")


def num_labels(labels: torch.Tensor) -> torch.Tensor:
    """Returns how many labels count, () int64; of a jagged batch, of all its documents."""
    return ((labels.values() if labels.is_nested else labels) != IGNORED).sum()
