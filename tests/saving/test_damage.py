"""Checkpoints that were damaged, or that a stranger made: refused before anything of them is run, read from
outside the folder, or taken for what was saved."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto
from stretto.runtime.runner import Runner
from stretto.saving import digests
from tests.saving.test_face import adamw, model, run, write


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "a"
    write("one", path, extra={"epoch": 3, "seen": torch.arange(4)})
    return path


def loaded(place: Path) -> tuple[str, list[torch.Tensor]]:
    """What is refused, before anything is changed, or ""; and the parameters and the optimizer's state."""

    def work(runner: Runner) -> tuple[str, list[torch.Tensor]]:
        optimizer = adamw(runner.named_parameters())
        before = [p.detach().clone() for p in runner.parameters()]
        try:
            extra = stretto.load(place, runner, optimizer)
        except stretto.StrettoError as error:
            assert runner.unfit or all(map(torch.equal, runner.parameters(), before))
            return str(error), []
        states = [state[key] for state in optimizer.state.values() for key in sorted(state)]
        assert extra["epoch"] == 3
        return "", [p.detach().clone() for p in runner.parameters()] + states + [extra["seen"]]

    return run("one", work, copy.deepcopy(model()))[0]  # type: ignore[no-any-return]


def reseal(place: Path, change: dict[str, Callable[[Any], Any]]) -> None:
    """Change JSON files and write their new digests, as one can who means harm."""
    for name, edit in change.items():
        data = json.loads((place / name).read_text())
        (place / name).write_text(json.dumps(edit(data) or data))
    sealed = json.loads((place / digests.NAME).read_text())["files"]
    (place / digests.NAME).write_bytes(digests.sealed({name: (place / name).read_bytes() for name in sealed}))


def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing(saved: Path, tmp_path: Path) -> None:
    draw = random.Random(0)
    _, right = loaded(saved)
    refused = 0
    for name in sorted(os.listdir(saved)):
        for _ in range(6):
            place = shutil.copytree(saved, tmp_path / "a", dirs_exist_ok=True)
            content = bytearray((place / name).read_bytes())
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            (place / name).write_bytes(content)
            told, found = loaded(place)
            if told:
                assert told.startswith(f"{place} cannot be read (")
                assert told.endswith(f"); {digests.ELSE}")
                refused += 1
            else:
                assert all(map(torch.equal, found, right)), name
    assert refused >= 24  # what is between tensors, and blanks in JSON, are no harm


class Command:
    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.made),)


@pytest.mark.parametrize("name", [".metadata", "rest.pt", "__0_0.distcp"])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_pickle_is_not_run(saved: Path, tmp_path: Path, name: str, sealed: bool) -> None:
    place, made = shutil.copytree(saved, tmp_path / "a"), tmp_path / "made"
    if name == ".metadata":
        (place / name).write_bytes(pickle.dumps(Command(made)))
    elif name == "rest.pt":
        torch.save({"format": Command(made)}, place / name)
    else:
        torch.save(Command(made), place / name)
    if sealed:

        def point(data: Any) -> None:
            nbytes = (place / name).stat().st_size
            for one in data["tensors"].values():
                digest = digests.digest_of((place / name).read_bytes())
                one["boxes"] = [[*box[:3], 0, nbytes, digest] for box in one["boxes"]]

        reseal(place, {"tensors.json": point} if name.endswith("distcp") else {})
    told, _ = loaded(place)
    assert not made.exists()
    assert told.startswith(f"{place} cannot be read (") or (sealed and name == ".metadata")


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a file above": lambda one: one["boxes"][0].__setitem__(2, "../secret"),
    "a file elsewhere": lambda one: one["boxes"][0].__setitem__(2, "/etc/passwd"),
    "a shape that no byte is of": lambda one: one.__setitem__("shape", [2**40 for _ in one["shape"]]),
    "a box outside": lambda one: one["boxes"][0].__setitem__(0, [7 for _ in one["shape"]]),
    "no box": lambda one: one.__setitem__("boxes", []),
    "a negative start": lambda one: one["boxes"][0].__setitem__(3, -1),
    "no dtype": lambda one: one.__setitem__("dtype", "load"),
    "another dtype": lambda one: one.__setitem__("dtype", "float32"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_table_that_does_not_fit_its_files(saved: Path, tmp_path: Path, wrong: str) -> None:
    (tmp_path / "secret").write_bytes((saved / "__0_0.distcp").read_bytes())
    place = shutil.copytree(saved, tmp_path / "a")

    def edit(data: Any) -> None:
        WRONG[wrong](max(data["tensors"].values(), key=lambda one: len(one["shape"])))

    reseal(place, {"tensors.json": edit})
    told, _ = loaded(place)
    assert told.startswith(f"{place} cannot be read (")


@pytest.mark.parametrize("name", ["digests.json", "__0_0.distcp", ".metadata", "rest.pt"])
@pytest.mark.parametrize("left", [None, b"PK"], ids=["gone", "short"])
def test_one_that_lacks_a_file_is_refused_by_its_name(
    saved: Path, tmp_path: Path, name: str, left: bytes | None
) -> None:
    place = shutil.copytree(saved, tmp_path / "a")
    (place / name).unlink()
    if left is not None:
        (place / name).write_bytes(left)
    error, _ = loaded(place)
    assert name in error or "no complete checkpoint" in error
    assert str(place) in error


def test_a_state_that_lacks_a_number_of_its_optimizer(saved: Path, tmp_path: Path) -> None:
    place = shutil.copytree(saved, tmp_path / "a")

    def drop(data: Any) -> None:
        for name in [name for name in data["tensors"] if name.endswith(".step")]:
            del data["tensors"][name]

    reseal(place, {"tensors.json": drop})
    assert loaded(place)[0].startswith(f"{place} cannot be read (KeyError: 'step')")
