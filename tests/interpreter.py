"""One process in which Triton kernels are interpreted on CPU.

``TRITON_INTERPRET`` counts when a kernel is defined, so the process is of its own, and nothing else runs there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from pool import FRESH, Pool


class Interpreter:
    """``run`` calls a module-level function of a test file in that process."""

    def __init__(self) -> None:
        self.pool = Pool(1, FRESH)

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns what ``fn`` returned; raises with its traceback."""
        if not self.pool.workers:  # not started yet, or stopped by a failure
            self.pool.run(_begin)
        return self.pool.run(fn, *args, **kwargs)[0]


def _begin() -> None:
    """Turns the interpreter on, and makes it treat bfloat16 as a GPU does.

    numpy has no bfloat16: Triton 3.6 to 3.9 keep its bits as integers, multiply them as such, and cut where a GPU
    rounds to the nearest.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def float32(x: Any) -> Any:
        if x.dtype.scalar is not tl.bfloat16:
            return TensorHandle(x.data.astype(np.float32), tl.float32)  # numpy multiplies float16 by hand
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, float32(a), float32(b), *rest)

    def cast_impl(self: Any, x: Any, kind: Any) -> Any:
        if x.dtype.scalar is tl.float32 and kind.scalar is tl.bfloat16:
            nearest = torch.from_numpy(np.array(x.data)).bfloat16().view(torch.int16).numpy()
            return TensorHandle(nearest.view(np.uint16), kind.scalar)
        return cast(self, x, kind)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl
