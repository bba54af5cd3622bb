"""Sharing: where copies of the parameters exist, each copy's ranks compute some blocks, and all get every direction.

Two copies on two ranks each (HSDP), three matrices, none cut; without sharing each is computed twice in the world::

    copy 0   rank 0 [ a . b ]   rank 1 [ c ]         computes   a        c
    copy 1   rank 2 [ a . b ]   rank 3 [ c ]         computes   b        -
    shares   0 -> 2 direction of a      2 -> 0 direction of b      1 -> 3 direction of c

Ranks that hold the same shard swap what they have, so every move is a slice of a run at both ends. Directions are
rounded to the rule's ``wire_dtype`` before, as always: every copy applies the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from vescale import collectives
from vescale.counting import Counters
from vescale.exchange import copy_all
from vescale.owners import Key
from vescale.run import Run


class Part(NamedTuple):
    """Elements ``[start, stop)`` of run ``run`` of a bucket."""

    run: int
    start: int
    stop: int


class Sharing:
    """The all-to-all of one bucket between copies of a shard: ``start``, then ``finish``.

    Args:
        parts: For each copy, what of this rank's runs it computes.
        group: The ranks that hold the same shard, one of each copy.
        counters: Told what this rank sends.
    """

    def __init__(self, parts: Sequence[Sequence[Part]], group: dist.ProcessGroup, counters: Counters | None) -> None:
        self.parts, self.group, self.counters = parts, group, counters
        self.replica = group.rank()
        self._flight: tuple[torch.Tensor, torch.Tensor, collectives.Handle | None] | None = None

    @property
    def sizes(self) -> list[int]:
        """Elements of the directions that each copy computes."""
        return [sum(part.stop - part.start for part in parts) for parts in self.parts]

    def start(self, directions: Sequence[torch.Tensor]) -> None:
        """Sends what this copy computed to the others.

        Args:
            directions: Of each run, (n,) in the wire dtype.
        """
        sizes = self.sizes
        mine, others = sizes[self.replica], len(sizes) - 1
        send = torch.cat([directions[0].new_empty(0), *self._slices(directions, self.replica)]).repeat(others)
        sizes[self.replica] = 0
        received = send.new_empty(sum(sizes))
        send_splits = [0 if copy == self.replica else mine for copy in range(len(sizes))]
        if self.counters is not None:
            self.counters.exchange_bytes += send.nbytes
        work = collectives.all_to_all(
            received, send, out_splits=sizes, send_splits=send_splits, group=self.group, async_op=True
        )
        self._flight = received, send, work  # the send buffer must outlive the work

    def finish(self, directions: Sequence[torch.Tensor]) -> None:
        """Waits, and writes what the others computed into the runs."""
        assert self._flight is not None  # start() came first
        (received, _, work), self._flight = self._flight, None
        if work is not None:
            work.wait()
        others = [copy for copy in range(len(self.parts)) if copy != self.replica]
        to = [piece for copy in others for piece in self._slices(directions, copy)]
        copy_all(to, list(received.split([piece.numel() for piece in to])))

    def _slices(self, directions: Sequence[torch.Tensor], copy: int) -> list[torch.Tensor]:
        return [directions[part.run][part.start : part.stop] for part in self.parts[copy]]


def sharing_of(runs: Sequence[Run], replicas: Mapping[Key, int], counters: Counters | None) -> Sharing | None:
    """Returns how runs that travel together are shared between the copies; None where every copy computes them."""
    group = runs[0].replicas
    if group is None or not replicas or not hasattr(runs[0].rule, "block"):
        return None
    parts: list[list[Part]] = [[] for _ in range(group.size())]
    for at, run in enumerate(runs):
        for index, (name, offset) in enumerate(zip(run.names, run.offsets, strict=True)):
            lattice = run.lattice(index)
            for granule in range(lattice.num_granules):
                start, stop = (
                    min(max(offset + edge, run.start), run.stop) - run.start for edge in lattice.granule(granule)
                )
                if stop > start:
                    _append(parts[replicas[name, granule]], Part(at, start, stop))
    return Sharing(parts, group, counters)


def _append(parts: list[Part], part: Part) -> None:
    """Adds a part, to the one before it where that ends where it begins."""
    if parts and (parts[-1].run, parts[-1].stop) == (part.run, part.start):
        parts[-1] = Part(part.run, parts[-1].start, part.stop)
    else:
        parts.append(part)
