"""Exchange: blocks that rank edges cut travel whole to one owner, and their directions back.

One table of moves serves both directions. A boundary granule [40, 120) of a buffer with shards of 64 and owner 0::

    rank 0 holds [40, 64)     send    1 -> 0 elements [64, 120) of the payload
    rank 1 holds [64, 120)    reply   0 -> 1 elements [64, 120) of the direction

Every move is contiguous at both ends: a slice of the sender's run, a slice of the granule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from vescale import collectives
from vescale.counting import Counters

Flat = tuple[int, torch.Tensor]  # where a run begins in its buffer, and its elements


class Crossing(NamedTuple):
    """One granule that rank edges cut.

    Which run, which of its parameters, which granule of that; elements ``[start, stop)`` of the run's buffer, the
    buffer's shard size, its owner.
    """

    run: int
    member: int
    granule: int
    start: int
    stop: int
    shard_size: int
    owner: int

    def part(self, rank: int) -> tuple[int, int]:
        """Elements of the granule that ``rank`` holds, in the buffer; empty where it holds none."""
        start = max(self.start, rank * self.shard_size)
        return start, max(start, min(self.stop, (rank + 1) * self.shard_size))

    def holders(self) -> range:
        """Ranks that hold a part."""
        return range(self.start // self.shard_size, (self.stop - 1) // self.shard_size + 1)


class Move(NamedTuple):
    """A part of a granule that goes between a holder and the owner: elements ``[start, stop)`` of the buffer."""

    crossing: int
    peer: int
    start: int
    stop: int


class Flight(NamedTuple):
    """An all-to-all under way; the send buffer must outlive the work."""

    received: torch.Tensor
    sent: torch.Tensor
    work: collectives.Handle | None

    def land(self) -> torch.Tensor:
        """Waits and returns what arrived."""
        if self.work is not None:
            self.work.wait()
        return self.received


class Exchange:
    """The all-to-all of one bucket, there and back: ``send``, ``arrived``, ``reply``, ``collect``, in this order.

    Args:
        crossings: Every cut granule of the bucket, the same list on every rank.
        rank: This rank's position in ``group``.
        num_ranks: Size of ``group``.
        group: The ranks that share the buffers.
        counters: Told what this rank sends.
    """

    outgoing: list[Move]  # parts that this rank holds of granules owned elsewhere, by peer, then by granule
    incoming: list[Move]  # parts that other ranks hold of granules owned here, by peer, then by granule

    def __init__(
        self,
        crossings: Sequence[Crossing],
        rank: int,
        num_ranks: int,
        group: dist.ProcessGroup,
        counters: Counters | None = None,
    ) -> None:
        self.crossings, self.rank, self.num_ranks, self.group = list(crossings), rank, num_ranks, group
        self.mine = [i for i, crossing in enumerate(crossings) if crossing.owner == rank]
        away = [Move(i, c.owner, *c.part(rank)) for i, c in enumerate(crossings) if c.owner != rank]
        here = [Move(i, peer, *crossings[i].part(peer)) for i in self.mine for peer in crossings[i].holders()]
        self.outgoing = sorted((move for move in away if move.stop > move.start), key=lambda move: move.peer)
        self.incoming = sorted((move for move in here if move.peer != rank), key=lambda move: move.peer)
        self.counters = counters or Counters()
        self._flight: Flight | None = None
        self._payloads: Sequence[Sequence[Flat]] = ()
        self._directions: dict[int, torch.Tensor] = {}

    def send(self, payloads: Sequence[Sequence[Flat]]) -> None:
        """Starts the payloads of cut blocks towards their owners.

        Args:
            payloads: Per run, per payload: where the run begins and its (n,) elements in the wire dtype.
        """
        self._payloads = payloads
        count = len(payloads[0])
        pieces = [
            _slice(payloads[self.crossings[move.crossing].run][k], move.start, move.stop)
            for move in self.outgoing
            for k in range(count)
        ]
        self._flight = self._all_to_all(pieces, self.outgoing, self.incoming, count)

    def arrived(self) -> Iterator[tuple[int, tuple[torch.Tensor, ...], torch.Tensor]]:
        """Waits, then yields each owned granule, as an index of ``crossings``, its payloads, (n,) each, and where its
        direction, (n,), goes.
        """
        granules = self._assemble(self._land())
        self._directions = {}
        for i in self.mine:
            flats = granules.pop(i)
            self._directions[i] = torch.empty_like(flats[0])
            yield i, tuple(flats), self._directions[i]

    def reply(self) -> None:
        """Starts the directions of owned blocks back to those who hold parts of them."""
        pieces = [
            _slice((self.crossings[move.crossing].start, self._directions[move.crossing]), move.start, move.stop)
            for move in self.incoming
        ]
        self._flight = self._all_to_all(pieces, self.incoming, self.outgoing, 1)
        self._payloads = ()

    def collect(self, directions: Sequence[Flat]) -> None:
        """Waits, then writes the directions of cut blocks into the runs.

        Args:
            directions: Per run: where it begins and its (n,) elements in the wire dtype.
        """
        received = self._land()
        to, sources = [], []
        for i in self.mine:
            crossing = self.crossings[i]
            own = crossing.part(self.rank)
            if own[1] > own[0]:
                to.append(_slice(directions[crossing.run], *own))
                sources.append(_slice((crossing.start, self._directions[i]), *own))
        for move, piece in zip(self.outgoing, received.split(_sizes(self.outgoing)), strict=True):
            to.append(_slice(directions[self.crossings[move.crossing].run], move.start, move.stop))
            sources.append(piece)
        copy_all(to, sources)
        self._directions = {}

    def _assemble(self, received: torch.Tensor) -> dict[int, list[torch.Tensor]]:
        """Puts the parts of each owned granule side by side, what arrived and what was here; one flat per payload."""
        count = len(self._payloads[0])
        sizes = {i: self.crossings[i].stop - self.crossings[i].start for i in self.mine}
        granules = {i: [received.new_empty(size) for _ in range(count)] for i, size in sizes.items()}
        to, sources = [], []
        for i in self.mine:
            crossing = self.crossings[i]
            own = crossing.part(self.rank)
            if own[1] > own[0]:
                to += [_slice((crossing.start, flat), *own) for flat in granules[i]]
                sources += [_slice(flat, *own) for flat in self._payloads[crossing.run]]
        for move in self.incoming:
            start = self.crossings[move.crossing].start
            to += [_slice((start, flat), move.start, move.stop) for flat in granules[move.crossing]]
        sources += received.split([size for size in _sizes(self.incoming) for _ in range(count)])
        copy_all(to, sources)
        return granules

    def _all_to_all(
        self, pieces: Sequence[torch.Tensor], out: Sequence[Move], back: Sequence[Move], count: int
    ) -> Flight:
        like = self._payloads[0][0][1]
        send = torch.cat(list(pieces)) if pieces else like.new_empty(0)
        send_splits, out_splits = (_splits(moves, self.num_ranks, count) for moves in (out, back))
        received = like.new_empty(sum(out_splits))
        self.counters.exchange_bytes += send.nbytes
        work = collectives.all_to_all(
            received, send, out_splits=out_splits, send_splits=send_splits, group=self.group, async_op=True
        )
        return Flight(received, send, work)

    def _land(self) -> torch.Tensor:
        assert self._flight is not None  # send() or reply() came first
        flight, self._flight = self._flight, None
        return flight.land()


def copy_all(to: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies each of ``sources`` into its place, in one launch where there are many."""
    if to:
        torch._foreach_copy_(to, sources)


def _sizes(moves: Sequence[Move]) -> list[int]:
    return [move.stop - move.start for move in moves]


def _slice(flat: Flat, start: int, stop: int) -> torch.Tensor:
    """Elements ``[start, stop)`` of the buffer, from a flat tensor that begins at ``flat[0]`` of it."""
    return flat[1][start - flat[0] : stop - flat[0]]


def _splits(moves: Sequence[Move], num_ranks: int, count: int) -> list[int]:
    splits = [0] * num_ranks
    for move in moves:
        splits[move.peer] += count * (move.stop - move.start)
    return splits
