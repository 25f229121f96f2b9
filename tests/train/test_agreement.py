"""Ranks that find different things on their machines refuse together, before they train on them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.train.tiny import WORDS, run, run_ranks, write_settings

from stretto.saving import digests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of one rank that left a checkpoint."""
    folder = tmp_path_factory.mktemp("ranks")
    status, _, err = run("train", write_settings(folder, steps=2, every=2, run="alone"))
    assert status == 0, err
    return folder


def two_ranks(folder: Path, *of_the_second: str) -> tuple[list[int], str]:
    """Statuses and errors of two ranks on the checkpoint of `alone`, the second with its own settings."""
    config = write_settings(folder, pp=2, steps=4, every=0, run="both")
    shared = ["train", str(config), "--set", f"checkpoint.dir={folder / 'alone' / 'checkpoints'}"]
    own = [part for change in of_the_second for part in ("--set", change)]
    told = run_ranks(shared, [*shared, *own])
    return [status for status, _, _ in told], "".join(err for _, _, err in told)


def test_other_checkpoints_are_refused(folder: Path) -> None:
    statuses, err = two_ranks(folder, f"checkpoint.dir={folder / 'elsewhere'}")
    assert (statuses, err.count("stretto: ")) == ([2, 2], 1), err
    assert f"rank 1 finds no checkpoint in {folder / 'elsewhere'}, but rank 0 goes on from" in err
    assert "step-000002, after step 2: set checkpoint.dir to a folder that all machines share" in err


def test_another_checkpoint_of_the_same_step_is_refused(folder: Path) -> None:
    copy = folder / "copy"
    shutil.copytree(folder / "alone" / "checkpoints", copy)
    state = copy / "step-000002" / "state.json"
    state.write_text(state.read_text() + "\n")
    files = json.loads((state.parent / digests.NAME).read_text())["files"]
    sealed = digests.sealed({name: (state.parent / name).read_bytes() for name in files})
    (state.parent / digests.NAME).write_bytes(sealed)
    statuses, err = two_ranks(folder, f"checkpoint.dir={copy}")
    assert (statuses, err.count("stretto: ")) == ([2, 2], 1), err
    assert "rank 1 goes on from" in err
    state.write_text("{")
    statuses, err = two_ranks(folder, f"checkpoint.dir={copy}")
    assert (statuses, err.count("stretto: ")) == ([2, 2], 1), err
    assert "state.json is not what was saved: its digest differs" in err
    assert "(on rank 1)" in err


def test_a_checkpoint_of_other_tokens_does_not_hide_that_texts_differ(folder: Path) -> None:
    (folder / "third").mkdir()
    (folder / "third" / "one.txt").write_text("\n".join([WORDS[::-1]] * 90))
    # Only the second rank would refuse the checkpoint; both refuse the text.
    statuses, err = two_ranks(folder, f'data.paths=["{folder / "third"}"]')
    assert (statuses, err.count("stretto: ")) == ([2, 2], 1), err
    assert err.startswith("stretto: data.paths: the tokens on rank 1 (")


def test_other_text_is_refused(folder: Path) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "one.txt").write_text("\n".join([WORDS.upper()] * 90))
    # Of the same number of tokens or not: what they are is compared.
    statuses, err = two_ranks(folder, f'data.paths=["{folder / "other"}"]', "checkpoint.resume=never")
    assert (statuses, err.count("stretto: ")) == ([2, 2], 1), err
    assert err.startswith("stretto: data.paths: the tokens on rank 1 (")


def test_other_settings_are_refused_and_other_places_are_not(folder: Path) -> None:
    statuses, err = two_ranks(folder, "training.steps=5", "optimizer.lr=0.1")
    assert (statuses, err.count("stretto: ")) == ([2, 2], 1), err
    assert "optimizer.lr = 0.1 on rank 1, but 0.003 on rank 0 (and 1 more): start all ranks with" in err
    places = [f"data.cache_dir={folder / 'own'}", f"output.run_dir={folder / 'own'}", "name=own"]
    statuses, err = two_ranks(folder, *places)
    assert statuses == [0, 0], err
