"""A permutation of 0 .. n - 1 that is computed, not stored: any place of it costs the same.

A Feistel network (Luby and Rackoff, 1988) permutes the numbers below the next power of four; numbers that
leave the range are permuted again until they are back in it (cycle walking; Black and Rogaway, 2002).
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

ROUNDS = 6
"""Four rounds look random for wide numbers (Luby and Rackoff); small ones are given two more."""


def permute(places: npt.NDArray[np.int64], size: int, key: str) -> npt.NDArray[np.int64]:
    """Where each of `places` (each in 0 .. size - 1) goes under the permutation that `key` names.

    Raises ValueError for a place that is out of range.
    """
    if places.size and (places.min() < 0 or places.max() >= size):
        raise ValueError(f"places must be in 0 .. {size - 1}")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    digest = hashlib.shake_256(key.encode()).digest(8 * ROUNDS)
    round_keys = np.frombuffer(digest, dtype="<u8")
    numbers = places.astype(np.uint64)
    outside = np.ones(numbers.shape, dtype=bool)
    while outside.any():
        numbers[outside] = _feistel(numbers[outside], half_bits, round_keys)
        outside = numbers >= np.uint64(size)
    return numbers.astype(np.int64)


def _feistel(
    numbers: npt.NDArray[np.uint64], half_bits: int, round_keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = numbers >> shift, numbers & mask
    for round_key in round_keys:
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    return (left << shift) | right


def _mix(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's output function (Steele, Lea and Flood, 2014); arithmetic wraps at 64 bits."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
