"""Copies of the parameters share the work on blocks: each is computed once in the world, and all copies stay equal."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from optimizers import SOAP, AdamW, Muon

SHAPES = {"a": (24, 40), "b": (40, 24), "c": (33, 17), "d": (16, 16), "stack": (3, 8, 12), "bias": (41,)}
MATRICES = [name for name, shape in SHAPES.items() if len(shape) > 1]
NUM_BLOCKS = 7  # four matrices, and a stack of three
GROUPS: dict[str, Any] = {"matrices": (MATRICES, Muon(lr=0.02)), "rest": ("*", AdamW(lr=0.01))}


def _build(shape: tuple[int, ...], groups: dict[str, Any], zero: int, **options: Any) -> tuple[nn.Module, Any]:
    from vescale import Optimizer, Rules, fully_shard

    torch.manual_seed(3)
    model, rules = nn.ParameterDict({k: nn.Parameter(torch.randn(s)) for k, s in SHAPES.items()}), Rules(**groups)
    fully_shard(model, mesh=init_device_mesh("cpu", shape), block_of=rules.block_of, max_padding=0.0, zero=zero)
    return model, Optimizer(model.named_parameters(), rules, **options)


def _train(shape: tuple[int, ...], zero: int, share: bool) -> dict[str, Any]:
    from vescale import counters, distribute
    from vescale.live import LiveBytes

    model, optimizer = _build(shape, GROUPS, zero, share_replicas=share)
    calls: list[int] = []
    original = Muon.block
    Muon.block = lambda self, payloads, state: (calls.append(len(payloads[0])), original(self, payloads, state))[1]
    try:
        with LiveBytes() as seen:
            for step in range(2):
                for name, param in model.named_parameters():
                    seed = torch.Generator().manual_seed(sum(map(ord, name)) * 1000 + step)
                    grad = torch.randn(SHAPES[name], generator=seed)
                    param.grad = distribute(grad, param.device_mesh, param.placements)
                if step == 0:
                    model["bias"].grad = None  # another set of runs
                seen.collectives.clear()
                before = counters(optimizer).exchange_bytes
                optimizer.step()
    finally:
        Muon.block = original
    sent = counters(optimizer).exchange_bytes - before
    # ByteDance-Seed/VeOmni #1011: with copies a gate never matched, and whole matrices were gathered instead.
    assert {call.name for call in seen.collectives} <= {"all_to_all"}
    assert sent == sum(call.nbytes * count for call, count in seen.collectives.items())
    return {
        "params": {name: param.full_tensor() for name, param in model.named_parameters()},
        "momenta": {name: optimizer.state[model[name]]["momentum"].full_tensor() for name in MATRICES},
        "blocks": sum(calls) / 2,
        "sent": sent,
        "flops": optimizer.loads[0].flops,
    }


@pytest.mark.parametrize(("shape", "zero", "copies"), [((2, 2), 3, 2), ((4,), 0, 4)])
def test_each_block_is_computed_once_in_the_world_and_all_copies_are_equal(pool, shape, zero, copies) -> None:
    alone, shared = (pool(4).run(_train, shape, zero, share) for share in (False, True))
    assert sum(rank["blocks"] for rank in alone) == copies * NUM_BLOCKS
    assert sum(rank["blocks"] for rank in shared) == NUM_BLOCKS
    for rank in shared:
        for kind in ("params", "momenta"):
            different = [n for n, value in rank[kind].items() if not torch.equal(value, alone[0][kind][n])]
            assert not different, f"{kind} {different}"
    flops = shared[0]["flops"]
    assert len(flops) == 4 and math.isclose(sum(flops) * copies, sum(alone[0]["flops"]) * copies)
    if copies == 4:  # nothing is cut: every direction goes, in bfloat16, to the three that did not compute it
        assert sum(rank["sent"] for rank in alone) == 0
        assert sum(rank["sent"] for rank in shared) == 3 * 2 * sum(math.prod(SHAPES[name]) for name in MATRICES)


def _refused() -> None:
    with pytest.raises(ValueError, match="share_replicas: expected copies of parameters .*got one copy"):
        _build((2,), GROUPS, 3, share_replicas=True)
    with pytest.raises(NotImplementedError, match="SOAP of group matrices keeps state where a block is computed"):
        _build((2,), GROUPS | {"matrices": (MATRICES, SOAP())}, 0, share_replicas=True)


def test_what_cannot_be_shared_is_refused(pool) -> None:
    pool(2).run(_refused)
