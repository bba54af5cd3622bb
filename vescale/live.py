"""What a process does to memory and to the network, seen from outside: by the operators that pass, not by our counters.

A dispatch mode sees every operator. Tensors it touches show the storages that live, and c10d's operators are the
collectives, whoever called them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# c10d's operators by the name a reader knows, and which argument's bytes are what the collective is about: the whole
# buffer of a gather and a scatter, what is sent of an exchange.
COLLECTIVES = {
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "alltoall_base_": ("all_to_all", 1),
}


class Collective(NamedTuple):
    """One kind of collective and its bytes: of the whole buffer; of an all-to-all, what this rank sends."""

    name: str
    nbytes: int


class LiveBytes(TorchDispatchMode):
    """Counts while active.

    Storages resized in place (freed and restored parameters) are counted at their size of the moment. Storages that
    exist before are counted once something touches them. Fake tensors count as real ones would; meta tensors do not.
    """

    peak: int  # largest sum of storage bytes after any operator
    allocations: int  # storages that operators made
    collectives: Counter[Collective]
    at_peak: dict[str, int]  # bytes by the operator that made or first touched them, at the peak; if ``explain``

    def __init__(self, *, explain: bool = False) -> None:
        super().__init__()
        self.peak, self.allocations, self.collectives, self.at_peak = 0, 0, Counter(), {}
        self._explain, self._bytes = explain, 0
        self._storages: dict[int, tuple[Any, int, str]] = {}  # by id: weak reference, bytes, operator
        self._resize: Any = None

    def __enter__(self) -> LiveBytes:
        self._resize = original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:  # no operator tells of it
            result = original(storage, size)
            self._see(storage, "resize_")
            self._top()
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *problem: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*problem)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor):
                local = getattr(leaf, "_local_tensor", leaf)
                if not (local.is_meta or type(local).__name__ == "RaggedTensor"):
                    self._see(local.untyped_storage(), str(func))
        if func.namespace == "c10d":
            self._count(func, args)
        self._top()
        return out

    def now(self) -> int:
        """Bytes alive at this moment."""
        return self._bytes

    def restart(self) -> None:
        """Forgets the peak and the collectives; what is alive stays known."""
        self.peak, self.allocations, self.collectives = self._bytes, 0, Counter()

    def _top(self) -> None:
        if self._bytes > self.peak:
            self.peak = self._bytes
            if self._explain:
                self.at_peak = dict(Counter())
                for _, size, name in list(self._storages.values()):  # another thread may let one go meanwhile
                    self.at_peak[name] = self.at_peak.get(name, 0) + size

    def _count(self, func: Any, args: Any) -> None:
        name = func.name().removeprefix("c10d::").partition(".")[0]
        if name in COLLECTIVES:
            known, index = COLLECTIVES[name]
            nbytes = sum(leaf.nbytes for leaf in tree_leaves(args[index]) if isinstance(leaf, torch.Tensor))
            self.collectives[Collective(known, nbytes)] += 1
        elif name not in ("barrier", "monitored_barrier_"):
            self.collectives[Collective(name, 0)] += 1

    def _see(self, storage: torch.UntypedStorage, name: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._storages.get(key)
        if known is None:
            gone = weakref.ref(storage, lambda _: self._forget(key))
            self.allocations += 1
        else:
            gone, name = known[0], known[2]
            self._bytes -= known[1]
        self._storages[key] = (gone, size, name)
        self._bytes += size

    def _forget(self, key: int) -> None:
        self._bytes -= self._storages.pop(key)[1]
