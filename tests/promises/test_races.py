"""Whoever reads before a work has landed, or gives its buffer away too soon, is found out: each work is held back until
it is waited for, alone of any other, everything freed or new is NaN, and the bits stay the same."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from works import Works

from models import LlamaConfig


def _model() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        tie_word_embeddings=True
    )  # fmt: skip
    model = config.build()
    model.init_weights()
    return model


def _sharded(policy: MixedPrecisionPolicy, replicas: bool) -> nn.Module:
    from vescale import fully_shard

    world, model = dist.get_world_size(), _model()
    mesh = init_device_mesh("cpu", (2, world // 2) if replicas else (world,))
    for unit in (*model.units(), model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return model


@contextlib.contextmanager
def _poisoned() -> Iterator[None]:
    """NaN in every storage before it is freed and after it is restored, and in every new tensor."""
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        nan = torch.empty(0, dtype=torch.float32).set_(storage) if storage.nbytes() % 4 == 0 else None
        if nan is not None:
            nan.fill_(float("nan"))
        result = original(storage, size)
        if size and size % 4 == 0:
            torch.empty(0, dtype=torch.float32).set_(storage).fill_(float("nan"))
        return result

    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty returns
    try:
        with mock.patch.object(torch.UntypedStorage, "resize_", resize):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def _train(model: nn.Module, late: frozenset[int], in_backward: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Three micro-batches of which the first is not reduced, a step, and one more; returns weights and works."""
    from vescale import step_in_backward

    def adamw(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-2, foreach=False)

    optimizers = step_in_backward(model, adamw) if in_backward else [adamw(model.parameters())]
    generator = torch.Generator().manual_seed(dist.get_rank())
    with Works(late) as works:
        for micro in range(3):
            model.set_requires_gradient_sync(micro > 0)
            tokens = torch.randint(0, 40, (2, 9), generator=generator)
            (model(tokens[:, :-1], tokens[:, 1:]) / 16).backward()
            if micro and not in_backward:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    weights = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    return weights, sum(event.what == "start" for event in works.log)


def _late_sets(count: int) -> list[frozenset[int]]:
    """All works, and few sets of them: of any two works there is one with the first and without the second.

    So each is late where any other that could hide it is not: one that would write into the same buffer, say. A work is
    in half of the sets, each in another half (Sperner's theorem: six sets tell 20 works apart, eight 70).
    """
    size = next(size for size in itertools.count(1) if math.comb(size, size // 2) >= count)
    halves = itertools.combinations(range(size), size // 2)
    found = [set[int]() for _ in range(size)]
    for number, half in zip(range(count), halves, strict=False):
        for at in half:
            found[at].add(number)
    return [frozenset(range(count)), *map(frozenset, found)]


def test_any_two_works_are_told_apart() -> None:
    sets = _late_sets(50)
    assert len(sets) == 1 + 8 and sets[0] == {*range(50)}
    for a, b in itertools.permutations(range(50), 2):
        assert any(a in late and b not in late for late in sets)


def _every_work_late(policy: MixedPrecisionPolicy, replicas: bool, in_backward: bool) -> int:
    expected, count = _train(_sharded(policy, replicas), frozenset(), in_backward)
    with _poisoned():
        for late in _late_sets(count):
            weights, _ = _train(_sharded(policy, replicas), late, in_backward)
            wrong = [name for name, value in expected.items() if not torch.equal(weights[name], value)]
            assert not wrong, f"works {sorted(late)} late: {wrong}"
    return count


@pytest.mark.parametrize(
    ("world", "dtype", "reduce", "replicas", "in_backward"),
    [
        (2, None, torch.float32, False, False),
        (2, torch.bfloat16, torch.bfloat16, False, False),
        (2, torch.bfloat16, torch.bfloat16, False, True),
        (4, None, torch.float32, True, False),
    ],
)
def test_each_work_late_and_everything_freed_poisoned_leaves_the_bits(
    pool, world: int, dtype: torch.dtype | None, reduce: torch.dtype, replicas: bool, in_backward: bool
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce)
    counts = pool(world).run(_every_work_late, policy, replicas, in_backward)
    assert counts[0] >= 3 * 3 * 2  # three micro-batches gather three layers twice
