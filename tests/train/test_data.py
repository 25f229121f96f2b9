"""Data from settings: kept and found again, rebuilt when damaged, safe for several processes, nothing shared
between what is trained on and what is held out."""

from __future__ import annotations

import errno
import json
import os
import pwd
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.forks import Fork, run_forks

from stretto.config import DataSettings, TrainSettings
from stretto.errors import StrettoError, UsageError
from stretto.files.kept import cache_dir
from stretto.train import data
from stretto.train.data import TextData, prepare_data
from stretto.train.reuse import kept_by

Prepare = Callable[..., TextData]


def write_text(folder: Path, files: int = 30) -> None:
    folder.mkdir(exist_ok=True)
    for number in range(files):
        lines = [f"file {number} line {line}: the value is {number * line % 97}" for line in range(40)]
        (folder / f"{number:03}.txt").write_text("\n".join(lines))


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def prepare(tmp_path: Path, said: list[str]) -> Prepare:
    write_text(tmp_path / "text")

    def run(**changes: object) -> TextData:
        values = {
            "paths": [str(tmp_path / "text")],
            "cache_dir": str(tmp_path / "cache"),
            "sequence_length": 16,
            "vocab_size": 400,
            "held_out_fraction": 0.3,
        }
        return prepare_data(DataSettings(**{**values, **changes}), said.append)

    return run


def documents_in(text: TextData, which: str) -> list[str]:
    tokens = getattr(text, which).tokens.tolist()
    parts: list[list[int]] = [[]]
    for token in tokens:
        parts.append([]) if token == 0 else parts[-1].append(token)
    return [text.tokenizer.decode(part) for part in parts[:-1]]


def folder_of(tmp_path: Path) -> Path:
    (found,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    return found


def builds(said: list[str]) -> int:
    return sum(line.startswith("learning") for line in said)


def test_every_document_is_on_exactly_one_side(prepare: Prepare, tmp_path: Path) -> None:
    text = prepare()
    train, held_out = documents_in(text, "train"), documents_in(text, "held_out")
    assert len(train) > 10
    assert len(held_out) > 3
    assert sorted(train + held_out) == sorted(path.read_text() for path in (tmp_path / "text").iterdir())


def test_equal_documents_are_on_the_same_side(prepare: Prepare, tmp_path: Path) -> None:
    for path in sorted((tmp_path / "text").iterdir()):
        (path.parent / f"copy-{path.name}").write_text(path.read_text())
    text = prepare()
    train, held_out = documents_in(text, "train"), documents_in(text, "held_out")
    assert len(train) + len(held_out) == 60
    assert not set(train) & set(held_out)


def test_of_few_documents_the_ends_are_held_out(prepare: Prepare, tmp_path: Path, said: list[str]) -> None:
    text = prepare(held_out_fraction=0.1)  # A tenth of 30 documents is fewer than 8.
    assert "only 30 documents: the last 10.0% of each is held out" in said
    train, held_out = documents_in(text, "train"), documents_in(text, "held_out")
    originals = [path.read_text() for path in sorted((tmp_path / "text").iterdir())]
    assert [a + b for a, b in zip(train, held_out, strict=True)] == originals
    assert all(part.endswith("\n") for part in train)
    assert 0.05 < sum(map(len, held_out)) / sum(map(len, originals)) < 0.1


def test_the_second_time_the_cache_is_used(prepare: Prepare, said: list[str]) -> None:
    first, second = prepare(), prepare(seed=5, sequence_length=8)
    assert builds(said) == 1
    assert np.array_equal(first.train.tokens, second.train.tokens)
    assert isinstance(second.train.tokens, np.memmap)
    assert second.train.tokens.dtype == np.uint16
    assert second.tokenizer.to_str() == first.tokenizer.to_str()
    assert second.unigram_entropy_nats == first.unigram_entropy_nats > 1.0
    assert second.vocab_size == first.tokenizer.get_vocab_size() <= 400


def test_the_held_out_batches_do_not_depend_on_the_seed(prepare: Prepare) -> None:
    first, second = prepare(seed=0), prepare(seed=1)
    assert torch.equal(first.held_out.batch(0, 4), second.held_out.batch(0, 4))
    assert not torch.equal(first.train.batch(0, 4), second.train.batch(0, 4))


def test_other_text_or_settings_make_another_cache(prepare: Prepare, tmp_path: Path, said: list[str]) -> None:
    prepare()
    prepare(vocab_size=350)
    prepare(held_out_fraction=0.4)
    assert builds(said) == 3
    changed = tmp_path / "text" / "000.txt"
    before = changed.stat()
    changed.write_text(changed.read_text().replace("0", "1"))
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    prepare()
    assert builds(said) == 4


def damage_truncate(folder: Path) -> None:
    path = folder / "train.npy"
    path.write_bytes(path.read_bytes()[:-100])


def damage_flip(folder: Path) -> None:
    path = folder / "train.npy"
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)


