"""Which checkpoint counts, which is removed, and what a failed write leaves."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from stretto.errors import UsageError
from stretto.saving import digests
from stretto.saving import folder as saving
from stretto.train import checkpoint_files as files


def begin(folder: Path, step: int) -> Path:
    """The place of a checkpoint that is being written."""
    files.tidy(folder)
    place = folder / files.name_of(step)
    saving.begin(place)
    return place


def make(folder: Path, step: int, keep: int = 9) -> Path:
    """As the trainer does, but for tensors."""
    place = begin(folder, step)
    partial = saving.partial_of(place)
    (partial / ".metadata").write_bytes(b"x")
    state = files.CheckpointState(step, step, 300, {"name": "a"})
    made = {"tokenizer.json": b"{}", "state.json": files.FILE.to_text(state).encode()}
    (partial / digests.NAME).write_bytes(digests.sealed(made))
    for name, data in made.items():
        saving.write_synced(partial / name, data)
    saving.commit(place)
    files.mark(place, keep)
    return place


def test_the_newest_is_marked_and_the_oldest_go(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        make(tmp_path, step, keep=2)
    assert [path.name for path in files.checkpoints_in(tmp_path)] == ["step-000010", "step-000015"]
    assert files.latest_in(tmp_path) == tmp_path / "step-000015"
    assert files.read_state(tmp_path / "step-000015") == files.CheckpointState(15, 15, 300, {"name": "a"})


def test_a_half_written_one_does_not_count_and_is_removed_by_the_next(tmp_path: Path) -> None:
    make(tmp_path, 5)
    left = saving.partial_of(begin(tmp_path, 10))
    (left / "state.json").write_text("{}")
    assert files.latest_in(tmp_path) == tmp_path / "step-000005"
    make(tmp_path, 15)
    assert not left.exists()


def test_the_marker_counts_and_is_not_trusted(tmp_path: Path) -> None:
    make(tmp_path, 5)
    make(tmp_path, 10)
    (tmp_path / "latest").write_text("step-000005\n")
    assert files.latest_in(tmp_path) == tmp_path / "step-000005"
    make(tmp_path / "other", 7)
    outside = (
        b"other/step-000007\n",
        f"../{tmp_path.name}/step-000005".encode(),
        bytes(tmp_path / "step-000005"),
    )
    for wrong in (b"step-000099\n", b"\xff\xfe", b"", b"\0", *outside):
        (tmp_path / "latest").write_bytes(wrong)
        assert files.latest_in(tmp_path) == tmp_path / "step-000010"


def test_a_path_may_be_a_checkpoint_its_folder_or_the_run(tmp_path: Path) -> None:
    path = make(tmp_path / "run" / "checkpoints", 5)
    assert [files.find(p) for p in (path, path.parent, path.parent.parent)] == [path] * 3
    with pytest.raises(UsageError, match="holds no whole checkpoint: name a checkpoint"):
        files.find(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        files.find(tmp_path / "nothing")


def test_what_is_not_a_checkpoint_of_ours_is_refused_with_its_file(tmp_path: Path) -> None:
    path = make(tmp_path, 5)

    def write(text: str) -> None:
        (path / "state.json").write_text(text)
        (path / digests.NAME).write_bytes(digests.sealed({"state.json": text.encode()}))

    write("[]")
    with pytest.raises(UsageError, match=r"state\.json: expected an object, found \[\]"):
        files.read_state(path)
    write(json.dumps({"format": files.FILE.format, "version": 99}))
    with pytest.raises(UsageError, match="version 99"):
        files.read_state(path)


def test_a_run_that_starts_anew_sets_the_old_ones_aside(tmp_path: Path) -> None:
    assert files.set_aside(tmp_path / "none") is None
    make(tmp_path, 5)
    assert files.set_aside(tmp_path) == tmp_path / "earlier-1"
    assert files.latest_in(tmp_path) is None
    make(tmp_path, 5)
    assert files.set_aside(tmp_path) == tmp_path / "earlier-2"
    assert files.is_whole(tmp_path / "earlier-1" / "step-000005")


def test_nothing_old_goes_before_the_new_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, 5)
    did: list[int | str] = []
    make_probe = saving.write_probe
    monkeypatch.setattr(saving, "write_probe", lambda folder: make_probe(folder) and did.clear())
    sync, rename = os.fsync, Path.rename

    def synced(number: int) -> None:
        did.append(os.fstat(number).st_ino)
        sync(number)

    def renamed(path: Path, target: Path) -> Path:
        did.append(target.name)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(shutil, "rmtree", lambda path: did.append(f"remove {path.name}"))
    place = make(tmp_path, 10, keep=1)
    made = (place / "tokenizer.json", place / "state.json", place, tmp_path / "latest", tmp_path)
    tokenizer, state, inside, latest, names = (path.stat().st_ino for path in made)
    assert did == [
        *(tokenizer, state, inside, "step-000010", names, latest, names),
        *("step-000005.gone.tmp", names, "remove step-000005.gone.tmp"),
    ]


@pytest.mark.parametrize("step", [5, 10], ids=["done again", "kept no longer"])
def test_one_that_is_removed_in_part_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    class KilledError(Exception):
        pass

    def killed(path: Path) -> None:
        raise KilledError

    make(tmp_path, 5)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KilledError):
            make(tmp_path, step, keep=1)
    assert files.checkpoints_in(tmp_path) == [tmp_path / files.name_of(step)]
    make(tmp_path, 15)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", files.name_of(step), "step-000015"]


def test_one_that_was_about_to_be_replaced_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save of the same step that is killed between its two renames has moved the old one away."""

    class KilledError(Exception):
        pass

    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.suffix == ".tmp":
            raise KilledError
        return rename(path, target)

    place = make(tmp_path, 5)
    make(tmp_path, 4)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        with pytest.raises(KilledError):
            make(tmp_path, 5)
    assert not place.exists()
    files.put_back(tmp_path)
    assert files.is_whole(place)
    make(tmp_path, 6)
    assert sorted(p.name for p in files.checkpoints_in(tmp_path)) == [
        files.name_of(step) for step in (4, 5, 6)
    ]
