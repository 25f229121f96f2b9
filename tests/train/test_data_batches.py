"""Batches: each window once an epoch, decided by seed and step alone; and the unigram baseline."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import UsageError
from stretto.train.dataset import TokenDataset, permute, unigram_entropy

TOKENS = np.arange(1000, dtype=np.uint16)


@given(st.integers(1, 700), st.text(max_size=5))
def test_a_permutation_takes_every_place_once(size: int, key: str) -> None:
    went = permute(np.arange(size, dtype=np.int64), size, key)
    assert sorted(went.tolist()) == list(range(size))


def test_a_permutation_mixes_and_its_key_decides() -> None:
    places = np.arange(4096, dtype=np.int64)
    one, two = permute(places, 4096, "1"), permute(places, 4096, "2")
    assert abs(np.corrcoef(places, one)[0, 1]) < 0.06  # Four standard deviations of chance.
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.06
    assert (one == places).sum() < 12


def test_a_permutation_of_a_huge_range_costs_no_memory() -> None:
    places = np.array([0, 10**14, 10**15 - 1], dtype=np.int64)
    assert len(set(permute(places, 10**15, "k").tolist())) == 3
    with pytest.raises(ValueError, match="must be in 0"):
        permute(np.array([10]), 10, "k")


@given(st.integers(1, 40), st.integers(1, 70), st.integers(0, 3))
def test_every_window_is_visited_once_an_epoch(length: int, batch: int, seed: int) -> None:
    dataset = TokenDataset(TOKENS, length, seed)
    windows = dataset.windows
    steps = math.ceil(2 * windows / batch)
    starts = np.concatenate([dataset.batch(step, batch)[:, 0].numpy() for step in range(steps)])
    for epoch in range(2):
        seen = starts[epoch * windows : (epoch + 1) * windows]
        assert sorted(seen.tolist()) == [length * window for window in range(windows)]


def test_epochs_and_seeds_have_different_orders() -> None:
    dataset = TokenDataset(TOKENS, 9, seed=0)
    first, second = dataset.batch(0, 111), dataset.batch(1, 111)
    assert not torch.equal(first, second)
    assert not torch.equal(first, TokenDataset(TOKENS, 9, seed=1).batch(0, 111))


def test_a_batch_is_consecutive_tokens_with_their_targets() -> None:
    batch = TokenDataset(TOKENS, 9, seed=0).batch(3, 5)
    assert batch.shape == (5, 10)
    assert batch.dtype == torch.int64
    assert torch.equal(batch, batch[:, :1] + torch.arange(10))


def test_a_step_is_the_same_in_any_order_and_in_another_process() -> None:
    dataset = TokenDataset(TOKENS, 9, seed=7)
    later = dataset.batch(50, 4)
    dataset.batch(3, 4)
    assert torch.equal(dataset.batch(50, 4), later)
    program = (
        "import numpy as np; from stretto.train.dataset import TokenDataset; "
        "print(TokenDataset(np.arange(1000, dtype=np.uint16), 9, seed=7).batch(50, 4).tolist())"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == str(later.tolist())


def test_too_little_text_says_how_much_is_needed() -> None:
    assert TokenDataset(TOKENS[:10], 9, 0).windows == 1
    with pytest.raises(UsageError) as caught:
        TokenDataset(TOKENS[:9], 9, 0, "the held-out text")
    assert "the held-out text has 9 tokens" in str(caught.value)
    assert "data.sequence_length = 9 needs 10" in str(caught.value)
    with pytest.raises(ValueError, match="global_batch = 0"):
        TokenDataset(TOKENS, 9, 0).batch(0, 0)


def test_unigram_entropy_is_the_textbooks() -> None:
    train = np.array([0, 0, 0, 1, 1, 2], dtype=np.uint16)
    held_out = np.array([0, 1, 3], dtype=np.uint16)
    # One is added to each count: 4, 3, 2 and 1 of 10.
    expected = -(math.log(0.4) + math.log(0.3) + math.log(0.1)) / 3
    assert unigram_entropy(train, held_out, 4) == pytest.approx(expected, rel=1e-12)
    even = np.arange(8000, dtype=np.uint16) % 8
    assert unigram_entropy(even, even, 8) == pytest.approx(math.log(8), rel=1e-12)
