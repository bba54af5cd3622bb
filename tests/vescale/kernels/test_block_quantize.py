"""Block quantisation: the codes of torch's own casts, errors within the format's."""

from __future__ import annotations

import pytest
import torch

from vescale.kernels.block_quantize import (
    LARGEST,
    dequantize,
    dequantize_torch,
    dequantize_triton,
    quantize,
    quantize_torch,
    quantize_triton,
)


def _codes() -> None:
    torch.manual_seed(0)
    for n, block in ((0, 16), (1, 16), (5000, 128), (4096, 2048)):
        for source in (torch.float32, torch.bfloat16):
            x = (torch.randn(n) * 10 ** (-6 * torch.rand(n))).to(source)
            x[block : 2 * block] = 0
            for dtype in LARGEST:
                codes, scales = quantize_triton(x, block=block, dtype=dtype)
                other, other_scales = quantize_torch(x, block=block, dtype=dtype)
                assert codes.dtype == dtype and torch.equal(scales, other_scales)
                assert torch.equal(codes.view(torch.uint8), other.view(torch.uint8)), (n, block, dtype)
                for out in (torch.empty(n), torch.empty(n, dtype=torch.bfloat16)):
                    twin = out.clone()
                    dequantize_triton(codes, scales, block=block, out=out)
                    dequantize_torch(codes, scales, block=block, out=twin)
                    assert torch.equal(out, twin)
                back = torch.empty(n)
                dequantize_triton(codes, scales, block=block, out=back)
                step = scales.repeat_interleave(block)[:n]
                bound = step / 2 if dtype is torch.int8 else torch.maximum(x.float().abs() / 16, step / 1024)
                assert ((back - x.float()).abs() <= bound * (1 + 1e-5)).all(), (n, block, dtype)


def test_codes_and_errors(interpreter) -> None:
    interpreter.run(_codes)


def _every_float8() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = torch.empty(256)
    dequantize_triton(every, torch.ones(1), block=256, out=values)
    assert torch.equal(values.nan_to_num(), every.float().nan_to_num()) and torch.equal(values.isnan(), every.isnan())
    # Scaled by one (each block holds 448): every number, every half-way point and their neighbours code as torch's.
    finite = every.float()[every.float().isfinite()].sort().values
    halves = (finite[1:] + finite[:-1]) / 2
    x = torch.cat([finite, halves, halves.nextafter(torch.tensor(0.0)), halves.nextafter(halves * 2)])
    x = torch.nn.functional.pad(x, (0, -len(x) % 15)).view(-1, 15)
    x = torch.cat([x, torch.full((len(x), 1), 448.0)], dim=1).view(-1)
    codes, _ = quantize_triton(x, block=16, dtype=torch.float8_e4m3fn)
    assert torch.equal(codes.view(torch.uint8), x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_every_float8(interpreter) -> None:
    interpreter.run(_every_float8)


def _not_finite() -> None:
    for run in (quantize_triton, quantize_torch):
        for dtype in LARGEST:
            for bad in (torch.nan, torch.inf):
                x = torch.ones(48)
                x[20] = bad
                out = torch.empty(48)
                dequantize_torch(*run(x, block=16, dtype=dtype), block=16, out=out)
                assert out[16:32].isnan().all(), (run, dtype, bad)
                torch.testing.assert_close(out[:16], x[:16])
                torch.testing.assert_close(out[32:], x[32:])


def test_what_is_not_finite_is_not_hidden(interpreter) -> None:
    interpreter.run(_not_finite)


def test_what_does_not_fit_is_refused() -> None:
    x = torch.ones(100)
    with pytest.raises(ValueError, match="expected codes of torch.int8 or torch.float8_e4m3fn, got torch.uint8"):
        quantize(x, block=32, dtype=torch.uint8)
    with pytest.raises(ValueError, match="power of two from 16 to 2048, got 100"):
        quantize(x, block=100, dtype=torch.int8)
    with pytest.raises(ValueError, match="expected a contiguous flat"):
        quantize(x[::2], block=32, dtype=torch.int8)
    codes, scales = quantize(x, block=32, dtype=torch.int8)
    with pytest.raises(ValueError, match="dequantize: expected contiguous codes"):
        dequantize(codes, scales[:3], block=32, out=x)
    out = torch.empty(100)
    dequantize(codes, scales, block=32, out=out)
    torch.testing.assert_close(out, x)
