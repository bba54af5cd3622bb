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
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from vescale import collectives
from vescale.bucket import Bucket, pack
from vescale.counting import Counters
from vescale.grad_norm import clip_grad_norm_
from vescale.owners import Deal, Key, Load, assign, owned_blocks
from vescale.ragged_tensor import RaggedTensor
from vescale.rule import Routing, Rules, state_bytes, table
from vescale.run import Run, runs_of
from vescale.unit import PENDING, Unit, home_of

# Which gradients ``clip_grad_norm_`` scales: those of rules without blocks only under "non_matrix", since a rule that
# orthogonalises has no use for the scale, and one spike scaled to nothing would stall it (NVIDIA/Megatron-LM #5394).
CLIP_POLICIES = ("all", "non_matrix", "none")


class Optimizer(torch.optim.Optimizer):
    """Steps every parameter by the rule that ``rules`` gives it.

    Each group of ``rules`` is one entry of ``param_groups``, with ``"name"`` and the rule's hyperparameters, which may
    be changed between steps (so torch's schedulers work): numbers or, of learning rate, decay and betas, 0-d tensors,
    which are not read where they are on a device. State exists from construction, for every parameter on every
    rank, as ``RaggedTensor`` of the parameter's own cut.

    Args:
        named_parameters: ``model.named_parameters()``, after ``fully_shard`` and after the weights have a device.
            Parameters outside any unit are stepped too, alike on every rank. Frozen ones are left out.
        rules: Groups and their rules.
        share_replicas: Where copies of the parameters exist (a mesh of two axes, ZeRO 0), deal the blocks over all
            copies' ranks: each is computed once in the world, and its direction travels to the other copies. False:
            each copy's ranks compute every block.
        offload_state: Keep the rules' state in the CPU's memory, pinned where there is an accelerator; a step brings a
            bucket of it at a time to the parameters' device and back. What is computed is computed there, all the same.

    Raises:
        ValueError: Where routing fails (see ``Rules.route``), an edge cuts what a rule never lets be cut, parameters
            are not of the rule's dtype (float32), on the meta device, not planned yet, or, outside any unit, not
            contiguous, where nothing is trainable, or there are no copies to share between.
        NotImplementedError: To share blocks of a rule that keeps state where they are computed.
    """

    routing: Routing
    runs: list[Run]
    dealt: Deal  # who computes what
    counters: Counters  # of this rank; see ``vescale.counters``
    in_backward: bool  # units are stepped one by one: see ``step_in_backward``

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        rules: Rules,
        *,
        share_replicas: bool = False,
        offload_state: bool = False,
    ) -> None:
        listed = list(named_parameters)
        named = [(name, param) for name, param in listed if param.requires_grad]
        if not named:
            why = f"all {len(listed)} parameters have requires_grad=False" if listed else "named_parameters is empty"
            raise ValueError(f"nothing is trainable: expected a parameter that requires a gradient, but {why}")
        _check_parameters(named)
        self.routing, self.rules = rules.route(named), rules
        params = dict(named)
        _check_dtypes(self.routing, params)
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
        self.runs = [
            run
            for group in self.param_groups
            for run in runs_of(group, rules.groups[group["name"]].rule, offload_state=offload_state)
        ]
        if share_replicas:
            check_sharing([(run.group, run.rule, run.num_replicas) for run in self.runs if hasattr(run.rule, "block")])
        self.dealt, self.counters, self.in_backward = (
            assign(self.runs, share_replicas=share_replicas),
            Counters(),
            False,
        )
        for run in self.runs:
            self._create_state(run)
        if any(run.steps.device.type != "cpu" for run in self.runs):
            warm_up(self.runs, share_replicas=share_replicas)
        self._units = list({id(run.home.unit): run.home.unit for run in self.runs if run.home}.values())
        self._programs: dict[tuple[tuple[int, int, int], ...], list[Bucket]] = {}
        self._failed = False  # a step raised here after some of it was taken, or while other ranks may have taken it
        self._applied = 0  # buckets of the step going on that are stepped: they keep what they wrote

    @property
    def owners(self) -> dict[Key, int]:
        """Of each cut granule (name, index): a position in its mesh."""
        return self.dealt.owners

    @property
    def loads(self) -> list[Load]:
        """Of each process group."""
        return self.dealt.loads

    # --- the step ---

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        skip: torch.Tensor | None = None,
        unit: Unit | None = None,
    ) -> Any:
        """Steps every parameter that has a gradient.

        An exception in a block takes back what the step wrote, except buckets (64 MiB of payloads) that were finished
        before, and on this rank alone: others may have taken the step, or wait for this one. Where any bucket was
        finished, or there are other ranks, it ends the job, which goes on from a checkpoint.

        Args:
            closure: Recomputes the loss, as in torch.
            skip: () float32 on the parameters' device, equal on every rank: 1.0 leaves parameters and state bit for bit
                as they are.
            unit: Step the parameters of this unit alone. Every rank steps its units in the same order.

        Returns:
            What the closure returned.

        Raises:
            ValueError: If a parameter has become of another dtype or, outside any unit, is not contiguous any more or
                has a sparse gradient; nothing is changed then.
            RuntimeError: If a block fails, naming its parameter; and from then on, where there are other ranks or a
                bucket was finished.
        """
        if self._failed:
            raise RuntimeError(
                "step: an earlier step of this Optimizer raised on this rank, and some of it was taken here, or other "
                "ranks may have taken it: end the job on every rank and go on from a checkpoint"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        runs = self.runs if unit is None else [run for run in self.runs if run.home and run.home.unit is unit]
        with torch._C.DisableTorchFunctionSubclass():  # a parameter's attributes are read three times as fast
            self._check_alive(runs, self._units if unit is None else [unit])
            buckets = self._program(runs)
        for run in runs:
            run.count()
            run.clock += 1
        rules = {group["name"]: self._rule_now(group) for group in self.param_groups}
        try:
            self._run(buckets, rules, skip)
        except Exception:
            for bucket in buckets:
                bucket.undo()
            self._failed = self._applied > 0 or (dist.is_initialized() and dist.get_world_size() > 1)
            raise
        return loss

    def _run(self, buckets: Sequence[Bucket], rules: dict[str, Any], skip: torch.Tensor | None) -> None:
        pending, self._applied = None, 0
        for bucket, following in zip_longest(buckets, buckets[1:]):
            if pending is None:
                bucket.prepare(rules[bucket.group], skip)
            if following is not None and following.has_blocks:
                following.prepare(rules[following.group], skip)  # travels while this one is computed
            bucket.compute(rules[bucket.group])
            if pending is not None:
                self._applied += 1
                pending.apply(rules[pending.group], skip)
            if following is not None and not following.has_blocks:
                following.prepare(rules[following.group], skip)  # writes at once: only when no block can fail any more
            pending = bucket
        if pending is not None:
            pending.apply(rules[pending.group], skip)

    def _check_alive(self, runs: Sequence[Run], units: Sequence[Unit]) -> None:
        """Puts parameters that were assigned to back into their shards, and refuses what cannot be stepped any more."""
        for unit in units:
            unit.realias()
        _check_plain(runs)
        for run in runs:
            wanted = _dtype_of(run.rule)
            if run.dtype is not wanted:
                raise ValueError(
                    f"{run.names[0]} has become {run.dtype}: expected {str(wanted).removeprefix('torch.')}, as when "
                    "this Optimizer was made; cast before making it, and compute in another dtype by "
                    "MixedPrecisionPolicy(param_dtype=...)"
                )

    def clip_grad_norm_(self, max_norm: float, *, policy: str = "all", norm_type: float = 2.0) -> torch.Tensor:
        """Scales gradients so that their joint norm is at most ``max_norm``; never touches an update.

        Args:
            max_norm: Upper bound, in units of the gradient; ``inf`` only measures.
            policy: "all" scales every gradient; "non_matrix" those of rules without blocks, such as AdamW; "none" none.
                The norm is always that of all gradients.
            norm_type: Order of the norm, > 0.

        Returns:
            () float32, the norm before, complete and equal on every rank.

        Raises:
            ValueError: For another policy, a negative ``max_norm`` or a ``norm_type`` that is not positive, or where
                units are stepped in backward, or a parameter outside any unit has a sparse gradient.
        """
        if self.in_backward:
            raise ValueError("clip_grad_norm_: units are stepped in backward, when the norm of all is not known yet")
        if policy not in CLIP_POLICIES:
            raise ValueError(f"clip_grad_norm_: expected a policy of {CLIP_POLICIES}, got {policy!r}")
        _check_plain(self.runs)
        every = [param for run in self.runs for param in run.params]
        scaled = [p for run in self.runs for p in run.params if policy == "all" or not hasattr(run.rule, "block")]
        return clip_grad_norm_(every, max_norm, norm_type, scaled=[] if policy == "none" else scaled)

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
        return dataclasses.replace(rule, **{key: _number(group[key]) for key in _hyperparameters(rule)})

    def _program(self, runs: Sequence[Run]) -> list[Bucket]:
        """Buckets of those runs that have gradients, made once per set of such runs."""
        active = [part for run in runs for part in run.active()]
        key = tuple((id(run.parent), run.first, len(run.params)) for run in active)
        if key not in self._programs:
            self._programs[key] = pack(active, self.dealt, self.counters)
        return self._programs[key]

    # --- state ---

    def _create_state(self, run: Run) -> None:
        if hasattr(run.rule, "block_state"):
            run.create_blocks(owned_blocks(run, self.owners))
        for index, param in enumerate(run.params):
            state = self.state[param]
            state["step"] = run.steps[index]
            state |= {name: values[index] for name, values in run.numbers.items()}
            state |= {name: run.view(name, index) for name in run.state}
            if run.blocks:
                state |= {name: run.block_view(name, index) for name in run.blocks[index].rows}

    def named_state(self) -> dict[str, torch.Tensor]:
        """Every state tensor under ``"<parameter>.<state>"``, the same keys on every rank.

        What a checkpoint saves and loads in place.
        """
        self._settle()
        return {
            f"{name}.{key}": value
            for run in self.runs
            for name, p in zip(run.names, run.params, strict=True)
            for key, value in self.state[p].items()
        }

    def state_dict(self) -> dict[str, Any]:
        """As torch's; tensors of state are those of this optimizer, not copies."""
        self._settle()
        return super().state_dict()

    def _settle(self) -> None:
        """Waits until state that a step was writing back to the CPU's memory is there."""
        for device in {run.steps.device for run in self.runs if run.offloaded} - {torch.device("cpu")}:
            torch.accelerator.current_stream(device).synchronize()

    def rows_of_one(self) -> dict[str, int]:
        """Returns, for every name of ``named_state``, the rows that it has for each row of its parameter."""
        return {
            f"{name}.{key}": run.rows_of_one(key, index)
            for run in self.runs
            for index, (name, p) in enumerate(zip(run.names, run.params, strict=True))
            for key in self.state[p]
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies state into the tensors that exist, so that they stay views of their flat runs; sets the groups'
        numbers.

        Args:
            state_dict: As ``state_dict`` returns it. A tensor is cut as the one here is, or whole and equal on every
                rank; its shape is the same, and floating-point numbers may have another precision.

        Raises:
            ValueError: If groups, parameters, or names, shapes, cuts or kinds of state differ, or a rule refuses a
                group's numbers; nothing is changed then.
        """
        own = self.state_dict()
        self._check_saved(own, state_dict)
        saved_groups, saved_state = state_dict["param_groups"], state_dict["state"]
        with torch.no_grad():
            for key, values in own["state"].items():
                for name, value in values.items():
                    value.copy_(saved_state[key][name])
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            group.update({key: value for key, value in saved.items() if key not in ("params", "param_names")})
        self.state_was_loaded()

    def _check_saved(self, own: dict[str, Any], saved: dict[str, Any]) -> None:
        """Refuses a ``state_dict`` that is not of these parameters and rules; see ``load_state_dict``."""
        if not {"param_groups", "state"} <= set(saved):
            raise ValueError(
                f"load_state_dict: expected the keys param_groups and state, got {sorted(map(str, saved))}"
            )
        ours, theirs = (
            [(group.get("name"), group.get("params")) for group in of["param_groups"]] for of in (own, saved)
        )
        if ours != theirs:
            raise ValueError("load_state_dict: the saved parameter groups hold other parameters than this optimizer's")
        problems = []
        for group in own["param_groups"]:
            for key, param in zip(group["params"], group["param_names"], strict=True):
                values, found = own["state"][key], saved["state"].get(key, {})
                if set(found) != set(values):
                    problems.append(f"{param}: expected names of state {sorted(values)}, got {sorted(found)}")
                    continue
                wrong = {name: _unlike(value, found[name]) for name, value in values.items()}
                problems += [f"{param}: {name}: {problem}" for name, problem in wrong.items() if problem]
        if problems:
            more = f", and {len(problems) - 1} more that do not fit" if len(problems) > 1 else ""
            raise ValueError(f"load_state_dict: {problems[0]}{more}")
        for group, other in zip(self.param_groups, saved["param_groups"], strict=True):
            self._rule_now({**group, **other})  # which refuses numbers that the next step would

    def state_was_loaded(self) -> None:
        """Rereads what the host keeps of the state; call it after writing into the tensors of ``named_state``."""
        for run in self.runs:
            run.recount()
            if hasattr(run.rule, "loaded"):
                for param in run.params:
                    run.rule.loaded(self.state[param])
        self._programs.clear()

    # --- what it will do ---

    def report(self) -> str:
        """Returns the table that a run prints at its start: who is stepped by what, what travels, what is kept.

        Granularity and block are the largest of the group, in elements; bytes are of all ranks together. Kept and cut
        bytes are of payloads; what is cut travels to its owner and back.
        """
        rows: list[Sequence[str]] = [
            ("group", "rule", "parameters", "elements", "block", "granularity", "kept MB", "cut MB", "state MB")
        ]
        parts: dict[tuple[str, str], list[Run]] = {}
        for run in self.runs:
            parts.setdefault((run.group, type(run.rule).__name__), []).append(run)
        rows += [(*key, *_summary(runs)) for key, runs in parts.items()]
        return "\n".join([table(rows), *map(str, self.loads)])


def _summary(runs: Sequence[Run]) -> list[str]:
    """Cells of one line of the report."""
    pairs = [(run, index) for run in runs for index in range(len(run.params))]
    lattices = [run.lattice(index) for run, index in pairs]
    elements = sum(lattice.numel for lattice in lattices)
    cut = 0
    for (run, index), lattice in zip(pairs, lattices, strict=True):
        if hasattr(run.rule, "block"):
            cut += sum(stop - start for start, stop in map(lattice.granule, run.boundary(index)))
    itemsize = runs[0].rule.wire_dtype.itemsize if hasattr(runs[0].rule, "block") else 0
    state = sum(state_bytes(run.rule, tuple(run.params[index].shape)) for run, index in pairs)
    block = max(math.prod(lattice.block) for lattice in lattices)
    granularity = max(lattice.granularity for lattice in lattices)
    sizes = (str(len(pairs)), f"{elements:,}", f"{block:,}", f"{granularity:,}")
    return [*sizes, *(f"{n / 1e6:,.1f}" for n in ((elements - cut) * itemsize, cut * itemsize, state))]


def _number(value: Any) -> Any:
    """A hyperparameter as rules take it: a 0-d tensor in host memory is read; one on a device never is."""
    if isinstance(value, list | tuple):
        return type(value)(map(_number, value))
    is_read = isinstance(value, torch.Tensor) and value.ndim == 0 and value.device.type == "cpu"
    return value.item() if is_read else value


def _hyperparameters(rule: Any) -> dict[str, Any]:
    return {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}


def _unlike(value: torch.Tensor, saved: Any) -> str:
    """Why ``saved`` cannot be copied into the state ``value``; empty if it can."""
    if not isinstance(saved, torch.Tensor):
        return f"expected a tensor, got {type(saved).__name__}"
    if saved.shape != value.shape:
        return f"expected shape {tuple(value.shape)}, got {tuple(saved.shape)}"
    if isinstance(saved, DTensor):
        if not isinstance(value, RaggedTensor):
            return f"expected a plain tensor, got one with placements {saved.placements}"
        if (saved.device_mesh, saved.placements) != (value.device_mesh, value.placements):
            return f"expected placements {value.placements} or a whole tensor, got {saved.placements}"
    if saved.is_meta or saved.layout is not torch.strided:
        return f"expected a tensor with dense memory, got {saved.layout} on {saved.device}"
    # Codes mean nothing in another dtype.
    if saved.dtype is not value.dtype and not (saved.is_floating_point() and value.is_floating_point()):
        return f"expected {value.dtype}, got {saved.dtype}"
    return ""


def _check_plain(runs: Sequence[Run]) -> None:
    """Refuses parameters outside any unit that, or whose gradients, are no flat run of memory."""
    for run in runs:
        if run.home is None:
            (name,), (param,) = run.names, run.params
            _check_contiguous(name, param)
            if param.grad is not None and param.grad.layout is not torch.strided:
                raise ValueError(
                    f"{name}: expected a dense gradient, got {param.grad.layout}: make its layer with sparse=False"
                )


def _check_contiguous(name: str, param: nn.Parameter) -> None:
    if not param.is_contiguous():
        raise ValueError(
            f"{name}: expected contiguous memory of a parameter outside any unit, got shape {tuple(param.shape)} with "
            f"strides {param.stride()}: make the parameter of tensor.contiguous()"
        )


def _check_parameters(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuses parameters that are about to be replaced by sharded ones, or have no memory."""
    bare = [name for name, param in named if param.is_meta]
    if bare:
        raise ValueError(
            f"{bare[0]} and {len(bare) - 1} more are on the meta device: make the Optimizer after to_empty()"
        )
    pending = [name for name, param in named if PENDING in param.__dict__]
    if pending:
        raise ValueError(
            f"{pending[0]} and {len(pending) - 1} more are not planned yet: take named_parameters() of the outermost "
            "module that fully_shard was called on, or call fully_shard on the root module too"
        )
    for name, param in named:
        if home_of(param) is None:
            _check_contiguous(name, param)


def warm_up(runs: Sequence[Run], *, share_replicas: bool) -> None:
    """Makes the communicators that a step's exchanges take, in the order of ``runs``, which is every rank's.

    A communicator is made by its first call, which waits for all its ranks. In the first step some would be late
    (PrimeIntellect-ai/prime-rl #3490).
    """
    groups: dict[int, tuple[dist.ProcessGroup, torch.device]] = {}
    for run in runs if dist.is_initialized() else ():
        is_cut = hasattr(run.rule, "block") and any(run.boundary(index) for index in range(len(run.params)))
        shared = run.replicas if share_replicas and hasattr(run.rule, "block") else None
        for group in (run.process_group if is_cut else None, shared):
            if group is not None:
                groups.setdefault(id(group), (group, run.steps.device))
    for group, device in groups.values():
        sent, ones = torch.zeros(group.size(), device=device), [1] * group.size()
        collectives.all_to_all(torch.empty_like(sent), sent, out_splits=ones, send_splits=ones, group=group)


def check_sharing(blocks: Sequence[tuple[str, Any, int]]) -> None:
    """Refuses to share between copies that do not exist, or blocks whose state is where they are computed.

    Args:
        blocks: What has blocks: its group, its rule, and copies of its parameters.

    Raises:
        ValueError: If there is one copy of everything.
        NotImplementedError: For a rule with block state.
    """
    if not any(copies > 1 for _, _, copies in blocks):
        raise ValueError(
            "share_replicas: expected copies of parameters whose rule has blocks (a mesh of two axes, or ZeRO 0), "
            "got one copy"
        )
    for group, rule, _ in blocks:
        if hasattr(rule, "block_state"):
            raise NotImplementedError(
                f"share_replicas: {type(rule).__name__} of group {group} keeps state where a block is "
                "computed, and every copy of the parameters has its own; leave share_replicas off for such a rule"
            )


def _check_dtypes(routing: Routing, params: dict[str, nn.Parameter]) -> None:
    """Refuses parameters of another dtype than their rule steps."""
    other = []
    for route in (route for routes in routing.routes.values() for route in routes):
        wanted, got = _dtype_of(routing.rules.rule_of(route.name, route.shape)), params[route.name].dtype
        if got is not wanted:
            other.append((wanted, f"{route.name} ({got})"))
    if other:
        wanted, names = other[0][0], [name for _, name in other]
        raise ValueError(
            f"expected {str(wanted).removeprefix('torch.')} parameters, got {', '.join(names[:4])}"
            f"{' ...' * (len(names) > 4)}: keep the masters in float32 and compute in another dtype by "
            "MixedPrecisionPolicy(param_dtype=...), or take a rule of that dtype"
        )


def _dtype_of(rule: Any) -> torch.dtype:
    """The dtype of the parameters that a rule steps."""
    dtype: torch.dtype = getattr(rule, "param_dtype", torch.float32)
    return dtype


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
