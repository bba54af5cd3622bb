"""Segments: granules kept at the least padding over all partitions, one budget for a model, bounds nothing beats."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vescale import planner
from vescale.commit import preview
from vescale.dbuffer import Layout
from vescale.fsdp import fully_shard
from vescale.partitions import ORDERS, SEGMENT, lower_bound
from vescale.planner import ALIGN, COLLECTIVE, SegmentPlan, TensorSpec, even_padding, lcm_padding, plan_segment
from vescale.segments import (
    MOST_HARD,
    plan_hard,
    plan_model,
    plan_unit,
)
from vescale.shard_state import state_of

world_sizes = st.one_of(st.integers(1, 16), st.integers(1, 4096), st.sampled_from([2, 3, 5, 7, 61, 127, 1021, 4093]))
matrices = st.builds(
    lambda rows, columns, block: (rows * columns, block * columns),
    st.integers(1, 3000),
    st.sampled_from([512, 1536, 2048, 2880, 4096, 7168]),
    st.sampled_from([1, 1, 2, 16, 100]),
)
units = st.lists(st.one_of(matrices, st.tuples(st.integers(0, 9000), st.just(1))), min_size=1, max_size=7)


def specs(pairs: list[tuple[int, int]]) -> list[TensorSpec]:
    return [TensorSpec(f"t{i}", numel, granularity) for i, (numel, granularity) in enumerate(pairs)]


def layer(shapes: dict[str, tuple[int, ...]], rows: int | None) -> list[TensorSpec]:
    """Granules of rows of the last dim, of whole matrices, or of single elements where there is one dim."""
    return [
        TensorSpec(name, math.prod(shape), 1 if len(shape) == 1 else (rows or shape[-2]) * shape[-1])
        for name, shape in shapes.items()
    ]


def waste(plans: tuple[SegmentPlan, ...]) -> int:
    return sum(plan.numel - plan.useful for plan in plans)


LLAMA_70B = {
    "norm": (8192,),
    "q": (8192, 8192),
    "k": (1024, 8192),
    "v": (1024, 8192),
    "o": (8192, 8192),
    "gate": (28672, 8192),
    "up": (28672, 8192),
    "down": (8192, 28672),
}
DEEPSEEK_ATTENTION = {
    "norm": (7168,),
    "q_a": (1536, 7168),
    "q_b": (24576, 1536),
    "kv_a": (576, 7168),
    "kv_b": (32768, 512),
    "o": (7168, 16384),
}
DEEPSEEK_DENSE = DEEPSEEK_ATTENTION | {"gate": (18432, 7168), "up": (18432, 7168), "down": (7168, 18432)}
DEEPSEEK_MOE = DEEPSEEK_ATTENTION | {
    f"{expert}.{name}": shape
    for expert in ("shared", *range(256))
    for name, shape in (("gate", (2048, 7168)), ("up", (2048, 7168)), ("down", (7168, 2048)))
}

# --- granules kept at any price ---------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, derandomize=True)
@given(units, world_sizes)
def test_hard_segments_hold_every_tensor_once_and_cut_nothing(pairs: list[tuple[int, int]], num_ranks: int) -> None:
    tensors = specs(pairs)
    plans = plan_hard(tensors, num_ranks=num_ranks)
    assert 1 <= len(plans) <= MOST_HARD
    assert sorted(tensor.name for plan in plans for tensor in plan.tensors) == sorted(t.name for t in tensors)
    for plan in plans:
        assert plan.cut_bytes == 0 and plan.shard_size % COLLECTIVE == 0
        assert all(offset % ALIGN == 0 for offset in plan.offsets)
        orders = [sorted(plan.tensors, key=lambda tensor: int(tensor.name[1:]))]
        orders += [sorted(orders[0], key=key) for key in ORDERS]
        assert list(plan.tensors) in orders
        for i, tensor in enumerate(plan.tensors):
            start, stop = plan.interval(i)
            assert i == 0 or plan.interval(i - 1)[1] <= start
            assert stop <= plan.numel
            edges = range((start // plan.shard_size + 1) * plan.shard_size, stop, plan.shard_size)
            assert all((edge - start) % tensor.granularity == 0 for edge in edges)
    one = plan_segment(tensors, num_ranks=num_ranks)
    assert waste(plans) + SEGMENT * (len(plans) - 1) <= one.numel - one.useful
    assert lower_bound(tensors, num_ranks=num_ranks) <= waste(plans)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(units, world_sizes)
def test_the_smallest_budget_is_named_and_can_be_met(pairs: list[tuple[int, int]], num_ranks: int) -> None:
    tensors = specs(pairs)
    total = sum(tensor.numel for tensor in tensors)
    try:
        plans = plan_hard(tensors, num_ranks=num_ranks, max_padding=0.001)
    except ValueError as error:
        if not total:
            return
        least = float(str(error).split("expected at least ")[1].split(",")[0])
        bound = math.ceil(lower_bound(tensors, num_ranks=num_ranks) / total * 1e6) / 1e6
        assert ("the smallest there is in" in str(error)) == (least == bound)
        assert (f"the smallest found (there is none below {bound:.6f})" in str(error)) == (least > bound)
        assert least > 0.001
        plans = plan_hard(tensors, num_ranks=num_ranks, max_padding=least)
        assert waste(plans) <= least * total
    else:
        assert waste(plans) <= 0.001 * total


@pytest.mark.parametrize(
    "shapes, rows, num_ranks, padding",
    [
        (LLAMA_70B, 32, 16, 0.0001),
        (LLAMA_70B, 32, 64, 0.0001),
        (LLAMA_70B, 32, 256, 0.0196),  # gate and up lie apart: with down in one segment, with the rest in another
        (LLAMA_70B, 32, 512, 0.0981),
        (DEEPSEEK_DENSE, 1, 512, 0.0002),
    ],
)
def test_layers_reach_the_bound(shapes: dict[str, tuple[int, ...]], rows: int, num_ranks: int, padding: float) -> None:
    tensors = layer(shapes, rows)
    useful = sum(tensor.numel for tensor in tensors)
    plans = plan_hard(tensors, num_ranks=num_ranks)
    assert waste(plans) <= padding * useful
    assert waste(plans) - lower_bound(tensors, num_ranks=num_ranks) <= SEGMENT * MOST_HARD


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)), min_size=1, max_size=5), st.integers(1, 6))
def test_no_single_segment_beats_the_bound(pairs: list[tuple[int, int]], num_ranks: int) -> None:
    """All numbers in alignments of 64, so that alignment decides nothing; every partition is looked at elsewhere."""
    tensors = specs([(64 * numel, 64 * granularity) for numel, granularity in pairs])
    plan = plan_segment(tensors, num_ranks=num_ranks)
    assert lower_bound(tensors, num_ranks=num_ranks) <= plan.numel - plan.useful


def test_another_order_is_taken_only_where_it_saves_a_segments_worth() -> None:
    tensors = specs([(1_835_008, 229_376), (1_835_008, 14_336), (22_544_384, 65_536)])
    (plan,) = plan_hard(tensors, num_ranks=8)
    assert [tensor.name for tensor in plan.tensors] == ["t0", "t2", "t1"] and plan.padding == 0
    assert plan_segment(tensors, num_ranks=8).padding == pytest.approx(0.02)
    small = specs(
        [(numel // 128, granularity // 128) for numel, granularity in ((t.numel, t.granularity) for t in tensors)]
    )
    (plan,) = plan_hard(small, num_ranks=8)
    assert list(plan.tensors) == small and plan.padding == pytest.approx(0.02)


def test_the_other_rules() -> None:
    assert even_padding([(10, 3), (4,), ()], num_ranks=4) == 2 * 3 + 0 + 3
    assert lcm_padding([(10, 6), (10, 4), ()], num_ranks=2) == 2 * 60 - 101


# --- one budget for a model -------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(units, min_size=1, max_size=4), world_sizes, st.sampled_from([0.0, 0.01, 0.3]))
def test_units_share_one_budget(model: list[list[tuple[int, int]]], num_ranks: int, max_padding: float) -> None:
    tensors = [specs(pairs) for pairs in model]
    plans = plan_model(tensors, num_ranks=num_ranks, max_padding=max_padding)
    total = sum(tensor.numel for unit in tensors for tensor in unit)
    spent = floor = 0
    for unit, segments in zip(tensors, plans, strict=True):
        assert sorted(t.name for p in segments for t in p.tensors) == sorted(t.name for t in unit)
        finest = plan_segment([t._replace(granularity=1) for t in unit], num_ranks=num_ranks)
        if max_padding * finest.useful < COLLECTIVE * num_ranks:
            assert len(segments) == 1
            assert waste(segments) <= max(COLLECTIVE * num_ranks, finest.numel - finest.useful)
        else:
            spent, floor = spent + waste(segments), floor + finest.numel - finest.useful
    assert spent <= max(max_padding * total, floor)
    assert plans == plan_model(tensors, num_ranks=num_ranks, max_padding=max_padding)


def test_equal_units_have_equal_plans_under_their_own_names() -> None:
    first = layer(LLAMA_70B, 32)
    second = [tensor._replace(name=f"other.{tensor.name}") for tensor in first]
    one, two = plan_model([first, second], num_ranks=64)
    assert [plan.offsets for plan in one] == [plan.offsets for plan in two]
    assert [[f"other.{t.name}" for t in plan.tensors] for plan in one] == [[t.name for t in p.tensors] for p in two]
    assert plan_model([], num_ranks=2) == []


def test_what_one_unit_leaves_of_the_budget_another_may_use() -> None:
    easy = [TensorSpec("easy", 64 * 8 * 40_000, 64)]
    hard = [TensorSpec(f"hard{i}", 1000 * 32, 1000 * 32, itemsize=8) for i in range(9)]
    assert plan_unit(hard, num_ranks=8, max_padding=0.2)[0].cut_bytes > 0
    plans = plan_model([easy, hard], num_ranks=8, max_padding=0.2)
    assert [plan.cut_bytes for segments in plans for plan in segments] == [0, 0]


def test_a_second_segment_keeps_what_one_would_cut() -> None:
    """Rows of 2048 and 7168 in one buffer pad 81 % or are cut; apart they pad nothing."""
    tensors = layer(DEEPSEEK_DENSE, 1)
    assert plan_segment(tensors, num_ranks=512).padding > 0.8
    plans = plan_unit(tensors, num_ranks=512)
    assert len(plans) > 1 and not any(plan.cut_bytes for plan in plans)
    assert waste(plans) <= 0.01 * sum(tensor.numel for tensor in tensors)


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the tensors that buffers are tried with: nearly all the work there is, on any machine."""
    counts, place = Counter[str](), planner._place

    def counted(pieces: Sequence[Any], *rest: Any) -> Any:
        counts["tensors"] += len(pieces)
        return place(pieces, *rest)

    monkeypatch.setattr(planner, "_place", counted)
    return counts


