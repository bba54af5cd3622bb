"""Runs: what blocks keep from the beginning, and whose turn it is after steps that were skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from optimizers import SOAP, NorMuon, Shampoo
from vescale import Optimizer, Rules

KEEPING = {"soap": SOAP(block_size=4, refresh=3), "shampoo": Shampoo(block_size=4, refresh=3), "normuon": NorMuon()}


def _after(rule: Any, flags: list[float]) -> dict[str, torch.Tensor]:
    """The parameter and its state; steps that are skipped see NaN, the others the same gradients."""
    torch.manual_seed(0)
    param, taken = nn.Parameter(torch.randn(9, 7)), 0
    optimizer = Optimizer([("w", param)], Rules(all=("*", rule)))
    for flag in flags:
        torch.manual_seed(taken)
        param.grad = torch.full_like(param, torch.nan) if flag else torch.randn_like(param)
        optimizer.step(skip=torch.tensor(flag))
        taken += not flag
    return {"w": param.detach(), **optimizer.named_state()}


@pytest.mark.parametrize("name", KEEPING)
def test_a_step_that_is_skipped_is_nobodys_turn(name: str) -> None:
    """Also the first, when a loss scale is too high: what a block keeps begins with the first gradient that counts."""
    expected = _after(KEEPING[name], [0.0] * 5)
    found = _after(KEEPING[name], [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    assert [key for key, value in expected.items() if not torch.equal(value, found[key])] == []


def test_blocks_that_end_with_the_tensor_begin_as_their_rule_says() -> None:
    """9 x 7 in blocks of 4 x 4: identities of one, three and four rows, each at the beginning of its row of state."""
    optimizer = Optimizer([("w", nn.Parameter(torch.zeros(9, 7)))], Rules(all=("*", KEEPING["soap"])))
    state = optimizer.named_state()
    for i, (rows, columns) in enumerate((m, n) for m in (4, 4, 1) for n in (4, 3)):
        for basis, size in ((state["w.left_basis"], rows), (state["w.right_basis"], columns)):
            assert torch.equal(basis[i].flatten()[: size**2], torch.eye(size).flatten())
            assert basis[i].count_nonzero() == size
