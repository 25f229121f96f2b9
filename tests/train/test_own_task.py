"""A task of your own, from a file that the settings name: trained, resumed, and refused where it is none."""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from tests.clusters import cores
from tests.train import tiny
from tests.train.tiny import run, run_ranks, steps_of, write_settings
from typer.testing import CliRunner

from stretto.checking.compare import Check
from stretto.cli.main import app, main
from stretto.cli.plan import make as plan_of
from stretto.cli.train import make as check_of
from stretto.config import TaskSettings, TrainSettings, load_settings
from stretto.errors import StrettoError, UsageError
from stretto.train.checkpoint import load_model
from stretto.train.checkpoint_files import find
from stretto.train.export import export
from stretto.train.task import own_task
from stretto.train.trainer import Trainer
from stretto.train.world import World

FILE = Path(__file__).with_name("own_task.py")

TASK = """
[task]
file = "{file}"
config = {{ width = 8 }}
"""


def write(folder: Path, *, pp: int = 1, steps: int = 60, run: str = "run", file: Path = FILE) -> Path:
    split = 'split = ["middle"]' if pp == 2 else ""
    layout = f"pp = {pp}\nmicrobatches = 2\n{split}"
    path = write_settings(folder, steps=steps, every=20, run=run, layout=layout)
    text = path.read_text()
    text = TASK.format(file=file) + text[text.index("[parallel]") :]
    for one, other in (
        ("lr = 3e-3", "lr = 1e-2\nweight_decay = 0.0"),
        ("global_batch = 4", "global_batch = 16"),
    ):
        text = text.replace(one, other)
    path.write_text(text)
    return path


def train(path: Path, *changes: str) -> TrainSettings:
    return tiny.train(path, *changes).settings


def test_two_ranks_train_it_over_the_border_that_its_skip_crosses(tmp_path: Path) -> None:
    (status, out, err), _ = run_ranks(*[["train", write(tmp_path, pp=2)]] * 2)
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
    constant, path = "lr_schedule.kind=constant", write(tmp_path, steps=40)
    straight = train(write(tmp_path, steps=40, run="straight"), constant)
    train(path, "training.steps=20", constant)
    again = train(path, constant)
    assert "resumed from" in capsys.readouterr().out
    one, other = ([s["loss"] for s in steps_of(run.run_dir).values()] for run in (again, straight))
    assert one == other
    model, _ = load_model(straight.checkpoint_dir / "step-000040", str(FILE))
    told = json.loads((straight.run_dir / "summary.json").read_text())["four_ones"]
    assert float(model(torch.ones(1, 4))) == told
    with pytest.raises(UsageError, match=r"task.config.width = 9, but the checkpoint"):
        train(path, "training.steps=50", "task.config.width=9")
    changed = tmp_path / "changed.py"
    changed.write_text(FILE.read_text() + "\n# other data\n")
    with pytest.raises(UsageError, match=r"what task.file makes has changed|task.file differs"):
        train(path, "training.steps=50", f"task.file={changed}")
    with pytest.raises(UsageError, match=r"stretto\.load"):
        export(straight.run_dir, tmp_path / "out", str(FILE))


def test_a_checkpoint_names_no_program(tmp_path: Path) -> None:
    """Its state.json is a stranger's: the file that it names is not run."""
    file, ran = tmp_path / "mine.py", tmp_path / "ran"
    file.write_text(FILE.read_text())
    run = train(write(tmp_path, steps=2, file=file)).run_dir
    file.write_text(f"{FILE.read_text()}\nPath({str(ran)!r}).touch()\n")
    for read in (lambda: export(run, tmp_path / "out"), lambda: load_model(find(run))):
        with pytest.raises(UsageError, match="--task FILE"):
            read()
    command = CliRunner().invoke(app, ["export", str(run), "-o", str(tmp_path / "out")])
    assert isinstance(command.exception, UsageError)
    assert not ran.exists()
    load_model(find(run), str(file))
    assert ran.exists()


