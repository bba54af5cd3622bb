"""A RaggedTensor is its logical tensor.

Every operator it answers gives the numbers of the whole, on any number of ranks. Reported cases among them: cuts
that are uneven on two axes (T-U3, pytorch#148894); norms over several meshes (T-C1, pytorch#180346) that are complete
scalars (T-C2); empty runs in torch's optimizers and checkpoints (T-U11, T-S1).
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

SHAPE = (5, 7)


def _setup(offset: int = 3, size: int = 13):
    from vescale import RaggedShard, distribute

    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(1)
    whole = torch.randn(SHAPE)
    size = max(size, -(-(whole.numel() + offset) // world))
    placement = RaggedShard.of_slot(SHAPE, offset=offset, shard_size=size, num_ranks=world)
    return mesh, whole, placement, distribute(whole, mesh, [placement])


def _operators() -> None:
    _, whole, _, ragged = _setup()
    assert torch.equal(ragged.full_tensor(), whole)
    assert torch.equal((ragged * 2 + ragged.abs().sqrt()).full_tensor(), whole * 2 + whole.abs().sqrt())
    assert torch.equal(torch.where(ragged > 0, ragged, -ragged).full_tensor(), whole.abs())
    assert torch.equal(ragged.bfloat16().full_tensor(), whole.bfloat16())
    ours = [t.full_tensor() for t in torch._foreach_add([ragged, ragged], [ragged, ragged * 3])]
    assert all(map(torch.equal, ours, [whole * 2, whole + whole * 3]))
    for reduce in (torch.max, torch.min, torch.sum, torch.mean):
        torch.testing.assert_close(reduce(ragged), reduce(whole))
    for p in (0, 1, 2, 3.5, float("inf"), -float("inf")):
        torch.testing.assert_close(torch.linalg.vector_norm(ragged, p), torch.linalg.vector_norm(whole, p))
    assert bool((ragged == ragged).all()) and not bool((ragged != ragged).any())
    assert torch.equal(ragged, ragged.clone()) and not torch.equal(ragged, ragged + 1)
    assert type(torch.linalg.vector_norm(ragged)) is torch.Tensor
    for name in ("normal_", "uniform_", "exponential_"):
        torch.manual_seed(9)
        drawn = getattr(torch.empty_like(ragged), name)().full_tensor()
        torch.manual_seed(9)
        assert torch.equal(drawn, getattr(torch.empty(SHAPE), name)()), name
    torch.manual_seed(9)
    drawn = torch.randn_like(ragged).full_tensor()
    torch.manual_seed(9)
    assert torch.equal(drawn, torch.randn(SHAPE))
    twin = copy.deepcopy(ragged)
    twin.zero_()
    assert ragged.full_tensor().any() and not twin.full_tensor().any()


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_operators_give_the_numbers_of_the_whole(pool, world: int) -> None:
    pool(world).run(_operators)


def _parts() -> None:
    """Rows are views: what initialisers and users write there is in the tensor."""
    _, whole, _, ragged = _setup()
    for tensor in (whole, ragged):
        tensor[1].fill_(3.0)
        tensor[-1, 2:4].zero_()
        tensor[2:4] *= 2
        tensor[0].copy_(torch.arange(7.0))
        tensor.masked_fill_(tensor > 2.5, 1.5)
        torch.manual_seed(4)
        nn.init.trunc_normal_(tensor[4:])
    assert torch.equal(ragged.full_tensor(), whole)
    assert torch.equal(ragged[1:4].full_tensor(), whole[1:4]) and ragged[3:3].full_tensor().shape == (0, 7)
    for wrong in (lambda t: t[:, 1], lambda t: t[::2], lambda t: t[1, 2], lambda t: t.new_empty(3)):
        with pytest.raises(NotImplementedError, match="RaggedTensor"):
            wrong(ragged)


@pytest.mark.parametrize("world", [1, 3])
def test_rows_are_views(pool, world: int) -> None:
    pool(world).run(_parts)


def _refusals() -> None:
    from vescale import RaggedShard, from_local, redistribute

    mesh, whole, placement, ragged = _setup()
    with pytest.raises(NotImplementedError, match="full_tensor"):
        ragged @ ragged.new_zeros(())
    with pytest.raises(ValueError, match="cut differently"):
        ragged + whole
    other = redistribute(ragged, [RaggedShard((0,), (5,) + (0,) * (mesh.size() - 1))])
    with pytest.raises(ValueError, match="cut differently"):
        ragged + other
    with pytest.raises(ValueError, match="cut differently"):
        torch._foreach_mul_([ragged], [other])
    with pytest.raises(NotImplementedError, match="pickled"):
        copy.copy(ragged)
    with pytest.raises(ValueError, match="expected a 1-D local run"):
        from_local(torch.zeros(99), mesh, [placement], shape=SHAPE)
    with pytest.raises(ValueError, match="whole shape"):
        ragged.copy_(torch.zeros(7))


def test_what_a_run_cannot_answer_raises(pool) -> None:
    pool(2).run(_refusals)


def _redistribute() -> None:
    from vescale import RaggedShard, RaggedTensor, redistribute

    mesh, whole, placement, ragged = _setup()
    world = mesh.size()
    for units in ([5] + [0] * (world - 1), [0] * (world - 1) + [5], [1] * (world - 1) + [6 - world]):
        moved = redistribute(ragged, [RaggedShard((0,), units)])
        assert torch.equal(moved.full_tensor(), whole)
        assert torch.equal(redistribute(moved, [placement]).to_local(), ragged.to_local())
    assert torch.equal(ragged.redistribute(placements=[Replicate()]).to_local(), whole)
    assert torch.equal(ragged.redistribute(placements=[Shard(0)]).full_tensor(), whole)
    replicated = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    assert torch.equal(redistribute(replicated, [placement]).full_tensor(), whole)
    partial = DTensor.from_local(whole * (dist.get_rank() + 1), mesh, [Partial()], run_check=False)
    torch.testing.assert_close(redistribute(partial, [placement]).full_tensor(), whole * (world * (world + 1) // 2))
    leaf = ragged.detach().requires_grad_()
    (leaf.full_tensor() * whole).sum().backward()
    assert isinstance(leaf.grad, RaggedTensor) and torch.equal(leaf.grad.full_tensor(), whole)
    leaf.grad = None
    leaf.to_local().sum().backward()
    assert torch.equal(leaf.grad.full_tensor(), torch.ones(SHAPE))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_change_of_cut_keeps_the_tensor(pool, world: int) -> None:
    pool(world).run(_redistribute)


def _stock_optimizers() -> None:
    from vescale import distribute

    mesh, whole, placement, _ = _setup()
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        ours, single = torch.nn.Parameter(distribute(whole, mesh, [placement])), torch.nn.Parameter(whole.clone())
        optimizers = [torch.optim.AdamW([p], lr=0.1, **options) for p in (ours, single)]
        for step in range(3):
            grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))
            ours.grad, single.grad = distribute(grad, mesh, [placement]), grad.clone()
            norms = [torch.nn.utils.clip_grad_norm_([p], 0.5) for p in (ours, single)]
            torch.testing.assert_close(*norms)
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(ours.full_tensor(), single.data, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_torchs_adamw_and_clipping_work_unchanged(pool, world: int) -> None:
    pool(world).run(_stock_optimizers)


def _save(folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": _setup()[3]}, checkpoint_id=folder)
    staged = _setup()[3]
    saving = dcp.async_save({"w": staged}, checkpoint_id=f"{folder}/later")
    staged.zero_()  # what is written was copied before
    saving.result()


def _load(folder: str) -> torch.Tensor:
    import torch.distributed.checkpoint as dcp

    from vescale import RaggedShard, redistribute

    mesh, _, _, ragged = _setup()
    units = [0] * mesh.size()
    units[-1] = 5  # every other rank holds nothing
    target = redistribute(torch.zeros_like(ragged), [RaggedShard((0,), units)])
    dcp.load({"w": target}, checkpoint_id=folder)
    later = torch.zeros_like(target)
    dcp.load({"w": later}, checkpoint_id=f"{folder}/later")
    assert torch.equal(later, target)
    return target.full_tensor()


@pytest.mark.parametrize(("saved", "loaded"), [(3, 2), (2, 3), (4, 1), (1, 4)])
def test_torchs_distributed_checkpoint_moves_between_world_sizes(pool, tmp_path: Path, saved: int, loaded: int) -> None:
    pool(saved).run(_save, str(tmp_path))
    torch.manual_seed(1)
    whole = torch.randn(SHAPE)
    assert all(torch.equal(result, whole) for result in pool(loaded).run(_load, str(tmp_path)))


def _second_axis(sizes: tuple[int, int]) -> None:
    """RaggedShard on the first axis of a mesh, Shard(0) or Shard(1) on the second, which cuts first."""
    from vescale import RaggedShard, RaggedTensor, clip_grad_norm_, distribute, from_local, redistribute

    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    (dp, tp), rank = sizes, mesh.get_local_rank("dp")
    for shape, dim in (((6, 4), 0), ((6, 4), 1), ((5, 3), 0), ((3, 5), 1), ((4, 3, 6), 2)):  # uneven ones too (T-U3)
        torch.manual_seed(1)
        whole = torch.randn(shape)
        parts = [*whole.chunk(tp, dim), *[whole.narrow(dim, 0, 0)] * tp]  # the last ones may be empty
        part = parts[mesh.get_local_rank("tp")]
        for first in (0, min(5, part.numel()), part.numel()):
            cut = [first, part.numel() - first, *[0] * (dp - 2)] if dp > 1 else [part.numel()]
            placement = RaggedShard(range(part.ndim), cut)
            ragged = distribute(whole, mesh, [placement, Shard(dim)])
            run = slice(sum(cut[:rank]), sum(cut[: rank + 1]))
            assert torch.equal(ragged.to_local(), part.reshape(-1)[run]) and ragged.shape == whole.shape
            assert torch.equal(ragged.full_tensor(), whole)
            inner = redistribute(ragged, [Replicate(), Shard(dim)])
            assert not isinstance(inner, RaggedTensor) and torch.equal(inner.to_local(), part)
            assert torch.equal(redistribute(inner, [placement, Shard(dim)]).to_local(), ragged.to_local())
            assert torch.equal(ragged.redistribute(placements=[Replicate(), Replicate()]).to_local(), whole)
            other = RaggedShard(range(part.ndim), [*[0] * (dp - 1), part.numel()])
            assert torch.equal(redistribute(ragged, [other, Shard(dim)]).full_tensor(), whole)
            partial = DTensor.from_local(part * (rank + 1), mesh, [Partial(), Shard(dim)],
                                         run_check=False, shape=whole.shape, stride=whole.stride())  # fmt: skip
            torch.testing.assert_close(
                redistribute(partial, [placement, Shard(dim)]).full_tensor(), whole * (dp * (dp + 1) // 2)
            )
            for reduce in (torch.max, torch.min, torch.sum, torch.mean, torch.linalg.vector_norm):
                torch.testing.assert_close(reduce(ragged), reduce(whole))
            torch.manual_seed(9)
            drawn = torch.empty_like(ragged).normal_().full_tensor()
            torch.manual_seed(9)
            assert torch.equal(drawn, torch.empty(shape).normal_())
            leaf = ragged.detach().requires_grad_()
            (leaf.full_tensor() * whole).sum().backward()
            assert torch.equal(leaf.grad.full_tensor(), whole)
            norm = clip_grad_norm_([leaf], 1.0)
            torch.testing.assert_close(norm, torch.linalg.vector_norm(whole))
            torch.testing.assert_close(leaf.grad.full_tensor(), whole / (norm + 1e-6))
            boxes = leaf.__create_chunk_list__()
            assert sum(box.sizes.numel() for box in boxes) == leaf.to_local().numel()
            for box in boxes:
                index = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
                assert torch.equal(ragged.__get_tensor_shard__(_at(box.offsets)), whole[index])
            assert torch.equal(torch._foreach_add([ragged], [ragged])[0].full_tensor(), whole * 2)
    with pytest.raises(ValueError, match="units"):
        from_local(torch.zeros(3), mesh, [RaggedShard((0,), [1] * dp), Shard(0)], shape=(48, 1))
    with pytest.raises(NotImplementedError, match="one RaggedShard"):
        distribute(torch.ones(4, 4), mesh, [RaggedShard((0,), [4] + [0] * (dp - 1)), Partial()])


def _at(offsets: torch.Size):
    from torch.distributed.checkpoint.metadata import MetadataIndex

    return MetadataIndex("w", offsets)


@pytest.mark.parametrize("sizes", [(2, 2), (2, 1), (1, 2), (3, 1), (1, 3)])
def test_a_second_mesh_axis_of_shard_cuts_first(pool, sizes: tuple[int, int]) -> None:
    pool(sizes[0] * sizes[1]).run(_second_axis, sizes)


def _norms(sizes: tuple[int, int]) -> None:
    """Ragged, stock and plain gradients of three meshes and three dtypes, some runs empty: one complete scalar."""
    from vescale import RaggedShard, clip_grad_norm_, distribute

    world = dist.get_world_size()
    one, two = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    whole = [torch.randn(6, 4), torch.randn(6, 4, dtype=torch.float64), torch.randn(8).bfloat16(), torch.randn(5),
             torch.randn(7, 3), torch.randn(2, 2)]  # fmt: skip
    last = [0] * (world - 1)
    rows = 6 // sizes[1]
    half = RaggedShard((0,), [1, rows - 1, *[0] * (sizes[0] - 2)] if sizes[0] > 1 else [rows])
    sharded = [
        distribute(whole[0], one, [RaggedShard((0,), (*last, 6))]),
        distribute(whole[1], two, [half, Shard(0)]),
        distribute(whole[2], two, [RaggedShard((0,), [*[0] * (sizes[0] - 1), 8]), Replicate()]),
        whole[3].clone(),
        torch.distributed.tensor.distribute_tensor(whole[4], one, [Shard(0)]),
        torch.distributed.tensor.distribute_tensor(whole[5], two, [Replicate(), Shard(1)]),
    ]
    for p in (2.0, 1.0, 3.0, float("inf")):
        params = [torch.nn.Parameter(torch.zeros_like(t)) for t in sharded]
        for param, grad in zip(params, sharded, strict=True):
            param.grad = grad.clone()
        expected = torch.linalg.vector_norm(torch.cat([t.float().flatten() for t in whole]), p)
        norm = clip_grad_norm_(params, 0.1, p)
        assert type(norm) is torch.Tensor and norm.dtype is torch.float32 and norm.shape == ()
        torch.testing.assert_close(norm, expected)
        for param, t in zip(params, whole, strict=True):
            clipped = param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad
            wanted = (t.float() * (0.1 / (expected + 1e-6))).to(t.dtype)
            torch.testing.assert_close(clipped, wanted, rtol=1e-2 if t.dtype is torch.bfloat16 else 1e-5, atol=1e-6)
    partial = torch.nn.Parameter(DTensor.from_local(torch.ones(2), one, [Replicate()], run_check=False))
    partial.grad = DTensor.from_local(torch.ones(2), one, [Partial()], run_check=False)
    with pytest.raises(ValueError, match="partial sum"):
        clip_grad_norm_([partial], 1.0)


@pytest.mark.parametrize("sizes", [(2, 2), (2, 1), (1, 3), (3, 1)])
def test_clipping_over_meshes_dtypes_and_empty_runs_is_complete(pool, sizes: tuple[int, int]) -> None:
    pool(sizes[0] * sizes[1]).run(_norms, sizes)


def _low_precision() -> None:
    """Partial results are added up in float32 or wider: float16 squares overflow from 256 on, bfloat16 has 8 bits."""
    from vescale import RaggedShard, distribute

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cut = RaggedShard((0,), [100, *[0] * (mesh.size() - 2), 2900])
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        whole = (torch.randn(3000, generator=torch.Generator().manual_seed(0)) * 10 + 1).to(dtype)
        ragged = distribute(whole, mesh, [cut])
        for p in (0, 1, 2, 3, float("inf")):
            torch.testing.assert_close(torch.linalg.vector_norm(ragged, p), torch.linalg.vector_norm(whole, p))
            torch.testing.assert_close(torch._foreach_norm([ragged], p)[0], torch._foreach_norm([whole], p)[0])
        torch.testing.assert_close(ragged.norm(dtype=torch.float64), whole.norm(dtype=torch.float64))
        for reduce in (torch.sum, torch.mean):
            torch.testing.assert_close(reduce(ragged), reduce(whole))
        assert torch.sum(ragged > 0) == torch.sum(whole > 0)
    wave = torch.randn(12, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    ragged = distribute(wave, mesh, [RaggedShard((0,), [4, *[0] * (mesh.size() - 2), 8])])
    torch.testing.assert_close(torch.linalg.vector_norm(ragged), torch.linalg.vector_norm(wave))
    torch.testing.assert_close(torch.sum(ragged), torch.sum(wave))


@pytest.mark.parametrize("world", [2, 3])
def test_reductions_of_every_dtype_are_as_exact_as_the_wholes(pool, world: int) -> None:
    pool(world).run(_low_precision)
