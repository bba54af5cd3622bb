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

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from vescale.commit import commit
from vescale.fsdp_module import FSDPModule
from vescale.shard_state import BlockOf, ShardState, state_of
from vescale.unit import PENDING, home_of


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    block_of: BlockOf | None = None,
    max_padding: float = 0.01,
    zero: int = 3,
) -> nn.Module:
    """Makes the parameters of ``module`` that no inner call has taken one unit: gathered, reduced and freed together.

    The module is changed in place: its class becomes a subclass of it and of ``FSDPModule``.

    Args:
        module: Any module; call on inner modules first, on the root last.
        mesh: One-dimensional; its ranks share the parameters. All ranks when left out.
        reshard_after_forward: Free the whole parameters after forward and gather them again for backward; None is True,
            except at the root.
        mp_policy: torch's ``MixedPrecisionPolicy``: ``param_dtype`` of compute and all-gather, ``reduce_dtype`` (None
            is ``param_dtype``), and so on.
        offload_policy: torch's ``OffloadPolicy``.
        ignored_params: Parameters to leave alone.
        block_of: Block of a parameter, from its name in the outermost sharded module; ``Rules.block_of``, or any
            function. None: single elements.
        max_padding: Padding that may be paid to keep blocks whole, as a fraction of the elements of all units that
            have the same.
        zero: ZeRO stage; 3 cuts parameters, gradients and optimizer state.

    Returns:
        The module itself.

    Raises:
        ValueError: For an argument of the wrong kind or range, or a module that is sharded already.
        NotImplementedError: For an option that is legal but not built.
    """
    _check(module, mesh, reshard_after_forward, offload_policy, max_padding, zero)
    state = ShardState(
        module,
        mesh=mesh,
        reshard_after_forward=None if reshard_after_forward is None else bool(reshard_after_forward),
        mp_policy=mp_policy or MixedPrecisionPolicy(),
        ignored=frozenset(map(id, ignored_params or ())),
        block_of=block_of,
        max_padding=max_padding,
    )
    _install(state)
    return module


def _check(module: Any, mesh: Any, reshard: Any, offload: Any, max_padding: float, zero: int) -> None:
    problems, missing = [], []
    if isinstance(module, list | tuple):
        missing.append("a list of modules as one unit; call it on their common parent")
    elif not isinstance(module, nn.Module):
        problems.append(f"module must be an nn.Module, got {type(module).__name__}")
    elif isinstance(module, FSDPModule):
        problems.append(f"{type(module).__name__} is sharded already")
    elif isinstance(module, nn.ModuleList | nn.ModuleDict):
        problems.append(f"{type(module).__name__} has no forward; call fully_shard on each of its modules")
    if mesh is not None and mesh.ndim != 1:
        missing.append(f"a mesh of {mesh.ndim} axes; slice one axis out of it")
    if not (reshard is None or isinstance(reshard, bool)):
        missing.append(f"reshard_after_forward={reshard!r}; use True, False or None")
    if offload is not None and type(offload) is not OffloadPolicy:
        missing.append(f"{type(offload).__name__}; use OffloadPolicy()")
    if not max_padding >= 0:
        problems.append(f"max_padding must be a fraction >= 0, got {max_padding}")
    if zero not in (0, 1, 2, 3):
        problems.append(f"zero must be 0, 1, 2 or 3, got {zero!r}")
    elif zero != 3:
        missing.append(f"zero={zero}; use 3")
    if problems:
        raise ValueError("fully_shard: " + "; ".join(problems))
    if missing:
        raise NotImplementedError("fully_shard cannot yet do " + "; ".join(missing))


def _install(state: ShardState) -> None:
    """Gives the module its class and hooks, and tells the sharded modules inside who is above them."""
    module, cls = state.module, type(state.module)
    module.__class__ = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
    module._vescale_state = state  # type: ignore[assignment]

    def pre_forward(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        commit(state)
        return state.pre_forward(module, args, kwargs)

    module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(state.post_forward, prepend=False)
    for inner in module.modules():
        for param in inner._parameters.values():
            if param is not None and home_of(param) is None and id(param) not in state.ignored:
                param.__dict__[PENDING] = True
        below = state_of(inner)
        if below is not None and below is not state and below.parent is None:
            below.parent = state
