"""Documents packed into one batch: which token is of which, at which position, and whether a batch is one at all.

Three documents of 3, 1 and 2 tokens, one after another::

    offsets     0     3 4   6
    documents   0 0 0 1 2 2
    positions   0 1 2 0 0 1
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch


class Sequences(NamedTuple):
    """Which sequence each token is of, a row of the batch or a packed document.

    Args:
        of_token: (tokens,) int64.
        number: Of the sequences, empty ones included.
    """

    of_token: torch.Tensor
    number: int


def rows(num_rows: int, num_tokens: int, device: torch.device) -> Sequences:
    """Returns the rows of a batch as its sequences, ``num_tokens`` each."""
    return Sequences(torch.arange(num_rows * num_tokens, device=device) // num_tokens, num_rows)


def places(
    num_tokens: int, offsets: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Returns the document of each token, None where all are of one, and its position there; each (num_tokens,) int64.

    Args:
        num_tokens: Of a row.
        offsets: (documents + 1,) integers: document i is tokens ``[offsets[i], offsets[i + 1])``. None: one document.
        device: Of the tokens.
    """
    positions = torch.arange(num_tokens, device=device)
    if offsets is None:
        return None, positions
    documents = torch.searchsorted(offsets[1:].contiguous(), positions, right=True)
    return documents, positions - offsets[documents]


def check(input_ids: torch.Tensor, labels: torch.Tensor | None, *, longest: int) -> None:
    """Raises ValueError unless the shapes fit; looks at shapes only, so the device is not waited for."""
    problems: list[str] = []
    if input_ids.is_nested:
        problems += _jagged_problems(input_ids, labels, longest)
    elif input_ids.ndim != 2 or not input_ids.numel():
        problems.append(f"input_ids: expected (batch, sequence) with at least one token, got {tuple(input_ids.shape)}")
    elif input_ids.shape[1] > longest:
        got = input_ids.shape[1]
        problems.append(f"input_ids: expected at most max_position_embeddings = {longest} tokens, got {got}")
    if not input_ids.is_nested and labels is not None and labels.shape != input_ids.shape:
        problems.append(f"labels: expected the shape of input_ids, {tuple(input_ids.shape)}, got {tuple(labels.shape)}")
    if problems:
        raise ValueError("; ".join(problems))


def _jagged_problems(input_ids: torch.Tensor, labels: torch.Tensor | None, longest: int) -> Iterator[str]:
    if input_ids.layout is not torch.jagged or input_ids.ndim != 2:
        yield f"input_ids: expected a jagged tensor (documents, tokens), got {input_ids.ndim} dims, {input_ids.layout}"
        return
    if input_ids.lengths() is not None:  # type: ignore[attr-defined]  # what jagged tensors have
        yield "input_ids: expected documents that lie end to end, got a jagged tensor with holes (lengths)"
        return
    if not input_ids.values().numel():
        yield f"input_ids: expected at least one token, got {input_ids.shape[0]} documents without"
        return
    offsets = input_ids.offsets()  # type: ignore[attr-defined]
    if offsets.device.type == "cpu":  # on a GPU they are not read: that would wait for it
        first, last, most = int(offsets[0]), int(offsets[-1]), int(offsets.diff().max())
        if (first, last) != (0, len(input_ids.values())):
            yield f"input_ids: expected offsets from 0 to {len(input_ids.values())} tokens, got {first} to {last}"
        if most > longest:
            yield f"input_ids: expected documents of at most max_position_embeddings = {longest} tokens, got {most}"
    if labels is not None and not (labels.is_nested and _same_documents(input_ids, labels)):
        yield "labels: expected a jagged tensor with the documents of input_ids"


def _same_documents(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two jagged tensors have as many tokens and, where that can be read without waiting, in each document."""
    if one.values().shape != other.values().shape:
        return False
    mine, its = one.offsets(), other.offsets()  # type: ignore[attr-defined]  # what jagged tensors have
    return mine.shape == its.shape and (mine.device.type != "cpu" or torch.equal(mine, its.to(mine.device)))
