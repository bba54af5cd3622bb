"""One call of every kernel, at the size of a layer of an 8B model: for code generation, and timed where there is a GPU.

Bytes are what a call must read and write once, FLOPs those of the general product (a symmetric kernel does about half).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from optimizers.kernels.adam8bit import BLOCK, Moments, adam8bit_triton
from optimizers.kernels.adamw import adamw_triton
from optimizers.kernels.gram import gram_triton, polynomial_triton
from optimizers.kernels.grouped_newton_schulz import Matrix, grouped_newton_schulz_triton
from optimizers.kernels.momentum import momentum_triton
from optimizers.kernels.shifted_product import shifted_product_triton
from vescale.kernels.accumulate import accumulate_triton, num_sums
from vescale.kernels.block_quantize import dequantize_triton, quantize_triton
from vescale.kernels.pieces import Pieces

ELEMENTS = 2**26  # of a flat run: 64 Mi, 256 MiB in float32, far beyond any cache
ROWS, COLS = 4096, 14336  # hidden and feed-forward width of Llama-3-8B
SMALL = ((512, 2048), (1024, 4096), (1536, 2048), (2048, 768))  # matrices of the grouped call, sixteen of each


class Call(NamedTuple):
    """What is called, the bytes it must move, the FLOPs of a general product, and the dtype of its products."""

    run: Callable[[], object]
    bytes: int
    flops: int = 0
    dtype: torch.dtype = torch.bfloat16


def calls(device: str, elements: int = ELEMENTS) -> dict[str, Callable[[], Call]]:
    """Returns what makes each call on ``device``, by name; "meta" for code generation."""

    def flat(dtype: torch.dtype = torch.float32, n: int = elements) -> Tensor:
        return torch.zeros(n, dtype=dtype, device=device)

    def matrix(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=device).mul_(shape[-1] ** -0.5).to(dtype)

    def number(value: float) -> Tensor:
        return torch.full((), value, device=device)

    def gram(dtype: torch.dtype) -> Call:
        x = matrix(ROWS, COLS, dtype=dtype)
        return Call(lambda: gram_triton(x), x.nbytes + ROWS * ROWS * x.itemsize, 2 * ROWS**2 * COLS, dtype)

    def polynomial(dtype: torch.dtype) -> Call:
        a = matrix(ROWS, ROWS, dtype=dtype)
        return Call(lambda: polynomial_triton(a, linear=-3.0, square=1.2), 2 * a.nbytes, 2 * ROWS**3, dtype)

    def product(dtype: torch.dtype) -> Call:
        p, x = matrix(ROWS, ROWS, dtype=dtype), matrix(ROWS, COLS, dtype=dtype)
        moved = p.nbytes + 2 * x.nbytes
        return Call(lambda: shifted_product_triton(p, x, shift=2.8), moved, 2 * ROWS**2 * COLS, dtype)

    def grouped() -> Call:
        shapes = SMALL * 16
        sizes = [rows * cols for rows, cols in shapes]
        matrices = tuple(Matrix(sum(sizes[:i]), *shape) for i, shape in enumerate(shapes))
        x, out = matrix(sum(sizes)), flat(torch.bfloat16, sum(sizes))
        options = {"coefficients": "quintic", "dtype": torch.bfloat16, "eps": 1e-30}
        flops = 5 * sum(2 * min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in shapes)
        return Call(lambda: grouped_newton_schulz_triton(x, out, matrices, **options), 2 * x.nbytes, flops)

    def momentum() -> Call:
        m, g, out, skip = flat(), flat(), flat(torch.bfloat16), number(0.0)
        return Call(lambda: momentum_triton(m, g, out, decay=0.95, nesterov=True, skip=skip), 14 * elements)

    numbers = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

    def adamw() -> Call:
        flats, low = [flat() for _ in range(4)], flat(torch.bfloat16)
        step, lr, skip = number(3.0), number(1e-3), number(0.0)
        return Call(lambda: adamw_triton(*flats, step, lr=lr, **numbers, skip=skip, low=low), 30 * elements)

    def adam8bit(form: str) -> Call:
        p, g, low, spans = flat(), flat(), flat(torch.bfloat16), ((0, elements),)
        codes, scales = flat(torch.uint8), flat(n=-(-elements // BLOCK))
        moments = Moments(codes, scales, codes.clone(), scales.clone())
        step, lr, skip = number(3.0), number(1e-3), number(0.0)
        options = {"spans": spans, "compat": form, "skip": skip, "low": low}
        return Call(lambda: adam8bit_triton(p, g, moments, step, lr=lr, **numbers, **options), 18 * elements)

    def accumulate() -> Call:
        grad, reduced, sums = flat(), flat(torch.bfloat16), flat(n=num_sums(elements))
        return Call(lambda: accumulate_triton(grad, reduced, scale=0.25, fresh=False, sums=sums), 10 * elements)

    # What lies between tensors: 32 elements behind every 3 Mi, and a long end.
    step = min(3 * 2**20, elements // 8)
    pieces = Pieces([*((at - 32, at) for at in range(step, elements - step, step)), (elements - step, elements)])

    def zero() -> Call:
        x = flat()
        return Call(lambda: pieces.zero_triton(x), 4 * pieces.num_elements)

    def quantized(dtype: torch.dtype) -> Call:
        x = flat(torch.bfloat16)
        return Call(lambda: quantize_triton(x, block=128, dtype=dtype), 3 * elements)

    def dequantized(dtype: torch.dtype) -> Call:
        codes, scales, out = flat(torch.uint8).view(dtype), flat(n=-(-elements // 128)), flat(torch.bfloat16)
        return Call(lambda: dequantize_triton(codes, scales, block=128, out=out), 3 * elements)

    bf16, fp32, int8, float8 = torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn
    return {
        "gram, bf16": lambda: gram(bf16),
        "gram, fp32": lambda: gram(fp32),
        "polynomial, bf16": lambda: polynomial(bf16),
        "shifted product, bf16": lambda: product(bf16),
        "shifted product, fp32": lambda: product(fp32),
        "grouped Newton-Schulz, 64 matrices": grouped,
        "momentum, to bf16": momentum,
        "AdamW, with bf16 copy": adamw,
        "Adam8bit, with bf16 copy": lambda: adam8bit("none"),
        "Adam8bit bnb, with bf16 copy": lambda: adam8bit("bnb"),
        "accumulate bf16, with norm": accumulate,
        "pieces: zero": zero,
        "quantize to int8": lambda: quantized(int8),
        "quantize to float8": lambda: quantized(float8),
        "dequantize int8": lambda: dequantized(int8),
        "dequantize float8": lambda: dequantized(float8),
    }
