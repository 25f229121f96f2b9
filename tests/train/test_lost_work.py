"""What was measured and learned is not lost: a finished run stays as it is, a folder has one run at a time,
and what an earlier run left is kept apart.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tests.clusters import cores
from tests.train import tiny
from tests.train.tiny import environment, steps_of, write_settings

import stretto
from stretto.config import load_settings
from stretto.errors import UsageError
from stretto.models.build import build_model
from stretto.models.gpt import next_token_loss
from stretto.train import launch
from stretto.train.checkpoint import load_model
from stretto.train.lock import LOCK, OWNER, folders_of, locked
from stretto.train.optimizer import make_optimizer
from stretto.train.progress import Progress

HOLD = """
import sys, time
from pathlib import Path
from stretto.train.lock import locked
locks = locked([("output.run_dir", Path(sys.argv[1]))])
print("kept", flush=True)
time.sleep(600)
"""
RESULTS = {"measured.json", "trace.perfetto-trace", "summary.json", "report.html"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose text and tokens all runs of this file share."""
    return tmp_path_factory.mktemp("lost")


def train(path: Path, *changes: str) -> Path:
    return tiny.train(path, *changes).settings.run_dir


@pytest.fixture(scope="module")
def done(folder: Path) -> tuple[Path, Path]:
    """A settings file and its run, which has come to its end."""
    path = write_settings(folder, steps=4, every=2, run="done")
    return path, train(path)


