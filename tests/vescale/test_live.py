"""Live bytes and collectives, counted by operators that pass."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from vescale.live import Collective, LiveBytes


def _bytes() -> tuple[list[int], int, int]:
    with LiveBytes() as live:
        a = torch.zeros(256)
        seen = [live.now()]
        b = a.view(16, 16)[:4] + 1  # a view is no storage, its sum is
        seen.append(live.now())
        a.untyped_storage().resize_(0)
        seen.append(live.now())
        del b
        seen.append(live.now())
        a.untyped_storage().resize_(2048)
        seen.append(live.now())
        return seen, live.peak, live.allocations


def test_storages_are_counted_at_their_size_of_the_moment_and_until_they_die() -> None:
    expected = ([1024, 1024 + 256, 256, 0, 2048], 2048, 2)
    assert _bytes() == expected
    with FakeTensorMode():
        assert _bytes() == expected
    original = torch.UntypedStorage.resize_
    assert "LiveBytes" not in original.__qualname__


def _calls() -> Counter[Collective]:
    full, shard = torch.zeros(8), torch.zeros(4)
    with LiveBytes() as live:
        dist.all_gather_single(full, shard)
        dist.reduce_scatter_single(shard, full)
        dist.all_reduce(shard)
        dist.all_to_all_single(torch.zeros(2), torch.zeros(2), [1, 1], [1, 1])
    return live.collectives


def test_collectives_are_counted_whoever_calls_them(pool) -> None:
    names = [("all_gather", 32), ("reduce_scatter", 32), ("all_reduce", 16), ("all_to_all", 8)]
    assert pool(2).run(_calls) == [Counter(Collective(*name) for name in names)] * 2
