"""Checksums of tensors that do not depend on how a tensor is cut.

Each element is mixed with its index in the whole tensor and with the tensor's name, and the results are added modulo
2^64. Addition commutes, so every rank adds up the elements that it holds, and the sum of the ranks' sums is the same
for any cut. Unlike a plain XOR or sum of the values, two elements that change places change it.
"""

from __future__ import annotations

import hashlib

import torch

CHUNK = 2**16  # elements mixed at a time: half a megabyte of int64 stays in the cache
# Odd constants with well spread bits. The first is that of splitmix64's sequence, the others its two multipliers
# (Steele, Lea, Flood 2014; prng.di.unimi.it/splitmix64.c); as int64, whose products wrap as uint64's do.
GOLDEN, FIRST, SECOND = (value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(values: torch.Tensor, *, name: str, first: int = 0) -> int:
    """Returns the share that ``values`` have in the checksum of the tensor called ``name``, in [0, 2^64).

    Args:
        values: Any shape and dtype of 1, 2, 4 or 8 bytes; elements that follow each other in the whole tensor.
        name: Of the whole tensor: equal values under two names have different checksums.
        first: Index of the first element in the whole tensor.
    """
    flat = values.detach().contiguous().reshape(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    salt = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].to(torch.int64)
        index = torch.arange(first + start, first + start + part.numel(), device=flat.device)
        total += _mix(_mix(index.mul_(GOLDEN).add_(salt)).add_(part)).sum()
    return int(total) % 2**64


def add(*sums: int) -> int:
    """Returns the sum of checksums, in [0, 2^64)."""
    return sum(sums) % 2**64


def _mix(word: torch.Tensor) -> torch.Tensor:
    """Returns splitmix64's finaliser of each word, in place."""
    for shift, factor in ((30, FIRST), (27, SECOND)):
        word.bitwise_xor_(_shifted(word, shift)).mul_(factor)
    return word.bitwise_xor_(_shifted(word, 31))


def _shifted(word: torch.Tensor, shift: int) -> torch.Tensor:
    """Returns ``word >> shift`` with zeros coming in: torch shifts int64 with its sign."""
    return (word >> shift) & ((1 << (64 - shift)) - 1)
