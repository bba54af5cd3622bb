"""Every public name of torch.distributed.fsdp and of its FSDPModule has a row in the README, and the row is true."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import Replicate, distribute_tensor

README = Path(__file__).parents[2] / "README.md"


def _rows() -> dict[str, str]:
    """Name to "works", "refused" or "torch's"."""
    table = README.read_text().split("## Coming from FSDP2")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (works|refused|torch's) \|", table, flags=re.M)
    return {name: verdict for names, verdict in rows for name in re.findall(r"`([^`]+)`", names)}


def _methods(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


def test_every_name_has_a_row() -> None:
    names = {*fsdp.__all__, *_methods(fsdp.FSDPModule), *list(inspect.signature(fsdp.fully_shard).parameters)[1:]}
    assert names <= _rows().keys(), names - _rows().keys()


def test_what_works_is_there_and_takes_the_same_arguments() -> None:
    import vescale

    for name, verdict in _rows().items():
        if verdict != "works":
            continue
        for theirs, ours in ((fsdp, vescale), (fsdp.FSDPModule, vescale.FSDPModule)):
            if name in vars(theirs) and callable(getattr(theirs, name)) and name != "FSDPModule":
                wanted = set(inspect.signature(getattr(theirs, name)).parameters)
                assert wanted <= set(inspect.signature(getattr(ours, name)).parameters), name


def _refusals() -> None:
    import vescale

    model = vescale.fully_shard(nn.Linear(3, 3))
    for name, verdict in _rows().items():
        if verdict == "refused" and hasattr(fsdp.FSDPModule, name):
            with pytest.raises(NotImplementedError, match=f"{name}: .{{20}}"):
                getattr(model, name)(True)
        elif verdict == "refused" and name in fsdp.__all__:
            with pytest.raises(AttributeError, match=name):
                getattr(vescale, name)
    for option in ("shard_placement_fn", "dp_mesh_dims"):
        with pytest.raises(NotImplementedError, match=f"{option};"):
            vescale.fully_shard(nn.Linear(3, 3), **{option: object()})
    for call in ("set_force_sum_reduction_for_comms", "set_reduce_scatter_unused_params"):
        with pytest.raises(ValueError, match=f"{call}: expected True, got False"):
            getattr(model, call)(False)
    with pytest.raises(NotImplementedError, match="set_symm_mem_for_comm: expected .*gloo on cpu.*drop the call"):
        model.set_symm_mem_for_comm()
    with pytest.raises(NotImplementedError, match="for_comm: gloo on cpu has no memory of its own"):
        model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_allocate_memory_from_process_group_for_comm(False)
    with pytest.raises(ValueError, match="set_custom_all_gather: expected a function, got int"):
        model.set_custom_all_gather(3)
    model.set_custom_all_gather(lambda *args, **options: None)
    with pytest.raises(ValueError, match="set_symm_mem_for_comm: a collective of this module is custom"):
        model.set_symm_mem_for_comm()
    model.set_custom_all_gather(None)
    with pytest.raises(NotImplementedError, match="no stream"):
        model.set_all_reduce_hook(lambda shard: None, stream=object())
    with pytest.raises(ValueError, match="expected True or False, got 1"):
        model.set_reshard_after_forward(1)
    with pytest.raises(ValueError, match="got Linear"):
        model.set_modules_to_forward_prefetch([nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="one outermost"):
        model.set_modules_to_backward_prefetch([vescale.fully_shard(nn.Linear(3, 3))])
    with pytest.raises(ValueError, match="no method 'generate'"):
        vescale.register_fsdp_forward_method(model, "generate")
    vescale.register_fsdp_forward_method(nn.Linear(2, 2), "generate")  # of no unit: nothing to do
    assert vescale.fully_shard(nn.Linear(2, 2)).unshard() is None


class Extended(torch.Tensor):
    """As quantised weights extend FSDP2's all-gather."""

    def fsdp_pre_all_gather(self, mesh: object) -> tuple[object, ...]:
        return (self,), None


def _parameters() -> None:
    from vescale import fully_shard

    parallel, extended = nn.Linear(4, 4), nn.Linear(4, 4)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    parallel.weight = nn.Parameter(distribute_tensor(parallel.weight.detach(), mesh, [Replicate()]))
    extended.weight = nn.Parameter(extended.weight.detach().as_subclass(Extended))
    with pytest.raises(NotImplementedError, match="weight, a DTensor .*tensor parallel"):
        fully_shard(parallel)
    with pytest.raises(NotImplementedError, match="weight, a .* with fsdp_pre_all_gather"):
        fully_shard(extended)
    fully_shard(extended, ignored_params={extended.weight})
    with pytest.raises(ValueError, match="weight has no shape yet"):
        fully_shard(nn.LazyLinear(3))
    with pytest.raises(ValueError, match="twice in the list, or inside another"):
        fully_shard([parallel, parallel])
    with pytest.raises(ValueError, match="at least one module.*ignored_params must be Parameters"):
        fully_shard([], ignored_params={"weight"})


def test_what_is_refused_says_what_to_do(pool) -> None:
    pool(2).run(_refusals)
    pool(2).run(_parameters)
