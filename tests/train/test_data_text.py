"""Text: the right files in the same order, the documents in them, faults with file and line; and its tokens,
from which every text comes back exactly."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel

from stretto.errors import UsageError
from stretto.models.build import END_OF_TEXT_ID
from stretto.train import encode as coding
from stretto.train import text as bpe
from stretto.train.text import documents, find_files, standard_library


def read(*paths: Path, field: str = "text", say: list[str] | None = None) -> list[str]:
    notices = say if say is not None else []
    return list(documents(find_files([str(path) for path in paths]), field, notices.append))


def test_no_paths_mean_the_standard_library() -> None:
    files = find_files([])
    names = [file.path.relative_to(standard_library()) for file in files]
    assert Path("json/decoder.py") in names
    assert all(name.suffix == ".py" for name in names)
    assert not any("site-packages" in name.parts or "__pycache__" in name.parts for name in names)
    assert [name.parts for name in names] == sorted(name.parts for name in names)
    assert sum(file.bytes for file in files) > 5_000_000
    assert files == find_files([])


def test_a_folder_is_walked_in_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.md", "a/z.txt", "a/b/c.py", ".git/config", "a/.hidden", "__pycache__/x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.txt").write_text("")
    assert read(tmp_path) == ["a/b/c.py", "a/z.txt", "b.md"]
    # A file that is found twice is read once.
    assert read(tmp_path, tmp_path / "b.md", tmp_path / "a") == ["a/b/c.py", "a/z.txt", "b.md"]
    for path, word in ((tmp_path / "gone", "gone does not exist"), (tmp_path / ".git" / "refs", "no file")):
        (tmp_path / ".git" / "refs").mkdir(exist_ok=True)
        with pytest.raises(UsageError, match=word):
            read(path)


def test_files_that_are_not_text_are_left_out_of_a_folder_and_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("\ufeffçà et là", encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "binary.txt").write_bytes(b"ab\0c")
    said: list[str] = []
    assert read(tmp_path, say=said) == ["çà et là"]
    assert len(said) == 1
    assert said[0].startswith("left out 2 of 3 files that are not UTF-8 text")
    for name, where in (("latin.txt", "byte 3"), ("binary.txt", "zero byte at byte 2")):
        with pytest.raises(UsageError, match=f"{name} is not UTF-8 text .*{where}"):
            read(tmp_path / name)


def test_a_jsonl_has_a_document_a_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"text": "one\ntwo"}, {"text": ""}, {"text": "trois é", "more": 3}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    assert read(path) == ["one\ntwo", "trois é"]
    path.write_text('{"body": "half \\ud800"}')
    assert read(path, field="body") == ["half ?"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"text": ', "is not JSON"),
        ('{"body": "x", "id": 3}', r"'text' \(there is: 'body', 'id'\)"),
        ('{"text": 3}', "'text'.*data.text_field"),
        ("[1]", r"\(there is: list\)"),
    ],
)
def test_a_wrong_line_of_a_jsonl_is_named(tmp_path: Path, line: str, expected: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(UsageError, match=f"rows.jsonl:2: .*{expected}"):
        read(path)


def test_a_parquet_has_a_document_a_row(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    texts = [f"text {row} é" for row in range(3000)]
    parquet.write_table(pyarrow.table({"body": [*texts, None, ""], "id": range(3002)}), path)
    assert read(path, field="body") == texts
    for field, words in (("text", r"body \(string\), id \(int64\)"), ("id", "no column of text")):
        with pytest.raises(UsageError, match=words):
            read(path, field=field)
    path.write_bytes(b"not parquet at all")
    with pytest.raises(UsageError, match="as parquet"):
        read(path)


def test_without_pyarrow_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"pip install 'stretto\[parquet\]'"):
        read(tmp_path / "rows.parquet")


# Tokens.

LINES = [f"def function_{number}(argument):\n    return argument + {number}\n" for number in range(200)]


def ids_of(tokenizer: bpe.Tokenizer, texts: list[str]) -> list[int]:
    return np.concatenate([*coding.encode(tokenizer, texts, (), 0)]).tolist()


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
    assert (coding.token_dtype(65_536), coding.token_dtype(65_537)) == (np.uint16, np.uint32)
    assert tokenizer.to_str() == bpe.learn(LINES, 400).to_str()
    assert bpe.parse(tokenizer.to_str()).encode("<|endoftext|>").ids == tokenizer.encode("<|endoftext|>").ids
    assert tokenizer.token_to_id(bpe.END_OF_TEXT) == END_OF_TEXT_ID == 0
    one, two = tokenizer.encode(LINES[0]).ids, tokenizer.encode(LINES[1]).ids
    assert ids_of(tokenizer, LINES[:2]) == [*one, 0, *two, 0], "each document ends with the end of text"


def test_groups_and_pieces_change_nothing_but_the_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = bpe.learn(LINES, 400)
    documents = ["".join(LINES[:7]), LINES[7], "".join(LINES[8:60]), "x" * 1000, LINES[61]]
    full = ids_of(tokenizer, documents)
    assert list(coding.pieces("x" * 9)) == ["x" * 9]
    monkeypatch.setattr(coding, "PIECE_CHARS", 10)
    assert list(coding.pieces("ab\ncdef\nghijk\nl")) == ["ab\ncdef\n", "ghijk\nl"]
    assert list(coding.pieces("x" * 25)) == ["x" * 10, "x" * 10, "x" * 5]
    monkeypatch.setattr(coding, "PIECE_CHARS", 100)
    monkeypatch.setattr(coding, "GROUP_CHARS", 350)
    groups = list(coding.encode(tokenizer, documents, (), 0))
    assert len(groups) > 5
    ids = np.concatenate(groups).tolist()
    assert [tokenizer.decode(part) for part in split_at_end(ids)] == documents
    assert [tokenizer.decode(part) for part in split_at_end(full)] == documents


TOKENIZER = bpe.learn([*LINES, "it's  they'll\n\t ½ é ² 12 ab12 __x__ == != "] * 3, 400)
LETTERS = st.sampled_from(
    ["a", "Z", "é", "ß", "7", "½", "٣", "_", "=", "'", "'s", "'ll", *" \t\n\r\v\f\x1c\x85\u2003\xa0\0"]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(LETTERS, min_size=1).map("".join) | st.text(min_size=1))
def test_words_are_encoded_as_the_library_does(text: str) -> None:
    assert "".join(coding.words(text)) == text
    assert ids_of(TOKENIZER, [text, text]) == [*TOKENIZER.encode(text).ids, 0] * 2
    if text.isascii():
        split = TOKENIZER.pre_tokenizer.pre_tokenize_str(text)
        assert [text[slice(*where)] for _, where in split] == coding.words(text)


def test_tokenizers_that_split_otherwise_encode_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert coding.splits_words(TOKENIZER)
    assert coding.splits_words(bpe.parse(TOKENIZER.to_str()))
    prefixed, normal, named = (Tokenizer.from_str(TOKENIZER.to_str()) for _ in range(3))
    assert not coding.splits_words(named)  # whose texts may have special tokens
    prefixed.pre_tokenizer = ByteLevel(add_prefix_space=True)
    normal.normalizer = NFC()
    for other in (prefixed, normal):
        other.encode_special_tokens = True
        assert not coding.splits_words(other)
        assert ids_of(other, ["it is a\nb"]) == [*other.encode("it is a\nb").ids, 0]
    monkeypatch.setattr(coding, "KNOWN_CHARS", 30)  # forgotten again and again
    monkeypatch.setattr(coding, "GROUP_CHARS", 20)
    known = ids_of(TOKENIZER, LINES[:9])
    monkeypatch.setattr(coding, "FEW_CORES", 0)
    assert known == ids_of(TOKENIZER, LINES[:9])


def split_at_end(ids: list[int]) -> list[list[int]]:
    documents: list[list[int]] = [[]]
    for token in ids:
        if token == 0:
            documents.append([])
        else:
            documents[-1].append(token)
    assert documents.pop() == []
    return documents


def test_a_sample_is_spread_evenly_over_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpe, "SAMPLE_BLOCK_CHARS", 10)
    monkeypatch.setattr(bpe, "SAMPLE_CHARS", 100)
    texts = [f"{number:010}" for number in range(100)]
    taken = [int(block) for block in bpe.sample(texts, 1000)]
    assert len(taken) in (10, 11)
    assert {b - a for a, b in pairwise(taken)} <= {10, 11}
    assert list(bpe.sample(["short"], 5)) == ["short"]
