"""The collectives are torch's, in place and in flight."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist


def _equal_to_torch(world: int, dtype: torch.dtype) -> None:
    from vescale import collectives

    rank, size = dist.get_rank(), 64
    mine = torch.arange(world * size, dtype=torch.float32).mul_(rank + 1).to(dtype)
    slot = mine[rank * size : (rank + 1) * size].clone()
    expected = torch.empty(world * size, dtype=dtype)
    dist.all_gather_single(expected, slot)
    for inside in (True, False):
        out = torch.full((world * size,), float("nan"), dtype=dtype)
        part = out[rank * size : (rank + 1) * size].copy_(slot) if inside else slot
        handle = collectives.all_gather(out, part, group=dist.group.WORLD, async_op=True)
        assert handle is not None
        handle.wait()
        assert torch.equal(out, expected)
    summed = torch.empty(size, dtype=torch.float32)
    dist.reduce_scatter_single(summed, mine.float())
    for inside in (True, False):
        full = mine.clone()
        out = full[rank * size : (rank + 1) * size] if inside else torch.full((size,), float("nan"), dtype=dtype)
        assert collectives.reduce_scatter(out, full, group=dist.group.WORLD) is None
        torch.testing.assert_close(out.float(), summed, rtol=2**-7 if dtype is torch.bfloat16 else 0, atol=0)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gather_and_reduce_equal_torchs(pool, world: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        pool(world).run(_equal_to_torch, world, dtype)


def _in_flight(world: int) -> None:
    from vescale import collectives

    group, rank = dist.group.WORLD, dist.get_rank()
    buffers = [torch.zeros(world * 4096) for _ in range(4)]
    for index, buffer in enumerate(buffers):
        buffer[rank * 4096 : (rank + 1) * 4096] = 10 * index + rank
    slots = [buffer[rank * 4096 : (rank + 1) * 4096] for buffer in buffers]
    gathers = [collectives.all_gather(b, s, group=group, async_op=True) for b, s in zip(buffers, slots, strict=True)]
    sums = [torch.empty(64) for _ in range(3)]
    fulls = [torch.full((world * 64,), float(index + rank)) for index in range(3)]
    reduces = [collectives.reduce_scatter(s, f, group=group, async_op=True) for s, f in zip(sums, fulls, strict=True)]
    for handle in (*reversed(gathers), *reversed(reduces)):  # in another order than they began
        handle.wait()
        handle.wait()  # a second wait does nothing
    for index, buffer in enumerate(buffers):
        assert torch.equal(buffer.view(world, -1)[:, 0], torch.arange(world) + 10.0 * index)
    for index, value in enumerate(sums):
        assert value.eq(world * index + sum(range(world))).all()


def test_several_in_flight_do_not_mix(pool) -> None:
    pool(3).run(_in_flight, 3)


def _plan_differs(world: int) -> None:
    from vescale import collectives

    with pytest.raises(RuntimeError, match="a plan differs between ranks.*rank 0: 0.*rank 1: 1"):
        collectives.same_on_every_rank(str(dist.get_rank()), what="a plan", group=dist.group.WORLD)


def test_a_difference_is_an_error_on_every_rank(pool) -> None:
    pool(2).run(_plan_differs, 2)
