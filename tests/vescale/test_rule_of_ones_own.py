"""Rules over blocks that a stranger writes from ``vescale/rule.py`` alone: the same bits for any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from optimizers import AdamW
from vescale import Optimizer, Rules, distribute, fully_shard


@dataclass(frozen=True, kw_only=True)
class ScaledSign:
    """The sign of the momentum times the mean magnitude of its matrix (arXiv 1901.09847, section 3)."""

    lr: float = 0.02
    beta: float = 0.9

    wire_dtype: ClassVar[torch.dtype] = torch.bfloat16
    finest: ClassVar[int] = 1

    def block_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*(1 for _ in shape[:-2]), *shape[-2:])

    def element_state(self) -> dict[str, torch.dtype]:
        return {"momentum": torch.float32}

    def prepare(
        self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], *, skip: Tensor | None
    ) -> tuple[Tensor, ...]:
        momentum = state["momentum"]
        moved = momentum.lerp(grad, 1 - self.beta)
        momentum.copy_(moved if skip is None else torch.where(skip > 0, momentum, moved))
        return (momentum.to(self.wire_dtype),)

    def block(self, payloads: tuple[Tensor, ...], state: Mapping[str, Tensor]) -> Tensor:
        (momentum,) = payloads
        return momentum.sign() * momentum.float().abs().mean((-2, -1), keepdim=True).to(self.wire_dtype)

    def apply(self, param: Tensor, direction: Tensor, state: Mapping[str, Tensor], *, skip: Tensor | None) -> None:
        moved = param.sub(direction, alpha=self.lr)
        param.copy_(moved if skip is None else torch.where(skip > 0, param, moved))


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """A low-rank factor of the momentum, of which a part of that is taken out (Dion, arXiv 2504.05295, algorithm 1)."""

    lr: float = 0.02
    mu: float = 0.95
    rank: int = 2

    wire_dtype: ClassVar[torch.dtype] = torch.float32
    finest: ClassVar[int] = 1

    def block_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*(1 for _ in shape[:-2]), 12, 12)

    def element_state(self) -> dict[str, torch.dtype]:
        return {}

    def block_state(self, block: tuple[int, ...]) -> dict[str, Tensor]:
        return {"momentum": torch.zeros(block[-2:]), "basis": torch.eye(block[-1])[:, : self.rank]}

    def prepare(
        self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], *, skip: Tensor | None
    ) -> tuple[Tensor, ...]:
        return (grad,)

    def block(
        self, payloads: tuple[Tensor, ...], state: Mapping[str, Tensor], *, refresh: str | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        momentum = state["momentum"] + payloads[0].reshape(state["momentum"].shape)
        left = torch.linalg.qr(momentum @ state["basis"])[0]
        right = momentum.mT @ left
        basis = right / right.norm(dim=-2, keepdim=True).clamp(min=1e-8)
        momentum = momentum - (1 - self.mu) * left @ right.mT
        return (left @ basis.mT).view(payloads[0].shape), {"momentum": momentum, "basis": basis}

    def apply(self, param: Tensor, direction: Tensor, state: Mapping[str, Tensor], *, skip: Tensor | None) -> None:
        moved = param.sub(direction, alpha=self.lr)
        param.copy_(moved if skip is None else torch.where(skip > 0, param, moved))


SHAPES = {"a": (30, 17), "b": (14, 31), "stack": (3, 24, 16), "bias": (7,)}


def _train() -> dict[str, Tensor]:
    found = {}
    for rule in (ScaledSign(), LowRank()):
        torch.manual_seed(0)
        rules = Rules(matrices=(["a", "b", "stack"], rule), rest=("*", AdamW()))
        model = nn.ParameterDict({name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()})
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh, block_of=rules.block_of, max_padding=0.0)
        optimizer = Optimizer(model.named_parameters(), rules)
        for step in range(4):
            torch.manual_seed(step)
            for param in model.values():
                grad = torch.full(param.shape, torch.nan) if step == 2 else torch.randn(param.shape)
                param.grad = distribute(grad, param.device_mesh, param.placements)
            optimizer.step(skip=torch.tensor(float(step == 2)))
        values = {**model, **optimizer.named_state()}
        kind = type(rule).__name__
        found |= {f"{kind}: {k}": getattr(v, "full_tensor", lambda v=v: v)().clone() for k, v in values.items()}
    return found


def test_they_run_on_any_number_of_ranks_to_the_same_bits(pool: Any) -> None:
    expected = pool(1).run(_train)[0]
    assert all(value.isfinite().all() for value in expected.values())
    for found in (pool(2).run(_train)[1], pool(3).run(_train)[0]):
        assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


@dataclass(frozen=True, kw_only=True)
class Forgetful(ScaledSign):
    def prepare(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], *, skip: Any) -> Any:
        return (state["momentum"].lerp_(grad, 0.5),)  # not rounded: bits would follow the cut


@dataclass(frozen=True, kw_only=True)
class Halved(ScaledSign):
    def block(self, payloads: tuple[Tensor, ...], state: Mapping[str, Tensor]) -> Tensor:
        return payloads[0][..., ::2]


@pytest.mark.parametrize(
    ("rule", "kind", "said"),
    [
        (Forgetful(), ValueError, r"w: Forgetful.prepare: expected .* \(12,\) torch.bfloat16, got .*float32"),
        (Halved(), RuntimeError, r"w: Halved.block failed on block 0 \(3, 4\)"),
    ],
)
def test_a_mistake_is_named_and_nothing_has_changed(rule: Any, kind: type[Exception], said: str) -> None:
    param = nn.Parameter(torch.ones(3, 4))
    optimizer = Optimizer([("w", param)], Rules(all=("*", rule)))
    param.grad = torch.ones(3, 4)
    with pytest.raises(kind, match=said):
        optimizer.step()
    assert torch.equal(param, torch.ones(3, 4)) and not optimizer.named_state()["w.momentum"].any()


def test_a_rule_that_has_half_of_what_blocks_need_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Half(AdamW):
        def block(self, payloads: tuple[Tensor, ...], state: Mapping[str, Tensor]) -> Tensor:
            return payloads[0]

    @dataclass(frozen=True, kw_only=True)
    class Named(AdamW):
        name: str = "mine"

    with pytest.raises(
        ValueError, match="a: Half has block, so it needs apply and wire_dtype too; b: Named has a field"
    ):
        Rules(a=("*", Half()), b=("*", Named()))
