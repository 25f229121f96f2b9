"""Callbacks of a run: what each is told and when, what one that fails costs, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.train.tiny import run_ranks, steps_of, train, write_settings

from stretto.config import load_settings
from stretto.errors import RunError, UsageError
from stretto.train import launch

EXAMPLES = Path(__file__).parents[2] / "examples"
TELLS = """
import json, os
import stretto

class Tells(stretto.Callback):
    def _add(self, *line):
        with open({out!r}, "a") as file:
            print(json.dumps(line), file=file)

    def on_start(self, run): self._add("start", run.step, str(run.folder), os.environ.get("RANK", "0"))
    def on_step(self, line): self._add("step", line["step"], line["loss"])
    def on_eval(self, line): self._add("eval", line["step"], line["held_out_loss"])
    def on_save(self, path): self._add("save", path.name, path.exists())
    def on_end(self, error): self._add("end", None if error is None else type(error).__name__)

class Fails:
    def on_step(self, line):
        if line["step"] == 3:
            raise KeyError("project")

class Cannot:
    def __init__(self): raise OSError("no network")
    def on_step(self, line): ...

class Typo:
    def on_setp(self, line): ...

class Nothing: ...
"""


@pytest.fixture
def told(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(TELLS.format(out=str(tmp_path / "told")))
    return tmp_path / "told"


def calls(told: Path) -> list[list[Any]]:
    return [json.loads(line) for line in told.read_text().splitlines()]


def of(folder: Path, *names: str) -> str:
    return f"output.callbacks={json.dumps([f'{folder}/own.py:{name}' for name in names])}"


def test_it_is_told_what_the_run_does(tmp_path: Path, told: Path) -> None:
    path = write_settings(tmp_path, steps=4, every=2)
    train(path, of(tmp_path, "Tells"), "training.eval_every=2", "checkpoint.asynchronous=false")
    made, losses = calls(told), steps_of(tmp_path / "run")
    steps = [["step", step, line["loss"]] for step, line in losses.items()]
    (first, last) = [one for one in made if one[0] == "eval"]
    assert made == [
        ["start", 0, str(tmp_path / "run"), "0"],
        *steps[:2],
        ["eval", 2, first[2]],
        ["save", "step-000002", True],
        *steps[2:],
        ["save", "step-000004", True],
        ["eval", 4, last[2]],
        ["end", None],
    ]
    train(path, of(tmp_path, "Tells"), "training.steps=5")
    assert calls(told)[len(made)][:2] == ["start", 4]


def test_one_that_fails_ends_the_run_with_its_line_and_the_others_are_told(
    tmp_path: Path, told: Path
) -> None:
    path = write_settings(tmp_path, steps=6, every=2)
    words = r"output.callbacks: Fails: on_step\(\) in .*own.py, line 19, ended with KeyError: 'project'"
    with pytest.raises(RunError, match=words):
        train(path, of(tmp_path, "Fails", "Tells"))
    assert calls(told)[-1] == ["end", "RunError"]
    assert (tmp_path / "run" / "checkpoints" / "step-000002").is_dir()
    assert len(steps_of(tmp_path / "run")) == 3
    with pytest.raises(RunError, match=r"Cannot: __init__\(\) in .*own.py, line 22.*OSError: no network"):
        train(path, of(tmp_path, "Cannot"))


def test_of_several_ranks_one_is_told_and_one_message_ends_all(tmp_path: Path, told: Path) -> None:
    path = write_settings(tmp_path, pp=2, steps=6, every=0)
    first, second = run_ranks(*[["train", path, of(tmp_path, "Tells", "Fails")]] * 2)
    assert (first[0], second[0]) == (1, 1)
    assert "own.py, line 19, ended with KeyError" in first[2]
    assert [one[0] for one in calls(told)] == ["start", "step", "step", "step", "end"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Tell", "has no class 'Tell' did you mean 'Tells'"),
        ("Typo", "has a method on_setp of a callback; did you mean 'on_step'"),
        ("Nothing", "has no method of a callback; known are on_start, on_step"),
    ],
)
def test_what_is_no_callback_is_refused_before_ranks_are_started(
    tmp_path: Path, told: Path, name: str, words: str
) -> None:
    settings = load_settings(write_settings(tmp_path, pp=2), [of(tmp_path, name)])
    with pytest.raises(UsageError, match=words):
        launch.start(settings, ["no such command"])


def test_files_that_cannot_be_run_are_refused(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("import no_such_package\n")
    for text, words in (
        ("log.txt:Logger", "is not FILE.py:CLASS"),
        ("nowhere.py:Logger", "nowhere.py does not exist"),
        (f"{tmp_path}/wrong.py:Logger", "No module named 'no_such_package'"),
    ):
        settings = load_settings(write_settings(tmp_path), [f'output.callbacks=["{text}"]'])
        with pytest.raises(UsageError, match=words):
            launch.start(settings, ["no such command"])


def test_a_file_is_run_once_and_may_have_dataclasses(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"""
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Counts:
    steps: int = 0
    def on_step(self, line): self.steps += 1

open({str(tmp_path / "runs")!r}, "a").write("run ")
""")
    settings = load_settings(write_settings(tmp_path, steps=1, every=0), [of(tmp_path, "Counts")])
    assert launch.start(settings, ["no such command"]) == 0
    assert (tmp_path / "runs").read_text() == "run "


def test_one_that_ends_the_program_is_told(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit(0)")
    path = write_settings(tmp_path, steps=2, every=0)
    with pytest.raises(UsageError, match=r"output.callbacks: .*own.py, line 1.*SystemExit: 0"):
        launch.start(load_settings(path, [of(tmp_path, "Ends")]), ["no such command"])
    (tmp_path / "own.py").write_text("""
class Ends:
    def on_step(self, line): raise SystemExit(0)
""")
    with pytest.raises(RunError, match=r"Ends: on_step\(\) in .*own.py, line 3, ended with SystemExit: 0"):
        launch.start(load_settings(path, [of(tmp_path, "Ends")]), ["no such command"])


class Fake(SimpleNamespace):
    """A package whose functions note how they were called."""

    def __init__(self) -> None:
        super().__init__(calls=[])

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **more: Any) -> Fake:
            self.calls.append((name, arguments, more))
            return self

        if name.startswith("_"):
            raise AttributeError(name)
        return call


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_the_examples_log_all_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    fake = Fake()
    monkeypatch.setitem(sys.modules, package, fake)  # type: ignore[arg-type]
    path = write_settings(tmp_path, steps=3, every=0)
    train(path, f'output.callbacks=["{EXAMPLES}/log_to_{package}.py:Logger"]')
    logs, end = {"wandb": ("log", "finish"), "mlflow": ("log_metrics", "end_run")}[package]
    lines = [(more["step"], arguments[0]) for name, arguments, more in fake.calls if name == logs]
    assert [step for step, _ in lines] == [1, 2, 3, 3]
    assert [line["loss"] for _, line in lines[:3]] == [
        one["loss"] for one in steps_of(tmp_path / "run").values()
    ]
    assert "held_out_loss" in lines[3][1]
    assert fake.calls[-1] in ((end, (), {"exit_code": 0}), (end, ("FINISHED",), {}))
