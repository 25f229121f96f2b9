"""Ranks that find different things on their machines refuse together, before they train on them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.train.tiny import WORDS, run, run_ranks, write_settings

from stretto.config import load_settings
from stretto.saving import digests
from stretto.train.agreement import RankView, agreed_checkpoint
from stretto.train.lock import LOCK


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of one rank that left a checkpoint, and copies of it that differ."""
    folder = tmp_path_factory.mktemp("ranks")
    status, _, err = run("train", write_settings(folder, steps=2, every=2, run="alone"))
    assert status == 0, err
    (folder / "other").mkdir()
    (folder / "other" / "one.txt").write_text("\n".join([WORDS.upper()] * 90))
    for name in ("copy", "broken"):
        step = Path(shutil.copytree(folder / "alone" / "checkpoints", folder / name)) / "step-000002"
        (step / "state.json").write_text((step / "state.json").read_text() + "\n")
        if name == "copy":
            files = json.loads((step / digests.NAME).read_text())["files"]
            sealed = digests.sealed({name: (step / name).read_bytes() for name in files})
            (step / digests.NAME).write_bytes(sealed)
    return folder


@pytest.mark.parametrize(
    ("of_the_second", "words"),
    [
        (["checkpoint.dir={}/elsewhere"], ["rank 1 finds no checkpoint", "step-000002, after step 2"]),
        (["checkpoint.dir={}/copy"], ["rank 1 goes on from"]),
        (["checkpoint.dir={}/broken"], ["its digest differs", "(on rank 1)"]),
        # Only the second rank would refuse the checkpoint; both refuse the text.
        (['data.paths=["{}/other"]'], ["data.paths: the tokens on rank 1 ("]),
        (['data.paths=["{}/other"]', "checkpoint.resume=never"], ["data.paths: the tokens on rank 1 ("]),
        (["training.steps=5", "optimizer.lr=0.1"], ["optimizer.lr = 0.1 on rank 1", "(and 1 more)"]),
        pytest.param(
            ["data.cache_dir={}/own", "output.run_dir={}/own", "name=own"], [], marks=pytest.mark.slow
        ),
    ],
    ids=["no checkpoint", "another checkpoint", "damaged", "text", "text again", "settings", "folders"],
)
def test_two_ranks_refuse_what_differs_between_them(
    folder: Path, of_the_second: list[str], words: list[str]
) -> None:
    config = write_settings(folder, pp=2, steps=4, every=0, run="both")
    shared = ["train", str(config), "--set", f"checkpoint.dir={folder / 'alone' / 'checkpoints'}"]
    own = [part for change in of_the_second for part in ("--set", change.format(folder))]
    ended = run_ranks(shared, [*shared, *own])
    err = "".join(err for _, _, err in ended)
    assert [status for status, _, _ in ended] == ([2, 2] if words else [0, 0]), err
    assert err.count("stretto: ") == bool(words), err
    assert all(word in err for word in words), err


def test_each_machine_may_have_its_sources_elsewhere(tmp_path: Path) -> None:
    path = write_settings(tmp_path)
    views: list[RankView] = []
    world: Any = SimpleNamespace(all_gather=lambda view: views.append(view) or [view])
    task: Any = SimpleNamespace(digest="", where="")
    for place, weight in (("a", 1), ("b", 1), ("a", 2)):
        sources = f'data.sources=[{{kind="pairs", paths=["{place}"], weight={weight}.0}}]'
        settings = load_settings(path, ["data.paths=[]", "data.tokenizer=t", "data.vocab_size=4096", sources])
        agreed_checkpoint(world, settings, task, lambda: None)
    one, elsewhere, other = (view.settings for view in views)
    assert one == elsewhere
    assert one != other


@pytest.mark.slow
def test_ranks_with_disks_of_their_own_are_refused(folder: Path) -> None:
    config = write_settings(folder, pp=2, steps=4, every=2, run="apart")
    ended = run_ranks(["train", config], ["train", config, "--set", f"output.run_dir={folder / 'apart-1'}"])
    err = "".join(err for _, _, err in ended)
    assert [status for status, _, _ in ended] == [2, 2], err
    assert err.count("the ranks do not share the folder of checkpoints") == 1
    for run_dir in (folder / "apart", folder / "apart-1"):
        assert not [path for path in run_dir.rglob("*") if path.is_file() and path.name != LOCK]
