"""Optimizer-centric fully sharded training on stock PyTorch: an open implementation of veScale-FSDP (arXiv 2602.22437).

Names are imported when first used, so that commands which only read configuration start without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vescale.backward_step import step_in_backward as step_in_backward
    from vescale.block import Block as Block
    from vescale.counting import Counters as Counters
    from vescale.counting import counters as counters
    from vescale.dbuffer import DBuffer as DBuffer
    from vescale.fsdp import fully_shard as fully_shard
    from vescale.fsdp import register_fsdp_forward_method as register_fsdp_forward_method
    from vescale.fsdp_module import FSDPModule as FSDPModule
    from vescale.fsdp_module import UnshardHandle as UnshardHandle
    from vescale.full_state import full_state_dict as full_state_dict
    from vescale.full_state import iter_full_state as iter_full_state
    from vescale.full_state import load_full as load_full
    from vescale.grad_norm import clip_grad_norm_ as clip_grad_norm_
    from vescale.meta_init import materialize as materialize
    from vescale.optimizer import Optimizer as Optimizer
    from vescale.placement import RaggedShard as RaggedShard
    from vescale.ragged_tensor import RaggedTensor as RaggedTensor
    from vescale.ragged_tensor import distribute as distribute
    from vescale.ragged_tensor import from_local as from_local
    from vescale.ragged_tensor import redistribute as redistribute
    from vescale.rule import Rules as Rules

_HOME = {
    "Block": "block", "Counters": "counting", "counters": "counting",
    "DBuffer": "dbuffer", "step_in_backward": "backward_step", "FSDPModule": "fsdp_module",
    "UnshardHandle": "fsdp_module", "fully_shard": "fsdp", "register_fsdp_forward_method": "fsdp",
    "full_state_dict": "full_state", "iter_full_state": "full_state", "load_full": "full_state",
    "materialize": "meta_init",
    "clip_grad_norm_": "grad_norm", "Optimizer": "optimizer", "RaggedShard": "placement",
    "RaggedTensor": "ragged_tensor", "distribute": "ragged_tensor", "from_local": "ragged_tensor",
    "redistribute": "ragged_tensor", "Rules": "rule",
}  # fmt: skip

__all__ = list(_HOME)

# Names of torch.distributed.fsdp that people will look for here.
_ELSEWHERE = {
    "share_comm_ctx": "nothing to share: every model of a process uses the same streams already; drop the call",
    "DataParallelMeshDims": 'pass the axes as mesh=mesh["name"] or mesh=mesh["replicate", "shard"]',
    "MixedPrecisionPolicy": "use torch.distributed.fsdp's",
    "OffloadPolicy": "use torch.distributed.fsdp's",
    "CPUOffloadPolicy": "use torch.distributed.fsdp's",
    "FullyShardedDataParallel": "FSDP1: call fully_shard on each layer, then on the model",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        why = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise AttributeError(f"module 'vescale' has no attribute {name!r}{why}")
    return getattr(import_module(f"vescale.{_HOME[name]}"), name)
