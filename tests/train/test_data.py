"""Data from settings: kept and found again, rebuilt when damaged, safe for several processes, nothing shared
between what is trained on and what is held out; each window once an epoch, by seed and step alone."""

from __future__ import annotations

import errno
import math
import os
import pwd
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.forks import Fork, run_forks

from stretto.config import DataSettings, TrainSettings
from stretto.errors import StrettoError, UsageError
from stretto.files.kept import cache_dir
from stretto.train import data
from stretto.train.data import TextData, TokenDataset, permute, prepare_data, unigram_entropy
from stretto.train.job import kept_by

Prepare = Callable[..., TextData]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def prepare(tmp_path: Path, said: list[str]) -> Prepare:
    """Makes data of 30 files."""
    (tmp_path / "text").mkdir()
    for number in range(30):
        lines = [f"file {number} line {line}: the value is {number * line % 97}" for line in range(40)]
        (tmp_path / "text" / f"{number:03}.txt").write_text("\n".join(lines))

    def run(**changes: object) -> TextData:
        values = {
            "paths": [str(tmp_path / "text")],
            "cache_dir": str(tmp_path / "cache"),
            "sequence_length": 16,
            "vocab_size": 400,
            "held_out_fraction": 0.3,
        }
        return prepare_data(DataSettings(**{**values, **changes}), said.append, begin=said.append)

    return run


def sides(text: TextData) -> list[list[str]]:
    """The documents to train on, and those held out."""
    made = []
    for dataset in (text.train, text.held_out):
        parts: list[list[int]] = [[]]
        for token in dataset.tokens.tolist():
            parts.append([]) if token == 0 else parts[-1].append(token)
        made.append([text.tokenizer.decode(part) for part in parts[:-1]])
    return made


def folder_of(tmp_path: Path) -> Path:
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    return folder


def builds(said: list[str]) -> int:
    return sum(line.startswith("learning") for line in said)


def test_every_document_is_on_exactly_one_side_with_its_copies(prepare: Prepare, tmp_path: Path) -> None:
    for path in sorted((tmp_path / "text").iterdir()):
        (path.parent / f"copy-{path.name}").write_text(path.read_text())
    train, held_out = sides(prepare())
    assert len(train) > 20
    assert len(held_out) > 6
    assert sorted(train + held_out) == sorted(path.read_text() for path in (tmp_path / "text").iterdir())
    assert not set(train) & set(held_out)


def test_of_few_documents_the_ends_are_held_out(prepare: Prepare, tmp_path: Path) -> None:
    train, held_out = sides(prepare(held_out_fraction=0.1))  # A tenth of 30 documents is fewer than 8.
    originals = [path.read_text() for path in sorted((tmp_path / "text").iterdir())]
    assert [a + b for a, b in zip(train, held_out, strict=True)] == originals
    assert all(part.endswith("\n") for part in train)
    assert 0.05 < sum(map(len, held_out)) / sum(map(len, originals)) < 0.1


def test_the_second_time_the_cache_is_used(prepare: Prepare, tmp_path: Path, said: list[str]) -> None:
    first, second = prepare(), prepare(seed=5, sequence_length=8)
    assert builds(said) == 1
    assert np.array_equal(first.train.tokens, second.train.tokens)
    assert isinstance(second.train.tokens, np.memmap)
    assert second.train.tokens.dtype == np.uint16
    assert second.tokenizer.to_str() == first.tokenizer.to_str()
    assert second.unigram_entropy_nats == first.unigram_entropy_nats > 1.0
    assert second.vocab_size == first.tokenizer.get_vocab_size() <= 400
    other = prepare(seed=1)
    assert torch.equal(first.held_out.batch(0, 4), other.held_out.batch(0, 4))
    assert not torch.equal(first.train.batch(0, 4), other.train.batch(0, 4))
    assert builds(said) == 1
    prepare(vocab_size=350)
    prepare(held_out_fraction=0.4)
    changed = tmp_path / "text" / "000.txt"
    before = changed.stat()
    changed.write_text(changed.read_text().replace("0", "1"))
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    prepare()
    assert builds(said) == 4, "other text, or other settings"


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "train.npy has ": lambda content: content[:-100],
    "the bytes of train.npy have changed": lambda content: content[:-7] + b"\xff" + content[-6:],
    "tokenizer.json: No such file": lambda content: None,
    "manifest.json cannot be read": lambda content: b'{"train.npy": ',
}


@pytest.mark.parametrize("notice", DAMAGE)
def test_a_damaged_cache_is_built_anew_with_a_notice(
    prepare: Prepare, tmp_path: Path, said: list[str], notice: str
) -> None:
    good = prepare().train.tokens.tolist()
    (name,) = (word.rstrip(":") for word in notice.split() if "." in word)
    content = DAMAGE[notice]((folder_of(tmp_path) / name).read_bytes())
    (folder_of(tmp_path) / name).unlink()
    if content is not None:
        (folder_of(tmp_path) / name).write_bytes(content)
    assert prepare().train.tokens.tolist() == good
    prepare()
    assert builds(said) == 2
    assert [line for line in said if "is damaged" in line and notice in line]


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


def test_a_cache_that_cannot_be_written(
    prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(data, "_write_tokens", full)
        with pytest.raises(StrettoError, match=rf"{tmp_path}/cache \(data\.cache_dir\): No space left"):
            prepare()
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] in ([], [".lock"])
    assert prepare().train.windows > 1
    (tmp_path / "file").write_text("")
    with pytest.raises(StrettoError, match=r"file/below \(data\.cache_dir\): Not a directory"):
        prepare(cache_dir=str(tmp_path / "file" / "below"))


