"""Communication is under way while other units compute: what fails when somebody serialises it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from works import Event, Works

DEPTH, WIDTH = 5, 8


class Layer(nn.Module):
    """Layer ``index`` has WIDTH * (WIDTH + index) weights, so that a buffer's size tells whose it is."""

    def __init__(self, index: int, works: list[Works]) -> None:
        super().__init__()
        self.index, self.works = index, works
        self.up = nn.Linear(WIDTH, 64 * (index + 1), bias=False)
        self.down = nn.Linear(64 * (index + 1), WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.down(torch.relu(self.up(x)))
        if self.works:
            self.works[-1].note("forward", f"layer {self.index}")
            if y.requires_grad:  # runs when the gradient of what goes in is there: the layer's products are behind it
                x.register_hook(lambda grad: self.works[-1].note("backward", f"layer {self.index}"))
        return y


def _log(micros: int, **setters: bool) -> tuple[list[Event], dict[int, int]]:
    from vescale import fully_shard

    works: list[Works] = []
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Layer(index, works) for index in range(DEPTH)))
    mesh = init_device_mesh("cpu", (2,))
    for layer in list(model)[1:]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.randn(3, WIDTH)
    model(x).sum().backward()  # records the order
    owners = {s.plan.numel: layer.index for layer in list(model)[1:] for s in next(layer.units()).segments}
    model.zero_grad()
    with Works() as recorder:
        works.append(recorder)
        for micro in range(micros):
            model.set_requires_gradient_sync(micro == micros - 1)
            model(x).sum().backward()
    return recorder.log, owners


def _find(log: list[Event], what: str, call: str, number: int | None = None) -> list[int]:
    return [i for i, e in enumerate(log) if (e.what, e.call) == (what, call) and number in (None, e.number)]


def _order() -> tuple[list[Event], dict[int, int]]:
    return _log(1)


def test_gathers_and_reductions_run_behind_the_neighbours_compute(pool) -> None:
    log, owners = pool(2).run(_order)[0]
    begun = [e for e in log if e.what == "start" and e.numel in owners]
    starts = {call: [e for e in begun if e.call == call] for call in ("all_gather", "reduce_scatter")}
    assert [owners[e.numel] for e in starts["all_gather"]] == [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]
    assert [owners[e.numel] for e in starts["reduce_scatter"]] == [4, 3, 2, 1, 0]
    for event in starts["all_gather"][:DEPTH]:  # forward: begun before the layer before is done, waited for after
        at = owners[event.numel]
        (start,), (wait,) = (_find(log, what, "all_gather", event.number) for what in ("start", "wait"))
        if at:
            (before,) = _find(log, "forward", f"layer {at - 1}")
            assert start < before < wait, f"the gather of layer {at} does not run behind layer {at - 1}"
    for event in starts["all_gather"][DEPTH:]:
        at = owners[event.numel]
        (start,), (wait,) = (_find(log, what, "all_gather", event.number) for what in ("start", "wait"))
        if at < DEPTH - 1:
            (before,) = _find(log, "backward", f"layer {at + 1}")
            assert start < before < wait, f"the gather of layer {at} does not run behind the backward of {at + 1}"
    for event in starts["reduce_scatter"]:
        at = owners[event.numel]
        (start,), (wait,) = (_find(log, what, "reduce_scatter", event.number) for what in ("start", "wait"))
        if at:
            (behind,) = _find(log, "backward", f"layer {at - 1}")
            assert start < behind < wait, f"the reduction of layer {at} does not run behind the backward of {at - 1}"


def test_at_most_two_layers_are_gathered_and_one_is_reduced_at_a_time(pool) -> None:
    log, owners = pool(2).run(_order)[0]
    gathered, reducing = set(), set()
    for event in log:
        if event.what == "start" and event.numel in owners:
            (gathered if event.call == "all_gather" else reducing).add(owners[event.numel])
        if event.what == "wait" and event.call == "reduce_scatter":
            reducing.discard(owners.get(event.numel))
        if event.what in ("forward", "backward"):  # freed when it is done
            gathered.discard(int(event.call.split()[1]))
        assert len(gathered) <= 2 and len(reducing) <= 1, (event, gathered, reducing)


@pytest.mark.parametrize("micros", [1, 3])
def test_accumulation_reduces_nothing_before_the_last_micro_batch(pool, micros: int) -> None:
    log, owners = pool(2).run(_log, micros)[0]
    reduced = [i for i, e in enumerate(log) if e.call == "reduce_scatter" and e.what == "start" and e.numel in owners]
    assert len(reduced) == DEPTH
    assert reduced[0] > _find(log, "forward", f"layer {DEPTH - 1}")[-1]