@pytest.mark.parametrize("num_ranks", [1, 8, 1021, 1024, 4093, 10_240])
@pytest.mark.parametrize("rows", [1, 2, 32, None])
def test_all_of_deepseek_v3_is_little_work(num_ranks: int, rows: int | None, placed: Counter[str]) -> None:
    """7 places tried for each of 45,000 tensors are 0.2 seconds; ``tests/bench/planner.py`` has the seconds."""
    root = layer({"embed": (129280, 7168), "head": (129280, 7168), "norm": (7168,)}, 1)
    model = [*(layer(DEEPSEEK_DENSE if i < 3 else DEEPSEEK_MOE, rows) for i in range(61)), root]
    plans = plan_model(model, num_ranks=num_ranks)
    useful = sum(plan.useful for segments in plans for plan in segments)
    assert sum(map(waste, plans)) <= 0.01 * useful
    assert placed["tensors"] <= 8 * sum(map(len, model))


def test_equal_layers_are_planned_once_and_share_their_tensors(placed: Counter[str]) -> None:
    first = layer(LLAMA_70B, 32)
    plan_model([first], num_ranks=64)
    once = placed["tensors"]
    layers = [[tensor._replace(name=f"{i}.{tensor.name}") for tensor in first] for i in range(80)]
    plans = plan_model(layers, num_ranks=64)
    assert placed["tensors"] == 2 * once > 0
    given = {id(tensor) for tensors in layers for tensor in tensors}
    assert all(id(tensor) in given for segments in plans for plan in segments for tensor in plan.tensors)


