"""Learning rate, decay and betas are numbers or tensors, and change between steps: the same bits for every rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from optimizers import SOAP, Adam8bit, AdamW, BF16AdamW, BF16Muon, Muon, Muon8bit, NorMuon, Shampoo
from vescale import Optimizer, Rules

RULES: dict[str, Any] = {
    type(rule).__name__: rule
    for rule in (
        *(AdamW(), BF16AdamW(), Adam8bit(min_numel=64), Muon(cautious=True), BF16Muon(), Muon8bit(), NorMuon()),
        *(Shampoo(block_size=16, refresh=2), SOAP(block_size=16, refresh=2)),
    )
}
# Of four steps; 0.3 and 0.7 are no float32 numbers.
SCHEDULE: dict[str, tuple[float, ...]] = {
    "lr": (0.3, 0.0, 0.01, 0.7), "weight_decay": (0.1, 0.3, 0.0, 0.2), "momentum": (0.85, 0.9, 0.95, 0.3),
    "beta2": (0.95, 0.9, 0.3, 0.8), "betas": (0.9, 0.8, 0.7, 0.3),
}  # fmt: skip


def _trained(rule: Any, *, tensors: bool) -> dict[str, torch.Tensor]:
    """Parameters and state after the schedule, given as numbers or filled into tensors that stay where they are."""
    torch.manual_seed(0)
    dtype = getattr(rule, "param_dtype", torch.float32)
    params = {
        name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in {"a": (40, 24), "b": (24, 24)}.items()
    }
    optimizer = Optimizer(params.items(), Rules(all=("*", rule)))
    (group,) = optimizer.param_groups
    held = {key: torch.zeros((), dtype=torch.float64) for key in SCHEDULE if key in group}
    changed = set()
    for step in range(4):
        for key in held:
            value: Any = held[key].fill_(SCHEDULE[key][step]) if tensors else SCHEDULE[key][step]
            group[key] = (value, value) if key == "betas" else value
        before = {name: param.detach().clone() for name, param in params.items()}
        for param in params.values():
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.step()
        changed |= {(step, name) for name, param in params.items() if not torch.equal(param, before[name])}
    assert {step for step, _ in changed} == {0, 2, 3}, "a rate of 0 steps nothing"
    after = {name: param.detach() for name, param in params.items()}
    return {**after, **{name: value.detach().clone() for name, value in optimizer.named_state().items()}}


@pytest.mark.parametrize("name", RULES)
def test_tensors_give_the_bits_of_numbers(name: str) -> None:
    numbers, tensors = (_trained(RULES[name], tensors=kind) for kind in (False, True))
    assert numbers.keys() == tensors.keys()
    assert [key for key, value in numbers.items() if not torch.equal(value, tensors[key])] == []


@pytest.mark.parametrize("name", RULES)
def test_what_is_no_number_and_no_tensor_of_one_is_refused(name: str) -> None:
    keys = [key for key in SCHEDULE if key in RULES[name].__dataclass_fields__]
    assert {"lr", "weight_decay"} < {*keys}
    for key in keys:
        for wrong in (-0.5, torch.ones(2), "0.1"):
            value = (wrong, wrong) if key == "betas" else wrong
            with pytest.raises(ValueError, match=f"{key}: expected .*number.* 0-d tensor"):
                type(RULES[name])(**{key: value})