def test_it_is_planned_and_checked_as_text_is(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, pp=2))
    plan = plan_of(settings, cores())  # type: ignore[arg-type]
    assert len(plan.job.stages) == 2
    found = check_of(settings)
    assert isinstance(found, Check)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "No such file"),
        ("x = 1", r"has no function task\(config, seed\)"),
        (
            "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass A: x: int",
            "has no function task",
        ),
        ("def task(config, seed): return 3", "and not 3"),
        (
            "def task(config, seed):\n    return config['depth']",
            r"line 2: KeyError: 'depth', with task.config = \{\}",
        ),
        ("import torch\nwidth = layers * 4", "line 2: NameError"),
        ("import no_such_package", "line 1: ModuleNotFoundError: .*no_such_package"),
        ("def task(:", "line 1: "),
        ("import sys\nsys.exit(0)\n", "line 2: .*SystemExit: 0"),
        ("import sys\ntask = lambda config, seed: sys.exit(0)\n", "line 2: .*SystemExit: 0"),
    ],
)
def test_files_that_give_no_task_are_refused(tmp_path: Path, code: str | None, words: str) -> None:
    path = tmp_path / "mine.py"
    if code is not None:
        path.write_text(code)
    with pytest.raises(UsageError, match=f"task.file = '.*mine.py'.*{words}"):
        own_task(TaskSettings(file=str(path)), 0)


@pytest.mark.parametrize("example", ["unet_digits", "unet_large"])
def test_an_example_says_what_to_install(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(UsageError, match=r"diffusers.* \(pip install 'stretto\[diffusion\]'\)"):
        own_task(TaskSettings(file=f"examples/{example}.py"), 0)


def test_settings_of_text_do_not_go_with_it(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text(path.read_text() + "\n[model]\nlayers = 3\n[data]\nvocab_size = 300\n")
    with pytest.raises(UsageError, match=r"(?s)take out \[model\].*take out \[data\]"):
        load_settings(path)


BROKEN = """
import sys
from torch import nn
import torch
from stretto.train.task import Task


def task(config, seed):
    def fail(where):
        if where == config["where"]:
            {"key": lambda: {}["none"], "exit": lambda: sys.exit(0)}[config["how"]]()

    def model():
        fail("model")
        torch.manual_seed(seed)
        return nn.Linear(4, 1)

    def train(step, rows):
        fail("train")
        return torch.randn(rows, 4)

    def held_out(step, rows):
        fail("held_out")
        return torch.randn(rows, 4)

    def loss(model, x):
        fail("loss")
        return model(x).square().mean()

    def report(model, folder, say):
        fail("report")
        return {}

    return Task(model=model, loss=loss, train=train, held_out=held_out, digest="a", report=report)
"""


@pytest.mark.parametrize("how", ["key", "exit"])
@pytest.mark.parametrize("where", ["model", "train", "held_out", "report"])
def test_an_error_of_its_own_code_is_reported_by_file_function_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str, how: str
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(BROKEN)
    path = write(tmp_path, steps=1, file=file)
    change = f'task.config={{where = "{where}", how = "{how}"}}'
    monkeypatch.setattr(sys, "argv", ["stretto", "train", str(path), "--set", change])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 1, said
    words = "KeyError: 'none'" if how == "key" else "SystemExit: 0"
    first, *trace = said.splitlines()
    place = rf"task\.file: {where}\(\) in {re.escape(str(file))}, line 1\d"
    assert re.fullmatch(f"stretto: {place}, ended with {words}", first)
    assert f"in {where}" in trace[0]
    assert trace[-1] == words
    assert "stretto/train" not in said.replace(str(file), ""), "the user's part of the traceback alone"


def test_an_error_of_its_loss_is_reported_by_the_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(BROKEN)
    settings = load_settings(
        write(tmp_path, steps=1, file=file), ['task.config={where = "loss", how = "key"}']
    )
    trainer = Trainer(settings, World())
    with pytest.raises(StrettoError, match=r"broken\.py:1\d: .*\n  KeyError: 'none'"):
        trainer.run()
    for thread in threading.enumerate():
        if thread.name == "phases":
            thread.join(10.0)
            assert not thread.is_alive(), "nothing is shown of a run that has ended"


@pytest.mark.slow
def test_one_of_its_ranks_reports_it_for_all(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(BROKEN.replace("nn.Linear(4, 1)", "nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))"))
    path = write(tmp_path, steps=1, file=file)
    change = 'task.config={where = "held_out", how = "key"}'
    status, _, err = run("train", path, "--set", change, "--set", "parallel.dp=2")
    assert status == 1, err
    assert err.splitlines()[-1] == "KeyError: 'none'"
    assert err.count("held_out() in") == err.count("ended with") == 1