@pytest.fixture
def run_dir(done: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of that run."""
    return shutil.copytree(done[1], tmp_path / "copy", copy_function=shutil.copy2)


@pytest.fixture
def again(done: tuple[Path, Path], run_dir: Path) -> Callable[..., None]:
    """Starts the command for the copy once more."""

    def start(*changes: str) -> None:
        train(done[0], f"output.run_dir={run_dir}", *changes)

    return start


def content(folder: Path) -> dict[str, str]:
    """Every file with a digest and the time of its last change, but for the lock itself."""
    return {
        str(
            path.relative_to(folder)
        ): f"{hashlib.sha256(path.read_bytes()).hexdigest()} {path.stat().st_mtime_ns}"
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != LOCK
    }


@pytest.mark.parametrize("read", [True, False], ids=["read to the end", "as into head"])
def test_a_run_that_was_killed_before_its_summary_ends_as_it_would_have(
    run_dir: Path, again: Callable[..., None], monkeypatch: pytest.MonkeyPatch, read: bool
) -> None:
    held_out_loss = json.loads((run_dir / "summary.json").read_text())["held_out_loss"]
    for name in RESULTS:
        (run_dir / name).unlink()
    monkeypatch.setenv("STRETTO_STARTED_AT", f"{time.time() - 7200.0:.3f}")
    say = Progress.say

    def read_so_far(self: Progress, line: str) -> None:
        if line.startswith("held-out loss") and not read:
            raise BrokenPipeError
        say(self, line)

    monkeypatch.setattr(Progress, "say", read_so_far)
    if read:
        again("training.steps=4")
    else:
        with pytest.raises(BrokenPipeError):
            again("training.steps=4")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["held_out_loss"], summary["steps"]) == (held_out_loss, 4)
    assert summary["sample"]
    assert 7200.0 < summary["seconds"] < 7800.0, "since the command was started"
    assert (run_dir / "report.html").exists()
    assert len(steps_of(run_dir)) == 4


@pytest.mark.parametrize("steps", [4, 2])
def test_a_finished_run_stays_as_it_is(
    run_dir: Path, again: Callable[..., None], capsys: pytest.CaptureFixture[str], steps: int
) -> None:
    before = content(run_dir)
    assert before.keys() >= RESULTS
    again(f"training.steps={steps}")
    assert content(run_dir) == before
    assert f"{run_dir} stays as it is" in capsys.readouterr().out


def test_a_launcher_starts_no_rank_for_a_finished_run(
    done: tuple[Path, Path], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(run_dir)
    changes = [f"output.run_dir={run_dir}", "parallel.pp=2"]
    assert launch.start(load_settings(done[0], changes), ["no such command"]) == 0
    assert content(run_dir) == before
    assert f"{run_dir} stays as it is" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"model.layers = 4, but the checkpoint .* with model.layers = 2"):
        launch.start(load_settings(done[0], [*changes, "model.layers=4"]), ["no such command"])


def test_going_on_keeps_what_was_measured_before(run_dir: Path, again: Callable[..., None]) -> None:
    before = content(run_dir)
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "\xff\xfe')  # of a run that was killed
    again("training.steps=5")
    kept = content(run_dir / "earlier-1")
    assert kept == {name: before[name] for name in RESULTS}
    assert sorted(steps_of(run_dir)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("resume", "steps"), [("never", 2), ("{}/checkpoints/step-000002", 3)], ids=["again", "going back"]
)
def test_lines_and_checkpoints_of_the_run_before_are_kept(
    run_dir: Path, again: Callable[..., None], resume: str, steps: int
) -> None:
    before = steps_of(run_dir)
    again(f"checkpoint.resume={resume.format(run_dir)}", f"training.steps={steps}")
    assert steps_of(run_dir / "earlier-1") == before
    assert sorted(steps_of(run_dir)) == list(range(1, steps + 1))
    assert (run_dir / "checkpoints" / "earlier-1" / "step-000004").is_dir() == (resume == "never")


def test_ones_own_loop_reads_the_checkpoint_of_a_run(done: tuple[Path, Path]) -> None:
    path, run_dir = done
    settings, made = load_settings(path), run_dir / "checkpoints" / "step-000004"
    plain, _ = load_model(made)
    model = build_model(settings.model, plain.config.vocab_size, seed=5)
    batch = torch.zeros(4, 17, dtype=torch.long)
    job = stretto.capture(model, batch, next_token_loss, stretto.Parallel(pp=2, microbatches=2))

    def work(runner: stretto.Runner) -> dict[str, torch.Tensor]:
        optimizer = make_optimizer([*runner.parameters()], settings.optimizer)
        assert stretto.load(made, runner, optimizer) is None
        assert {int(state["step"]) for state in optimizer.state.values()} == {4}
        return runner.state_dict()

    values = stretto.run_threads(stretto.plan(job, cores()), lambda _: copy.deepcopy(model), work)[1]
    assert all(torch.equal(values[name], value) for name, value in plain.state_dict().items())


# One run in a folder.


def test_a_second_run_in_the_folder_is_refused_with_whose_it_is(folder: Path) -> None:
    path = write_settings(folder, steps=2, run="twice")
    run_dir = load_settings(path).run_dir
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run_dir)], env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "kept\n"
        with pytest.raises(UsageError, match=rf"process {owner.pid} on host .* set output\.run_dir"):
            train(path)
        assert not (run_dir / "metrics.jsonl").exists()
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    assert (run_dir / OWNER).exists()  # it could not say that it is gone
    train(path)
    assert sorted(steps_of(run_dir)) == [1, 2]
    assert not (run_dir / OWNER).exists()


def test_checkpoints_elsewhere_are_locked_too(tmp_path: Path) -> None:
    path, elsewhere = write_settings(tmp_path, run="a"), tmp_path / "elsewhere"
    both = [
        load_settings(path, [f"checkpoint.dir={elsewhere}", f"output.run_dir={tmp_path / name}"])
        for name in "ab"
    ]
    assert folders_of(load_settings(path)) == [("output.run_dir", tmp_path / "a")]
    one = locked(folders_of(both[0]))
    with pytest.raises(UsageError, match=r"elsewhere: .* set checkpoint\.dir"):
        locked(folders_of(both[1]))
    assert not (tmp_path / "b" / OWNER).exists()  # what it had locked before it was refused is free
    one.close()
    locked(folders_of(both[1])).close()


def test_of_several_at_once_one_has_the_folder(tmp_path: Path) -> None:
    locks, ready = ExitStack(), threading.Barrier(8)

    def attempt(_: int) -> str:
        ready.wait()
        try:
            locks.enter_context(locked([("output.run_dir", tmp_path)]))
        except UsageError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(8) as pool:
        first, *others = sorted(pool.map(attempt, range(8)))
    assert first == ""
    assert all("another run is at work" in one for one in others)
    locks.close()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(stretto.StrettoError, match=r"cannot lock .*output\.run_dir"):
        train(write_settings(tmp_path, run="nowhere"), f"output.run_dir={tmp_path / 'file' / 'x'}")
