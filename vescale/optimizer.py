"""Optimizer: the one ``torch.optim.Optimizer``; it runs any rule over parameters that lie anywhere.

Two ranks, one Muon matrix cut by the edge between them and two that are not::

    rank 0   [ w0 ........ ][ w1 ...        prepare   both update momentum on their run
    rank 1   ... w1 ][ w2 ........... ]     travel    rank 1 sends its part of w1's payload to the owner, rank 0
                                            block     rank 0: w0, w1    rank 1: w2     (each matrix once in the world)
                                            return    rank 0 sends rank 1 its part of w1's direction
                                            apply     both step their run

Kept blocks (w0, w2) never move. Cut blocks travel in the rule's ``wire_dtype``, packed into one uneven all-to-all per
bucket and direction, and while one bucket travels the kept blocks of the one before are computed. Payloads and
directions of kept blocks are rounded to ``wire_dtype`` too: that is why the update does not depend on the number of
ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import nn

from vescale.block import Lattice
from vescale.exchange import Crossing, Exchange, deal
from vescale.rule import Routing, Rules
from vescale.run import Run, runs_of
from vescale.unit import PENDING, home_of

# Payload bytes of one all-to-all: large enough that its latency does not show, small enough that a few in flight are no
# memory to speak of.
BUCKET_BYTES = 64 * 2**20


class Optimizer(torch.optim.Optimizer):
    """Steps every parameter by the rule that ``rules`` gives it.

    Each group of ``rules`` is one entry of ``param_groups``, with ``"name"`` and the rule's hyperparameters, which may
    be changed between steps (so torch's schedulers work). State exists from construction, for every parameter on every
    rank, as ``RaggedTensor`` of the parameter's own cut.

    Args:
        named_parameters: ``model.named_parameters()``, after ``fully_shard`` and after the weights have a device.
            Parameters outside any unit are stepped too, alike on every rank. Frozen ones are left out.
        rules: Groups and their rules.

    Raises:
        ValueError: Where routing fails (see ``Rules.route``), an edge cuts what a rule never lets be cut, or parameters
            are not float32, on the meta device, or not planned yet.
        NotImplementedError: For a rule with block state, or with several blocks in a granule.
    """

    routing: Routing
    runs: list[Run]
    owners: dict[tuple[str, int], int]  # of each cut granule (name, index); a position in its mesh

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], rules: Rules) -> None:
        named = [(name, param) for name, param in named_parameters if param.requires_grad]
        _check_parameters(named)
        self.routing, self.rules = rules.route(named), rules
        params = dict(named)
        groups = [
            {
                "params": [(route.name, params[route.name]) for route in routes],
                "name": name,
                **_hyperparameters(rules.groups[name].rule),
            }
            for name, routes in self.routing.routes.items()
            if routes
        ]
        super().__init__(groups, {})
        _check_cuts(self.routing, params)
        self.runs = [run for group in self.param_groups for run in runs_of(group, rules.groups[group["name"]].rule)]
        for run in self.runs:
            self._create_state(run)
        self.owners = _owners(self.runs)
        self._programs: dict[tuple[tuple[int, int, int], ...], list[Bucket]] = {}

    # --- the step ---

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, skip: torch.Tensor | None = None) -> Any:
        """Steps every parameter that has a gradient.

        Args:
            closure: Recomputes the loss, as in torch.
            skip: () float32 on the parameters' device, equal on every rank: 1.0 leaves parameters and state bit for bit
                as they are.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for unit in {id(run.home.unit): run.home.unit for run in self.runs if run.home}.values():
            unit.realias()
        for run in self.runs:
            run.clock += 1
        buckets = self._program()
        rules = {group["name"]: self._rule_now(group) for group in self.param_groups}
        pending: Bucket | None = None
        for bucket, following in zip_longest(buckets, buckets[1:]):
            if pending is None:
                bucket.prepare(rules[bucket.group], skip)
            if following is not None:
                following.prepare(rules[following.group], skip)  # travels while this one is computed
            bucket.compute(rules[bucket.group])
            if pending is not None:
                pending.apply(rules[pending.group], skip)
            pending = bucket
        if pending is not None:
            pending.apply(rules[pending.group], skip)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses once the optimizer is made: rules decide where a parameter goes.

        Raises:
            NotImplementedError: After construction.
        """
        if hasattr(self, "runs"):
            raise NotImplementedError("add_param_group: make a new Optimizer over all parameters, with their rules")
        super().add_param_group(param_group)

    def _rule_now(self, group: dict[str, Any]) -> Any:
        """The rule with the numbers that the group holds now."""
        rule = self.rules.groups[group["name"]].rule
        return dataclasses.replace(rule, **{key: group[key] for key in _hyperparameters(rule)})

    def _program(self) -> list[Bucket]:
        """Buckets of the runs that have gradients, made once per set of such runs."""
        active = [part for run in self.runs for part in run.active()]
        key = tuple((id(run.parent), run.first, len(run.params)) for run in active)
        if key not in self._programs:
            self._programs[key] = _buckets(active, self.owners)
        return self._programs[key]

    # --- state ---

    def _create_state(self, run: Run) -> None:
        for index, param in enumerate(run.params):
            self.state[param]["step"] = run.steps[index]
            for name, flat in run.state.items():
                self.state[param][name] = run.view(flat, index)

    def named_state(self) -> dict[str, torch.Tensor]:
        """Every state tensor under ``"<parameter>.<state>"``, the same keys on every rank.

        What a checkpoint saves and loads in place.
        """
        return {
            f"{name}.{key}": value
            for run in self.runs
            for name, p in zip(run.names, run.params, strict=True)
            for key, value in self.state[p].items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies state into the tensors that exist, so that they stay views of their flat runs; sets the groups'
        numbers.

        Raises:
            ValueError: If groups, parameters or names of state differ; nothing is changed then.
        """
        own = self.state_dict()
        saved_groups, saved_state = state_dict["param_groups"], state_dict["state"]
        if [group["params"] for group in own["param_groups"]] != [group["params"] for group in saved_groups]:
            raise ValueError("load_state_dict: the saved parameter groups hold other parameters than this optimizer's")
        differs = [key for key in own["state"] if set(saved_state.get(key, {})) != set(own["state"][key])]
        if differs:
            raise ValueError(f"load_state_dict: names of state differ for parameters {differs[:8]}")
        with torch.no_grad():
            for key, values in own["state"].items():
                for name, value in values.items():
                    value.copy_(saved_state[key][name])
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            group.update({key: value for key, value in saved.items() if key not in ("params", "param_names")})
        self.state_was_loaded()

    def state_was_loaded(self) -> None:
        """Rereads what the host keeps of the state; call it after writing into the tensors of ``named_state``."""
        for run in self.runs:
            run.ages = [int(step) for step in run.steps.tolist()]
        self._programs.clear()


def _hyperparameters(rule: Any) -> dict[str, Any]:
    return {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}


def _check_parameters(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuses parameters that are about to be replaced by sharded ones, have no memory, or are not float32."""
    bare = [name for name, param in named if param.is_meta]
    if bare:
        raise ValueError(
            f"{bare[0]} and {len(bare) - 1} more are on the meta device: make the Optimizer after to_empty()"
        )
    other = [f"{name} ({param.dtype})" for name, param in named if param.dtype is not torch.float32]
    if other:
        raise ValueError(
            f"expected float32 parameters, got {', '.join(other[:4])}{' ...' * (len(other) > 4)}: keep the masters in "
            "float32 and compute in another dtype by MixedPrecisionPolicy(param_dtype=...)"
        )
    pending = [name for name, param in named if PENDING in param.__dict__]
    if pending:
        raise ValueError(
            f"{pending[0]} and {len(pending) - 1} more are not planned yet: take named_parameters() of the outermost "
            "module that fully_shard was called on, or call fully_shard on the root module too"
        )


def _check_cuts(routing: Routing, params: dict[str, nn.Parameter]) -> None:
    """Refuses an edge inside a run that a rule never lets be cut; the plan was made for another rule."""
    problems = []
    for route in (route for routes in routing.routes.values() for route in routes):
        home = home_of(params[route.name])
        if home is not None and route.block.finest > 1:
            offset, size = home.segment.plan.offsets[home.at], home.segment.plan.shard_size
            first, last = offset // size + 1, (offset + params[route.name].numel() - 1) // size
            if any((k * size - offset) % route.block.finest for k in range(first, last + 1)):
                problems.append(f"{route.name} is cut inside a run of {route.block.finest} elements")
    if problems:
        raise ValueError(
            "; ".join(problems) + ": give fully_shard(..., block_of=rules.block_of) the same rules as the Optimizer"
        )


# --- buckets ---


class Kept(NamedTuple):
    """Neighbouring whole granules of one parameter on this rank.

    Elements ``[start, stop)`` of its run, ``blocks`` of them.
    """

    start: int
    stop: int
    blocks: int
    block: tuple[int, ...]


class Bucket:
    """Runs of one rule that travel together, and where each is in the step."""

    def __init__(self, runs: Sequence[Run], owners: dict[tuple[str, int], int]) -> None:
        self.runs, self.group, self.rule = list(runs), runs[0].group, runs[0].rule
        self.has_blocks = hasattr(self.rule, "block")
        self.kept = [_kept(run) if self.has_blocks else [] for run in runs]
        cut = (
            [crossing for index, run in enumerate(runs) for crossing in _crossings(index, run, owners)]
            if self.has_blocks
            else []
        )
        first, group = runs[0], runs[0].process_group
        self.exchange = Exchange(cut, first.rank, first.num_ranks, group) if cut and group else None
        self.payloads: list[tuple[torch.Tensor, ...]] = []
        self.directions: list[torch.Tensor] = []

    def prepare(self, rule: Any, skip: torch.Tensor | None) -> None:
        """Runs the rule's element-wise part and sends the payloads of cut blocks on their way."""
        self.payloads = []
        for run in self.runs:
            state = {**run.state, "step": run.steps[0]}
            self.payloads.append(rule.prepare(run.param(), run.grad(), state, skip=skip))
            run.advance(skip)
        if self.exchange:
            self.exchange.send(
                [[(run.start, flat) for flat in flats] for run, flats in zip(self.runs, self.payloads, strict=True)]
            )

    def compute(self, rule: Any) -> None:
        """Computes the kept blocks, then the cut ones that have arrived here, and sends their directions back."""
        if not self.has_blocks:
            return
        self.directions = [torch.empty_like(flats[0]) for flats in self.payloads]
        for run_index, kept in enumerate(self.kept):
            for piece in kept:
                self._compute_kept(rule, run_index, piece)
        if self.exchange:
            for blocks, done in self.exchange.arrived():
                done(rule.block(blocks, {}))
            self.exchange.reply()
        self.payloads = []

    def _compute_kept(self, rule: Any, run_index: int, piece: Kept) -> None:
        shape = (piece.blocks, *piece.block)
        blocks = tuple(flat[piece.start : piece.stop].view(shape) for flat in self.payloads[run_index])
        self.directions[run_index][piece.start : piece.stop].view(shape).copy_(rule.block(blocks, {}))

    def apply(self, rule: Any, skip: torch.Tensor | None) -> None:
        """Steps the parameters along the directions."""
        if not self.has_blocks:
            return
        if self.exchange:
            self.exchange.collect([(run.start, flat) for run, flat in zip(self.runs, self.directions, strict=True)])
        for run, direction in zip(self.runs, self.directions, strict=True):
            _zero_gaps(run, direction)
            rule.apply(run.param(), direction, run.state, skip=skip)
        self.directions = []


def _zero_gaps(run: Run, direction: torch.Tensor) -> None:
    """Padding between parameters takes no step: it stays zero in the master shard."""
    ends = [offset + param.numel() for offset, param in zip(run.offsets, run.params, strict=True)]
    for start, stop in zip(ends, [*run.offsets[1:], run.stop], strict=True):
        low, high = max(start, run.start) - run.start, min(stop, run.stop) - run.start
        if high > low:
            direction[low:high].zero_()


def _buckets(runs: Sequence[Run], owners: dict[tuple[str, int], int]) -> list[Bucket]:
    """Packs runs of one group and one mesh, in order, until their payload reaches BUCKET_BYTES."""
    packed: list[list[Run]] = []
    size = 0
    for run in runs:
        same = (
            packed
            and packed[-1][0].group == run.group
            and packed[-1][0].process_group is run.process_group
            and run.home is not None
        )
        itemsize = getattr(run.rule, "wire_dtype", torch.float32).itemsize
        if not same or size + run.shard_size * itemsize > BUCKET_BYTES:
            packed.append([])
            size = 0
        packed[-1].append(run)
        size += run.shard_size * itemsize
    return [Bucket(bucket, owners) for bucket in packed]


def _kept(run: Run) -> list[Kept]:
    """The whole granules of a run on this rank, neighbours of one parameter together."""
    pieces = []
    for index, param in enumerate(run.params):
        lattice = run.lattice(index)
        low, high = (min(max(edge - run.offsets[index], 0), param.numel()) for edge in (run.start, run.stop))
        whole = lattice.cut(low, high).whole if high > low else range(0)
        if len(whole):
            start, stop = lattice.granule(whole[0])[0], lattice.granule(whole[-1])[1]
            at = run.offsets[index] - run.start
            pieces.append(Kept(start + at, stop + at, len(whole), lattice.block))
    return pieces


def _crossings(run_index: int, run: Run, owners: dict[tuple[str, int], int]) -> list[Crossing]:
    """The granules of a run that rank edges cut, on every rank, with their owners."""
    found = []
    for index, (name, offset) in enumerate(zip(run.names, run.offsets, strict=True)):
        lattice = run.lattice(index)
        for granule in run.boundary(index):
            start, stop = lattice.granule(granule)
            found.append(
                Crossing(run_index, offset + start, offset + stop, run.shard_size, owners[name, granule], lattice.block)
            )
    return found


def _owners(runs: Sequence[Run]) -> dict[tuple[str, int], int]:
    """Deals the cut granules of all runs over the ranks.

    The same on every rank, since everybody sees the same plans.
    """
    owners: dict[tuple[str, int], int] = {}
    meshes: dict[int, list[Run]] = {}
    for run in runs:
        if hasattr(run.rule, "block"):
            _refuse(run)
            meshes.setdefault(id(run.process_group), []).append(run)
    for members in meshes.values():
        load = [0.0] * members[0].num_ranks
        work: list[tuple[float, tuple[str, int], range]] = []
        for run in members:
            for index, name in enumerate(run.names):
                lattice = run.lattice(index)
                cost = _cost(run.rule, lattice.block)
                cut = list(run.boundary(index))
                _add_kept(load, run, index, lattice, set(cut), cost)
                work += [(cost, (name, granule), _holders(run, index, lattice, granule)) for granule in cut]
        owners.update(deal(work, load))
    return owners


def _add_kept(load: list[float], run: Run, index: int, lattice: Lattice, cut: set[int], cost: float) -> None:
    for granule in range(lattice.num_granules):
        if granule not in cut:
            load[(run.offsets[index] + lattice.granule(granule)[0]) // run.shard_size] += cost


def _holders(run: Run, index: int, lattice: Lattice, granule: int) -> range:
    start, stop = lattice.granule(granule)
    return range((run.offsets[index] + start) // run.shard_size, (run.offsets[index] + stop - 1) // run.shard_size + 1)


def _cost(rule: Any, block: tuple[int, ...]) -> float:
    """Work of one block: the rule's own ``cost``, else the elements."""
    if hasattr(rule, "cost"):
        return rule.cost(block)
    return float(torch.Size(block).numel())


def _refuse(run: Run) -> None:
    if getattr(run.rule, "block_state", None):
        raise NotImplementedError(f"{type(run.rule).__name__} has block state, which the Optimizer cannot keep yet")
    for index, name in enumerate(run.names):
        if run.lattice(index).blocks_per_granule > 1:
            raise NotImplementedError(
                f"{name}: {type(run.rule).__name__} has several blocks in a granule, which cannot be split yet"
            )
