"""Lattices against plain enumeration: every element is asked for its block, every run for the blocks that it holds."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale.block import Block, Cut, Lattice


def block_of_elements(shape: tuple[int, ...], block: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The block of each element, in row-major order."""
    if len(block) == len(shape) and shape:
        return [tuple(i // b for i, b in zip(index, block, strict=True)) for index in product(*map(range, shape))]
    return [(i // (block[0] if block else 1),) for i in range(math.prod(shape))]


def shortest_runs(owners: list[tuple[int, ...]]) -> list[tuple[int, int]]:
    """Cuts the elements wherever no block lies on both sides."""
    last = {owner: i for i, owner in enumerate(owners)}
    runs, start, reach = [], 0, -1
    for i, owner in enumerate(owners):
        reach = max(reach, last[owner])
        if i == reach:
            runs.append((start, i + 1))
            start = i + 1
    return runs


@st.composite
def lattices(draw: st.DrawFn) -> Lattice:
    """Any tensor of up to three dims with a legal box, a run of consecutive elements, or no block at all."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    if not shape or draw(st.booleans()):
        return Lattice(shape, draw(st.sampled_from([(), (1,), (2,), (5,), (7,), (40,)])))
    block = [draw(st.integers(1, 7)) for _ in shape]
    clipped = [min(want, max(size, 1)) for size, want in zip(shape, block, strict=True)]
    axis = next((i for i, want in enumerate(clipped) if want > 1), 0)
    if math.prod(shape[:axis]) > 1:  # granules must not straddle the dims before this one
        block[axis] = draw(st.sampled_from([want for want in range(2, 8) if shape[axis] % min(want, shape[axis]) == 0]))
    return Lattice(shape, tuple(block))


@settings(max_examples=250, deadline=None)
@given(lattices())
def test_granules_are_the_shortest_runs_of_whole_blocks(lattice: Lattice) -> None:
    owners = block_of_elements(lattice.shape, lattice.block)
    granules = [lattice.granule(i) for i in range(lattice.num_granules)]
    finest = set(shortest_runs(owners))
    # Of equal length but the last: where blocks end with the tensor, runs of fewer elements than a granule may do.
    assert [start for start, _ in granules] == list(range(0, len(owners), lattice.granularity))
    assert [stop for _, stop in granules] == [*[start for start, _ in granules][1:], *[len(owners)][: len(granules)]]
    assert {start for start, _ in granules} <= {start for start, _ in finest}
    if lattice.num_granules > 1:
        assert granules[0] in finest
    assert lattice.num_blocks == len(set(owners))


@settings(max_examples=250, deadline=None)
@given(lattices(), st.data())
def test_a_cut_names_granules_inside_a_slice_and_granules_its_ends_cut(lattice: Lattice, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, lattice.numel))
    stop = data.draw(st.integers(start, lattice.numel))
    cut = lattice.cut(start, stop)
    granules = [lattice.granule(i) for i in range(lattice.num_granules)]
    assert list(cut.whole) == [i for i, (low, high) in enumerate(granules) if start <= low and high <= stop]
    touched = [i for i, (low, high) in enumerate(granules) if low < stop and start < high and start < stop]
    assert list(cut.parts) == [i for i in touched if i not in cut.whole]
    assert len(cut.parts) <= 2


@settings(max_examples=100, deadline=None)
@given(lattices())
def test_the_shape_of_a_block_is_that_of_its_window(lattice: Lattice) -> None:
    granules = range(lattice.num_granules if lattice.block else 0)
    windows = [window for i in granules for window in lattice.windows(i)]
    for i, window in enumerate(windows):
        sizes = tuple(part.stop - part.start for part in window)
        assert lattice.block_at(i) == (1,) * (len(lattice.block) - len(sizes)) + sizes


@pytest.mark.parametrize(
    ("shape", "block", "granularity", "granules", "per_granule"),
    [
        ((5, 7), (2, 3), 14, 3, 3),  # rows of blocks, the last of one row
        ((8, 6), (8, 6), 48, 1, 1),  # a whole matrix
        ((4, 8, 6), (1, 8, 6), 48, 4, 1),  # a stack of experts, one matrix each
        ((4, 8, 6), (1, 4, 6), 24, 8, 1),  # half an expert
        ((4, 8, 6), (2, 8, 6), 96, 2, 1),  # experts in pairs
        ((3, 8, 6), (2, 4, 3), 96, 2, 4),  # blocks that span experts lie in a granule together
        ((4, 6), (1, 3), 3, 8, 1),  # parts of rows
        ((4, 6), (1, 1), 1, 24, 1),
        ((10, 100), (256,), 256, 4, 1),  # consecutive elements, whatever the rows
        ((1000,), (256,), 256, 4, 1),
        ((1, 300), (128, 128), 128, 3, 1),  # a single row: nothing before it to straddle
        ((3, 4), (128, 128), 12, 1, 1),  # a block larger than the tensor ends with it
        ((3, 4), (100,), 12, 1, 1),
        ((3, 4), (), 1, 12, 1),  # no blocks: every element for itself
        ((), (), 1, 1, 1),
        ((), (256,), 1, 1, 1),
        ((0,), (0,), 1, 0, 1),
        ((0, 4), (2, 4), 4, 0, 1),
        ((3, 0), (3, 0), 1, 0, 0),
        ((2, 3, 0), (1, 2, 5), 1, 0, 0),
    ],
)
def test_worked_lattices(
    shape: tuple[int, ...], block: tuple[int, ...], granularity: int, granules: int, per_granule: int
) -> None:
    lattice = Lattice(shape, block)
    assert (lattice.granularity, lattice.num_granules, lattice.blocks_per_granule) == (
        granularity,
        granules,
        per_granule,
    )
    assert lattice.num_blocks == granules * per_granule
    assert lattice.cut(0, lattice.numel) == Cut(range(granules), ())


def test_the_lattice_drawn_in_the_module_is_the_real_one() -> None:
    lattice = Lattice((5, 7), (2, 3))
    assert [lattice.granule(i) for i in range(3)] == [(0, 14), (14, 28), (28, 35)]
    assert lattice.num_blocks == 9
    assert lattice.cut(10, 28) == Cut(range(1, 2), (0,))


def test_a_slice_inside_one_granule_cuts_it_once() -> None:
    assert Lattice((4, 8), (2, 8)).cut(3, 9) == Cut(range(1, 1), (0,))


def test_a_block_that_would_straddle_experts_names_the_divisor_to_take() -> None:
    with pytest.raises(ValueError, match=r"128 does not divide dim 1.*take 120;.*\(32, 2880, 64\)"):
        Lattice((32, 2880, 64), (1, 128, 64))
    assert Lattice((32, 2880, 64), (1, 120, 64)).num_granules == 32 * 24
    assert Lattice((2880, 64), (128, 64)).num_granules == 23  # nothing before it: the last granule is short


@pytest.mark.parametrize(
    ("shape", "block", "message"),
    [
        ((4, 4, 4), (2, 2), "one size per dim"),
        ((4, 4), (0, 4), "at least one element"),
        ((4, 4), (4, -1), "at least one element"),
        ((4, 4), (0,), "at least one element"),
        ((-1, 4), (2, 2), "not negative"),
    ],
)
def test_impossible_blocks_are_refused(shape: tuple[int, ...], block: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lattice(shape, block)


def test_granules_and_slices_outside_the_tensor_are_refused() -> None:
    lattice = Lattice((5, 7), (2, 7))
    for i in (-1, 3):
        with pytest.raises(ValueError, match=r"granule in \[0, 3\)"):
            lattice.granule(i)
    for start, stop in ((-1, 4), (5, 4), (0, 36)):
        with pytest.raises(ValueError, match=r"slice of \[0, 35\)"):
            lattice.cut(start, stop)


def test_a_block_is_a_shape_that_may_also_be_cut_anywhere_and_belongs_to_no_group() -> None:
    assert Block((4, 4)) == ((4, 4), 1, "")
