"""Optimizer step: what the step costs a rank, and what other ways to give rules whole blocks would cost.

======================  ==============================  ==========================  =========================
way                     travels                         is computed                 held beside
======================  ==============================  ==========================  =========================
cut blocks to an owner  parts of cut blocks, and back   each block once, balanced   two buckets under way
no block cut            nothing                         each once, where it lies    padding
gather every block      every block to everybody        all blocks on every rank    a matrix and its products
======================  ==============================  ==========================  =========================

The first is what ``vescale.Optimizer`` does, the last what ``full_tensor()`` in the step of FSDP2 does.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from vescale import memory
from vescale.blueprint import Blueprint, state_by_kind
from vescale.machine import Machine
from vescale.owners import Load


class OptimizerStep:
    """The step of the rank that holds the most.

    Args:
        blueprint: Of the ranks that share a copy of the model.
        machine: That they run on.
    """

    def __init__(self, blueprint: Blueprint, machine: Machine) -> None:
        self.blueprint, self.machine = blueprint, machine

    @cached_property
    def state(self) -> dict[str, int]:
        """Bytes of optimizer state of that rank by kind."""
        return state_by_kind(self.blueprint.runs(self.blueprint.worst_rank))

    @property
    def seconds(self) -> float:
        """That the busiest rank computes."""
        load = self.blueprint.load
        blocks = 0.0 if load is None else max(load.flops)
        return self.machine.compute_seconds(blocks) + self.elementwise_seconds

    @property
    def elementwise_seconds(self) -> float:
        """To read and write parameters, gradients and state once."""
        masters = sum(unit.grad_bytes for unit in self.blueprint.units)  # of those that are trained
        return (3 * masters + 2 * sum(self.state.values())) / self.machine.memory_bandwidth

    def figures(self) -> dict[str, Any]:
        """Returns the section of the plan; without ways where no rule works on whole blocks."""
        kept, cut = self.blueprint.blocks
        load, sent = self.blueprint.load, self.blueprint.exchanged
        found: dict[str, Any] = {
            "blocks_kept": kept,
            "blocks_cut": cut,
            "elementwise_seconds": self.elementwise_seconds,
        }
        if load is None or not load.mean:
            return found
        return found | {
            "work": sum(load.flops),
            "balance": max(load.flops) / load.mean,
            "largest_block": load.largest / load.mean,
            "bytes_moved": int(sent.sum()),
            "bytes_moved_worst_rank": int(sent.sum(axis=1).max()),
            "ways": [self._to_owners(load), self._uncut(), self._gathered()],
        }

    def _way(self, name: str, *, sent: float, network: float, work: float, memory_bytes: float, note: str) -> dict:
        compute = self.machine.compute_seconds(work)
        return {
            "way": name,
            "bytes_per_rank": sent,
            "network_seconds": network,
            "flops_per_rank": work,
            "compute_seconds": compute,
            "seconds": network + compute,
            "extra_bytes": memory_bytes,
            "note": note,
        }

    def _to_owners(self, load: Load) -> dict[str, Any]:
        sent, ranks = self.blueprint.exchanged, self.blueprint.num_ranks
        network = sum(self.machine.seconds("all_to_all", int(way.max()), ranks) for way in sent.T)
        steps = self.blueprint.steps(self.blueprint.worst_rank).values()
        return self._way(
            "cut blocks to an owner",
            sent=int(sent.sum(axis=1).max()),
            network=network,
            work=max(load.flops),
            memory_bytes=max(map(memory.step_bytes, steps)),
            note="what vescale does",
        )

    def _uncut(self) -> dict[str, Any]:
        """Every block on one rank, at the price of padding; equal layers put equal blocks on the same ranks."""
        shard, work = self.blueprint.without_cuts()
        now = sum(unit.shard for unit in self.blueprint.units)
        held = sum(unit.master_bytes + unit.grad_bytes for unit in self.blueprint.units)
        per_element = (held + sum(self.state.values())) / now
        padding = shard * self.blueprint.num_ranks / self.blueprint.numel - 1
        return self._way(
            "no block cut",
            sent=0,
            network=0.0,
            work=float(work.max()),
            memory_bytes=max((shard - now) * per_element, 0.0),
            note=f"{padding:.1%} padding, in every collective too",
        )

    def _gathered(self) -> dict[str, Any]:
        """Everybody gathers every matrix and computes all of them."""
        nbytes, ranks = self.blueprint.block_bytes, self.blueprint.num_ranks
        return self._way(
            "gather every block",
            sent=nbytes * (1 - 1 / ranks),
            network=self.machine.seconds("all_gather", nbytes, ranks),
            work=self.blueprint.work,
            memory_bytes=self.blueprint.largest_numel * memory.WORKSPACE,
            note="FSDP2 with full_tensor() in the step",
        )
