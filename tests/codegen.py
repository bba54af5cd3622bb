"""Machine code of Triton kernels for GPUs that need not be there.

A launch is recorded instead of run, on meta tensors, so what is compiled is what a GPU would be asked for: the same
types, alignments, constants and options.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


class Launch(NamedTuple):
    """One launch of a kernel: what the compiler is given for it."""

    kernel: JITFunction
    source: ASTSource
    options: dict[str, Any]

    def compile(self, target: str) -> Any:
        """Returns Triton's compiled kernel for a key of ``TARGETS``."""
        return triton.compile(self.source, target=TARGETS[target], options=self.options)


class Resources(NamedTuple):
    """What one program of a kernel takes."""

    registers: int  # per thread
    spilled: int  # bytes per thread on NVIDIA, registers on AMD
    shared: int  # bytes per program


def launches(call: Callable[[], Any]) -> list[Launch]:
    """Returns what ``call`` would launch, in order."""
    found: list[Launch] = []

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {key: kwargs.pop(key) for key in OPTIONS if key in kwargs}
        found.append(Launch(kernel, _source(kernel, args, kwargs), options))

    with mock.patch.object(JITFunction, "run", record):
        call()
    return found


def _source(kernel: JITFunction, args: Any, kwargs: Any) -> ASTSource:
    bound = inspect.signature(kernel.fn).bind(*args, **kwargs).arguments
    signature, constants, attributes = {}, {}, {}
    for index, (name, value) in enumerate(bound.items()):
        if kernel.params[index].is_constexpr or value is None or (type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value  # Triton specialises on None and on 1
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[index,] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[index,] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def resources(compiled: Any) -> Resources:
    """Returns what a compiled kernel takes, read from its machine code."""
    if "cubin" not in compiled.asm:
        code = compiled.asm["amdgcn"]
        count = {key: int(re.search(rf"\.{key}:\s+(\d+)", code)[1]) for key in ("vgpr_count", "vgpr_spill_count")}
        return Resources(count["vgpr_count"], count["vgpr_spill_count"], compiled.metadata.shared)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        out = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    use = {key: int(re.search(rf"\b{key}:(\d+)", out.stdout)[1]) for key in ("REG", "STACK", "LOCAL")}
    return Resources(use["REG"], use["STACK"] + use["LOCAL"], compiled.metadata.shared)


def narrow_offsets(compiled: Any) -> list[str]:
    """Returns the lines of Triton's IR that add a 32-bit offset, which overflows at 2^31 elements, to a pointer."""
    constants = set(re.findall(r"(%\S+) = arith\.constant", compiled.asm["ttir"]))
    added = re.findall(r"(tt\.addptr (%\S+), (%\S+) : .*)", compiled.asm["ttir"])
    return [line for line, _, offset in added if offset not in constants and re.search(r", (tensor<[\dx]*x)?i32", line)]
