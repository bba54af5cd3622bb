"""What a step does where parameters are on a GPU, seen without one: on torch's meta device, with kernels that count.

A meta tensor has no value, so whoever reads one raises: that is how a step that waits for its device shows.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import optimizers.kernels
from optimizers import SOAP, Adam8bit, AdamW, BF16AdamW, BF16Muon, Muon, Muon8bit, NorMuon
from optimizers.kernels import adam8bit, dynamic_map, grouped_newton_schulz
from vescale import Optimizer, Rules
from vescale.run import Run

SHAPES = {"a": (96, 64), "b": (64, 32), "stack": (3, 32, 64), "bias": (64,)}
MATRICES = ["a", "b", "stack"]
# Shampoo looks whether a root has failed, which waits for the device: it says so in matrix_root.inverse_root.
RULES: dict[str, Any] = {
    type(rule).__name__: rule
    for rule in (
        *(Adam8bit(), AdamW(), BF16AdamW(), BF16Muon(), Muon(), Muon8bit(), NorMuon()),
        SOAP(block_size=32),
    )
}
RULES["Muon, cautious"] = Muon(cautious=True)
CACHES = (adam8bit._edges, dynamic_map.tables, grouped_newton_schulz._tables)


class Launches:
    """Stands for a kernel: ``kernel[grid](...)`` is counted, and all its tensors are on the device."""

    def __init__(self, name: str, seen: Counter[str]) -> None:
        self.name, self.seen = name, seen

    def __getitem__(self, grid: Any) -> Any:
        return self._launch

    def _launch(self, *args: Any, **options: Any) -> None:
        assert all(arg.is_meta for arg in args if isinstance(arg, torch.Tensor))
        self.seen[self.name] += 1


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Launches of each kernel, with the meta device taken for a GPU."""
    seen: Counter[str] = Counter()
    for found in pkgutil.iter_modules(optimizers.kernels.__path__):
        module = importlib.import_module(f"optimizers.kernels.{found.name}")
        for name, value in [*vars(module).items()]:
            if name == "runs_kernels":
                monkeypatch.setattr(module, name, lambda tensor: tensor.is_meta)
            elif hasattr(value, "warmup") and hasattr(value, "fn"):  # a JITFunction
                monkeypatch.setattr(module, name, Launches(name, seen))
    monkeypatch.setattr("vescale.optimizer._check_parameters", lambda named: None)  # which refuses the meta device
    monkeypatch.setattr(Run, "put_back", lambda self, **options: None)  # nothing comes back from there
    monkeypatch.setattr(torch, "_foreach_add_", lambda tensors, value: None)  # CUDA's takes a tensor as it is
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr("vescale.run.HostRead", lambda flag: SimpleNamespace(wait=lambda: 0.0))  # read a step later
    yield seen
    for cache in CACHES:
        cache.cache_clear()


def _on_a_gpu(rule: Any, **options: Any) -> Optimizer:
    """Of parameters there, with gradients."""
    dtype = getattr(rule, "param_dtype", torch.float32)
    rest = BF16AdamW() if dtype is torch.bfloat16 else AdamW()
    params = {name: nn.Parameter(torch.empty(s, dtype=dtype, device="meta")) for name, s in SHAPES.items()}
    for param in params.values():
        param.grad = torch.empty_like(param)
    return Optimizer(params.items(), Rules(matrices=(MATRICES, rule), rest=("*", rest)), **options)


# What a block keeps is written to host memory from the device, which has no values here.
HELD = [
    (name, held) for name, rule in RULES.items() for held in (False, True) if not (held and name in ("NorMuon", "SOAP"))
]


@pytest.mark.parametrize(("name", "offload"), HELD)
def test_a_step_reads_nothing_from_the_device(name: str, offload: bool, launches: Counter[str]) -> None:
    """Whatever its numbers are; and state that is held in host memory is stepped on the device."""
    optimizer = _on_a_gpu(RULES[name], offload_state=offload)
    optimizer.step()
    optimizer.clip_grad_norm_(1.0)
    number = torch.tensor(0.5, device="meta", dtype=torch.float64)
    for group in optimizer.param_groups:
        group |= {key: number for key in ("lr", "weight_decay", "momentum", "beta2") if key in group}
        group |= {key: (number, number) for key in ("betas",) if key in group}
    for _ in range(2):
        optimizer.step(skip=torch.zeros((), device="meta"))
    with pytest.raises(RuntimeError, match="item.* meta"):
        float(optimizer.param_groups[0]["lr"])  # what any read would have come to
    assert launches.total() > 0


def test_unequal_matrices_of_a_run_are_one_launch(launches: Counter[str]) -> None:
    """Three launches for each of five steps of Newton-Schulz, whatever the matrices; here each parameter is a run."""
    _on_a_gpu(Muon()).step()
    assert (launches["_product"], launches["_symmetric"], launches["_scaled"]) == (3 * 5, 3 * 10, 3)


# --- real tensors, of which a bucket is told that they are on no CPU ---


def _stepped(in_place: bool) -> tuple[dict[str, torch.Tensor], list[list[tuple[int, int]]]]:
    from vescale import fully_shard
    from vescale.bucket import Bucket

    torch.manual_seed(3)
    rules = Rules(matrices=(MATRICES, Muon(lr=0.02)), rest=("*", AdamW(lr=0.01)))
    model = nn.ParameterDict({name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()})
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model, mesh=mesh, block_of=rules.block_of, max_padding=0.0)
    calls: list[list[tuple[int, int]]] = []
    grouped = grouped_newton_schulz.grouped_newton_schulz

    def counted(flat: torch.Tensor, out: torch.Tensor, matrices: Any, **options: Any) -> None:
        calls.append([(matrix.rows, matrix.cols) for matrix in matrices])
        grouped(flat, out, matrices, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("optimizers.muon.grouped_newton_schulz", counted)
        if in_place:
            patch.setattr(Bucket, "_batched", True)
        optimizer = Optimizer(model.named_parameters(), rules)
        for step in range(3):
            torch.manual_seed(step)
            for param in model.values():
                whole = torch.randn(param.shape)
                start, stop = param.run
                param.grad = torch.empty_like(param)
                param.grad.to_local().view(-1).copy_(whole.view(-1)[start:stop])
            optimizer.step()
    return {name: param.full_tensor() for name, param in model.named_parameters()}, calls


def test_matrices_in_place_are_the_matrices_one_by_one(pool: Any) -> None:
    """On one rank all five in one call; on three each in the call of the rank that keeps or owns it."""
    for world in (1, 3):
        (plain, none), (ours, _) = (pool(world).run(_stepped, in_place)[0] for in_place in (False, True))
        assert none == []
        assert [name for name, value in ours.items() if not torch.equal(value, plain[name])] == []
        ranks = [calls for _, calls in pool(world).run(_stepped, True)]
        matrices = [matrix for calls in ranks for call in calls for matrix in call]
        assert sorted(matrices) == sorted(3 * ([(96, 64), (64, 32)] + 3 * [(32, 64)]))
    assert pool(1).run(_stepped, True)[0][1] == 3 * [[(96, 64), (64, 32), *3 * [(32, 64)]]]
