"""Capacity: what a run needs at least and what this machine has, before anything is allocated; and what to say after.

The least is what every rank holds at the end of backward, from the plan's numbers: its share of the masters, of their
gradients unless units are stepped in backward, and of the optimizer's state unless a GPU's is in the host's memory.
Activations and gathered units come on top, so a run that is refused could not have begun, while one that is let through
may still be too large.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from vescale.rule import Rules, state_bytes
from vescale.stop import Stopped

CGROUP = Path("/sys/fs/cgroup/memory.max")
CPU_WORDS = (
    "can't allocate memory"  # of the CPU's allocator, which raises a plain RuntimeError (c10/core/impl/alloc_cpu.cpp)
)


def least_bytes(
    named: Iterable[tuple[str, nn.Parameter]], rules: Rules, *, ranks: int, gradients: bool = True, state: bool = True
) -> int:
    """Returns the bytes that a rank holds at the end of backward, at least.

    Args:
        named: Parameters by name; they may be on the meta device.
        rules: Their optimizer.
        ranks: That share them.
        gradients: Whether all gradients are there at a time.
        state: Whether the optimizer's state is there.
    """
    params, total = dict(named), 0
    for routes in rules.route(params.items()).routes.values():
        for route in routes:
            total += params[route.name].nbytes * (1 + gradients)
            total += state_bytes(route.rule, route.shape) if state else 0
    return total // ranks


def check(
    named: Iterable[tuple[str, nn.Parameter]], rules: Rules, *, ranks: int, device: torch.device, **held: bool
) -> int:
    """Returns the bytes that a rank holds at least, unless this machine has less; ``held`` is as for ``least_bytes``.

    Raises:
        ValueError: In one line, with both numbers.
    """
    needed, there = least_bytes(named, rules, ranks=ranks, **held), available_bytes(device)
    if needed > there:
        raise ValueError(refusal(needed, there, ranks=ranks))
    return needed


def available_bytes(device: torch.device) -> int:
    """Returns the bytes that one rank on this machine may take: free on its GPU, or its share of the host's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    if CGROUP.is_file() and (limit := CGROUP.read_text().strip()).isdigit():
        found.append(int(limit))
    return min(found, default=2**63) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def refusal(needed: int, there: int, *, ranks: int) -> str:
    """Returns the line that refuses a run for which there is no memory."""
    return (
        f"the model needs at least {needed / 2**30:,.1f} GiB on each of {ranks} ranks for weights, gradients and "
        f"optimizer, and {there / 2**30:,.1f} GiB are free: more ranks, a smaller model=..., or dry_run=true to plan it"
    )


def exhausted(problem: BaseException, *, needed: int, device: torch.device) -> str:
    """Returns the line for a run that ran out of memory: what the plan counts beside what was allocated."""
    if device.type == "cuda":
        held, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        seen = f"{held / 2**30:,.1f} GiB are allocated, {peak / 2**30:,.1f} were at most"
    else:
        seen = f"the machine has {available_bytes(device) / 2**30:,.1f} GiB free"
    first = str(problem).partition("\n")[0][:160]
    return (
        f"out of memory ({first}); between steps the plan holds {needed / 2**30:,.1f} GiB a rank, {seen}: the rest are "
        "activations and gathered units: try trainer.micro_batch=1, model.checkpoint=full, or more ranks"
    )


def is_shortage(problem: BaseException | None) -> bool:
    """Returns whether memory ran out: of a GPU, of Python, or of torch on a CPU."""
    if isinstance(problem, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(problem, RuntimeError) and CPU_WORDS in str(problem)


@contextmanager
def told(*, needed: int, device: torch.device) -> Iterator[None]:
    """As a context, says in one line that memory ran out.

    Raises:
        Stopped: On the rank that ran out of memory alone.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as problem:
        if not is_shortage(problem):
            raise
        raise Stopped(exhausted(problem, needed=needed, device=device)) from problem
