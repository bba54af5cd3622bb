"""In cache: an element-wise part in stretches, so that what one of its passes wrote the next finds in the cache."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

# Elements of a stretch: four float32 tensors of 256 KiB lie in a second-level cache of 1 MiB or more.
STRETCH = 2**16


def in_cache(*flats: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yields the same stretch of every tensor, as views, until their end; on an accelerator all of them at once.

    For operators that give an element the same bits wherever a run is cut.

    Args:
        flats: (n,) each, of any dtypes, on one device.
    """
    if flats[0].device.type != "cpu" or flats[0].numel() <= STRETCH:
        yield flats
    else:
        yield from zip(*(flat.split(STRETCH) for flat in flats), strict=True)
