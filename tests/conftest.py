from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from interpreter import Interpreter
from pool import Pool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Pool]]:
    """``pool(world).run(fn, *args)`` runs ``fn`` on ``world`` ranks and returns the results in rank order."""
    pools: dict[int, Pool] = {}
    yield lambda world: pools.setdefault(world, Pool(world))
    for started in pools.values():
        started.stop()


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """``interpreter.run(fn, *args)`` runs ``fn`` where Triton kernels are interpreted."""
    started = Interpreter()
    yield started
    started.pool.stop()
