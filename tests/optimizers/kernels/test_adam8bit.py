"""Fused 8-bit Adam: codes by the definition, against the twin, both formats, spans, skipped, at any cut of blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from optimizers.kernels.adam8bit import (
    BLOCK,
    COMPAT,
    Moments,
    Spans,
    adam8bit_,
    adam8bit_torch,
    adam8bit_triton,
    num_blocks,
)
from optimizers.quantize import dequantize, dynamic_map

NUMBERS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
SPANS: tuple[Spans, ...] = (((0, 0),), ((0, 1),), ((0, 1024),), ((0, 256), (288, 300), (320, 1900)))


def _moments(n: int, spans: Spans) -> Moments:
    codes, scales = torch.zeros(n, dtype=torch.uint8), torch.zeros(num_blocks(spans))
    return Moments(codes, scales, codes.clone(), scales.clone())


def _gradient(n: int) -> Tensor:
    """Within a block the scales spread over four decades, as in the stress that bitsandbytes' format fails."""
    return torch.randn(n) * 10 ** (-4 * torch.rand(n))


def _against_the_twin() -> None:
    torch.manual_seed(0)
    for spans in SPANS:
        n = spans[-1][1] + 20
        for form in COMPAT:
            old, p = _moments(n, spans), torch.randn(n)
            for step in range(2):
                g, results = _gradient(n), []
                for run in (adam8bit_triton, adam8bit_torch):
                    new, moments, low = p.clone(), Moments(*(t.clone() for t in old)), torch.zeros(n).bfloat16()
                    run(new, g, moments, torch.tensor(float(step)), **NUMBERS, spans=spans, compat=form, low=low)
                    results.append((new, moments, low))
                (p, old, low), (twin, other, twin_low) = results
                torch.testing.assert_close(p, twin, rtol=1e-6, atol=1e-6)
                for mine, theirs in zip(old[1::2], other[1::2], strict=True):
                    torch.testing.assert_close(mine, theirs, rtol=2e-7, atol=0)
                flips = [(a.int() - b.int()).abs() for a, b in zip(old[::2], other[::2], strict=True)]
                assert all(flip.max() <= 1 and (flip > 0).sum() <= max(1, n // 1000) for flip in flips)
                assert not p[spans[-1][1] :].equal(torch.zeros(20)) and not low[spans[-1][1] :].any()


def test_kernel_and_twin_give_the_same_codes(interpreter) -> None:
    interpreter.run(_against_the_twin)


def _tensors() -> None:
    """Numbers that lie on the device: the bits of numbers of the host."""
    torch.manual_seed(0)
    n, spans = 700, ((0, 700),)
    p, g = torch.randn(n), _gradient(n)
    given = {name: torch.tensor(NUMBERS[name], dtype=torch.float64) for name in ("lr", "weight_decay")}
    given["betas"] = tuple(torch.tensor(beta, dtype=torch.float64) for beta in NUMBERS["betas"])
    for run in (adam8bit_triton, adam8bit_torch):
        results = []
        for numbers in (NUMBERS, NUMBERS | given):
            new, moments = p.clone(), _moments(n, spans)
            run(new, g, moments, torch.tensor(3.0), **numbers, spans=spans, compat="none")
            results.append((new, *moments))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), run


def test_tensors_are_the_numbers_in_them(interpreter) -> None:
    interpreter.run(_tensors)


def _by_definition() -> None:
    torch.manual_seed(0)
    n, spans = 4 * BLOCK, ((0, 4 * BLOCK),)
    p, g, moments = torch.randn(n), _gradient(n), _moments(n, spans)
    g[BLOCK : 2 * BLOCK] = 0.0  # a block of zeros
    g[7] = -10.0  # a negative extreme
    for run in (adam8bit_triton, adam8bit_torch):
        new, got = p.clone(), Moments(*(t.clone() for t in moments))
        run(new, g, got, torch.tensor(0.0), **NUMBERS | {"eps": 1e-15}, spans=spans, compat="none")
        m, root = (0.1 * g).view(4, BLOCK), (0.001 * g * g).sqrt().view(4, BLOCK)
        decoded = [
            dequantize(codes, scale, signed=signed).view(4, BLOCK)
            for codes, scale, signed in ((got[0], got[1], True), (got[2], got[3], False))
        ]
        for mine, exact, signed in zip(decoded, (m, root), (True, False), strict=True):
            gap = dynamic_map(signed).diff().max() / 2  # half of the widest interval
            assert ((mine - exact).abs() <= exact.abs().amax(1, keepdim=True) * gap * (1 + 1e-5)).all()
        assert got.exp_avg[7] == 255 and got.exp_avg_scale[0] < 0  # the extreme itself is kept exactly
        assert (got.exp_avg[BLOCK : 2 * BLOCK] == 127).all() and got.exp_avg_scale[1] == 0
        assert (got.exp_avg_sq[BLOCK : 2 * BLOCK] == 0).all() and got.exp_avg_sq_scale[1] == 0
        assert (got.exp_avg_sq[g != 0] > 0).all()
        first = torch.where(g == 0, 0.0, g.sign())  # Adam's first step has length lr
        torch.testing.assert_close(new, p * (1 - 1e-3) - 1e-2 * first, rtol=0, atol=3e-6)


def test_codes_by_their_definition(interpreter) -> None:
    interpreter.run(_by_definition)


def _skipped() -> None:
    spans = ((0, 700),)
    for run in (adam8bit_triton, adam8bit_torch):
        p, moments, low = torch.randn(700), _moments(700, spans), torch.zeros(700)
        run(p, _gradient(700), moments, torch.tensor(0.0), **NUMBERS, spans=spans, compat="none")
        before, old = p.clone(), [tensor.clone() for tensor in moments]
        g = torch.full((700,), torch.nan)
        run(p, g, moments, torch.tensor(1.0), **NUMBERS, spans=spans, compat="none", skip=torch.tensor(1.0), low=low)
        assert torch.equal(p, before) and not low.any()
        assert all(torch.equal(a, b) for a, b in zip(moments, old, strict=True))
        # Without the flag a NaN spreads in its block, and its codes are still codes.
        run(p, g, moments, torch.tensor(1.0), **NUMBERS, spans=spans, compat="none", skip=torch.tensor(0.0))
        assert p.isnan().all() and moments.exp_avg_scale.isnan().all()


def test_skip_leaves_every_bit(interpreter) -> None:
    interpreter.run(_skipped)


def _cut(run_name: str) -> None:
    run = {"triton": adam8bit_triton, "torch": adam8bit_torch}[run_name]
    n = 6 * BLOCK + 100
    p, g, whole = torch.randn(n), _gradient(n), _moments(n, ((0, n),))
    pieces, q = Moments(*(tensor.clone() for tensor in whole)), p.clone()
    run(p, g, whole, torch.tensor(0.0), **NUMBERS, spans=((0, n),), compat="none")
    for first, last in ((0, 1), (1, 4), (4, 7)):
        cut, scales = slice(first * BLOCK, min(last * BLOCK, n)), slice(first, last)
        part = Moments(pieces[0][cut], pieces[1][scales], pieces[2][cut], pieces[3][scales])
        run(q[cut], g[cut], part, torch.tensor(0.0), **NUMBERS, spans=((0, cut.stop - cut.start),), compat="none")
    assert torch.equal(p, q) and all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


@pytest.mark.parametrize("run", ["triton", "torch"])
def test_a_run_may_be_cut_between_blocks(interpreter, run: str) -> None:
    interpreter.run(_cut, run)


def test_what_does_not_fit_is_refused() -> None:
    p, moments, step = torch.zeros(300), _moments(300, ((0, 300),)), torch.tensor(0.0)
    with pytest.raises(ValueError, match="expected compat from .* got 'fp4'"):
        adam8bit_(p, p, moments, step, **NUMBERS, compat="fp4")
    with pytest.raises(ValueError, match=r"exp_avg_scale: expected contiguous \(2,\)"):
        adam8bit_(p, p, moments._replace(exp_avg_scale=torch.zeros(1)), step, **NUMBERS)
    with pytest.raises(ValueError, match=r"expected ascending spans within 300 elements, got \[100, 301\)"):
        adam8bit_(p, p, moments, step, **NUMBERS, spans=((0, 100), (100, 301)))
    adam8bit_(p, torch.ones(300), moments, step, **NUMBERS)
    torch.testing.assert_close(p, torch.full((300,), -1e-2))
