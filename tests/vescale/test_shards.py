"""Ranks of any capacity: where their shards begin, what that cuts, and plans for them against exhaustive search."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import chain
from math import gcd
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale import planner, shards
from vescale.partitions import lower_bound
from vescale.planner import ALIGN, COLLECTIVE, TensorSpec, plan_segment
from vescale.segments import plan_hard, plan_unit
from vescale.shards import Boundary, Ranks

capacities = st.lists(
    st.one_of(st.integers(1, 6), st.fractions(Fraction(1, 4), 3, max_denominator=4)), min_size=1, max_size=9
)
tensor_lists = st.lists(
    st.builds(
        lambda numel, granularity, finest: (numel, granularity, finest),
        st.one_of(st.integers(0, 300), st.integers(0, 40_000), st.sampled_from([64, 8192])),
        st.sampled_from([1, 7, 32, 96, 100, 256, 1000, 5760]),
        st.sampled_from([1, 1, 256]),
    ),
    min_size=1,
    max_size=7,
)


def specs(triples: list[tuple[int, int, int]]) -> list[TensorSpec]:
    return [TensorSpec(f"t{i}", *triple) for i, triple in enumerate(triples)]


# --- who holds what ---------------------------------------------------------------------------------------------------


def test_capacities_are_the_least_whole_numbers_of_their_ratio() -> None:
    assert Ranks.of(3, (1, 2, Fraction(1, 2))).capacity == (2, 4, 1)
    assert Ranks.of(3, (80, 40, 80)).capacity == (2, 1, 2)
    assert Ranks.of(4, (Fraction(3, 7),) * 4) == Ranks.of(4) == Ranks(4)


def test_the_shards_drawn_in_the_module_are_the_real_ones() -> None:
    drawn = next(line for line in (shards.__doc__ or "").splitlines() if "element " in line)
    ranks = Ranks.of(3, (1, 2, Fraction(1, 2)))
    assert [192 * start for start in ranks.starts] == [int(number) for number in re.findall(r"\d+", drawn)]


@pytest.mark.parametrize(
    "capacity, said",
    [
        ((1, 2), "one for each of 3 ranks, got 2"),
        ((1, 0, 2), "rank 1: expected a positive"),
        ((1, 2, -Fraction(1, 2)), r"rank 2: expected a positive integer or Fraction, got Fraction\(-1, 2\)"),
        ((1, 0.5, True), "rank 1: .*got 0.5; rank 2: .*got True"),
    ],
)
def test_capacities_that_are_none_are_refused(capacity: tuple[int, ...], said: str) -> None:
    for plan in (plan_unit, plan_hard, plan_segment, lower_bound):
        with pytest.raises(ValueError, match=f"capacity: .*{said}"):
            plan([TensorSpec("a", 64)], num_ranks=3, capacity=capacity)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 200), st.integers(0, 150), st.integers(1, 60), st.integers(1, 60), capacities, st.integers(1, 20))
def test_boundary_granules_are_counted_without_being_visited(
    offset: int, numel: int, granularity: int, size: int, capacity: list[int | Fraction], run: int
) -> None:
    unequal = Ranks.of(len(capacity), capacity)
    some = [share for share in unequal.capacity for _ in range(run)]  # neighbours of one capacity
    many = Ranks(400, tuple((some * 400)[:400]))
    lengths = [share * size for share in many.capacity or [1] * 400]
    held = [rank for rank in range(offset + numel + 1) for _ in range(lengths[rank])][: offset + numel + 1]
    assert [many.at(size, place) for place in range(offset + numel)] == held[: offset + numel]
    edges = [place for place in range(offset + 1, offset + numel) if held[place] != held[place - 1]]
    assert list(chain.from_iterable(many.edges(size, offset, offset + numel))) == edges
    boundary = Boundary(offset, numel, granularity, size, many if many.capacity else None)
    granules = [(start, min(start + granularity, numel)) for start in range(0, numel, granularity)]
    cut = [i for i, (start, stop) in enumerate(granules) if held[offset + start] != held[offset + stop - 1]]
    assert list(boundary) == cut
    assert len(boundary) == len(cut)
    assert boundary.elements == sum(granules[i][1] - granules[i][0] for i in cut)
    least = many.least(numel, granularity)
    assert all((sum(share * s // granularity * n for share, n in many.kinds.items()) >= numel) == (s >= least)
               for s in (least - 1, least) if s >= 0)  # fmt: skip


# --- plans for unequal ranks ------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None, derandomize=True)
@given(tensor_lists, capacities, st.integers(1, 10), st.sampled_from([0.0, 0.01, 0.3]))
def test_unequal_shards_keep_what_equal_ones_promise(
    triples: list[tuple[int, int, int]], capacity: list[int | Fraction], times: int, max_padding: float
) -> None:
    tensors, capacity = specs(triples), capacity * times
    num_ranks = len(capacity)
    ranks = Ranks.of(num_ranks, capacity)
    (soft, hard) = (
        plan_unit(tensors, num_ranks=num_ranks, max_padding=max_padding, capacity=capacity),
        plan_hard(tensors, num_ranks=num_ranks, capacity=capacity),
    )
    for plan in (*soft, *hard):
        assert plan.shard_size % COLLECTIVE == 0 and plan.numel == ranks.total * plan.shard_size
        begins = [plan.shard(rank)[0] for rank in range(num_ranks)]
        ends = [plan.shard(rank)[1] for rank in range(num_ranks)]
        assert begins == [start * plan.shard_size for start in ranks.starts[:-1]]
        assert ends == [*begins[1:], plan.numel]
        position = 0
        for i, tensor in enumerate(plan.tensors):
            start, stop = plan.interval(i)
            assert position <= start and start % ALIGN == 0 and stop - start == tensor.numel
            position = stop
            assert all((edge - start) % plan.planned[i] == 0 for edge in begins if start < edge < stop)
            parts = [plan.local(i, rank) for rank in range(num_ranks)]
            assert sum(high - low for low, high in parts) == tensor.numel
            assert list(plan.holders(i)) == [rank for rank, (low, high) in enumerate(parts) if low < high]
        assert position <= plan.numel
    assert not any(plan.cut_bytes for plan in hard)
    waste, numel = sum(plan.numel - plan.useful for plan in hard), sum(tensor.numel for tensor in tensors)
    assert lower_bound(tensors, num_ranks=num_ranks, capacity=capacity) <= waste
    finest = plan_segment([t._replace(granularity=t.finest) for t in tensors], num_ranks=num_ranks, capacity=capacity)
    allowed = max(max_padding * numel, finest.numel - finest.useful, COLLECTIVE * ranks.total)
    assert sum(plan.numel - plan.useful for plan in soft) <= allowed


def test_equal_capacities_are_the_plans_of_equal_ranks() -> None:
    tensors = specs([(8192 * 64, 8192, 1), (300, 1, 1), (4096 * 100, 4096, 1)])
    for plan in (plan_unit, plan_hard):
        equal = plan(tensors, num_ranks=24)
        assert plan(tensors, num_ranks=24, capacity=[Fraction(80, 3)] * 24) == equal
    (other,) = plan_unit(tensors, num_ranks=24, capacity=[2] * 8 + [1] * 16)
    assert other.digest() != equal[0].digest() and "24 ranks of capacity 1 to 2 x " in str(other)


def is_legal(start: int, numel: int, granularity: int, edges: list[int]) -> bool:
    return all((edge - start) % granularity == 0 for edge in edges if start < edge < start + numel)


def fits_anyhow(pairs: list[tuple[int, int]], starts: list[int], size: int) -> bool:
    """Whether some legal placement in this order exists: the set of ends that any reaches, every start tried."""
    edges, end, ends = [start * size for start in starts], starts[-1] * size, {0}
    for numel, granularity in pairs:
        legal = [start for start in range(end - numel + 1) if is_legal(start, numel, granularity, edges)]
        ends = {start + numel for start in legal if start >= min(ends, default=end + 1)}
    return bool(ends)


def instances(count: int) -> list[tuple[list[tuple[int, int]], Ranks]]:
    random, found = Random(2602), []
    while len(found) < count:
        ranks = Ranks.of(n := random.randint(2, 8), random.choices(random.sample(range(1, 5), 2), k=n))
        pairs = [
            (random.randint(1, random.choice((12, 40))), random.randint(1, 9)) for _ in range(random.randint(1, 5))
        ]
        found += [(pairs, ranks)] if ranks.capacity else []
    return found


def test_a_fixed_order_and_size_fits_exactly_where_any_placement_does() -> None:
    for pairs, ranks in instances(200):
        least = max(sum(numel for numel, _ in pairs) // ranks.total, 1)
        for size in range(least, least + 8):
            pieces = [planner._Piece(*pair) for pair in pairs]
            assert (planner._place(pieces, size, ranks, size) is not None) == fits_anyhow(
                pairs, list(ranks.starts), size
            ), (pairs, ranks, size)


def test_unequal_shards_are_nearly_always_the_smallest() -> None:
    ratios = []
    for pairs, ranks in instances(300):
        tensors = [TensorSpec(str(i), *pair) for i, pair in enumerate(pairs)]
        plan = plan_segment(tensors, num_ranks=ranks.count, capacity=ranks.capacity, align=1, collective=1)
        size = max(-(-plan.useful // ranks.total), 1)
        while not fits_anyhow(pairs, list(ranks.starts), size):
            size += 1
        ratios.append(plan.shard_size / size)
    assert min(ratios) == 1 and max(ratios) <= 2
    assert sum(ratio > 1 for ratio in ratios) <= 0.01 * len(ratios), sum(ratio > 1 for ratio in ratios)


def test_ten_thousand_unequal_ranks_hold_in_proportion() -> None:
    capacity = [3] * 4096 + [2] * 6144
    tensors = specs([(8192 * 8192, 8192, 1), (28672 * 8192, 8192, 1), (8192, 1, 1), (8192 * 28672, 28672, 1)])
    (plan,) = plan_unit(tensors, num_ranks=10_240, capacity=capacity)
    assert plan.padding <= 0.01
    (start, stop), (other, end) = plan.shard(4095), plan.shard(4096)
    assert stop == other and 2 * (stop - start) == 3 * (end - other)
    assert gcd(*plan.capacity) == 1
