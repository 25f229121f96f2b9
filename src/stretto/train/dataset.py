"""Batches of token sequences: a pure function of the seed and the step, so that resuming needs no state.

Reads an array of tokens (in memory or mapped from a file) and touches nothing else.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stretto.errors import UsageError

Tokens = npt.NDArray[np.unsignedinteger]
"""Token ids in one dim, in memory or mapped from a file."""


ROUNDS = 6
"""Four rounds look random for wide numbers (Luby and Rackoff); small ones are given two more."""


class TokenDataset:
    """Windows of `sequence_length + 1` tokens, visited in an order that the seed decides.

    Window i begins at token i * sequence_length: each token but the first is predicted in exactly one
    window. Every window is visited once before any is visited again, in another order each time.
    """

    def __init__(self, tokens: Tokens, sequence_length: int, seed: int, what: str = "the text") -> None:
        """Raises UsageError when `tokens`, called `what` in the message, do not fill one window."""
        if len(tokens) < sequence_length + 1:
            raise UsageError(
                f"data.paths: {what} has {len(tokens)} tokens, and a sequence of data.sequence_length = "
                f"{sequence_length} needs {sequence_length + 1}; give more text, or set a shorter length"
            )
        self.tokens = tokens
        self.sequence_length = sequence_length
        self.seed = seed

    @property
    def windows(self) -> int:
        """How many sequences an epoch has."""
        return (len(self.tokens) - 1) // self.sequence_length

    def batch(self, step: int, global_batch: int) -> Tensor:
        """The sequences of a step: int64, (global_batch, sequence_length + 1), on the CPU.

        With the same `global_batch`, steps 0, 1, 2, ... go through one epoch after another.
        """
        if step < 0 or global_batch < 1:
            raise ValueError(f"step = {step} must be 0 or more, and global_batch = {global_batch} 1 or more")
        visits = np.arange(step * global_batch, (step + 1) * global_batch, dtype=np.int64)
        epochs, visits = np.divmod(visits, self.windows)
        windows = np.empty_like(visits)
        for epoch in np.unique(epochs):
            now = epochs == epoch
            windows[now] = permute(visits[now], self.windows, f"{self.seed}:{epoch}")
        starts = windows * self.sequence_length
        index = starts[:, None] + np.arange(self.sequence_length + 1)
        return torch.from_numpy(self.tokens[index].astype(np.int64))


def unigram_entropy(train: Tokens, held_out: Tokens, vocab_size: int) -> float:
    """How well token frequencies alone predict the held-out text: cross-entropy in nats a token.

    The frequencies are those of `train`, each count one higher, so that a token never seen there has a
    probability too. A model whose held-out loss is not below this has learned nothing from context.
    """
    counts = _counts(train, vocab_size) + 1
    log_probability = np.log(counts) - np.log(counts.sum())
    return float(-(_counts(held_out, vocab_size) * log_probability).sum() / len(held_out))


def _counts(tokens: Tokens, vocab_size: int) -> npt.NDArray[np.int64]:
    # In parts, since bincount makes int64 of what it is given, and tokens may be larger than memory.
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(tokens), 1 << 24):
        counts += np.bincount(tokens[start : start + (1 << 24)], minlength=vocab_size)
    return counts


def permute(numbers: npt.NDArray[np.int64], size: int, key: str) -> npt.NDArray[np.int64]:
    """Where each of `numbers` (each in 0 .. size - 1) goes under the permutation that `key` names.

    It is computed and not stored: any number of it costs the same. A Feistel network (Luby and Rackoff, 1988)
    permutes the numbers below the next power of four; those that leave the range are permuted again until
    they are back in it (cycle walking; Black and Rogaway, 2002). Raises ValueError for a number out of range.
    """
    if numbers.size and (numbers.min() < 0 or numbers.max() >= size):
        raise ValueError(f"numbers must be in 0 .. {size - 1}")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    digest = hashlib.shake_256(key.encode()).digest(8 * ROUNDS)
    round_keys = np.frombuffer(digest, dtype="<u8")
    permuted = numbers.astype(np.uint64)
    outside = np.ones(permuted.shape, dtype=bool)
    while outside.any():
        permuted[outside] = _feistel(permuted[outside], half_bits, round_keys)
        outside = permuted >= np.uint64(size)
    return permuted.astype(np.int64)


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
