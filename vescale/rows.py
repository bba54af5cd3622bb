"""Rows of a tensor whose other rows are with other ranks, as torch's distributed checkpoint sees them.

A parameter with an attribute ``part_of`` (``first``, ``stop``, ``total``, ``group``) is rows ``[first, stop)`` of a
tensor of ``total`` rows; the other ranks of ``group`` have the rest. Experts that are dealt over ranks are such. Saved,
it is one tensor under one name, so that a checkpoint does not depend on how they were dealt::

    4 experts, dealt over 2 ranks, each sharded over 2     rank 0: [0, 1)   rank 1: [2, 3)
                                                           rank 2: [1, 2)   rank 3: [3, 4)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem

from vescale.ragged_tensor import RaggedTensor


def rows_of(tensor: torch.Tensor, part: Any, *, each: int = 1) -> torch.Tensor:
    """Returns what a checkpoint saves and loads in place of ``tensor``: itself, or ``Rows`` of it.

    Args:
        tensor: A parameter, or state of one: of its shape, a scalar, or with several rows for each of its rows.
        part: ``part_of`` of the parameter, or None.
        each: Rows of ``tensor`` for each row of the parameter; a rank without any cannot see it. 0: none that is whole.

    Raises:
        NotImplementedError: If the rows of state do not belong to one row of the parameter each.
    """
    if part is None or tensor.ndim == 0:
        return tensor
    assert isinstance(tensor, RaggedTensor)
    if not each or tensor.shape[0] != each * (part.stop - part.first):
        raise NotImplementedError(
            f"checkpoint: state of shape {tuple(tensor.shape)} for {part.stop - part.first} of {part.total} experts, "
            "whose rows belong to several; deal no experts (ep=1), or take a rule whose blocks lie inside an expert"
        )
    return Rows.of(tensor, first=each * part.first, total=each * part.total)


class Rows(torch.Tensor):
    """A RaggedTensor under the indices of the tensor that it is rows of; itself a tensor of that shape and no memory.

    Made by ``rows_of``. What is read and written are views of ``rows``.
    """

    rows: RaggedTensor
    first: int  # index of its first row

    @classmethod
    def of(cls, rows: RaggedTensor, *, first: int, total: int) -> Rows:
        """Returns ``rows`` as those that begin at ``first`` of ``total``."""
        # Checkpoint's look-up wants a torch.Tensor, and asks its methods; nothing reads its one element.
        found = torch.empty((), dtype=rows.dtype).expand(total, *rows.shape[1:]).as_subclass(cls)
        found.rows, found.first = rows, first
        return found

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        items = []
        for item in self.rows.__create_write_items__(fqn, object):
            data = item.tensor_data
            assert data is not None and item.index.offset is not None
            moved = TensorWriteData(self._moved(data.chunk), data.properties, self.shape)
            index = dataclasses.replace(item.index, offset=self._shifted(item.index.offset, self.first))
            items.append(dataclasses.replace(item, index=index, tensor_data=moved))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._moved(chunk) for chunk in self.rows.__create_chunk_list__()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        here = dataclasses.replace(index, offset=self._shifted(index.offset, -self.first))
        return self.rows.__get_tensor_shard__(here)

    def _moved(self, chunk: ChunkStorageMetadata) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(self._shifted(chunk.offsets, self.first), chunk.sizes)

    @staticmethod
    def _shifted(offset: torch.Size, rows: int) -> torch.Size:
        return torch.Size((offset[0] + rows, *offset[1:]))
