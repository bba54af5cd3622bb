"""commit: gives every parameter to a unit and plans the units, when the parameters are first needed.

Until then ``fully_shard`` has only declared units. Now the outermost sharded module is known, so names are complete,
and a parameter that several units share goes to their lowest common unit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale import collectives
from vescale.anatomy import Anatomy
from vescale.block import Block, Lattice
from vescale.member import Member, member_specs
from vescale.planner import SegmentPlan
from vescale.rule import unwrapped
from vescale.segments import Capacity, plan_model
from vescale.shard_state import ShardState, Tree, state_of
from vescale.state_hooks import watch_states
from vescale.unit import Unit


def states_below(module: nn.Module) -> list[ShardState]:
    """Returns the states of a module and of the sharded modules inside, in definition order, each once."""
    return list(dict.fromkeys(state for inner in module.modules() if (state := state_of(inner)) is not None))


def _states_of(root: ShardState) -> list[ShardState]:
    return list(dict.fromkeys(state for module in root.modules for state in states_below(module)))


def commit(state: ShardState) -> None:
    """Plans every unit of the outermost module, and puts sharded parameters into the modules; once.

    The plans are compared over the ranks, and the units joined into a tree.
    """
    if not state.committed:
        with torch.inference_mode(False):  # the first forward may be an inference; the masters outlive it
            _commit(state.outermost)


def _commit(root: ShardState) -> None:
    states = _states_of(root)
    fresh = [state for state in states if not state.committed]
    mesh = _default_mesh() if any(state.mesh is None for state in fresh) else None
    members = _assign(root)
    for state in fresh:
        state.mesh = state.mesh or mesh
    meshes = Meshes()
    plans = _plan([(state, members[id(state)], meshes.of(state).size(-1)) for state in fresh])
    for state, segments in zip(fresh, plans, strict=True):
        state.unit = Unit(
            members[id(state)],
            segments,
            meshes.of(state),
            mp_policy=state.mp_policy,
            controls=state.controls,
            offload_policy=state.offload_policy,
            zero=state.zero,
            part_group=meshes.part_group(state),
        )
        watch_states(state.unit)
        state.unit.driver = state
        state.committed = True
    tree = Tree(states, survey(root))
    for state in states:
        state.tree = tree
    for used in {id(state.unit.mesh): state.unit.mesh for state in fresh}.values():
        # Only of the units on this mesh: ranks with other experts have other plans for them.
        units = [state.unit for state in fresh if state.unit.mesh is used]
        digests = "".join(segment.plan.digest() for unit in units for segment in unit.segments)
        for group in used.get_all_groups():
            collectives.same_on_every_rank(digests, what="the plan of fully_shard", group=group)


class Meshes:
    """The meshes of one commit that are derived from those of the calls; equal ones are made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], DeviceMesh] = {}

    def of(self, state: ShardState) -> DeviceMesh:
        """The mesh of a unit: of its call, except in stage 0, where every rank is a replica of one shard."""
        mesh = state.mesh
        assert mesh is not None
        return self._folded(mesh, 1) if state.zero == 0 else mesh

    def part_group(self, state: ShardState) -> dist.ProcessGroup | None:
        """Neighbouring ranks that share out the gathered parameters after forward, when a number of them was asked for.

        Raises:
            ValueError: Unless the number divides the ranks that share the parameters.
        """
        ranks, mesh = state.part_ranks, state.mesh
        assert mesh is not None
        if ranks is None or ranks == mesh.size(-1):
            return None
        if mesh.size(-1) % ranks:
            raise ValueError(
                f"fully_shard: reshard_after_forward={ranks} does not divide the {mesh.size(-1)} ranks of the mesh"
            )
        return self._folded(mesh, ranks).get_group(1)

    def _folded(self, mesh: DeviceMesh, ranks: int) -> DeviceMesh:
        """The ranks of ``mesh``, ``ranks`` neighbours to a row."""
        key = (id(mesh), ranks)
        if key not in self._made:
            names = ("dp_replicate", "dp_shard")
            self._made[key] = DeviceMesh(mesh.device_type, mesh.mesh.view(-1, ranks), mesh_dim_names=names)
        return self._made[key]


def survey(root: ShardState) -> Anatomy:
    """Returns the anatomy of a planned outermost module as it is now."""
    homes = [home for state in _states_of(root) for home in state.unit.named_homes()]
    return Anatomy(root.modules, homes)


