"""Triton where it is installed. Elsewhere kernels stay functions that nobody launches, and the twins run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

jit: Callable[[Callable[..., Any]], Any]
try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:  # no wheel for this platform
    tl = None

    def jit(kernel: Callable[..., Any]) -> Any:
        """Returns ``kernel`` itself."""
        return kernel


def runs_kernels(tensor: Tensor) -> bool:
    """Returns whether kernels run where ``tensor`` is: on a GPU that Triton has code for."""
    return tl is not None and tensor.is_cuda


__all__ = ["jit", "runs_kernels", "tl"]
