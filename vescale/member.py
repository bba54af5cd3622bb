"""Member and Segment: what a unit is made of, and where a parameter finds the unit that holds it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from vescale.block import Block, Lattice
from vescale.dbuffer import DBuffer
from vescale.planner import SegmentPlan, TensorSpec

HOME = "_vescale_home"  # attribute of a sharded parameter: its Home
PENDING = "_vescale_pending"  # attribute of a whole parameter that a sharded one will replace


@dataclass(eq=False)
class Member:
    """One parameter: its name, every module attribute that is it (several when tied), and its block."""

    name: str
    param: nn.Parameter
    homes: list[tuple[nn.Module, str]]
    block: Block = Block(())


Version = tuple[int, ...]  # version counters: two equal ones mean that nothing was written between


@dataclass(eq=False)
class Segment:
    """One buffer of a unit: parameters of one dtype and trainability, with one plan."""

    plan: SegmentPlan
    members: list[Member]
    master: DBuffer
    trainable: bool
    sharded: list[nn.Parameter] = field(default_factory=list)
    unsharded: list[nn.Parameter] = field(default_factory=list)
    full: DBuffer | None = None
    grad_full: DBuffer | None = None
    grad: DBuffer | None = None
    gathered: Version | None = None  # of the masters that `full` holds; None while its storage is freed
    part: Part | None = None  # between forward and backward, of an int reshard
    partial: torch.Tensor | None = None  # (S,) reduced over the shards, not yet over the replicas
    reduced: torch.Tensor | None = None  # (S,) reduced over all, not yet the gradient; not beyond a backward

    def version(self) -> Version:
        """Counts writes to the masters: to the shard, by operators on sharded parameters, to their runs, by optimizers.

        Each count rises on every rank, also where a run is empty, so that all ranks gather or none does.
        """
        runs = (param._local_tensor._version for param in self.sharded)  # type: ignore[attr-defined]
        shard, steps = self.master.local._version, optimizer_steps()[0]
        return (shard, steps, *(param._version for param in self.sharded), *runs)


@functools.cache
def optimizer_steps() -> list[int]:
    """The number of steps of all torch optimizers of this process since this was first asked.

    Fused ones write without raising a version counter.
    """
    count = [0]

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        count[0] += 1

    register_optimizer_step_post_hook(stepped)
    return count


class Home(NamedTuple):
    """Where a sharded parameter lies."""

    unit: Any  # the Unit
    segment: Segment
    at: int  # index in the segment


def home_of(param: torch.Tensor) -> Home | None:
    """Returns where a parameter lies; None when no unit holds it."""
    return param.__dict__.get(HOME)


class Part(NamedTuple):
    """A rank's share of the gathered buffer among a few neighbours."""

    version: Version | None  # of the masters that were gathered
    local: torch.Tensor  # (m * S / n,)


def member_specs(members: Sequence[Member]) -> list[TensorSpec]:
    """Returns a unit's parameters as the planner sees them.

    Parameters of one group lie next to each other, so that an optimizer step is one run per group.
    """
    groups = list(dict.fromkeys(member.block.group for member in members))
    ordered = sorted(members, key=lambda member: groups.index(member.block.group))
    return [
        TensorSpec(
            name=member.name,
            numel=member.param.numel(),
            granularity=Lattice(tuple(member.param.shape), member.block.shape).granularity,
            finest=member.block.finest,
            kind=(str(member.param.dtype), member.param.requires_grad),
            itemsize=member.param.element_size(),
            shape=tuple(member.param.shape),
            block=tuple(member.block.shape),
        )
        for member in ordered
    ]


def own_attributes(param: torch.Tensor) -> dict[str, Any]:
    """What a user attached to a parameter; both sides of it carry that."""
    ours = (HOME, PENDING, "grad_slot", "grad_slot_written")
    return {name: value for name, value in param.__dict__.items() if name not in ours}


def put(module: nn.Module, attribute: str, param: nn.Parameter | None) -> None:
    """Sets a parameter of a module, past torch's own ``__setattr__``, which costs more than all of a swap."""
    if param is None or type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[attribute] = param
    else:  # an nn.LSTM keeps a second list of its weights, as FSDP2 knows too
        setattr(module, attribute, param)
