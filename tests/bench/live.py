"""Bytes of live tensors, seen from outside.

Every storage that an operator makes or touches, at its present size, until it dies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts while active; ``peak`` is the largest sum of storage bytes at any operator.

    Storages resized in place (freed and restored parameters) are counted at their size of the moment. Storages that
    exist before are counted once something touches them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        """Bytes alive at this moment."""
        total = 0
        for pointer, weak in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(weak)
            if storage is None:
                torch.UntypedStorage._free_weak_ref(weak)
                del self._storages[pointer]
            else:
                total += storage.nbytes()
        return total

    def _see(self, tensor: torch.Tensor) -> None:
        local = getattr(tensor, "_local_tensor", tensor)
        if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.is_meta:
            return
        storage = local.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage._weak_ref()
