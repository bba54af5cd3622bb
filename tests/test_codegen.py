"""Every kernel becomes machine code for one GPU (the bench has four): no spills, offsets of 64 bits, wide loads."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from codegen import launches, narrow_offsets, resources
from kernel_calls import calls

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
