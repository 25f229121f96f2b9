"""Files that begin with a byte-order mark, as editors and spreadsheets write them, are read as any other."""

from __future__ import annotations

import json
from pathlib import Path

from stretto.cli.walks import _read
from stretto.config import TaskSettings, load_settings
from stretto.ir.serialize import load_plan
from stretto.models.gpt import GPT, GPTConfig
from stretto.models.pretrained import load_gpt, save_gpt
from stretto.price.cluster import Cluster, describe
from stretto.price.nccl_tests import read_nccl_tests
from stretto.schedule.csv import read_csv
from stretto.schedule.families import make_schedule
from stretto.train.task import own_task
from stretto.train.text import documents, find_files
from tests.clusters import cores_file
from tests.price.test_nccl_tests import NEW
from tests.synthetic import make_plan
from tests.train.own_task import task

MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"
"""As UTF-8 it is EF BB BF."""


def marked(path: Path, text: str) -> Path:
    path.write_text(MARK + text, encoding="utf-8")
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")
    return path


def test_settings_clusters_and_tasks(tmp_path: Path) -> None:
    assert load_settings(marked(tmp_path / "run.toml", "[training]\nsteps = 7\n")).training.steps == 7
    assert isinstance(describe(str(marked(tmp_path / "c.toml", cores_file()))), Cluster)
    text = Path(str(task.__code__.co_filename)).read_text(encoding="utf-8")
    made = own_task(TaskSettings(file=str(marked(tmp_path / "t.py", text)), config={"width": 4}), 0)
    assert made.unit == "vectors"


def test_schedules_and_plans(tmp_path: Path) -> None:
    path = marked(tmp_path / "mine.csv", "0F0,0B0\n1F0,1B0\n")
    assert read_csv(path).ranks == 2
    assert _read(path).startswith("0F0")
    plan = make_plan(make_schedule("1f1b", 2, 2))
    plan.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text(encoding="utf-8")
    assert load_plan(marked(tmp_path / "marked.json", text)) == plan


def test_text_to_train_on(tmp_path: Path) -> None:
    marked(tmp_path / "a.txt", "words")
    marked(tmp_path / "b.jsonl", json.dumps({"text": "more"}) + "\n")
    assert list(documents(find_files([str(tmp_path)]), "text", print)) == ["words", "more"]


def test_a_model_that_was_written(tmp_path: Path) -> None:
    save_gpt(GPT(GPTConfig(vocab_size=11, layers=1, hidden=8, heads=2, context=4)), tmp_path)
    text = (tmp_path / "config.json").read_text(encoding="utf-8")
    marked(tmp_path / "config.json", text)
    assert load_gpt(tmp_path).config.vocab_size == 11


def test_measurements_of_others(tmp_path: Path) -> None:
    plain = tmp_path / "plain.txt"
    plain.write_text(NEW, encoding="utf-8")
    assert read_nccl_tests(marked(tmp_path / "marked.txt", NEW)) == read_nccl_tests(plain)
