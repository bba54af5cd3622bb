"""Fused AdamW with the cast: against its twin and float64, at any cut, skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from closeness import worst
from torch import Tensor

from optimizers.kernels.adamw import adamw_, adamw_torch, adamw_triton

NUMBERS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def _operands(n: int, step: int) -> list[Tensor]:
    return [torch.randn(n), torch.randn(n), torch.randn(n) / 8, torch.rand(n) / 64, torch.tensor(float(step))]


def _exact(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    p, g, m, v = (tensor.double() for tensor in (p, g, m, v))
    t, (beta1, beta2) = float(step) + 1, NUMBERS["betas"]
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    update = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + NUMBERS["eps"])
    return p * (1 - NUMBERS["lr"] * NUMBERS["weight_decay"]) - NUMBERS["lr"] * update, m, v


def _numbers() -> None:
    torch.manual_seed(0)
    for n in (0, 1, 1000, 3001):
        # Step 0 is where 1 - beta2^t loses most to float32; a tensor for lr is what a schedule on the device gives.
        for step, lr in ((0, 1e-2), (1, torch.tensor(1e-2)), (10**5, 1e-2)):
            operands = _operands(n, step)
            exact = _exact(*operands)
            for run in (adamw_triton, adamw_torch):
                p, g, m, v, t = (tensor.clone() for tensor in operands)
                low = torch.empty(n, dtype=torch.bfloat16)
                run(p, g, m, v, t, **NUMBERS | {"lr": lr}, low=low)
                for got, wanted in zip((p, m, v), exact, strict=True):
                    assert worst(got, wanted) <= 3e-7, (run, n, step)
                assert torch.equal(low, p.bfloat16()) and torch.equal(g, operands[1]) and float(t) == step


def test_against_float64(interpreter) -> None:
    interpreter.run(_numbers)


def _tensors() -> None:
    """Numbers that lie on the device: the bits of numbers of the host."""
    torch.manual_seed(0)
    number = {name: torch.tensor(NUMBERS[name], dtype=torch.float64) for name in ("lr", "weight_decay")}
    betas = {"betas": tuple(torch.tensor(beta, dtype=torch.float64) for beta in NUMBERS["betas"])}
    operands = _operands(1500, 3)
    for run in (adamw_triton, adamw_torch):
        expected = [tensor.clone() for tensor in operands]
        run(*expected, **NUMBERS)
        for given in (number, betas, number | betas, {"betas": (0.9, betas["betas"][1])}):
            ours = [tensor.clone() for tensor in operands]
            run(*ours, **NUMBERS | given)
            assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True)), (run, given)


def test_tensors_are_the_numbers_in_them(interpreter) -> None:
    interpreter.run(_tensors)


def _zero_betas() -> None:
    p, g, m, v, t = _operands(100, 0)
    old = p.clone()
    adamw_triton(p, g, m, v, t, lr=1, betas=(0, 0), eps=1e-8, weight_decay=0)
    torch.testing.assert_close(p, old - g.sign())


def test_integers_and_zeros_are_numbers_too(interpreter) -> None:
    interpreter.run(_zero_betas)


def _skipped() -> None:
    for run in (adamw_triton, adamw_torch):
        operands = _operands(1500, 3)
        operands[1].fill_(torch.nan)
        low = torch.zeros(1500)
        before = [tensor.clone() for tensor in operands]
        run(*operands, **NUMBERS, skip=torch.tensor(1.0))
        assert all(torch.equal(a, b) for a, b in zip(operands[::2], before[::2], strict=True)), run
        assert torch.equal(operands[3], before[3]) and not low.any()


def test_skip_leaves_every_bit(interpreter) -> None:
    interpreter.run(_skipped)


def _cut() -> None:
    whole = _operands(4000, 3)
    pieces = [tensor.clone() for tensor in whole]
    adamw_triton(*whole, **NUMBERS)
    for start, stop in ((0, 1), (1, 1037), (1037, 1037), (1037, 4000)):
        adamw_triton(*(tensor[start:stop] for tensor in pieces[:4]), pieces[4], **NUMBERS)
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


def test_a_run_may_be_cut_anywhere(interpreter) -> None:
    interpreter.run(_cut)


def test_what_does_not_fit_is_refused() -> None:
    p, g, m, v, t = _operands(8, 0)
    with pytest.raises(ValueError, match="exp_avg: expected .* float32 .* got .* float64.*; lr: expected"):
        adamw_(p, g, m.double(), v, t, **NUMBERS | {"lr": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"adamw_: low: expected contiguous \(8,\)"):
        adamw_(p, g, m, v, t, **NUMBERS, low=torch.zeros(9))
    before = p.clone()
    adamw_(p, g, m, v, t, **NUMBERS)
    assert not torch.equal(p, before)
