"""Copies, seen from outside: every operator that writes 4 KiB or more of what another tensor holds already."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SMALLEST = 4096  # bytes
_MAKES = ("aten::_to_copy", "aten::clone", "aten::cat", "aten::contiguous")  # its result is the copy
_FILLS = ("aten::copy_", "aten::_foreach_copy_", "aten::split_with_sizes_copy", "aten::_chunk_cat")  # its target is
_TORCHS = ("fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "fsdp::chunk_cat")  # FSDP2's own operators


class Copy(NamedTuple):
    """One copy: the operator and the bytes it wrote."""

    op: str
    nbytes: int


class Copies(TorchDispatchMode):
    """Collects copies while active; ``seen`` is in the order of execution."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Copy] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name
        if name in _MAKES:
            self._add(name, out)
        elif name in _FILLS or name in _TORCHS:
            self._add(name, kwargs.get("out", args[0]))
        return out

    @property
    def nbytes(self) -> int:
        """Of all copies together."""
        return sum(copy.nbytes for copy in self.seen)

    def _add(self, name: str, written: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)]
        nbytes = sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in tensors)
        if nbytes >= SMALLEST:
            self.seen.append(Copy(name, nbytes))
