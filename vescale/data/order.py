"""The order of samples: a permutation of an epoch that is a pure function of (seed, epoch, index), with no table."""

from __future__ import annotations

import numpy as np

ROUNDS = 8
ORDER = f"feistel-{ROUNDS}"  # names the order of samples; a run must not go on in another one


def permute(index: np.ndarray, *, size: int, seed: int, epoch: np.ndarray) -> np.ndarray:
    """Returns where each ``index`` goes in the permutation of ``range(size)`` that belongs to (seed, epoch).

    No table is made. A Feistel network permutes the smallest ``2**(2*half) >= size``, and what falls outside ``size``
    walks on until it falls inside: less than four times on average (Black and Rogaway 2002, "cycle walking"). Four
    rounds make a pseudo-random permutation (Luby and Rackoff 1988); with the one or two bits a side of a tiny ``size``
    four show a bias that eight do not.

    Args:
        index: (n,) integers in [0, size).
        size: Samples of an epoch.
        seed: Any integer.
        epoch: (n,) integers >= 0, the epoch of each index.

    Returns:
        (n,) int64 in [0, size).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    start = _mix(np.array([seed % 2**64], np.uint64))
    keys = [_mix(_mix(start + epoch.astype(np.uint64)) + np.uint64(number)) for number in range(ROUNDS)]
    place = _feistel(index.astype(np.uint64), keys, half=half)
    while (outside := place >= size).any():
        place = np.where(outside, _feistel(place, keys, half=half), place)
    return place.astype(np.int64)


def _feistel(place: np.ndarray, keys: list[np.ndarray], *, half: int) -> np.ndarray:
    """Returns ``place`` permuted within ``range(2**(2*half))``, by one key per round and index."""
    mask = np.uint64((1 << half) - 1)
    left, right = place >> np.uint64(half), place & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << np.uint64(half)) | right


def _mix(word: np.ndarray) -> np.ndarray:
    """Returns splitmix64 of each word (Steele, Lea, Flood 2014; constants: prng.di.unimi.it/splitmix64.c)."""
    word = word + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
