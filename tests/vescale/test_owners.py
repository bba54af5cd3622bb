"""Dealing from a heap chooses as looking at every rank does; costs in closed form are the sums over the blocks."""

from __future__ import annotations

import math
from random import Random
from types import SimpleNamespace
from typing import Any

from vescale.block import Lattice
from vescale.owners import Key, Work, deal, granule_costs, window_shape


def _by_looking(work: list[Work], load: list[float]) -> dict[Key, int]:
    """Longest first to the least loaded holder, or to the least loaded of all, a holder among equals, if above."""
    load, owners = list(load), {}
    mean = (sum(load) + sum(item.cost for item in work)) / len(load)
    for item in sorted(work, key=lambda item: (not item.stays, -item.cost, item.key)):
        owner = min(item.holders, key=load.__getitem__)
        if not item.stays and load[owner] + item.cost > max(mean, item.cost):
            owner = min(range(len(load)), key=lambda rank: (load[rank], rank not in item.holders))
        load[owner] += item.cost
        owners[item.key] = owner
    return owners


def test_the_owners_are_those_that_looking_at_every_rank_finds() -> None:
    random = Random(0)
    for _ in range(300):
        ranks = random.randint(1, 12)
        load = [float(random.randint(0, 6)) for _ in range(ranks)]
        work = []
        for i in range(random.randint(0, 30)):
            first = random.randrange(ranks)
            held = range(first, random.randint(first, ranks - 1) + 1)
            work.append(Work(float(random.randint(0, 5)), ("w", i), held, random.random() < 0.3))
        assert deal(work, load) == _by_looking(work, load)


def test_the_cost_of_a_granule_is_that_of_its_blocks() -> None:
    rule: Any = SimpleNamespace(cost=lambda block: float(sum(block) * math.prod(block)))
    for shape, block in (((10, 7), (4, 3)), ((8, 6), (8, 6)), ((3, 8, 6), (1, 4, 4)), ((20,), (6,)), ((0, 4), (2, 2))):
        lattice = Lattice(shape, block)
        run: Any = SimpleNamespace(rule=rule, lattice=lambda index, lattice=lattice: lattice)
        expected = []
        for granule in range(lattice.num_granules):
            lead = (1,) * (len(lattice.block) - len(lattice.box(granule)))
            expected.append(sum(rule.cost(lead + window_shape(window)) for window in lattice.windows(granule)))
        assert granule_costs(run, 0) == expected
