"""Saver: writes checkpoints while training goes on.

::

    rank 0   | step | copy | step | step | step |            copy     to buffers in host memory, kept from save to save
      thread        | write, hash | parts of all? seal, rename | old ones removed
    rank 1   | step | copy | step | step | step |
      thread        | write, hash |

A step waits for the copy alone. Nothing is communicated: every rank knows from the placements which pieces it writes,
and the ranks' threads meet in the folder itself, where each leaves a ``part`` that says what it wrote. Rank 0 makes a
checkpoint of them once all are there. A rank that dies leaves no part, so what was being written keeps its name
``.partial`` and is never read. The name has a mark of this run: a rank of a run before, stopped and not yet ended, can
add nothing to it when it wakes up.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import pickle
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from vescale import checkpoint
from vescale.checkpoint import PARTIAL, RANDOM, RECORD, SEAL
from vescale.checksum import add, checksum
from vescale.ragged_tensor import RaggedTensor
from vescale.rows import Rows

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.02  # seconds between two looks for a folder or a part; slower on a file system of a cluster is as good


class Part(NamedTuple):
    """What one rank wrote; its file says that it did."""

    results: list[Any]  # torch's WriteResult of each item
    files: dict[str, tuple[int, str]]  # name -> bytes, sha256
    sums: dict[str, int]  # tensor -> this rank's share of its checksum
    stored: dict[str, TensorStorageMetadata]  # tensor -> the chunks of it that this rank wrote


class Saver:
    """Writes the checkpoints of a run, one at a time.

    Every rank makes one and calls its methods at the same steps.

    Args:
        root: Holds the checkpoints; what a killed run left half-written there is removed.
        keep: Newest checkpoints that stay, > 0.
        keep_every: Checkpoints of steps that are multiples of this stay too; None: no others.

    Raises:
        ValueError: If ``keep`` or ``keep_every`` is not positive.
    """

    held_up_s: float  # how long the last save kept its step waiting, seconds
    _buffers: dict[str, torch.Tensor]  # host memory, by tensor
    _items: list[WriteItem] | None  # what this rank writes; the same at every save
    _failed: Exception | None  # of the thread

    def __init__(self, root: Path, *, keep: int, keep_every: int | None = None) -> None:
        if keep < 1 or (keep_every is not None and keep_every < 1):
            raise ValueError(f"Saver: expected keep and keep_every > 0, got {keep} and {keep_every}")
        self.root, self.keep, self.keep_every = root, keep, keep_every
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.held_up_s, self._buffers, self._items = 0.0, {}, None
        self._thread: threading.Thread | None = None
        self._folder, self._failed = root, None
        self._given_up = threading.Event()
        self._mark = checkpoint.from_rank_0(secrets.token_hex(3))
        if self.rank == 0:
            for left in root.glob(f"*{PARTIAL}"):
                _remove(left)

    def save(
        self,
        step: int,
        *,
        tensors: Mapping[str, torch.Tensor],
        extra: dict[str, Any],
        record: dict[str, Any] | None = None,
    ) -> None:
        """Begins a checkpoint of ``step`` once the one before is written; returns when the tensors may change again.

        Args:
            step: Names it.
            tensors: As ``checkpoint.tensors`` and ``checkpoint.random_state`` give them, the same at every save.
            extra: JSON values of rank 0, returned by ``checkpoint.load``.
            record: JSON values of rank 0; checksums are added to it.

        Raises:
            OSError: On every rank, if the one before could not be written; this one is not begun.
        """
        began = time.perf_counter()
        self.wait()
        staged = self._stage(tensors)
        if self._items is None:
            self._items = _items(staged, self.rank)
        self._folder, self._failed = self.root / f"step_{step:08}", None
        self._given_up.clear()
        facts = {"extra": extra, "record": record or {}}
        self._thread = threading.Thread(target=self._run, args=(staged, facts), name="checkpoint", daemon=True)
        self._thread.start()
        self.held_up_s = time.perf_counter() - began

    @property
    def failed(self) -> bool:
        """Whether this rank could not write its part; ``wait`` tells every rank."""
        return self._failed is not None

    @property
    def busy(self) -> bool:
        """Whether this rank's thread is writing."""
        return self._thread is not None and self._thread.is_alive()

    def join(self, *, timeout_s: float) -> None:
        """Waits for this rank's thread, alone: what a run that ends early was writing becomes whole all the same.

        Args:
            timeout_s: Most seconds to wait, for ranks that are gone.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)

    def wait(self) -> None:
        """Waits until the checkpoint that was begun is whole; called by all ranks together.

        Raises:
            OSError: On every rank, if it could not be written.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        pause, first = LOOK_EVERY_S, None
        while True:
            thread.join(pause)
            states = checkpoint.gather((thread.is_alive(), self._failed))
            failed = [problem for _, problem in states if problem is not None]
            if failed:
                first = first or failed[0]
                self._given_up.set()  # a part, or the folder, is missing for good: nobody need look for it any longer
            if not any(alive for alive, _ in states):
                break
            pause = min(2 * pause, 1.0)
        if first is not None:
            if self.rank == 0:  # of a full disk, say: nobody writes there any more, and it makes room
                _remove(self._partial)
            raise first

    @property
    def _partial(self) -> Path:
        """Where the checkpoint is while it is being written."""
        return self._folder.with_name(f"{self._folder.name}.{self._mark}{PARTIAL}")

    # --- the copy ---

    def _stage(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns copies in host memory of what this rank writes."""
        staged: dict[str, torch.Tensor] = {}
        for name, value in tensors.items():
            ragged = value.rows if isinstance(value, Rows) else value
            local = ragged._local_tensor if isinstance(ragged, RaggedTensor) else value
            if name not in self._buffers:
                self._buffers[name] = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
            self._buffers[name].copy_(local, non_blocking=True)
            staged[name] = self._buffers[name]
            if isinstance(ragged, RaggedTensor):
                staged[name] = RaggedTensor(self._buffers[name], ragged._spec)
            if isinstance(value, Rows):
                staged[name] = Rows.of(staged[name], first=value.first, total=value.shape[0])  # type: ignore[arg-type]
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return staged

    # --- the thread ---

    def _run(self, staged: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
        partial = self._partial
        try:
            if self.rank == 0:
                partial.mkdir(parents=True)
            else:
                self._until(partial.is_dir)
            self._write(partial, staged)
            if self.rank == 0:
                self._finish(partial, facts)
        except Exception as problem:  # wait() raises it on every rank
            self._failed = OSError(f"checkpoint {self._folder} was not written: {_reason(problem)}")

    def _until(self, condition: Any) -> None:
        while not condition():
            if self._given_up.wait(LOOK_EVERY_S):
                raise OSError("a rank could not write its part")

    def _write(self, partial: Path, staged: dict[str, torch.Tensor]) -> None:
        """Writes this rank's files, and then the part that says so."""
        planner = dcp.DefaultSavePlanner()
        planner.set_up_planner(staged, None, is_coordinator=False)
        writer = dcp.FileSystemWriter(partial, overwrite=True)
        plan = writer.prepare_global_plan([SavePlan([])] * self.rank + [SavePlan(self._items or [])])[self.rank]
        results = writer.write_data(plan, planner).wait()
        names = sorted({result.storage_data.relative_path for result in results})
        files = {name: checkpoint.fingerprint(partial / name) for name in names}
        sums = {name: _sum(name, value) for name, value in staged.items() if self.rank in _writers(name, value)}
        part = Part(results, files, sums, _stored(self._items or []))
        fresh = partial / f"part.{self.rank}.new"
        fresh.write_bytes(pickle.dumps(tuple(part)))
        fresh.rename(partial / f"part.{self.rank}")

    def _finish(self, partial: Path, facts: dict[str, Any]) -> None:
        """On rank 0: makes a checkpoint of all parts, gives it its name, and removes old ones."""
        paths = [partial / f"part.{rank}" for rank in range(self.world)]
        self._until(lambda: all(path.is_file() for path in paths))
        parts = [Part(*pickle.loads(path.read_bytes())) for path in paths]
        writer = dcp.FileSystemWriter(partial, overwrite=True)
        writer.finish(_metadata(parts), [part.results for part in parts])
        sums: dict[str, int] = {}
        for part in parts:
            sums |= {name: add(sums.get(name, 0), value) for name, value in part.sums.items()}
        record = {**facts["record"], **checksums(sums)}
        checkpoint.write_json(partial / RECORD, record)
        files = {name: value for part in parts for name, value in part.files.items()}
        files |= {name: checkpoint.fingerprint(partial / name) for name in (".metadata", RECORD)}
        for path in paths:
            path.unlink()
        checkpoint.write_json(partial / SEAL, checkpoint.seal_of(facts["extra"], files))
        if self._folder.exists():  # without a seal, or damaged: nobody goes on from it
            checkpoint.remove(self._folder)
        _sync(partial)
        partial.rename(self._folder)
        _sync(self.root)
        with _told(f"checkpoint {self._folder} is whole, but the run's record is of an older one"):
            checkpoint.write_json(self.root.parent / RECORD, record)
        self._remove_old()

    def _remove_old(self) -> None:
        """Removes what need not stay; a checkpoint that was made read-only stays."""
        for path in checkpoint.whole(self.root)[: -self.keep]:
            kept = self.keep_every and checkpoint.step_of(path) % self.keep_every == 0
            if path != self._folder and not kept and os.access(path, os.W_OK):
                _remove(path)


def _writers(name: str, value: torch.Tensor) -> list[int]:
    """Which ranks write a tensor: the first copy's ranks their runs, rank 0 what is equal everywhere."""
    if name.startswith(RANDOM):
        return [int(name.rpartition(".")[2])]
    if isinstance(value, Rows):
        value = value.rows
    if not isinstance(value, RaggedTensor):
        return [0]
    return value.device_mesh.mesh.movedim(value.ragged_axis, -1).reshape(-1, value.placement.num_ranks)[0].tolist()


def _items(staged: Mapping[str, torch.Tensor], rank: int) -> list[WriteItem]:
    """What ``rank`` writes, as torch's writer takes it."""
    items: list[WriteItem] = []
    for name, value in staged.items():
        if rank not in _writers(name, value):
            continue
        if isinstance(value, RaggedTensor | Rows):
            items += value.__create_write_items__(name, value)
        else:
            chunk = ChunkStorageMetadata(torch.Size([0] * value.ndim), value.shape)
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(value), value.shape)
            items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.TENSOR, tensor_data=data))
    return items


