"""A task of one's own, from a file that the settings name: trained, resumed, and refused where it is none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tests.train.own_task import task
from tests.train.tiny import run, steps_of

import stretto
from stretto.check.compare import Check
from stretto.cli.check import make as check_of
from stretto.cli.plan import make as plan_of
from stretto.config import TrainSettings, load_settings
from stretto.config.task import TaskSettings
from stretto.errors import UsageError
from stretto.train.export import export
from stretto.train.task import own_task
from stretto.train.trainer import Trainer
from stretto.train.whole import load_whole
from stretto.train.world import World

FILE = Path(__file__).with_name("own_task.py")

SETTINGS = """
[task]
file = "{file}"
config = {{ width = 8 }}
[parallel]
pp = {pp}
microbatches = 2
{split}
[optimizer]
lr = 1e-2
weight_decay = 0.0
[training]
steps = {steps}
global_batch = 16
eval_every = 0
threads_per_rank = 1
[checkpoint]
every_steps = 20
[output]
run_dir = "{run}"
trace_steps = 1
"""


def write(folder: Path, *, pp: int = 1, steps: int = 60, run: str = "run", file: Path = FILE) -> Path:
    split = 'split = ["middle"]' if pp == 2 else ""
    path = folder / f"{run}.toml"
    path.write_text(SETTINGS.format(file=file, pp=pp, steps=steps, run=folder / run, split=split))
    return path


def train(path: Path, *changes: str) -> TrainSettings:
    settings = load_settings(path, changes)
    Trainer(settings, World()).run()
    return settings


def test_two_ranks_train_it_over_the_border_that_its_skip_crosses(tmp_path: Path) -> None:
    status, out, err = run("train", write(tmp_path, pp=2))
    assert status == 0, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    losses = [line["loss"] for line in steps_of(tmp_path / "run").values()]
    assert losses[-1] < 0.1 * losses[0]
    assert summary["held_out_loss"] < 0.1 * losses[0]
    assert f"four ones make {summary['four_ones']:.2f}" in out
    assert "vectors/s" in out
    assert summary["vectors_per_s"] > 0
    assert "token" not in out
    train(write(tmp_path, pp=1, run="alone"))
    alone = [line["loss"] for line in steps_of(tmp_path / "alone").values()]
    assert losses == pytest.approx(alone, rel=1e-4)


def test_the_report_is_of_the_trained_model_and_a_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    straight, path = train(write(tmp_path, steps=40, run="straight")), write(tmp_path, steps=40)
    train(path, "training.steps=20", "lr_schedule.kind=constant")
    again = train(path, "lr_schedule.kind=constant")
    assert "resumed from" in capsys.readouterr().out
    other = train(write(tmp_path, steps=40, run="constant"), "lr_schedule.kind=constant")
    assert [s["loss"] for s in steps_of(again.run_dir).values()] == [
        s["loss"] for s in steps_of(other.run_dir).values()
    ]
    model, _ = load_whole(straight.checkpoint_dir / "step-000040")
    told = json.loads((straight.run_dir / "summary.json").read_text())["four_ones"]
    assert float(model(torch.ones(1, 4))) == told
    with pytest.raises(UsageError, match=r"task.config.width = 9, but the checkpoint"):
        train(path, "training.steps=50", "task.config.width=9")
    changed = tmp_path / "changed.py"
    changed.write_text(FILE.read_text() + "\n# other data\n")
    with pytest.raises(UsageError, match=r"what task.file makes has changed|task.file differs"):
        train(path, "training.steps=50", f"task.file={changed}")
    with pytest.raises(
        UsageError, match=r"is of a task of one's own .*, whose model is a \w+, and .*stretto.load"
    ):
        export(straight.run_dir, tmp_path / "out")


def test_it_is_planned_and_checked_as_text_is(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, pp=2))
    plan = plan_of(settings, stretto.Cluster())  # type: ignore[arg-type]
    assert len(plan.job.stages) == 2
    found = check_of(settings)
    assert isinstance(found, Check)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (None, r"cannot be read \(No such file or directory\): give a file of Python"),
        ("x = 1", r"defines no function task\(config, seed\)"),
        ("def task(config, seed): return 3", r"is to return a stretto.train.task.Task, and returned 3"),
        (
            "def task(config, seed):\n    return config['depth']",
            r"line 2: task\(config, seed\) failed with task.config = \{\}: KeyError: 'depth'",
        ),
        ("import torch\nwidth = layers * 4", "line 2: NameError: name 'layers' is not defined"),
        ("import no_such_package", "cannot import what it needs: No module named 'no_such_package'"),
        ("def task(:", "line 1: "),
    ],
)
def test_files_that_give_no_task_are_refused(tmp_path: Path, code: str | None, told: str) -> None:
    path = tmp_path / "mine.py"
    if code is not None:
        path.write_text(code)
    with pytest.raises(UsageError, match=f"task.file = '.*mine.py'.*{told}"):
        own_task(TaskSettings(file=str(path)), 0)


@pytest.mark.parametrize("example", ["unet_digits", "unet_large"])
def test_an_example_says_what_to_install(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(UsageError, match=r"diffusers.* \(pip install 'stretto\[diffusion\]'\)"):
        own_task(TaskSettings(file=f"examples/{example}.py"), 0)


def test_settings_of_text_do_not_go_with_it(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text(path.read_text() + "\n[model]\nlayers = 3\n[data]\nvocab_size = 300\n")
    with pytest.raises(
        UsageError, match=r"(?s)model is of text, and .* take out \[model\].*take out \[data\]"
    ):
        load_settings(path)


def test_a_task_is_the_same_each_time() -> None:
    one, other = (task({"width": 8}, 3).model().state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
