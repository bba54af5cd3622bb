"""fully_shard: FSDP2's call, with parameters packed so that the blocks of their optimizer stay whole.

::

    for layer in model.layers:
        fully_shard(layer, mesh=mesh, block_of=rules.block_of)
    fully_shard(model, mesh=mesh, block_of=rules.block_of)

A call only declares a unit. Plans are made when the parameters are first needed (first forward, ``parameters()``,
``state_dict()``, ``to_empty``): then the outermost sharded module is known, so names are complete, and a parameter that
several units share goes to their lowest common unit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from vescale.commit import commit
from vescale.fsdp_module import FSDPModule
from vescale.member import PENDING, home_of
from vescale.segments import Capacity
from vescale.shard_state import BlockOf, ShardState, state_of
from vescale.shards import Ranks

Modules = TypeVar("Modules", bound="nn.Module | Sequence[nn.Module]")


def fully_shard(
    module: Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Any = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    block_of: BlockOf | None = None,
    max_padding: float = 0.01,
    zero: int = 3,
    capacity: Capacity = None,
) -> Modules:
    """Makes the parameters of ``module`` that no inner call has taken one unit: gathered, reduced and freed together.

    The module is changed in place: its class becomes a subclass of it and of ``FSDPModule``.

    Args:
        module: Any module, or several that shall be one unit; call on inner modules first, on the root last. A unit of
            several is gathered when the first is called and freed when the last has been.
        mesh: One axis: its ranks share the parameters. Two axes: the ranks of the second share them, the first holds
            copies (HSDP). All ranks on one axis when left out.
        reshard_after_forward: Free the whole parameters after forward and gather them again for backward; None is True,
            except at the root. A number shares them out among so many neighbouring ranks instead, e.g. those of one
            node, and backward gathers among these.
        shard_placement_fn: FSDP2's; refused, since a parameter is cut in its elements and never along a dim.
        mp_policy: torch's ``MixedPrecisionPolicy``: ``param_dtype`` of compute and all-gather, ``reduce_dtype`` (None
            is ``param_dtype``), and so on.
        offload_policy: torch's ``OffloadPolicy``; ``CPUOffloadPolicy`` keeps master shards, gradients and so the
            optimizer's state on the CPU.
        ignored_params: Parameters to leave alone: whole on every rank, their gradients not reduced.
        dp_mesh_dims: FSDP2's; refused, pass ``mesh[name]``.
        block_of: Block of a parameter, from its name in the outermost sharded module; ``Rules.block_of``, or any
            function. None: single elements.
        max_padding: Padding that may be paid to keep blocks whole, as a fraction of the elements of all units that
            have the same.
        zero: ZeRO stage (arXiv 1910.02054): 0 cuts nothing and all-reduces gradients; 1 cuts masters and optimizer
            state, and keeps the gathered parameters until the optimizer has stepped; 2 also reduces gradients into
            shards at every micro-batch, whatever ``set_requires_gradient_sync`` says; 3 frees the gathered parameters.
        capacity: What each rank can hold, in any unit. Unequal shards are planned (``preview``), but not built yet.

    Returns:
        The module itself.

    Raises:
        ValueError: For an argument of the wrong kind or range, or a module that is sharded already.
        NotImplementedError: For an option that is legal but not built.
    """
    modules: list[Any] = list(module) if isinstance(module, list | tuple) else [module]
    _check(modules, ignored_params)
    _check_params(modules, ignored_params or ())
    _check_options(mesh, reshard_after_forward, shard_placement_fn, offload_policy, dp_mesh_dims, max_padding, zero)
    if capacity is not None and Ranks.of(len(capacity), capacity).capacity:
        raise NotImplementedError(
            "fully_shard cannot yet do capacity: shards of unequal size; see vescale.commit.preview"
        )
    state = ShardState(
        modules,
        mesh=mesh,
        reshard_after_forward=_whole_number(reshard_after_forward),
        mp_policy=mp_policy or MixedPrecisionPolicy(),
        offload_policy=offload_policy or OffloadPolicy(),
        zero=zero,
        ignored=frozenset(ignored_params or ()),
        block_of=block_of,
        max_padding=max_padding,
    )
    for each in modules:
        _install(each, state)
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Lets a method be called as ``forward`` is: gathers the parameters before it, and frees them after it.

    Called inside ``forward`` it is the plain method: the parameters are there.

    Args:
        module: A module that ``fully_shard`` was called on; any other is left as it is.
        method_name: Its method, e.g. ``"generate"``.

    Raises:
        ValueError: If the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"register_fsdp_forward_method: {type(module).__name__} has no method {method_name!r}")
    original = getattr(module, method_name)
    # A partial of bound methods, not a closure: deepcopy binds it to the copy.
    setattr(module, method_name, functools.update_wrapper(functools.partial(_as_forward, module, original), original))


def _as_forward(module: FSDPModule, method: Any, *args: Any, **kwargs: Any) -> Any:
    state = module._vescale_state
    commit(state)
    if state.tree.root is not None and id(module) in state.to_run:
        return method(*args, **kwargs)
    args, kwargs = state.pre_forward(module, args, kwargs)  # type: ignore[arg-type]
    return state.post_forward(module, args, method(*args, **kwargs))  # type: ignore[arg-type]


def _check(modules: Sequence[Any], ignored_params: Any) -> None:
    """Refuses what is no module, is sharded already, is never called itself, or lies inside another of the list."""
    problems = [] if modules else ["expected at least one module, got an empty list"]
    for module in modules:
        name = type(module).__name__
        if not isinstance(module, nn.Module):
            problems.append(f"module must be an nn.Module or a list of them, got {name}")
        elif isinstance(module, FSDPModule):
            problems.append(f"{name} is sharded already")
        elif isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
            problems.append(f"{name} has no forward; call fully_shard on each of its modules")
        elif sum(module is inner for other in modules if isinstance(other, nn.Module) for inner in other.modules()) > 1:
            problems.append(f"{name} is twice in the list, or inside another module of it")
        elif any(_taken_above(param, module) for param in _own_params(module)):
            problems.append(f"{name} is inside a module that was sharded before; inner modules come first")
    if any(not isinstance(param, nn.Parameter) for param in ignored_params or ()):
        problems.append("ignored_params must be Parameters, not names")
    if problems:
        raise ValueError("fully_shard: " + "; ".join(problems))


def _own_params(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters below a module, without those of sharded modules inside."""
    yield from (param for param in module._parameters.values() if param is not None)
    for inner in module._modules.values():
        if inner is not None and not isinstance(inner, FSDPModule):
            yield from _own_params(inner)


