"""Files that begin with a byte-order mark, as editors and spreadsheets write them, are read as any other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto.cli.walks import _read
from stretto.config import TaskSettings, load_settings
from stretto.ir.serialize import load_plan
from stretto.models.gpt import GPT, GPTConfig
from stretto.models.pretrained import load_gpt, save_gpt
from stretto.price.cluster import describe
from stretto.price.nccl_tests import read_nccl_tests
from stretto.schedule.csv import read_csv
from stretto.schedule.families import make_schedule
from stretto.train.task import own_task
from stretto.train.text import documents, find_files
from tests.clusters import cores_file
from tests.price.test_nccl_tests import NEW
from tests.synthetic import make_plan
from tests.train.own_task import task


def plan_in(folder: Path) -> None:
    make_plan(make_schedule("1f1b", 2, 2)).save(folder / "plan.json")


def gpt_in(folder: Path) -> None:
    save_gpt(GPT(GPTConfig(vocab_size=11, layers=1, hidden=8, heads=2, context=4)), folder)


Read = Callable[[Path], Any]
FILES: dict[str, tuple[str | Callable[[Path], None], Read]] = {
    "run.toml": ("[training]\nsteps = 7\n", load_settings),
    "cluster.toml": (cores_file(), lambda path: describe(str(path))),
    "task.py": (
        Path(str(task.__code__.co_filename)).read_text(encoding="utf-8"),
        lambda path: own_task(TaskSettings(file=str(path), config={"width": 4}), 0).unit,
    ),
    "mine.csv": ("0F0,0B0\n1F0,1B0\n", lambda path: (read_csv(path), _read(path))),
    "plan.json": (plan_in, load_plan),
    "a.txt": ("words", lambda path: [*documents(find_files([str(path)]), "text", print)]),
    "b.jsonl": (
        json.dumps({"text": "more"}),
        lambda path: [*documents(find_files([str(path)]), "text", print)],
    ),
    "config.json": (gpt_in, lambda path: load_gpt(path.parent).config),
    "nccl.txt": (NEW, read_nccl_tests),
}


@pytest.mark.parametrize("name", FILES)
def test_a_marked_file_is_read_as_the_plain_one(name: str, tmp_path: Path) -> None:
    content, read = FILES[name]
    path = tmp_path / name
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    else:
        content(tmp_path)
    plain = read(path)
    path.write_text(path.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")
    assert read(path) == plain