def damage_remove(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"train.npy": ')


@pytest.mark.parametrize(
    ("damage", "notice"),
    [
        (damage_truncate, "train.npy has "),
        (damage_flip, "the bytes of train.npy have changed"),
        (damage_remove, "tokenizer.json: No such file"),
        (damage_manifest, "manifest.json cannot be read"),
    ],
)
def test_a_damaged_cache_is_built_anew_with_a_notice(
    prepare: Prepare, tmp_path: Path, said: list[str], damage: Callable[[Path], None], notice: str
) -> None:
    good = prepare().train.tokens.tolist()
    damage(folder_of(tmp_path))
    assert prepare().train.tokens.tolist() == good
    assert builds(said) == 2
    assert [line for line in said if "is damaged" in line and notice in line]
    prepare()
    assert builds(said) == 2


def test_what_a_killed_process_left_is_cleared_away(
    prepare: Prepare, tmp_path: Path, said: list[str]
) -> None:
    prepare()
    folder = folder_of(tmp_path)
    partial = folder.rename(folder.with_name(folder.name + ".partial"))
    (partial / "junk").write_text("half")
    prepare()
    assert not partial.exists()
    assert not (folder / "junk").exists()
    assert builds(said) == 2


def test_a_full_disk_is_told_and_leaves_nothing(
    prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(data, "_write_tokens", full)
        with pytest.raises(StrettoError) as caught:
            prepare()
    assert caught.value.exit_status == 1
    assert "the disk is full" in str(caught.value)
    assert str(tmp_path / "cache") in str(caught.value)
    assert "data.cache_dir" in str(caught.value)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] in ([], [".lock"])
    assert prepare().train.windows > 1


def test_a_cache_folder_that_cannot_be_used(prepare: Prepare, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"data\.cache_dir: .*file/below cannot be used"):
        prepare(cache_dir=str(tmp_path / "file" / "below"))


def test_four_processes_at_once_build_once_and_agree(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    program = f"""
import zlib
from stretto.config import DataSettings, TrainSettings
from stretto.train.data import prepare_data
text = prepare_data(DataSettings(paths=[{str(tmp_path / "text")!r}], cache_dir={str(tmp_path / "cache")!r},
    sequence_length=16, vocab_size=400, held_out_fraction=0.3), print)
print("sum", zlib.crc32(text.train.batch(9, 8).numpy().tobytes()))
"""
    (tmp_path / "program.py").write_text(program)
    files = [tmp_path / f"said{number}" for number in range(4)]
    ended = run_forks([Fork(str(tmp_path / "program.py"), (), {}, str(file)) for file in files], 120)
    outputs = [file.read_text() for file in files]
    assert ended.statuses == (0,) * 4, outputs
    assert sum("learning" in output for output in outputs) == 1
    assert len({output.splitlines()[-1] for output in outputs}) == 1
    assert outputs[0].splitlines()[-1].startswith("sum ")


def test_the_cache_is_where_the_desktop_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "stretto"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert cache_dir() == tmp_path / "home" / ".cache" / "stretto"


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "STRETTO_REUSE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=r"no home directory.*set XDG_CACHE_HOME"):
        cache_dir()
    said: list[str] = []
    assert kept_by(TrainSettings(), said.append) is None
    (note,) = said
    assert note.startswith("note: costs and plan are not kept for the next run: this user has no home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept_by(TrainSettings()) is not None


@pytest.mark.parametrize(
    ("told", "setting", "renew"),
    [
        ("", "auto", False),
        ("", "renew", True),
        ("", "off", None),
        ("auto", "off", False),
        ("auto", "renew", True),
        ("renew", "auto", True),
        ("renew", "off", True),
        ("off", "renew", None),
    ],
)
def test_what_is_found_again_by_the_environment_and_the_settings(
    told: str, setting: str, renew: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRETTO_REUSE", told)
    kept = kept_by(TrainSettings.model_validate({"planning": {"reuse": setting}}))
    assert (None if kept is None else kept.renew) is renew


def test_too_little_text(prepare: Prepare, tmp_path: Path) -> None:
    few = tmp_path / "few.txt"
    few.write_text("a few words, and no more than that\n" * 3)
    with pytest.raises(UsageError, match=r"the text to train on has \d+ tokens.*= 200 needs 201"):
        prepare(paths=[str(few)], sequence_length=200)
    with pytest.raises(UsageError, match=r"the held-out text has \d+ tokens.*= 50 needs 51"):
        prepare(paths=[str(few)], sequence_length=50, vocab_size=257)
    few.write_text("")
    with pytest.raises(UsageError, match=r"there is no text in .*few\.txt"):
        prepare(paths=[str(few)])
    few.write_text("a")
    with pytest.raises(UsageError, match=r"1 characters, is too short to hold out 30\.0%"):
        prepare(paths=[str(few)])


def test_a_jsonl_of_rows_is_split_by_row(prepare: Prepare, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [f"row {number} says {number * 7 % 31} and then {number * 3}" for number in range(100)]
    path.write_text("\n".join(json.dumps({"body": row}) for row in rows))
    text = prepare(paths=[str(path)], text_field="body")
    train, held_out = documents_in(text, "train"), documents_in(text, "held_out")
    assert sorted(train + held_out) == sorted(rows)
    assert 10 < len(held_out) < 60
