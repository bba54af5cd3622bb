"""A DBuffer's views are its memory: gathering copies nothing, reducing leaves each rank its sum."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from vescale.planner import SegmentPlan, TensorSpec, plan_segment

SHAPES = ((6, 8), (5, 5), (24,))


def _plan(ranks: int) -> SegmentPlan:
    return plan_segment([TensorSpec("a", 48, 8), TensorSpec("b", 25, 1), TensorSpec("c", 24, 1)], num_ranks=ranks)


def test_the_picture() -> None:
    plan = _plan(2)
    assert (plan.shard_size, plan.numel) == (64, 128)
    assert [plan.interval(i) for i in range(3)] == [(0, 48), (64, 89), (96, 120)]
    assert plan.gaps() == [(48, 64), (89, 96), (120, 128)]


def _round_trip() -> None:
    from vescale import DBuffer, RaggedTensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = _plan(mesh.size())
    values = [torch.randn(s, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(SHAPES)]
    sharded = DBuffer.zeros(plan, SHAPES, mesh, dtype=torch.float32, device="cpu")
    for i, value in enumerate(values):
        sharded.tensor(i).copy_(value)
        assert isinstance(sharded.tensor(i), RaggedTensor)
    full, work = sharded.all_gather(async_op=True)
    assert work is not None
    work.wait()
    for i, value in enumerate(values):
        assert torch.equal(full.view(i), value)
        assert full.view(i).untyped_storage().data_ptr() == full.local.untyped_storage().data_ptr()
        assert full.view(i).is_contiguous()
    assert full.slot().data_ptr() == full.local[mesh.get_local_rank() * plan.shard_size :].data_ptr()

    out = torch.full((plan.numel,), float("nan"), dtype=torch.bfloat16)
    low, _ = sharded.all_gather(out)
    assert low.local is out and all(torch.equal(low.view(i), v.bfloat16()) for i, v in enumerate(values))

    partial = DBuffer(plan, SHAPES, mesh, Partial(), torch.full((plan.numel,), float("nan")))
    for i, value in enumerate(values):
        partial.view(i).copy_(value * (mesh.get_local_rank() + 1))
    partial.zero_gaps()
    reduced, _ = partial.reduce_scatter()
    assert reduced.sharded and reduced.local.data_ptr() == partial.slot().data_ptr()
    total = sum(range(1, mesh.size() + 1))
    for i, value in enumerate(values):
        torch.testing.assert_close(reduced.tensor(i).full_tensor(), value * total)
    everything = torch.cat([value.flatten() for value in values])
    for p in (1.0, 2.0, float("inf")):
        torch.testing.assert_close(sharded.norm(p), torch.linalg.vector_norm(everything, p))
        for dtype in (torch.float64, torch.float16):
            other = sharded.sibling(Shard(0), sharded.local.to(dtype) * 100)
            expected = torch.linalg.vector_norm(everything.to(dtype) * 100, p, dtype=other.norm(p).dtype)
            torch.testing.assert_close(other.norm(p), expected)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gather_and_reduce_are_changes_of_placement_in_place(pool, world: int) -> None:
    pool(world).run(_round_trip)


def _refusals() -> None:
    from vescale import DBuffer

    mesh, plan = init_device_mesh("cpu", (2,)), _plan(2)
    with pytest.raises(ValueError, match="expected a flat local tensor of 64 elements"):
        DBuffer(plan, SHAPES, mesh, Shard(0), torch.zeros(65))
    sharded = DBuffer.zeros(plan, SHAPES, mesh, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match="a: a sharded DBuffer has no whole tensor"):
        sharded.view(0)
    with pytest.raises(ValueError, match="expected a partial"):
        sharded.reduce_scatter()
    with pytest.raises(ValueError, match="expected a sharded"):
        DBuffer(plan, SHAPES, mesh, Replicate(), torch.zeros(128)).all_gather()


def test_a_change_that_a_buffer_cannot_make_is_refused(pool) -> None:
    pool(2).run(_refusals)
