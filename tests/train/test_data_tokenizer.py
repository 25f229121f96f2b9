"""The tokenizer: every text comes back exactly, and the same text gives the same tokens."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.models.build import END_OF_TEXT_ID
from stretto.train import tokenizer as bpe

LINES = [f"def function_{number}(argument):\n    return argument + {number}\n" for number in range(200)]


def ids_of(tokenizer: bpe.Tokenizer, texts: list[str]) -> list[int]:
    return np.concatenate([ids for _, ids in bpe.encode(tokenizer, texts)]).tolist()


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_any_text_is_encoded_and_decoded_exactly(text: str) -> None:
    tokenizer = bpe.learn(["some text"], 300)
    text += "<|endoftext|>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert 0 not in tokenizer.encode(text).ids


def test_merges_are_learned_and_the_same_text_gives_the_same() -> None:
    tokenizer = bpe.learn(LINES, 400)
    assert tokenizer.get_vocab_size() <= 400
    assert len(tokenizer.encode(LINES[0]).ids) < len(LINES[0]) / 2
    assert tokenizer.to_str() == bpe.learn(LINES, 400).to_str()
    assert bpe.parse(tokenizer.to_str()).encode("<|endoftext|>").ids == tokenizer.encode("<|endoftext|>").ids


def test_each_document_ends_with_the_end_of_text() -> None:
    tokenizer = bpe.learn(LINES, 400)
    assert tokenizer.token_to_id(bpe.END_OF_TEXT) == END_OF_TEXT_ID == 0
    one, two = tokenizer.encode(LINES[0]).ids, tokenizer.encode(LINES[1]).ids
    assert ids_of(tokenizer, LINES[:2]) == [*one, 0, *two, 0]


def test_groups_and_pieces_change_nothing_but_the_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = bpe.learn(LINES, 400)
    documents = ["".join(LINES[:7]), LINES[7], "".join(LINES[8:60]), "x" * 1000, LINES[61]]
    whole = ids_of(tokenizer, documents)
    monkeypatch.setattr(bpe, "PIECE_CHARS", 100)
    monkeypatch.setattr(bpe, "GROUP_CHARS", 350)
    groups = list(bpe.encode(tokenizer, documents))
    assert len(groups) > 5
    assert sum(chars for chars, _ in groups) == sum(map(len, documents))
    ids = np.concatenate([ids for _, ids in groups]).tolist()
    assert [tokenizer.decode(part) for part in split_at_end(ids)] == documents
    assert [tokenizer.decode(part) for part in split_at_end(whole)] == documents


def split_at_end(ids: list[int]) -> list[list[int]]:
    documents: list[list[int]] = [[]]
    for token in ids:
        if token == 0:
            documents.append([])
        else:
            documents[-1].append(token)
    assert documents.pop() == []
    return documents


def test_pieces_are_cut_at_lines_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpe, "PIECE_CHARS", 10)
    assert list(bpe.pieces("ab\ncdef\nghijk\nl")) == ["ab\ncdef\n", "ghijk\nl"]
    assert list(bpe.pieces("x" * 25)) == ["x" * 10, "x" * 10, "x" * 5]


def test_a_sample_is_spread_evenly_over_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpe, "SAMPLE_BLOCK_CHARS", 10)
    monkeypatch.setattr(bpe, "SAMPLE_CHARS", 100)
    texts = [f"{number:010}" for number in range(100)]
    taken = [int(block) for block in bpe.sample(texts, 1000)]
    assert len(taken) in (10, 11)
    assert {b - a for a, b in pairwise(taken)} <= {10, 11}
    assert list(bpe.sample(["short"], 5)) == ["short"]


def test_ids_take_two_bytes_where_they_fit() -> None:
    assert bpe.token_dtype(65_536) == np.uint16
    assert bpe.token_dtype(65_537) == np.uint32