def preview(
    module: nn.Module, num_ranks: int, *, capacity: Capacity = None, fewer: Mapping[nn.Module, int] | None = None
) -> list[tuple[str, tuple[SegmentPlan, ...]]]:
    """Returns the name and the plans of every unit as ``num_ranks`` ranks would have them, and changes nothing.

    Args:
        module: The outermost module that ``fully_shard`` was called on; its parameters may be on the meta device.
        num_ranks: Ranks to plan for; no process group is needed.
        capacity: What each rank can hold, in any unit; None: all the same.
        fewer: Number of ranks that share a module's unit, where it is not ``num_ranks``.

    Raises:
        ValueError: If the module is not sharded, or planned already.
    """
    root = state_of(module)
    if root is None or root.committed:
        raise ValueError("preview: expected a module that fully_shard was called on and whose parameters nobody took")
    members = _assign(root)
    names: dict[ShardState, str] = {}
    for name, inner in module.named_modules():
        if (state := state_of(inner)) is not None:
            names.setdefault(state, unwrapped(name))
    sharing = {state_of(inner): count for inner, count in (fewer or {}).items()}
    units = [(s, members[id(s)], sharing.get(s, num_ranks) if s.zero else 1) for s in names]
    return list(zip(names.values(), _plan(units, capacity), strict=True))


def _plan(
    units: Sequence[tuple[ShardState, Sequence[Member], int]], capacity: Capacity = None
) -> list[tuple[SegmentPlan, ...]]:
    """Plans units, each on its number of ranks; those of one number and one ``max_padding`` share their budget."""
    budgets: dict[tuple[int, float], list[int]] = defaultdict(list)
    for i, (state, _, num_ranks) in enumerate(units):
        budgets[num_ranks, state.max_padding].append(i)
    found: dict[int, tuple[SegmentPlan, ...]] = {}
    for (num_ranks, max_padding), some in budgets.items():
        specs, shares = [member_specs(units[i][1]) for i in some], capacity if num_ranks > 1 else None
        plans = plan_model(specs, num_ranks=num_ranks, max_padding=max_padding, capacity=shares)
        found.update(zip(some, plans, strict=True))
    return [found[i] for i in range(len(units))]


def _assign(root: ShardState) -> dict[int, list[Member]]:
    """Finds each parameter's unit: the nearest sharded module above it, or above all its uses when it is tied."""
    found: dict[int, tuple[Member, ShardState]] = {}
    seen: set[tuple[int, ShardState]] = set()  # a module may be a child of several: of each unit once

    def visit(module: nn.Module, state: ShardState, prefix: str) -> None:
        state = state_of(module) or state
        if (id(module), state) in seen or (state.committed and state is not root):
            return
        seen.add((id(module), state))
        for name, param in module._parameters.items():
            if param is None or any(param in s.ignored for s in _chain(state)):
                continue
            if id(param) in found:
                member, owner = found[id(param)]
                found[id(param)] = (member, _common(owner, state))
            else:
                member = Member(unwrapped(prefix + name), param, [])
                found[id(param)] = (member, state)
            if (module, name) not in member.homes:
                member.homes.append((module, name))
        for name, child in module._modules.items():
            if child is not None:
                visit(child, state, f"{prefix}{name}.")

    for index, module in enumerate(root.modules):
        visit(module, root, f"{index}." if len(root.modules) > 1 else "")
    result: dict[int, list[Member]] = defaultdict(list)
    for member, state in found.values():
        member.block = _block(state, member)
        result[id(state)].append(member)
    return result


def _chain(state: ShardState) -> list[ShardState]:
    return [state] if state.parent is None else [state, *_chain(state.parent)]


def _common(a: ShardState, b: ShardState) -> ShardState:
    """The lowest unit above both; the outermost module is above everything."""
    above = set(map(id, _chain(b)))
    return next(state for state in _chain(a) if id(state) in above)


def _block(state: ShardState, member: Member) -> Block:
    if state.block_of is None:
        return Block(())
    said = state.block_of(member.name, member.param)
    try:
        block = said if isinstance(said, Block) else Block(tuple(said))
        Lattice(tuple(member.param.shape), block.shape)  # refuses what does not fit
        if block.finest < 1:
            raise ValueError(f"finest must be >= 1, got {block.finest}")
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{member.name}: block_of returned {said!r}: {problem}") from None
    return block


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        raise ValueError(
            "fully_shard: no mesh given and no process group: call torch.distributed.init_process_group() first"
        )
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    return init_device_mesh(device.type, (dist.get_world_size(),))  # type: ignore[union-attr]
