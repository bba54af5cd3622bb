"""What kernels ask of the tensors they are given: one sentence that names all that does not fit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOAT32 = (torch.float32,)
RATES = (torch.float32, torch.float64)  # of 0-d tensors that stand for numbers
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def expect(kernel: str, /, **operands: tuple[Tensor | None, Sequence[int], Sequence[torch.dtype]]) -> None:
    """Refuses tensors that a kernel cannot take: another shape or dtype, not contiguous, or on different devices.

    Args:
        kernel: Name for the message.
        **operands: Name to (tensor, shape, dtypes allowed); None stands for one that was left out.

    Raises:
        ValueError: Names every operand that does not fit, what was expected and what it is.
    """
    problems = []
    device = next((tensor.device for tensor, _, _ in operands.values() if tensor is not None), None)
    for name, (tensor, shape, dtypes) in operands.items():
        if tensor is None:
            continue
        fits = tuple(tensor.shape) == tuple(shape) and tensor.dtype in dtypes
        if not fits or not tensor.is_contiguous() or tensor.device != device:
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            strides = "" if tensor.is_contiguous() else f" with strides {tensor.stride()}"
            problems.append(
                f"{name}: expected contiguous {tuple(shape)} {kinds} on {device}, got "
                f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{strides} on {tensor.device}"
            )
    if problems:
        raise ValueError(f"{kernel}: " + "; ".join(problems))
