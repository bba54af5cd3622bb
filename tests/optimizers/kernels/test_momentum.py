"""Momentum with the pack: against its twin and float64, at any cut, skipped."""

from __future__ import annotations

import pytest
import torch
from closeness import apart, worst

from optimizers.kernels.momentum import momentum_, momentum_torch, momentum_triton

DECAY = 0.95


def _numbers() -> None:
    torch.manual_seed(0)
    for n in (0, 1, 1000, 3001):
        for nesterov in (True, False):
            for dtype in (torch.bfloat16, torch.float32):
                m, g = torch.randn(n), torch.randn(n)
                exact = DECAY * m.double() + (1 - DECAY) * g.double()
                wanted = DECAY * exact + (1 - DECAY) * g.double() if nesterov else exact
                results = []
                for run in (momentum_triton, momentum_torch):
                    new, out = m.clone(), torch.empty(n, dtype=dtype)
                    run(new, g, out, decay=DECAY, nesterov=nesterov)
                    assert worst(new, exact) <= 2e-7 and worst(out, wanted) <= (2e-7 if out.itemsize == 4 else 2**-8)
                    results.append(new)
                # torch fuses the multiplication and the addition on CPU, the kernel rounds both.
                assert (results[0] - results[1]).abs().max() <= 5e-7 if n else True


def test_against_float64(interpreter) -> None:
    interpreter.run(_numbers)


def _tensors() -> None:
    m, g = torch.randn(1500), torch.randn(1500)
    for run in (momentum_triton, momentum_torch):
        results = []
        for decay in (DECAY, torch.tensor(DECAY, dtype=torch.float64)):
            new, out = m.clone(), torch.empty(1500, dtype=torch.bfloat16)
            run(new, g, out, decay=decay, nesterov=True)
            results.append((new, out))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), run


def test_a_tensor_is_the_number_in_it(interpreter) -> None:
    interpreter.run(_tensors)


def _skipped() -> None:
    for run in (momentum_triton, momentum_torch):
        m, g = torch.randn(1500), torch.full((1500,), torch.nan)
        before, out = m.clone(), torch.empty(1500, dtype=torch.bfloat16)
        run(m, g, out, decay=DECAY, nesterov=True, skip=torch.tensor(1.0))
        assert torch.equal(m, before)
        with_flag, without = m.clone(), m.clone()
        run(with_flag, before, out, decay=DECAY, nesterov=True, skip=torch.tensor(0.0))
        run(without, before, out, decay=DECAY, nesterov=True)
        assert apart(with_flag, without) == 0


def test_skip_leaves_every_bit(interpreter) -> None:
    interpreter.run(_skipped)


def _cut(run_name: str) -> None:
    run = {"triton": momentum_triton, "torch": momentum_torch}[run_name]
    m, g = torch.randn(4000), torch.randn(4000)
    whole, packed = m.clone(), torch.empty(4000, dtype=torch.bfloat16)
    run(whole, g, packed, decay=DECAY, nesterov=True)
    pieces, sent = m.clone(), torch.empty(4000, dtype=torch.bfloat16)
    for start, stop in ((0, 1), (1, 1037), (1037, 1037), (1037, 2999), (2999, 4000)):
        run(pieces[start:stop], g[start:stop], sent[start:stop], decay=DECAY, nesterov=True)
    assert torch.equal(whole, pieces) and torch.equal(packed, sent)


@pytest.mark.parametrize("run", ["triton", "torch"])
def test_a_run_may_be_cut_anywhere(interpreter, run: str) -> None:
    interpreter.run(_cut, run)


def test_what_does_not_fit_is_refused() -> None:
    m, out = torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"momentum_: grad: expected contiguous \(8,\) float32.*\(7,\).*; out: expected"
    ):
        momentum_(m, torch.zeros(7), torch.zeros(9), decay=0.9, nesterov=True)
    with pytest.raises(ValueError, match="skip: expected"):
        momentum_(m, m, out, decay=0.9, nesterov=True, skip=torch.zeros(1))
    momentum_(m, torch.ones(8), out, decay=0.75, nesterov=False)
    assert torch.equal(m, torch.full((8,), 0.25)) and torch.equal(out.float(), m)
