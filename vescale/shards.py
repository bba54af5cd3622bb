"""Where each rank's part of a buffer begins, and which granules of a tensor that cuts.

Shards are equal, or in proportion to what each rank can hold. ``Ranks.of(3, (1, 2, Fraction(1, 2)))`` has capacities of
2, 4 and 1, the least whole numbers of that ratio; with shards of 192 elements for each unit of capacity::

    element   0        384                 1152  1344
    rank      <-- 0 --><------- 1 --------><- 2 ->

Nothing loops over equal ranks: 10,240 of them cost as much as two.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, chain, pairwise


@dataclass(frozen=True)
class Ranks:
    """Who shares a buffer, and how much of it each holds. A shard's ``size`` is that of a unit of capacity."""

    count: int
    capacity: tuple[int, ...] = ()  # of each rank, without a common divisor; empty where all are equal

    @classmethod
    def of(cls, num_ranks: int, capacity: Sequence[int | Fraction] | None = None) -> Ranks:
        """Returns the ranks whose shards are in the ratio of ``capacity``; equal ones where it is None.

        Raises:
            ValueError: If there is not one positive integer or fraction for each rank.
        """
        if num_ranks < 1:
            raise ValueError(f"num_ranks: expected at least 1, got {num_ranks}")
        if capacity is None:
            return cls(num_ranks)
        wrong = (
            [] if len(capacity) == num_ranks else [f"expected one for each of {num_ranks} ranks, got {len(capacity)}"]
        )
        wrong += [
            f"rank {rank}: expected a positive integer or Fraction, got {share!r}"
            for rank, share in enumerate(capacity)
            if not isinstance(share, int | Fraction) or isinstance(share, bool) or share <= 0
        ]
        if wrong:
            raise ValueError("capacity: " + "; ".join(wrong[:8]))
        denominator = math.lcm(*(share.denominator for share in capacity))
        whole = [int(share * denominator) for share in capacity]
        divisor = math.gcd(*whole)
        return cls(num_ranks, tuple(share // divisor for share in whole) if len(set(whole)) > 1 else ())

    @cached_property
    def total(self) -> int:
        """Units of capacity of all ranks."""
        return sum(self.capacity) if self.capacity else self.count

    @cached_property
    def kinds(self) -> Counter[int]:
        """How many ranks have each capacity."""
        return Counter(self.capacity) if self.capacity else Counter({1: self.count})

    @cached_property
    def largest(self) -> int:
        """The largest capacity of a rank."""
        return max(self.kinds)

    @cached_property
    def starts(self) -> Sequence[int]:
        """Units of capacity before each rank, and of all."""
        return tuple(accumulate(self.capacity, initial=0)) if self.capacity else range(self.count + 1)

    @cached_property
    def runs(self) -> Sequence[int]:
        """The first rank of each run of neighbours of one capacity, and the number of ranks."""
        capacity = self.capacity
        firsts = (rank for rank in range(1, self.count) if capacity and capacity[rank] != capacity[rank - 1])
        return (0, *firsts, self.count)

    def run_end(self, rank: int) -> int:
        """Returns the first rank behind ``rank`` and those of its capacity that follow it."""
        return self.runs[bisect_right(self.runs, rank)]

    def edges(self, size: int, start: int, stop: int) -> list[range]:
        """Returns the offsets between ``start`` and ``stop``, without these, where a rank begins: a range for a run."""
        if not self.capacity:
            inside = range((start // size + 1) * size, stop, size)
            return [inside] if inside else []
        starts, runs = self.starts, self.runs
        low, high = bisect_right(starts, start // size), bisect_left(starts, -(-stop // size))
        found = []
        for run in range(bisect_right(runs, low) - 1, bisect_left(runs, high) if low < high else 0):
            first, last = max(low, runs[run]), min(high, runs[run + 1]) - 1
            found.append(range(starts[first] * size, starts[last] * size + 1, self.capacity[first] * size))
        return found

    def at(self, size: int, offset: int) -> int:
        """Returns the rank that holds an offset of the buffer, which may be its end."""
        return bisect_right(self.starts, offset // size) - 1 if self.capacity else offset // size

    def least(self, granules: int, step: int) -> int:
        """Returns the least size of which so many granules of ``step`` elements each have a place in one rank."""
        if not self.capacity:
            return -(-granules // self.count) * step

        def held(size: int) -> int:
            return sum(count * (share * size // step) for share, count in self.kinds.items())

        low = granules * step // self.total
        return low + bisect_left(range(low, granules * step + 1), granules, key=held)

    def divisor(self, step: int) -> int:
        """Returns what divides every size of which some rank's shard is a multiple of ``step``."""
        return step // math.gcd(step, math.lcm(*self.kinds)) if self.capacity else step


@dataclass(frozen=True)
class Boundary:
    """The granules of one tensor that rank edges cut: ``len`` counts them, iteration yields their indices, ascending.

    Counts and elements are closed forms: a tensor may span thousands of ranks.
    """

    offset: int  # of the tensor, in elements of the buffer
    numel: int
    granularity: int
    shard_size: int  # elements, for each unit of capacity
    ranks: Ranks | None = None  # where they are not equal

    @cached_property
    def edges(self) -> list[range]:
        """Elements of the tensor, without its first, where a rank begins: a range for each run of equal shards."""
        if self.ranks is None:
            inside = range(self.shard_size - self.offset % self.shard_size, self.numel, self.shard_size)
            return [inside] if inside else []
        runs = self.ranks.edges(self.shard_size, self.offset, self.offset + self.numel)
        return [range(run.start - self.offset, run.stop - self.offset, run.step) for run in runs]

    def __len__(self) -> int:
        count = sum(_cut(run, self.granularity) for run in self.edges)
        # A granule that the last edge of a run and the first of the next cut was counted twice.
        for before, after in pairwise(self.edges):
            granule, inside = divmod(before[-1], self.granularity)
            count -= inside > 0 and after[0] // self.granularity == granule
        return count

    def __iter__(self) -> Iterator[int]:
        previous = -1
        for granule in chain.from_iterable(_granules(run, self.granularity) for run in self.edges):
            if granule != previous:
                yield granule
                previous = granule

    @property
    def elements(self) -> int:
        """Elements of all cut granules together; the tensor's last granule may be short."""
        last = (self.numel - 1) // self.granularity * self.granularity  # where the last granule begins
        missing = last + self.granularity - self.numel if self.edges and self.edges[-1][-1] > last else 0
        return len(self) * self.granularity - missing


def _granules(edges: range, granularity: int) -> Iterable[int]:
    """Which granules equally spaced edges cut, ascending; as ``_cut`` counts them."""
    if edges.step >= granularity:
        return (edge // granularity for edge in edges if edge % granularity)
    return range(edges[0] // granularity, -(-edges[-1] // granularity))


def _cut(edges: range, granularity: int) -> int:
    """How many granules equally spaced edges cut."""
    if edges.step >= granularity:  # every edge has a granule of its own
        return len(edges) - _multiples(edges, granularity)
    # Edges are closer than granules are long: all granules from the first edge to the last are cut, and the last one's
    # unless the edge is where it begins.
    return -(-edges[-1] // granularity) - edges[0] // granularity


def _multiples(edges: range, granularity: int) -> int:
    """How many of ``edges`` are multiples of ``granularity``: solves ``first + k * stride = 0`` modulo it."""
    divisor = math.gcd(edges.step, granularity)
    if edges[0] % divisor:
        return 0
    period = granularity // divisor
    first = -(edges[0] // divisor) * pow(edges.step // divisor, -1, period) % period
    return len(range(first, len(edges), period))