def _stored(items: Iterable[WriteItem]) -> dict[str, TensorStorageMetadata]:
    """What a rank wrote of each tensor."""
    found: dict[str, TensorStorageMetadata] = {}
    for item in items:
        data = item.tensor_data
        assert data is not None
        found.setdefault(item.index.fqn, TensorStorageMetadata(data.properties, data.size, [])).chunks.append(
            data.chunk
        )
    return found


def _metadata(parts: Iterable[Part]) -> Metadata:
    """Where every piece of every tensor lies, as the ranks said."""
    found: dict[str, Any] = {}
    for part in parts:
        for name, stored in part.stored.items():
            found.setdefault(name, dataclasses.replace(stored, chunks=[])).chunks.extend(stored.chunks)
    return Metadata(found, planner_data={name: (name,) for name in found})


def _sum(name: str, value: torch.Tensor) -> int:
    """This rank's share of the tensor's checksum."""
    if isinstance(value, Rows):
        before = value.first * math.prod(value.shape[1:])
        return checksum(value.rows._local_tensor, name=name, first=before + value.rows.run[0])
    if isinstance(value, RaggedTensor):
        return checksum(value._local_tensor, name=name, first=value.run[0])
    return checksum(value, name=name)


def checksums(sums: Mapping[str, int]) -> dict[str, Any]:
    """Returns the checksums of a record: of all weights, of the optimizer's state, and of each tensor.

    Args:
        sums: Checksum of each tensor, by its name in a checkpoint.
    """
    named = {name: value for name, value in sums.items() if not name.startswith(RANDOM)}
    return {
        "weights": f"{add(*(v for name, v in named.items() if name.startswith('model.'))):016x}",
        "optimizer": f"{add(*(v for name, v in named.items() if name.startswith('optimizer.'))):016x}",
        "tensors": {name: f"{value:016x}" for name, value in sorted(named.items())},
    }


def _reason(problem: BaseException) -> str:
    """What went wrong, in one line: the system's own words, which torch's writer hides behind its own."""
    chain = [problem]
    while (behind := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(behind)
    found = next((one for one in chain if isinstance(one, OSError)), chain[-1])
    return " ".join(str(found).split()) or type(found).__name__


@contextmanager
def _told(what: str) -> Iterator[None]:
    """As a context, takes a file system's refusal of what no run depends on, with a warning."""
    try:
        yield
    except OSError as problem:
        logger.warning("%s: %s", what, _reason(problem))


def _remove(path: Path) -> None:
    with _told(f"{path} cannot be removed"):
        checkpoint.remove(path)


def _sync(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
