"""twin: a unit of a copied model, for ``deepcopy``: the same plan and mesh, shards of its own, no gradients.

Two passes, since a deepcopy learns parameters before modules: ``copied`` makes the parameters, and ``move_in`` points
the unit at the modules that hold them.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import nn

from vescale.counting import Counters
from vescale.member import HOME, Home, Segment, own_attributes, put
from vescale.unit import Unit


def copied(unit: Unit, memo: dict[int, Any]) -> Unit:
    """Returns a unit of the same plan with a copy of the master shards and without gradients.

    Args:
        unit: Put back to its shards.
        memo: Of the deepcopy; learns the unit and each of its parameters.
    """
    unit.reshard()
    twin = memo[id(unit)] = copy.copy(unit)
    twin.controls, twin.hooks = copy.deepcopy(unit.controls, memo), copy.deepcopy(unit.hooks, memo)
    twin.hooks.unit = twin
    twin._gathers, twin._reduces, twin.counters, twin.after_reduce = [], [], Counters(), None
    twin.segments = [_copied_segment(twin, segment, memo) for segment in unit.segments]
    return twin


def _copied_segment(twin: Unit, old: Segment, memo: dict[int, Any]) -> Segment:
    master = old.master.sibling(old.master.placement, old.master.local.clone())
    segment = Segment(old.plan, [replace(member) for member in old.members], master, old.trainable)
    for index, (member, param) in enumerate(zip(segment.members, old.sharded, strict=True)):
        fresh = memo[id(param)] = nn.Parameter(master.tensor(index), requires_grad=param.requires_grad)
        fresh.__dict__.update(copy.deepcopy(own_attributes(param), memo) | {HOME: Home(twin, segment, index)})
        segment.sharded.append(fresh)
        member.param = fresh
    return segment


def move_in(unit: Unit, memo: dict[int, Any]) -> None:
    """Points a copied unit at the copied modules, and has them hold its parameters.

    A module that the deepcopy met before the unit holds copies that lie in no unit.
    """
    for segment in unit.segments:
        for member in segment.members:
            member.homes = [(memo[id(module)], attribute) for module, attribute in member.homes]
            for module, attribute in member.homes:
                put(module, attribute, member.param)
