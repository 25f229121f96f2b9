"""Files are written in full or not at all. Texts that are kept are found by all that they depend on."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stretto.files import kept as room
from stretto.files.kept import Kept, ago, code_digest, key_of
from stretto.files.whole_file import write_file


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "not there yet")
    assert kept.find("plan", "a", "") is None
    kept.keep("plan", "a", "text\nof two lines, é")
    assert kept.find("plan", "a", "") == "text\nof two lines, é"
    assert kept.find("costs", "a", "") is None, "another kind"
    renewing = Kept(kept.folder, renew=True)
    assert renewing.find("plan", "a", "") is None
    renewing.keep("plan", "a", "new")
    assert Kept(kept.folder).find("plan", "a", "") == "new"


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda full: full[:-3],
    "changed": lambda full: full.replace(b"enough", b"little"),
    "no head": lambda full: full.partition(b"\n")[2],
    "empty": lambda full: b"",
    "not UTF-8": lambda full: full[:-3] + b"\xff\xfe\xfd",
    "a deep head": lambda full: b"[" * 100_000 + b"\ntext",
    "a large number": lambda full: b'{"made_at_s": 1e999, "sha256": ""}\ntext',
    "a list": lambda full: b'{"made_at_s": []}\ntext',
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_none_and_goes(damage: str, tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.keep("plan", "a", "a long enough text")
    (path,) = tmp_path.glob("*.kept")
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert kept.find("plan", "a", "") is None
    assert not path.exists()


def test_what_is_too_old_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(tmp_path)
    kept.keep("costs", "a", "text")
    now_s = time.time()
    monkeypatch.setattr(room.time, "time", lambda: now_s + 100.0)
    assert kept.find("costs", "a", "", most_age_s=50.0) is None
    assert kept.find("costs", "a", "", most_age_s=150.0) is not None
    monkeypatch.setattr(room.time, "time", lambda: now_s - 100.0)
    assert kept.find("costs", "a", "", most_age_s=50.0) is None, "the clock was set back"


def test_those_that_were_not_used_for_longest_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "MOST_ENTRIES", 3)
    kept = Kept(tmp_path)
    for at, key in enumerate("abc"):
        kept.keep("plan", key, "text")
        os.utime(tmp_path / f"plan-{key}.kept", (at, at))
    assert kept.find("plan", "a", "") is not None
    kept.keep("plan", "d", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan-a.kept", "plan-c.kept", "plan-d.kept"]
    monkeypatch.setattr(room, "MOST_BYTES", 300)
    kept.keep("plan", "e", "x" * 1000)
    assert [path.name for path in tmp_path.iterdir()] == ["plan-e.kept"], "one alone may be larger"


def test_what_a_killed_writer_left_goes(tmp_path: Path) -> None:
    old, new = tmp_path / ".plan-a.kept.17.tmp", tmp_path / ".plan-b.kept.18.tmp"
    for path in (old, new):
        path.write_text("half")
    os.utime(old, (0, 0))
    Kept(tmp_path).keep("plan", "c", "text")
    assert not old.exists()
    assert new.exists(), "somebody may be writing it"


def test_a_folder_that_cannot_be_written_is_noted_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    kept = Kept(tmp_path / "file", say=said.append)
    kept.keep("plan", "a", "text")
    assert [str(tmp_path / "file") in line for line in said] == [True]
    assert kept.find("plan", "a", "") is None


def test_keys_differ_where_one_part_ends_elsewhere() -> None:
    assert key_of("a", "b") == key_of("a", "b")
    assert len({key_of("ab"), key_of("a", "b"), key_of("b", "a"), key_of("a", "b", ""), key_of()}) == 5
    assert code_digest() == code_digest()


def test_ages_are_words() -> None:
    ages = [ago(age_s) for age_s in (0.4, 59.0, 61.0, 7200.0, 5e5)]
    assert ages == ["0 s ago", "59 s ago", "1 minute ago", "2 hours ago", "5 days ago"]


# One file.


def full_disk(_descriptor: int) -> None:
    """In place of `os.fsync`, where a disk that is full fails at the latest."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("data", ["déjà vu\n", b"\x00\xff"])
def test_what_is_written_is_there(tmp_path: Path, data: str | bytes) -> None:
    write_file(tmp_path / "a", data)
    assert (tmp_path / "a").read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert os.listdir(tmp_path) == ["a"]


def test_a_failure_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_file(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    write_file(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "a").read_text() == "new"


def test_a_pipe_is_written_as_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_file(tmp_path / "pipe", "words")
    assert os.read(reader, 9) == b"words"
    os.close(reader)
