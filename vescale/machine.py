"""Machine: what a node's devices compute and what travels between them, and how long a collective takes.

Times are those of a ring, which is what NCCL's own model of all-gather and reduce-scatter is (NVIDIA/nccl,
src/graph/tuning.cc, ``ncclTopoTuneModel``)::

    seconds = start + steps inside a node * latency inside + steps between nodes * latency between
              + (m - 1) / m * bytes of the whole buffer / bandwidth          all-reduce: twice the steps and bytes

Each of a node's ``devices`` drives a ring of its own through its own network port, so the network moves ``devices *
bandwidth_between`` bytes/s for the node, and a ring that leaves the node runs at the lower of that and
``bandwidth_inside``: H100 nodes with eight 400 Gb/s ports at 400 GB/s. An all-to-all has no ring: what leaves the node
goes through each device's own port.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A node of equal devices and the network between nodes. Bandwidths are in one direction.

    Args:
        name: Of the profile.
        devices: Of a node.
        memory: Bytes of one device.
        flops: Dense bf16 peak of one device, in FLOP/s; 0 where nobody says.
        utilisation: Fraction of the peak that a step reaches; an assumption.
        memory_bandwidth: Bytes/s of one device's memory.
        bandwidth_inside: Bytes/s from one device to another of its node.
        bandwidth_between: Bytes/s of one device's share of the network.
        latency_inside: Seconds of a ring's step inside a node.
        latency_between: Seconds of a ring's step between nodes.
        latency_start: Seconds before a collective's first step.

    Raises:
        ValueError: If a number is out of range; all of them are named.
    """

    name: str
    devices: int
    memory: float
    flops: float
    utilisation: float
    memory_bandwidth: float
    bandwidth_inside: float
    bandwidth_between: float
    latency_inside: float
    latency_between: float
    latency_start: float

    def __post_init__(self) -> None:
        above = ("devices", "memory", "flops", "memory_bandwidth", "bandwidth_inside", "bandwidth_between")
        problems = [f"{name}: expected a number > 0, got {getattr(self, name)}" for name in above if self._low(name)]
        if not 0 < self.utilisation <= 1:
            problems.append(f"utilisation: expected a fraction in (0, 1], got {self.utilisation}")
        for name in ("latency_inside", "latency_between", "latency_start"):
            if not 0 <= getattr(self, name) < math.inf:
                problems.append(f"{name}: expected seconds >= 0, got {getattr(self, name)}")
        if problems:
            raise ValueError("; ".join(problems))

    def _low(self, name: str) -> bool:
        return not 0 < getattr(self, name) < math.inf

    def nodes(self, ranks: int, stride: int = 1) -> int:
        """Returns how many nodes hold a group of ``ranks``, every ``stride``-th of them."""
        return min(-(-ranks * stride // self.devices), ranks)

    def bandwidth(self, ranks: int, stride: int = 1) -> float:
        """Returns the bytes/s that pass each device of a ring over ``ranks``, every ``stride``-th of them.

        As many rings as ``stride`` run at once and share a node's ports.
        """
        if self.nodes(ranks, stride) == 1:
            return self.bandwidth_inside
        return min(self.bandwidth_inside, self.devices * self.bandwidth_between / min(stride, self.devices))

    def seconds(self, collective: str, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Returns the time of one collective.

        Args:
            collective: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
            nbytes: Of the whole buffer; of an all-to-all, what the busiest rank sends to others.
            ranks: Of the group.
            stride: Ranks from one of the group to the next, 1 for neighbours; the other ranks do the same at once.

        Raises:
            ValueError: For an unknown collective.
        """
        if collective == "all_to_all":
            return self._all_to_all(nbytes, ranks)
        nodes = self.nodes(ranks, stride)
        latency = (ranks - nodes) * self.latency_inside + (nodes - 1) * self.latency_between
        rounds = 2 if collective == "all_reduce" else 1
        wire = moved(collective, nbytes, ranks) / self.bandwidth(ranks, stride)
        return (self.latency_start + rounds * latency + wire) if ranks > 1 else 0.0

    def _all_to_all(self, nbytes: float, ranks: int) -> float:
        """One latency per peer that is sent to, all at once; what leaves the node goes through the device's port."""
        if ranks == 1 or not nbytes:
            return 0.0
        if self.nodes(ranks) == 1:
            return self.latency_start + self.latency_inside + nbytes / self.bandwidth_inside
        outside = (ranks - self.devices) / (ranks - 1)
        wire = max(nbytes * outside / self.bandwidth_between, nbytes * (1 - outside) / self.bandwidth_inside)
        return self.latency_start + self.latency_between + wire

    def compute_seconds(self, flops: float) -> float:
        """Returns the time of ``flops`` on one device at the assumed utilisation."""
        return flops / (self.flops * self.utilisation)


def moved(collective: str, nbytes: float, ranks: int) -> float:
    """Returns the bytes that pass each rank of a ring in one direction.

    ``(m - 1) / m`` of the whole buffer for an all-gather and for a reduce-scatter, both after each other for an
    all-reduce: 7e9 gradients in bf16 are 14 GB, and reducing them over many ranks moves 28 GB, 70 ms at 400 GB/s.

    Args:
        collective: "all_gather", "reduce_scatter" or "all_reduce".
        nbytes: Of the whole buffer.
        ranks: Of the group; ``math.inf`` for the limit of many.

    Raises:
        ValueError: For an unknown collective.
    """
    rounds = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
    if collective not in rounds:
        raise ValueError(f"collective: expected one of {', '.join(rounds)}, got {collective!r}")
    return rounds[collective] * nbytes * (1 - 1 / ranks)


def exposed(communication: float, compute: float, *, overlap: float) -> float:
    """Returns the fraction of a step that waits for the network.

    ``waiting / (compute + waiting)``, waiting being what is left of the communication after the share ``overlap`` of it
    ran behind compute, which it can only as long as there is compute. 70 ms beside 200 ms: 26 % with nothing
    overlapping, 0 with all of it.

    Args:
        communication: Seconds.
        compute: Seconds.
        overlap: Share of the communication that may run behind compute, in [0, 1].
    """
    waiting = communication - min(communication * overlap, compute)
    return waiting / (compute + waiting) if waiting else 0.0


def parse_bytes(text: str | float) -> int:
    """Returns ``80GB`` (10**9), ``80GiB`` (2**30) or a plain number as bytes.

    Raises:
        ValueError: If it is none of these, or below a MiB: a plain 80 is meant to be 80GB.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = _UNITS.get(match[2].upper()) if match else None
    try:
        value = float(match[1]) * unit if match and unit else 0.0
    except ValueError:
        value = 0.0
    if not 2**20 <= value < math.inf:
        raise ValueError(f"device_memory: expected a size such as 80GB or 80GiB, got {text!r}")
    return round(value)
