from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from composing import compose_once
from interpreter import Interpreter
from pool import Pool

torch.set_num_threads(1)
compose_once()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--lane", choices=("ranks", "single"), help="only tests that use the pools of ranks, or the others"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file that does not say ``pool`` has no test of that lane: what only it imports need not be."""
    if config.getoption("lane") != "ranks" or collection_path.suffix != ".py":
        return None
    return None if _says_pool(collection_path) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests of the lane: launch/test.sh runs the two side by side, and one of them alone has pools."""
    lane = config.getoption("lane")
    if lane is not None:
        kept = [item for item in items if ("pool" in getattr(item, "fixturenames", ())) == (lane == "ranks")]
        left = [item for item in items if item not in kept]
        lost = [item.nodeid for item in left if lane == "single" and not _says_pool(item.path)]
        if lost:
            raise pytest.UsageError(f"in no lane, since their files do not say pool: {', '.join(lost)}")
        config.hook.pytest_deselected(items=left)
        items[:] = kept


@functools.cache
def _says_pool(file: Path) -> bool:
    return "pool" in file.read_text()


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported is no garbage, and some tests collect often


def pytest_sessionfinish() -> None:
    gc.unfreeze()


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