def test_four_processes_at_once_build_once_and_agree(prepare: Prepare, tmp_path: Path) -> None:
    program = f"""
import zlib
from stretto.config import DataSettings
from stretto.train.data import prepare_data
text = prepare_data(DataSettings(paths=[{str(tmp_path / "text")!r}], cache_dir={str(tmp_path / "cache")!r},
    sequence_length=16, vocab_size=400, held_out_fraction=0.3), print, begin=print)
print("sum", zlib.crc32(text.train.batch(9, 8).numpy().tobytes()))
"""
    (tmp_path / "program.py").write_text(program)
    files = [tmp_path / f"said{number}" for number in range(4)]
    ended = run_forks([Fork(str(tmp_path / "program.py"), (), {}, str(file)) for file in files], 120)
    outputs = [file.read_text() for file in files]
    assert ended.statuses == (0,) * 4, outputs
    assert sum("learning" in output for output in outputs) == 1
    mine = f"sum {zlib.crc32(prepare().train.batch(9, 8).numpy().tobytes())}"
    assert {output.splitlines()[-1] for output in outputs} == {mine}


def test_the_cache_is_where_the_desktop_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "stretto"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert cache_dir() == tmp_path / "home" / ".cache" / "stretto"

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "STRETTO_REUSE"):
        monkeypatch.delenv(name)
    with pytest.raises(UsageError, match="XDG_CACHE_HOME"):
        cache_dir()
    said: list[str] = []
    assert kept_by(TrainSettings(), said.append) is None
    assert "no home" in said[0]


@pytest.mark.parametrize(
    ("variable", "setting", "renew"),
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
def test_the_environment_comes_before_the_setting(
    variable: str, setting: str, renew: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRETTO_REUSE", variable)
    kept = kept_by(TrainSettings.model_validate({"planning": {"reuse": setting}}))
    assert (None if kept is None else kept.renew) is renew


@pytest.mark.parametrize(
    ("text", "changes", "words"),
    [
        ("a few words, and no more\n" * 3, {"sequence_length": 200}, "the text to train on .* needs 201"),
        (
            "a few words, and no more than that\n" * 3,
            {"sequence_length": 50, "vocab_size": 257},
            "the held-out text .* needs 51",
        ),
        ("", {}, "no text"),
        ("a", {}, "1 characters, is too short"),
    ],
)
def test_too_little_text(
    prepare: Prepare, tmp_path: Path, text: str, changes: dict[str, int], words: str
) -> None:
    (tmp_path / "few.txt").write_text(text)
    with pytest.raises(UsageError, match=words):
        prepare(paths=[str(tmp_path / "few.txt")], **changes)


# Batches.

TOKENS = np.arange(1000, dtype=np.uint16)


@given(st.integers(1, 700), st.text(max_size=5))
def test_a_permutation_takes_every_number_once(size: int, key: str) -> None:
    went = permute(np.arange(size, dtype=np.int64), size, key)
    assert sorted(went.tolist()) == list(range(size))


def test_a_permutation_mixes_and_its_key_decides() -> None:
    numbers = np.arange(4096, dtype=np.int64)
    one, two = permute(numbers, 4096, "1"), permute(numbers, 4096, "2")
    assert abs(np.corrcoef(numbers, one)[0, 1]) < 0.06  # Four standard deviations of chance.
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.06
    assert (one == numbers).sum() < 12
    huge = np.array([0, 10**14, 10**15 - 1], dtype=np.int64)
    assert len(set(permute(huge, 10**15, "k").tolist())) == 3, "a huge range costs no memory"


@given(st.integers(1, 40), st.integers(1, 70), st.integers(0, 3))
def test_every_window_is_visited_once_an_epoch(length: int, batch: int, seed: int) -> None:
    dataset = TokenDataset(TOKENS, length, seed)
    windows = dataset.windows
    steps = math.ceil(2 * windows / batch)
    starts = np.concatenate([dataset.batch(step, batch)[:, 0].numpy() for step in range(steps)])
    for epoch in range(2):
        seen = starts[epoch * windows : (epoch + 1) * windows]
        assert sorted(seen.tolist()) == [length * window for window in range(windows)]


def test_a_batch_is_consecutive_tokens_by_seed_and_step_alone() -> None:
    dataset = TokenDataset(TOKENS, 9, seed=0)
    first, second = dataset.batch(0, 111), dataset.batch(1, 111)
    assert first.shape == (111, 10)
    assert first.dtype == torch.int64
    assert torch.equal(first, first[:, :1] + torch.arange(10))
    assert not torch.equal(first, second), "epochs have orders of their own"
    assert not torch.equal(first, TokenDataset(TOKENS, 9, seed=1).batch(0, 111))
    assert torch.equal(first, dataset.batch(0, 111)), "whatever was asked for before"
    made = TokenDataset(TOKENS, 9, seed=7).batch(50, 4)
    assert zlib.crc32(made.numpy().tobytes()) == 468051496, "the same in every process"


def test_unigram_entropy_is_the_textbooks() -> None:
    train = np.array([0, 0, 0, 1, 1, 2], dtype=np.uint16)
    held_out = np.array([0, 1, 3], dtype=np.uint16)
    # One is added to each count: 4, 3, 2 and 1 of 10.
    expected = -(math.log(0.4) + math.log(0.3) + math.log(0.1)) / 3
    assert unigram_entropy(train, held_out, 4) == pytest.approx(expected, rel=1e-12)
    even = np.arange(8000, dtype=np.uint16) % 8
    assert unigram_entropy(even, even, 8) == pytest.approx(math.log(8), rel=1e-12)
