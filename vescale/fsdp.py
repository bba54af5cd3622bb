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
from vescale.segments import Capacity
from vescale.shard_state import BlockOf, ShardState, state_of
from vescale.shards import Ranks
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
    capacity: Capacity = None,
) -> nn.Module:
    """Makes the parameters of ``module`` that no inner call has taken one unit: gathered, reduced and freed together.

    The module is changed in place: its class becomes a subclass of it and of ``FSDPModule``.

    Args:
        module: Any module; call on inner modules first, on the root last.
        mesh: One axis: its ranks share the parameters. Two axes: the ranks of the second share them, the first holds
            copies (HSDP). All ranks on one axis when left out.
        reshard_after_forward: Free the whole parameters after forward and gather them again for backward; None is True,
            except at the root. A number shares them out among so many neighbouring ranks instead, e.g. those of one
            node, and backward gathers among these.
        mp_policy: torch's ``MixedPrecisionPolicy``: ``param_dtype`` of compute and all-gather, ``reduce_dtype`` (None
            is ``param_dtype``), and so on.
        offload_policy: torch's ``OffloadPolicy``; ``CPUOffloadPolicy`` keeps master shards, gradients and so the
            optimizer's state on the CPU.
        ignored_params: Parameters to leave alone.
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
    _check(module, mesh, reshard_after_forward, offload_policy, max_padding, zero)
    if capacity is not None and Ranks.of(len(capacity), capacity).capacity:
        raise NotImplementedError(
            "fully_shard cannot yet do capacity: shards of unequal size; see vescale.commit.preview"
        )
    state = ShardState(
        module,
        mesh=mesh,
        reshard_after_forward=_whole_number(reshard_after_forward),
        mp_policy=mp_policy or MixedPrecisionPolicy(),
        offload_policy=offload_policy or OffloadPolicy(),
        zero=zero,
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
    if mesh is not None and mesh.ndim > 2:
        problems.append(f"expected a mesh of one axis, or of two for HSDP, got {mesh.ndim}; slice them out of it")
    if not (reshard is None or isinstance(reshard, int)) or (type(reshard) is int and reshard < 1):
        problems.append(f"reshard_after_forward must be True, False, None or a number of ranks, got {reshard!r}")
    if reshard not in (None, True, False) and zero in (0, 1, 2):
        problems.append(f"zero={zero} keeps the gathered parameters; leave reshard_after_forward={reshard} out")
    if not (offload is None or isinstance(offload, OffloadPolicy)):
        problems.append(f"offload_policy must be an OffloadPolicy, got {type(offload).__name__}")
    if not max_padding >= 0:
        problems.append(f"max_padding must be a fraction >= 0, got {max_padding}")
    if zero not in (0, 1, 2, 3):
        problems.append(f"zero must be 0, 1, 2 or 3, got {zero!r}")
    if problems:
        raise ValueError("fully_shard: " + "; ".join(problems))
    if missing:
        raise NotImplementedError("fully_shard cannot yet do " + "; ".join(missing))


def _whole_number(reshard: bool | int | None) -> bool | int | None:
    """One rank's part of the parameters is all of them: nothing is freed."""
    return False if reshard is not None and not isinstance(reshard, bool) and reshard == 1 else reshard


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
