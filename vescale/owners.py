"""Owners: which rank computes a granule that rank edges cut, and how even the work is.

Longest first, each to its least loaded holder, or to the least loaded rank if that holder is above the mean. Owners
among holders alone save bytes but leave 1.2 to 1.5 times the mean load on some rank when layers are equal; letting the
excess go anywhere brings that to about 1.1 for a tenth more bytes. Blocks with state of their own stay with a holder:
then the owners of a parameter's blocks do not decrease with the block, and their state is a tensor cut along them::

    granule         0       1       2       3            rank edges cut 1 and 3
    holders         0      0, 1     1      1, 2
    owner           0       1       1       2            blocks of the ranks: (1, 2, 1) granules

Where copies of the parameters exist (HSDP, ZeRO 0) each copy's ranks may compute every block, or all of them share the
work: then a granule has a **seat**, ``replica * ranks + rank``, and kept granules are dealt over the copies too.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from vescale.block import Lattice
from vescale.run import Run

Key = tuple[str, int]  # a parameter's name and a granule of it


class Work(NamedTuple):
    """One cut granule.

    Args:
        cost: Of all its blocks, in FLOPs.
        key: Which.
        holders: Ranks, or seats, that hold a part.
        stays: Only a holder may own it.
    """

    cost: float
    key: Key
    holders: Sequence[int]
    stays: bool = False


class Load(NamedTuple):
    """How even the work is over the ranks of one process group.

    Args:
        group: The ranks; None for parameters outside any unit.
        flops: Of each rank, or seat.
        largest: FLOPs of the largest granule.
        cut: Granules that edges cut, of all.
        fixed: FLOPs of the rank that has the most of what cannot go elsewhere: kept granules, and cut ones with state.
    """

    group: dist.ProcessGroup | None
    flops: tuple[float, ...]
    largest: float
    cut: int
    fixed: float

    @property
    def mean(self) -> float:
        """FLOPs of a rank if they could be divided at will."""
        return sum(self.flops) / len(self.flops)

    @property
    def bound(self) -> float:
        """What no rank has more than. A granule with a choice goes where there is no more than the mean of all others
        (Graham, Bounds for certain multiprocessing anomalies, 1966, theorem 1).
        """
        return max(self.fixed, self.mean + (1 - 1 / len(self.flops)) * self.largest)

    def __str__(self) -> str:
        worst, mean = max(self.flops), self.mean or 1.0
        return (
            f"owners: {self.cut} cut granules over {len(self.flops)} ranks; load max/mean {worst / mean:.3f}, largest "
            f"granule {self.largest / mean:.3f}, longest-first bound {self.bound / mean:.3f}"
        )


def deal(work: Sequence[Work], load: Sequence[float]) -> dict[Key, int]:
    """Chooses an owner for every cut granule.

    Args:
        work: Every cut granule.
        load: FLOPs that each rank has already, from the blocks it keeps.

    Returns:
        The owner of each; a function of the arguments only, ties go by name and granule.
    """
    load = list(load)
    mean = (sum(load) + sum(item.cost for item in work)) / len(load)
    least = [(flops, rank) for rank, flops in enumerate(load)]
    heapq.heapify(least)
    owners = {}
    for item in sorted(work, key=lambda item: (not item.stays, -item.cost, item.key)):
        owner = min(item.holders, key=load.__getitem__)
        if not item.stays and load[owner] + item.cost > max(mean, item.cost):
            while least[0][0] != load[least[0][1]]:  # it was given more since
                heapq.heappop(least)
            if least[0][0] < load[owner]:
                owner = least[0][1]
        load[owner] += item.cost
        heapq.heappush(least, (load[owner], owner))
        owners[item.key] = owner
    return owners


class Deal(NamedTuple):
    """Who computes what, the same on every rank.

    Args:
        owners: Of each cut granule, a position in its process group.
        loads: Of each process group.
        replicas: Which copy's ranks compute each granule, kept ones too; empty when those of every copy do.
    """

    owners: dict[Key, int]
    loads: list[Load]
    replicas: dict[Key, int]


def assign(runs: Sequence[Run], *, share_replicas: bool = False) -> Deal:
    """Deals the cut granules of all runs over the ranks, and all granules over the copies if these share the work.

    A function of the plans, which everybody knows.
    """
    found = Deal({}, [], {})
    for members in _by_group([run for run in runs if hasattr(run.rule, "block")]):
        ranks, copies = members[0].num_ranks, members[0].num_replicas if share_replicas else 1
        load, work, largest, num_cut = [0.0] * (ranks * copies), [], 0.0, 0
        for run in members:
            for index, name in enumerate(run.names):
                costs, cut = granule_costs(run, index), set(run.boundary(index))
                largest, num_cut = max([largest, *costs[-2:]]), num_cut + len(cut)  # those before the last are alike
                for granule in range(len(costs)) if copies > 1 else sorted(cut):
                    held = holders(run, index, granule)
                    seats = held if copies == 1 else [copy * ranks + rank for copy in range(copies) for rank in held]
                    stays = granule not in cut or hasattr(run.rule, "block_state")
                    work.append(Work(costs[granule], (name, granule), seats, stays))
                offset, size, step = run.offsets[index], run.shard_size, run.lattice(index).granularity
                for granule, cost in enumerate(costs if copies == 1 else ()):
                    if granule not in cut:
                        load[(offset + granule * step) // size] += cost
        seats_of, fixed = deal(work, load), list(load)
        for item in work:
            load[seats_of[item.key]] += item.cost
            fixed[seats_of[item.key]] += item.cost if item.stays else 0.0
        found.owners.update((item.key, seats_of[item.key] % ranks) for item in work if copies == 1 or not item.stays)
        if copies > 1:
            found.replicas.update((key, seat // ranks) for key, seat in seats_of.items())
        found.loads.append(Load(members[0].process_group, tuple(load), largest, num_cut, max(fixed)))
    return found


def _by_group(runs: Sequence[Run]) -> list[list[Run]]:
    groups: dict[int, list[Run]] = {}
    for run in runs:
        groups.setdefault(id(run.process_group), []).append(run)
    return list(groups.values())


def owned_blocks(run: Run, owners: dict[Key, int]) -> list[list[int]]:
    """Returns, for each parameter of a run, how many of its blocks each rank computes."""
    counts = []
    for index, name in enumerate(run.names):
        lattice, units = run.lattice(index), [0] * run.num_ranks
        offset, size, step, each = run.offsets[index], run.shard_size, lattice.granularity, lattice.blocks_per_granule
        for granule in range(lattice.num_granules):
            owner = owners.get((name, granule))
            units[(offset + granule * step) // size if owner is None else owner] += each
        counts.append(units)
    return counts


def holders(run: Run, index: int, granule: int) -> range:
    """Returns the ranks that hold a part of a granule of parameter ``index``."""
    start, stop = run.lattice(index).granule(granule)
    offset, size = run.offsets[index], run.shard_size
    return range((offset + start) // size, (offset + stop - 1) // size + 1)


def granule_costs(run: Run, index: int) -> list[float]:
    """Returns the work of each granule of parameter ``index``: its blocks' ``rule.cost``, else the elements."""
    lattice = run.lattice(index)
    last = lattice.num_granules - 1  # all before it are alike, and it may be shorter
    full = [_granule_cost(run.rule, lattice, 0)] * last if last > 0 else []
    return [*full, _granule_cost(run.rule, lattice, last)] if last >= 0 else []


def _granule_cost(rule: Any, lattice: Lattice, granule: int) -> float:
    """Along each dim of a granule there are blocks of at most two lengths: full ones, and one that ends with it."""
    box = lattice.box(granule)
    lead = (1,) * (len(lattice.block) - len(box))
    lengths = [
        [(length, count) for length, count in ((want, size // want), (size % want, 1)) if length and count]
        for size, want in zip(box, lattice.block[len(lead) :], strict=True)
    ]
    total = 0.0
    for sizes in itertools.product(*lengths):
        total += math.prod(count for _, count in sizes) * _cost(rule, lead + tuple(length for length, _ in sizes))
    return total


def window_shape(window: Sequence[slice]) -> tuple[int, ...]:
    """Returns the shape of what a block's slices take."""
    return tuple(part.stop - part.start for part in window)


def _cost(rule: Any, block: tuple[int, ...]) -> float:
    return float(rule.cost(block)) if hasattr(rule, "cost") else float(math.prod(block))
