"""RaggedShard is a cut into whole units; runs break into boxes that tile exactly."""

from __future__ import annotations

import itertools
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale.placement import RaggedShard, Slot, boxes


def test_the_picture() -> None:
    placement = RaggedShard.of_slot((4, 6), offset=8, shard_size=12, num_ranks=3)
    assert placement.dims == (0, 1) and placement.local_units == (4, 12, 8)
    assert [placement.run((4, 6), rank) for rank in range(3)] == [(0, 4), (4, 16), (16, 24)]
    rows = RaggedShard.of_slot((4, 6), offset=6, shard_size=12, num_ranks=3)
    assert rows.dims == (0,) and rows.local_units == (1, 2, 1)


@given(st.lists(st.integers(0, 5), min_size=0, max_size=4), st.integers(0, 40), st.integers(1, 30), st.integers(1, 9))
def test_runs_tile_the_tensor_in_rank_order(shape: list[int], offset: int, size: int, ranks: int) -> None:
    numel = math.prod(shape)
    ranks = max(ranks, -(-(offset + numel) // size))
    placement = RaggedShard.of_slot(shape, offset=offset, shard_size=size, num_ranks=ranks)
    placement.check(shape, ranks)
    runs = [placement.run(shape, rank) for rank in range(ranks)]
    expected = [
        (min(max(k * size - offset, 0), numel), min(max((k + 1) * size - offset, 0), numel)) for k in range(ranks)
    ]
    assert runs == expected
    assert RaggedShard(placement.dims, placement.local_units).local_units == placement.local_units


@given(st.lists(st.integers(1, 4), min_size=0, max_size=4), st.data())
def test_boxes_tile_a_run_and_are_few(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    found = []
    for box in boxes(shape, start, stop):
        for index in itertools.product(*(range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))):
            found.append(sum(i * math.prod(shape[d + 1 :]) for d, i in enumerate(index)))
    assert found == list(range(start, stop))
    assert len(boxes(shape, start, stop)) <= max(1, 2 * (len(shape) - 1) + 1)


def test_placements_are_values() -> None:
    a = RaggedShard((0,), (2, 0, 3))
    b = RaggedShard.of_slot((4, 6), offset=8, shard_size=12, num_ranks=3)
    assert pickle.loads(pickle.dumps(a)) == a and pickle.loads(pickle.dumps(b)) == b
    assert len({a, RaggedShard((0,), (2, 0, 3)), b}) == 2
    assert not a.is_shard() and not a.is_shard(0) and not a.is_replicate() and not a.is_partial()


def test_bad_placements_are_named() -> None:
    with pytest.raises(ValueError, match="prefix"):
        RaggedShard((1,), (2, 3))
    with pytest.raises(ValueError, match=">= 0"):
        RaggedShard((0,), (2, -3))
    with pytest.raises(ValueError, match="num_ranks"):
        RaggedShard((0,), Slot(0, 4, 1, 8))
    with pytest.raises(ValueError, match="places 5 units over 2 ranks.*6 units"):
        RaggedShard((0,), (2, 3)).check((6, 2), 2)
