"""Every kernel becomes machine code for one GPU (the bench has four), without spilling, with offsets of 64 bits."""

from __future__ import annotations

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
    found = launches(CALLS[name]().run)
    assert found
    for launch in found:
        compiled = launch.compile("sm_90")
        assert resources(compiled).spilled == 0
        assert not narrow_offsets(compiled)