def _taken_above(param: nn.Parameter, module: nn.Module) -> bool:
    """Whether a call on a module around ``module`` has taken ``param``."""
    home = home_of(param)
    state = param.__dict__.get(PENDING) if home is None else home.unit.driver
    return state is not None and any(module in around.modules() for around in state.modules)


def _check_params(modules: Sequence[nn.Module], ignored: Iterable[nn.Parameter]) -> None:
    """Refuses parameters that are no plain dense tensors."""
    missing, skip = [], frozenset(ignored)
    for module in modules:
        for name, param in module.named_parameters():
            if home_of(param) is not None or param in skip:
                continue
            if isinstance(param, UninitializedParameter):
                raise ValueError(f"fully_shard: {name} has no shape yet; run the lazy module once first")
            if isinstance(param, DTensor):
                missing.append(f"{name}, a DTensor {param.placements} (tensor parallel)")
            elif hasattr(param, "fsdp_pre_all_gather"):
                missing.append(f"{name}, a {type(param).__name__} with fsdp_pre_all_gather")
            elif is_traceable_wrapper_subclass(param) or param.layout is not torch.strided:
                missing.append(f"{name}, a {type(param).__name__} of layout {param.layout}")
    if missing:
        raise NotImplementedError("fully_shard cannot yet shard " + "; ".join(missing[:4]) + "; or ignored_params it")


def _check_options(
    mesh: Any, reshard: Any, placement_fn: Any, offload: Any, dims: Any, max_padding: float, zero: int
) -> None:
    problems, missing = [], []
    if mesh is not None and mesh.ndim > 2:
        problems.append(f"expected a mesh of one axis, or of two for HSDP, got {mesh.ndim}; slice them out of it")
    if not (reshard is None or isinstance(reshard, int)) or (type(reshard) is int and reshard < 1):
        problems.append(f"reshard_after_forward must be True, False, None or a number of ranks, got {reshard!r}")
    if reshard not in (None, True, False) and zero in (0, 1, 2):
        problems.append(f"zero={zero} keeps the gathered parameters; leave reshard_after_forward={reshard} out")
    if placement_fn is not None:
        missing.append("shard_placement_fn; any shape goes on any number of ranks, block_of says what must stay whole")
    if not (offload is None or isinstance(offload, OffloadPolicy)):
        problems.append(f"offload_policy must be an OffloadPolicy, got {type(offload).__name__}")
    if dims is not None:
        missing.append('dp_mesh_dims; pass the axis as mesh=mesh["name"]')
    if not max_padding >= 0:
        problems.append(f"max_padding must be a fraction >= 0, got {max_padding}")
    if zero not in (0, 1, 2, 3):
        problems.append(f"zero must be 0, 1, 2 or 3, got {zero!r}")
    if problems:
        raise ValueError("fully_shard: " + "; ".join(problems))
    if missing:
        raise NotImplementedError("fully_shard does not take " + "; ".join(missing))


def _whole_number(reshard: bool | int | None) -> bool | int | None:
    """One rank's part of the parameters is all of them: nothing is freed."""
    return False if reshard is not None and not isinstance(reshard, bool) and reshard == 1 else reshard


def _install(module: nn.Module, state: ShardState) -> None:
    """Gives a module its class and hooks, and tells the sharded modules inside who is above them."""
    cls = type(module)
    module.__class__ = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
    module._vescale_state = state  # type: ignore[assignment]
    module.register_forward_pre_hook(functools.partial(_pre_forward, state), prepend=True, with_kwargs=True)
    module.register_forward_hook(functools.partial(_post_forward, state), prepend=False)
    for inner in module.modules():
        for param in inner._parameters.values():
            if param is not None and home_of(param) is None and param not in state.ignored:
                param.__dict__[PENDING] = state
        below = state_of(inner)
        if below is not None and below is not state and below.parent is None:
            below.parent = state


def _untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps ``module.compile()`` out of a hook, and ``torch._dynamo``, which takes seconds to import, out of eager."""

    @functools.wraps(hook)
    def call(*args: Any) -> Any:
        return torch.compiler.disable(hook)(*args) if torch.compiler.is_compiling() else hook(*args)

    return call


@_untraced
def _pre_forward(state: ShardState, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    commit(state)
    return state.pre_forward(module, args, kwargs)


@_untraced
def _post_forward(state: ShardState, module: nn.Module, args: Any, output: Any) -> Any:
    return state.post_forward(module, args, output)
