"""Worker processes, one pool per world size, that live for the whole test run.

Starting eight ranks costs seconds, a call milliseconds.
"""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any

TIMEOUT_S = 180  # of one collective; a hang is a failure, not a wait
# Workers are forks of a process that has imported what most tests use: a rank is there in milliseconds, and shares the
# memory of what it imported.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        *("torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint"),
        *("torch._dynamo", "vescale", "vescale.train", "vescale.trainer", "optimizers", "models", "models.hf"),
        *("hydra._internal.core_plugins.importlib_resources_config_source", "hydra.main", "torch.profiler", "recipes"),
        *("hypothesis", "hypothesis.strategies", "pytest"),
    ]
)
FRESH = multiprocessing.get_context("spawn")  # for what must be set before anything is imported


def _function(path: str, name: str) -> Callable[..., Any]:
    """The function ``name`` of the test file ``path``, which is loaded once per worker."""
    key = f"_pool_{path}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, path)
        assert spec is not None and spec.loader is not None
        sys.modules[key] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[key])
    return getattr(sys.modules[key], name)


def _serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    os.environ.update(OMP_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    import torch
    import torch.distributed as dist
    from composing import compose_once

    compose_once()
    gc.freeze()  # what was imported is no garbage: looking through it again costs a run its first tenths of a second
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S)
    )
    while True:
        try:
            path, name, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            result = _function(path, name)(*args, **kwargs)
            plain = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), result)
            pipe.send_bytes(pickle.dumps((True, plain)))  # by value: a rank may be gone before its result is read
        except BaseException:
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))


class Pool:
    """``world`` ranks on gloo; ``run`` calls a module-level function of a test file on all of them.

    Args:
        world: Number of ranks.
        context: How their processes are started.
        may_die: A rank that dies is no failure: its result is its exit code, and the others are waited for.
    """

    def __init__(self, world: int, context: BaseContext = FORKED, *, may_die: bool = False) -> None:
        self.world, self.context, self.may_die = world, context, may_die
        self.workers: list[Any] = []
        self.pipes: list[Connection] = []
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Returns what ``fn`` returned on each rank; raises with the traceback of the first rank that failed."""
        if not self.workers or not all(worker.is_alive() for worker in self.workers):
            self.restart()
        for pipe in self.pipes:
            pipe.send((fn.__code__.co_filename, fn.__name__, args, kwargs))
        results: dict[int, Any] = {}
        while len(results) < self.world:
            for pipe in wait([self.pipes[r] for r in range(self.world) if r not in results]):
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                ok, value = self._receive(rank)
                if not ok:
                    self.stop()
                    raise AssertionError(f"rank {rank} of {self.world} in {fn.__name__}:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(self.world)]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            return pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self.workers[rank].join()
            code = self.workers[rank].exitcode
            return self.may_die, code if self.may_die else f"the process died with exit code {code}"

    def restart(self) -> None:
        """Starts new workers."""
        self.stop()
        self.folder = tempfile.TemporaryDirectory(prefix="pool_")
        store = f"{self.folder.name}/store"  # where the ranks find each other
        for rank in range(self.world):
            here, there = self.context.Pipe()
            worker = self.context.Process(target=_serve, args=(rank, self.world, store, there), daemon=True)
            worker.start()
            there.close()
            self.workers.append(worker)
            self.pipes.append(here)

    def stop(self) -> None:
        """Kills the workers."""
        for pipe in self.pipes:
            pipe.close()
        for worker in self.workers:
            worker.kill()
            worker.join()
        self.workers, self.pipes = [], []
        if self.folder is not None:
            self.folder.cleanup()
