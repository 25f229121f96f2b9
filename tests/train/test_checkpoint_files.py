"""Which checkpoint counts, which is removed, and what a failed write leaves."""

from __future__ import annotations

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
    saving.commit(place, (saving.partial_of(place) / saving.PROBE).read_text())
    files.mark(place, keep)
    return place


def test_the_newest_is_marked_and_the_oldest_go(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        make(tmp_path, step, keep=2)
    left = saving.partial_of(begin(tmp_path, 20))
    (left / "state.json").write_text("{}")
    assert [path.name for path in files.checkpoints_in(tmp_path)] == ["step-000010", "step-000015"]
    assert files.latest_in(tmp_path) == tmp_path / "step-000015"
    assert files.read_state(tmp_path / "step-000015") == files.CheckpointState(15, 15, 300, {"name": "a"})
    make(tmp_path, 25)
    assert not left.exists(), "half written, and removed by the next"


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
    for wrong, word in ((tmp_path, "no complete checkpoint"), (tmp_path / "nothing", "does not exist")):
        with pytest.raises(UsageError, match=word):
            files.find(wrong)


def test_a_run_that_starts_anew_sets_the_old_ones_aside(tmp_path: Path) -> None:
    assert files.set_aside(tmp_path / "none") is None
    make(tmp_path, 5)
    assert files.set_aside(tmp_path) == tmp_path / "earlier-1"
    assert files.latest_in(tmp_path) is None
    make(tmp_path, 5)
    assert files.set_aside(tmp_path) == tmp_path / "earlier-2"
    assert files.is_full(tmp_path / "earlier-1" / "step-000005")


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


class KilledError(Exception):
    pass


def killed_at(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, folder: Path, step: int) -> None:
    """A save that ends where it first calls `name`."""

    def killed(path: Path, *_: object) -> None:
        raise KilledError

    original = getattr(owner, name)
    with monkeypatch.context() as patched:
        call = (
            killed
            if name == "rmtree"
            else lambda path, to: killed(path) if path.suffix == ".tmp" else original(path, to)
        )
        patched.setattr(owner, name, call)
        with pytest.raises(KilledError):
            make(folder, step, keep=1)


@pytest.mark.parametrize("step", [5, 10], ids=["done again", "kept no longer"])
def test_one_that_is_removed_in_part_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    make(tmp_path, 5)
    killed_at(monkeypatch, shutil, "rmtree", tmp_path, step)
    assert files.checkpoints_in(tmp_path) == [tmp_path / files.name_of(step)]
    make(tmp_path, 15)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", files.name_of(step), "step-000015"]


def test_one_that_was_about_to_be_replaced_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save of the same step that is killed between its two renames has moved the old one away."""
    place = make(tmp_path, 5)
    killed_at(monkeypatch, Path, "rename", tmp_path, 5)
    assert not place.exists()
    files.put_back(tmp_path)
    assert files.is_full(place)
