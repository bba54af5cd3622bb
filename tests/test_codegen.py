"""Every kernel becomes machine code for one GPU (the bench has four): no spills, offsets of 64 bits, wide loads."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from codegen import launches, narrow_offsets, resources
from kernel_calls import calls

from optimizers.kernels.adam8bit import Moments, adam8bit_triton
from optimizers.kernels.adamw import adamw_triton
from optimizers.kernels.momentum import momentum_triton

CALLS = calls("meta")


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Iterator[None]:
    """Triton's cache, empty at first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.mark.parametrize("name", CALLS)
def test_every_kernel_compiles(name: str, cache: None) -> None:
    found = {launch.source.hash(): launch for launch in launches(CALLS[name]().run)}
    assert found
    for launch in found.values():
        compiled = launch.compile("sm_90")
        assert resources(compiled).spilled == 0
        assert not narrow_offsets(compiled)
        narrow = re.findall(r"(?:ld|st)\.global\S*\.b(?:8|16) ", compiled.asm["ptx"])
        assert not narrow or name.startswith("grouped"), "elements are loaded and stored one by one"
        if name in ("gram, bf16", "polynomial, bf16", "shifted product, bf16"):
            assert "wgmma.mma_async" in compiled.asm["ptx"]  # tensor cores


def test_numbers_that_lie_on_the_device_compile_too(cache: None) -> None:
    flat, scales = torch.zeros(4096, device="meta"), torch.zeros(16, device="meta")
    codes = flat.byte()
    number = torch.zeros((), dtype=torch.float64, device="meta")
    numbers = {"lr": number, "betas": (number, number), "eps": 1e-8, "weight_decay": number}
    moments, options = Moments(codes, scales, codes, scales), {"spans": ((0, 4096),), "compat": "none"}
    for call in (
        lambda: adamw_triton(flat, flat, flat, flat, number.float(), **numbers),
        lambda: adam8bit_triton(flat, flat, moments, number.float(), **numbers, **options),
        lambda: momentum_triton(flat, flat, flat.bfloat16(), decay=number, nesterov=True),
    ):
        (launch,) = launches(call)
        assert resources(launch.compile("sm_90")).spilled == 0
