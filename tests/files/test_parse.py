"""Files of others: byte-order marks are read over, large numbers and deep nesting are refused."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stretto
from stretto.config import TaskSettings, load_settings
from stretto.files.parse import LARGEST, parse_json, parse_toml
from stretto.files.typed_file import read_text
from stretto.ir.serialize import load_plan, plan_from_text, plan_to_text
from stretto.models.gpt import GPT, GPTConfig
from stretto.models.pretrained import load_gpt, save_gpt
from stretto.price.calibration import load_calibration
from stretto.price.cluster import describe
from stretto.price.cluster_file import load_cluster
from stretto.price.nccl_tests import read_nccl_tests
from stretto.price.profiler_trace import read_trace
from stretto.report.files import load_timeline
from stretto.schedule.csv import read_csv
from stretto.schedule.families import make_schedule
from stretto.train.checkpoint_files import read_state
from stretto.train.task import own_task
from stretto.train.text import documents, find_files
from tests.capturing.zoo import Chain, mean_square, rows
from tests.clusters import cores, cores_file
from tests.price.test_nccl_tests import NEW
from tests.synthetic import make_plan
from tests.train.own_task import task

DIGITS = "9" * 400
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("text", [DIGITS, f"-{DIGITS}", "9" * 5000, f'{{"a": [{LARGEST + 1}]}}', DEEP])
def test_what_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"too large|too deeply"):
        parse_json(text)
    with pytest.raises(ValueError, match=r"too large|too deeply|Exceeds the limit"):
        parse_toml(f"key = {text}" if not text.startswith("{") else f"key = {LARGEST + 1}")


def test_the_largest() -> None:
    assert parse_json(f"[{LARGEST}, -{LARGEST}, 1.5]") == [LARGEST, -LARGEST, 1.5]
    assert parse_toml(f"key = {LARGEST}") == {"key": LARGEST}


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [leaf for key, item in items for leaf in leaves(item, (*path, key))] or [path]


def test_a_plan_with_either_anywhere() -> None:
    """One leaf of each kind: positions in lists count as one."""
    job = stretto.capture(Chain(), rows(), mean_square, stretto.Parallel(pp=2, microbatches=2))
    text = plan_to_text(stretto.plan(job, cores(), order="list"))
    kinds = {tuple(0 if isinstance(k, int) else k for k in path): path for path in leaves(json.loads(text))}
    for *path, last in kinds.values():
        for trouble in (DIGITS, "[" * 1000 + "]" * 1000, "[" * 900 + "]" * 900):
            data = json.loads(text)
            functools.reduce(lambda below, key: below[key], path, data)[last] = "HERE"
            with pytest.raises(stretto.StrettoError):
                stretto.verify(plan_from_text(json.dumps(data).replace('"HERE"', trouble)))


READERS: list[tuple[Callable[[Path], Any], str, str]] = [
    (load_settings, "run.toml", "[training]\nsteps = %s"),
    (load_cluster, "cluster.toml", "device = %s"),
    (load_calibration, "calibration.json", '{"version": %s}'),
    (load_timeline, "timeline.json", '{"format": %s}'),
    (lambda path: read_state(path.parent), "state.json", '{"format": %s}'),
    (lambda path: load_gpt(path.parent), "config.json", '{"model_type": %s}'),
    (read_nccl_tests, "nccl.json", '{"config": %s}'),
    (read_trace, "trace.json", '{"traceEvents": %s}'),
    (read_csv, "schedule.csv", "0F%s"),
]


@pytest.mark.parametrize(("read", "name", "content"), READERS, ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize("trouble", [DIGITS, "9" * 5000, DEEP], ids=["digits", "more", "deep"])
def test_files_with_either(
    read: Callable[[Path], Any], name: str, content: str, trouble: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(content % trouble)
    with pytest.raises(stretto.UsageError) as caught:
        read(path)
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value)) < 6000


# Byte-order marks.


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
    "mine.csv": ("0F0,0B0\n1F0,1B0\n", lambda path: (read_csv(path), read_text(path))),
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
