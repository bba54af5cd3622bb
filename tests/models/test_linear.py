"""Linear is nn.Linear, bit for bit, wherever its weight's gradient is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from models.linear import Linear


def _pair(dtype: torch.dtype, slot: torch.dtype | None = None) -> tuple[nn.Module, nn.Linear]:
    """A Linear whose weight has a slot of NaN, and the nn.Linear it must equal."""
    torch.manual_seed(0)
    ours, plain = Linear(24, 40).to(dtype), nn.Linear(24, 40, bias=False).to(dtype)
    with torch.no_grad():
        ours.weight.copy_(plain.weight)
    weight: Any = ours.weight
    storage = torch.full((40, 24), float("nan"), dtype=slot or dtype)
    weight.grad_slot, weight.grad_slot_written = lambda: storage, False
    return ours, plain


def _x(rows: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(2, rows // 2, 24, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recompute", [None, True, False])
def test_gradients_have_the_bits_of_nn_linear(dtype: torch.dtype, recompute: bool | None) -> None:
    ours, plain = _pair(dtype)
    inputs = []
    for module in (ours, plain):
        x = _x(64, dtype)
        out = module(x) if recompute is None else checkpoint(module, x, use_reentrant=recompute)
        out.square().sum().backward()
        inputs.append(x.grad)
    assert ours.weight.grad is None and ours.weight.grad_slot_written
    assert torch.equal(ours.weight.grad_slot(), plain.weight.grad) and torch.equal(*inputs)


def test_later_uses_are_added_and_a_wider_slot_is_rounded_once_per_use() -> None:
    ours, plain = _pair(torch.float32)
    for module in (ours, plain):
        (module(_x(8, torch.float32)).sum() + module(_x(8, torch.float32, 2)).square().sum()).backward()
        module(_x(8, torch.float32, 3)).sum().backward()
    assert torch.equal(ours.weight.grad_slot(), plain.weight.grad)
    ours, plain = _pair(torch.bfloat16, torch.float32)
    for use in (1, 2):
        for module in (ours, plain):
            module(_x(8, torch.bfloat16, use)).square().sum().backward()
        expected = plain.weight.grad.float() if use == 1 else expected + plain.weight.grad.float()  # noqa: F821
        plain.weight.grad = None
    assert torch.equal(ours.weight.grad_slot(), expected)


def _untouched(how: Callable[[nn.Module, torch.Tensor], Any]) -> Any:
    ours, _ = _pair(torch.float32)
    result = how(ours, _x(8, torch.float32))
    assert ours.weight.grad_slot().isnan().all() and not ours.weight.grad_slot_written
    return result


def test_what_does_not_accumulate_leaves_the_slot_alone() -> None:
    _untouched(lambda m, x: torch.autograd.grad(m(x).sum(), x))
    _untouched(lambda m, x: m(x).sum().backward(inputs=[x]))
    _untouched(lambda m, x: m(x.detach()).detach())
    _, plain = _pair(torch.float32)
    (want,) = torch.autograd.grad(plain(_x(8, torch.float32)).sum(), plain.weight)
    (got,) = _untouched(lambda m, x: torch.autograd.grad(m(x).sum(), m.weight))
    assert torch.equal(got, want)


def test_a_gradient_of_the_gradient_is_nn_linears() -> None:
    def penalty(module: nn.Module, x: torch.Tensor) -> Any:
        (slope,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), module.weight)[0]

    _, plain = _pair(torch.float32)
    torch.testing.assert_close(_untouched(penalty), penalty(plain, _x(8, torch.float32)))


@pytest.mark.parametrize("how", ["autocast", "frozen", "no slot"])
def test_elsewhere_it_is_nn_linear(how: str) -> None:
    ours, plain = _pair(torch.float32)
    grads = []
    for module in (ours, plain):
        x = _x(8, torch.float32)
        module.weight.requires_grad_(how != "frozen")
        if how == "no slot" and module is ours:
            del ours.weight.grad_slot
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            out = module(x)
        out.float().square().sum().backward()
        grads.append((out, x.grad, module.weight.grad))
    for got, want in zip(*grads, strict=True):
        assert got is want is None or torch.equal(got, want)
