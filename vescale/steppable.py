"""Steppable: what an Optimizer can step, and the sentence for what it cannot: parameters, groups, flags."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.member import PENDING, home_of
from vescale.rule import Routing, Rules, rule_for, whole_shape
from vescale.run import Run, chunk_state


def check_named(named_parameters: Any, rules: Any) -> list[tuple[str, nn.Parameter]]:
    """Returns the named parameters as a list; refuses what are no names and parameters, or no rules.

    Raises:
        ValueError: For anything but pairs of a name and a tensor, a name or a tensor that stands there twice, or rules
            that are no ``Rules``.
    """
    if not isinstance(rules, Rules):
        raise ValueError(f"Optimizer: expected Rules(name=(pattern, rule), ...), got {type(rules).__name__}")
    named = list(named_parameters) if isinstance(named_parameters, Iterable) else [named_parameters]
    for pair in named:
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not is_pair or not isinstance(pair[0], str) or not isinstance(pair[1], torch.Tensor):
            what = type(pair).__name__ if not is_pair else f"({', '.join(type(item).__name__ for item in pair)})"
            raise ValueError(f"Optimizer: expected model.named_parameters(), pairs of name and parameter, got {what}")
    names: set[str] = set()
    first: dict[int, str] = {}
    for name, param in named:
        if name in names:
            raise ValueError(f"Optimizer: two parameters are named {name}")
        if id(param) in first:
            raise ValueError(
                f"Optimizer: {first[id(param)]} and {name} are one parameter, which would be stepped twice"
            )
        names.add(name)
        first[id(param)] = name
    return named


def check_groups(groups: Sequence[Mapping[str, Any]], rules: Mapping[str, Any]) -> None:
    """Refuses parameter groups that are not those of the rules, or have lost a number.

    Args:
        groups: ``param_groups``.
        rules: Rule of each group.

    Raises:
        ValueError: If a group came, went or lacks a field of its rule.
    """
    names = [group.get("name") for group in groups]
    if names != list(rules):
        raise ValueError(
            f"step: expected the groups {list(rules)}, got {names}: a group is made and left out by the Rules of a new "
            "Optimizer"
        )
    for group in groups:
        missing = [key for key in rules[group["name"]] if key not in group]
        if missing:
            raise ValueError(f"step: group {group['name']} has lost {', '.join(missing)}")


def check_layout(run: Run, rule: Any) -> None:
    """Refuses a rule that has other blocks or other state of a run than the rule that the run was made for.

    Raises:
        ValueError: Naming a parameter.
    """
    for name, param in zip(run.names, run.params, strict=True):
        shape, now = tuple(param.shape), rule_for(rule, whole_shape(param))
        made, wanted = _layout(run.rule, shape), _layout(now, shape)
        if made != wanted:
            what = next(key for key in made if made[key] != wanted[key])
            raise ValueError(
                f"group {run.group}: {what} of {name} cannot change from {made[what]} to {wanted[what]}: make a new "
                "Optimizer"
            )


def _layout(rule: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """What memory and buckets are made for."""
    block = rule.block_shape(shape)
    kept = rule.block_state(block) if hasattr(rule, "block_state") else {}
    return {
        "the rule": type(rule).__name__,
        "the block": block,
        "state": {**rule.element_state(), **chunk_state(rule), **{name: tuple(v.shape) for name, v in kept.items()}},
    }


def check_skip(skip: Any, runs: Sequence[Run]) -> None:
    """Refuses a flag that is no flag, or lies where the parameters are not.

    Raises:
        ValueError: If it is neither None nor () float32 on the device of the runs.
    """
    if skip is None:
        return
    devices = {run.steps.device for run in runs}
    is_flag = isinstance(skip, torch.Tensor) and skip.ndim == 0 and skip.dtype is torch.float32
    if not is_flag or {skip.device} != devices and devices:
        got = f"{tuple(skip.shape)} {skip.dtype} on {skip.device}" if isinstance(skip, torch.Tensor) else repr(skip)
        where = " and ".join(sorted(map(str, devices)))
        raise ValueError(f"step: skip: expected None or a () torch.float32 tensor on {where}, got {got}")


def check_plain(runs: Sequence[Run]) -> None:
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


def check_parameters(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuses parameters that are about to be replaced by sharded ones, have no memory, or are cut by others."""
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
            if isinstance(param, DTensor):
                raise ValueError(
                    f"{name}: expected a parameter of a module that fully_shard was called on, or a plain one, got a "
                    f"{type(param).__name__} of placements {param.placements}"
                )
            _check_contiguous(name, param)


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


def check_dtypes(routing: Routing, params: dict[str, nn.Parameter]) -> None:
    """Refuses parameters of another dtype than their rule steps."""
    other = []
    for route in (route for routes in routing.routes.values() for route in routes):
        wanted, got = dtype_of(route.rule), params[route.name].dtype
        if got is not wanted:
            other.append((wanted, f"{route.name} ({got})"))
    if other:
        wanted, names = other[0][0], [name for _, name in other]
        raise ValueError(
            f"expected {str(wanted).removeprefix('torch.')} parameters, got {', '.join(names[:4])}"
            f"{' ...' * (len(names) > 4)}: keep the masters in float32 and compute in another dtype by "
            "MixedPrecisionPolicy(param_dtype=...), or take a rule of that dtype"
        )


def dtype_of(rule: Any) -> torch.dtype:
    """The dtype of the parameters that a rule steps."""
    dtype: torch.dtype = getattr(rule, "param_dtype", torch.float32)
    return dtype


def check_cuts(routing: Routing, params: dict[str, nn.Parameter]) -> None:
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
