"""Triton where it is installed. Elsewhere kernels stay functions that nobody launches, and the twins run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


__all__ = ["jit", "tl"]