# --- the plans of a sharded module ------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A head that is the embedding, two equal layers, a scalar and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))
        self.head = nn.Linear(24, 30, bias=False)
        self.head.weight = self.embed.weight
        self.scale, self.none = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(0, 3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _sharded() -> nn.Module:
    model = Tied()
    for module in (model.embed, *model.layers, model.head, model):
        fully_shard(module, block_of=lambda name, param: param.shape if param.ndim == 2 and param.numel() else ())
    return model


def _previewed_and_real() -> list[list[tuple[str, list[str]]]]:
    preview_of = preview(_sharded(), dist.get_world_size())
    model = _sharded()
    model(torch.zeros(2, 3, dtype=torch.long))
    real = [
        (name, [s.plan for s in m._vescale_state.unit.segments]) for name, m in model.named_modules() if state_of(m)
    ]
    return [[(name, [plan.digest() for plan in plans]) for name, plans in units] for units in (preview_of, real)]


def test_a_preview_is_the_plan_of_the_run_and_the_same_on_every_rank(pool: Any) -> None:
    results = pool(3).run(_previewed_and_real)
    expected = [(name, [plan.digest() for plan in plans]) for name, plans in preview(_sharded(), 3)]
    assert all(units == expected for result in results for units in result)


@pytest.mark.parametrize("num_ranks", [1, 2, 4093])
def test_tied_parameters_have_one_slot_and_those_of_no_dim_and_no_element_have_one_too(num_ranks: int) -> None:
    plans = dict(preview(_sharded(), num_ranks))
    names = [tensor.name for segments in plans.values() for plan in segments for tensor in plan.tensors]
    assert sorted(names) == sorted(name for name, _ in Tied().named_parameters())
    assert plans["head"] == plans["embed"] == ()
    (root,) = plans[""]
    assert {t.name: (t.numel, t.shape) for t in root.tensors} == {
        "embed.weight": (720, (30, 24)),
        "scale": (1, ()),
        "none": (0, (0, 3)),
    }


def test_unequal_capacities_are_previewed_and_not_yet_sharded() -> None:
    plans = dict(preview(_sharded(), 3, capacity=(1, 1, 2)))
    assert all(plan.capacity == (1, 1, 2) for segments in plans.values() for plan in segments)
    with pytest.raises(NotImplementedError, match="capacity: shards of unequal size"):
        fully_shard(Tied(), capacity=(1, 1, 2))
    with pytest.raises(ValueError, match="capacity: rank 1"):
        fully_shard(Tied(), capacity=(1, 0, 2))
    with pytest.raises(NotImplementedError, match="equal shards"):
        Layout(plans[""][0], [(30, 24), (), (0, 3)], None)
    fully_shard(Tied(), capacity=(3, 3, 3))
