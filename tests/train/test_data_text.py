"""Text: the right files in the same order, the documents in them, and faults with file and line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from stretto.errors import UsageError
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


def test_files_that_are_not_text_are_left_out_of_a_folder_and_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("\ufeffçà et là", encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "binary.txt").write_bytes(b"ab\0c")
    said: list[str] = []
    assert read(tmp_path, say=said) == ["çà et là"]
    assert len(said) == 1
    assert said[0].startswith("left out 2 of 3 files that are not UTF-8 text")
    with pytest.raises(UsageError, match=r"latin\.txt is not UTF-8 text \(byte 3 is not UTF-8\)"):
        read(tmp_path / "latin.txt")
    with pytest.raises(UsageError, match=r"binary\.txt is not UTF-8 text \(a zero byte at byte 2\)"):
        read(tmp_path / "binary.txt")


def test_paths_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data\.paths: .*gone does not exist"):
        find_files([str(tmp_path / "gone")])
    with pytest.raises(UsageError, match=r"data\.paths: there is no file in "):
        find_files([str(tmp_path)])


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
        ('{"text": ', r"rows\.jsonl:2: is not JSON"),
        (
            '{"body": "x", "id": 3}',
            r"rows\.jsonl:2: there is no text in the field 'text' \(there is: 'body', 'id'\)",
        ),
        ('{"text": 3}', r"rows\.jsonl:2: there is no text in the field 'text'.*set data\.text_field"),
        ("[1]", r"rows\.jsonl:2: there is no text in the field 'text' \(there is: list\)"),
    ],
)
def test_a_wrong_line_of_a_jsonl_is_named(tmp_path: Path, line: str, expected: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(UsageError, match=expected):
        read(path)


def test_a_parquet_has_a_document_a_row(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    texts = [f"text {row} é" for row in range(3000)]
    parquet.write_table(pyarrow.table({"body": [*texts, None, ""], "id": range(3002)}), path)
    assert read(path, field="body") == texts
    with pytest.raises(
        UsageError, match=r"no column of text 'text' \(there is: body \(string\), id \(int64\)\)"
    ):
        read(path)
    with pytest.raises(UsageError, match="no column of text 'id'"):
        read(path, field="id")
    path.write_bytes(b"not parquet at all")
    with pytest.raises(UsageError, match=r"rows\.parquet cannot be read as parquet"):
        read(path)


def test_without_pyarrow_the_user_is_told_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"pip install 'stretto\[parquet\]'"):
        read(tmp_path / "rows.parquet")
