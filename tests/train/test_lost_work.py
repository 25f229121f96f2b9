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
from pathlib import Path

import pytest
import torch
from tests.train import tiny
from tests.train.tiny import environment, steps_of, write_settings
from typer.testing import CliRunner

import stretto
from stretto.cli.main import app
from stretto.config import load_settings
from stretto.errors import UsageError
from stretto.models.build import build_model
from stretto.models.gpt import next_token_loss
from stretto.train import launch as launcher
from stretto.train.checkpoint import load_model
from stretto.train.lock import LOCK, OWNER, RunLock, folders_of, refuse_if_locked
from stretto.train.optimizer import make_optimizer
from stretto.train.progress import Progress

HOLD = """
import sys, time
from pathlib import Path
from stretto.train.lock import RunLock
lock = RunLock()
lock.take([("output.run_dir", Path(sys.argv[1]))])
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose text and tokens all runs of this file share."""
    return tmp_path_factory.mktemp("lost")


@pytest.fixture(autouse=True)
def _described(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are for a machine that nobody looks at, which is faster than looking at this one."""
    monkeypatch.setattr(
        "stretto.train.trainer.make_plan", lambda job, cluster, **_: stretto.plan(job, stretto.Cluster())
    )


def train(path: Path, *changes: str) -> Path:
    return tiny.train(path, *changes).settings.run_dir


@pytest.fixture(scope="module")
def done(folder: Path) -> tuple[Path, Path]:
    """A settings file and its run, which has come to its end."""
    path = write_settings(folder, steps=4, every=2, run="done")
    return path, train(path)


@pytest.fixture
def again(done: tuple[Path, Path], tmp_path: Path) -> Callable[..., Path]:
    """Starts the command for a copy of that run once more; returns the copy."""
    path, run_dir = done
    copied = shutil.copytree(run_dir, tmp_path / "copy", copy_function=shutil.copy2)

    def start(*changes: str) -> Path:
        return train(path, f"output.run_dir={copied}", *changes) if changes != ("not",) else copied

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


@pytest.mark.parametrize("with_report_command", [False, True], ids=["the next start", "stretto report"])
def test_a_run_that_was_killed_before_its_report_gets_it(
    again: Callable[..., Path], capsys: pytest.CaptureFixture[str], with_report_command: bool
) -> None:
    run_dir = again("not")
    before = content(run_dir)
    (run_dir / "report.html").unlink()
    if with_report_command:
        told = CliRunner().invoke(app, ["report", str(run_dir)]).output
        assert f"The run was killed before it wrote its page.\nwrote {run_dir / 'report.html'}" in told
    else:
        again("training.steps=4")
        told = capsys.readouterr().out
        assert f"the run had ended before its report: {run_dir / 'report.html'} is made now" in told
        assert "all 4 steps are done" in told
    assert "Measured timeline" in (run_dir / "report.html").read_text()
    after = content(run_dir)
    assert {**after, "report.html": ""} == {**before, "report.html": ""}


def test_a_run_that_was_killed_before_its_summary_ends_as_it_would_have(again: Callable[..., Path]) -> None:
    run_dir = again("not")
    results = ("measured.json", "trace.perfetto-trace", "summary.json", "report.html")
    held_out_loss = json.loads((run_dir / "summary.json").read_text())["held_out_loss"]
    for name in results:
        (run_dir / name).unlink()
    again("training.steps=4")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["held_out_loss"], summary["steps"]) == (held_out_loss, 4)
    assert (run_dir / "report.html").exists()
    assert len(steps_of(run_dir)) == 4


def test_a_report_is_written_though_nobody_reads_the_end(
    again: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `stretto train ... | head -20`."""
    run_dir = again("not")
    for name in ("summary.json", "report.html"):
        (run_dir / name).unlink()
    say = Progress.say

    def read_so_far(self: Progress, line: str) -> None:
        if "held-out loss" in line:
            raise BrokenPipeError
        say(self, line)

    monkeypatch.setattr(Progress, "say", read_so_far)
    with pytest.raises(BrokenPipeError):
        again("training.steps=4")
    assert json.loads((run_dir / "summary.json").read_text())["sample"]
    assert (run_dir / "report.html").exists()


def test_the_time_of_a_run_is_counted_from_its_start(
    again: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks begin some seconds after the command that starts them."""
    monkeypatch.setenv("STRETTO_STARTED_AT", f"{time.time() - 7200.0:.3f}")
    run_dir = again("not")
    (run_dir / "summary.json").unlink()
    again("training.steps=4")
    assert "\ndone in 2:0" in capsys.readouterr().out
    assert 7200.0 < json.loads((run_dir / "summary.json").read_text())["seconds"] < 7800.0


def test_a_finished_run_stays_as_it_is(
    again: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(again("not"))
    assert {"measured.json", "trace.perfetto-trace", "summary.json", "report.html"} <= before.keys()
    run_dir = again("training.steps=4")
    assert content(run_dir) == before
    out = capsys.readouterr().out
    assert f"all 4 steps are done, and {run_dir} stays as it is: set training.steps higher to go on" in out
    assert content(again("training.steps=2")) == before


def test_going_on_keeps_what_was_measured_before(
    again: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(again("not"))
    with (again("not") / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "\xff\xfe')  # of a run that was killed
    run_dir = again("training.steps=5")
    assert f"what an earlier run measured is now in {run_dir / 'earlier-1'}" in capsys.readouterr().out
    kept = content(run_dir / "earlier-1")
    assert kept == {name: before[name] for name in kept}
    assert kept.keys() == {"measured.json", "trace.perfetto-trace", "summary.json", "report.html"}
    assert sorted(steps_of(run_dir)) == [1, 2, 3, 4, 5]


def test_starting_anew_keeps_lines_and_checkpoints_of_the_run_before(
    again: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    before = steps_of(again("not"))
    run_dir = again("checkpoint.resume=never", "training.seed=1", "training.steps=2")
    assert "started anew; the checkpoints of an earlier run are now in" in capsys.readouterr().out
    assert (run_dir / "checkpoints" / "earlier-1" / "step-000004").is_dir()
    assert steps_of(run_dir / "earlier-1") == before
    assert sorted(steps_of(run_dir)) == [1, 2]


def test_going_back_to_an_earlier_step_keeps_the_later_lines(again: Callable[..., Path]) -> None:
    before = steps_of(again("not"))
    run_dir = again(f"checkpoint.resume={again('not') / 'checkpoints' / 'step-000002'}", "training.steps=3")
    assert steps_of(run_dir / "earlier-1") == before
    assert sorted(steps_of(run_dir)) == [1, 2, 3]


def test_a_checkpoint_from_before_the_rest_was_kept_goes_on(again: Callable[..., Path]) -> None:
    copied = again("not")
    one = again("training.steps=5", f"output.run_dir={copied.parent / 'one'}", f"checkpoint.resume={copied}")
    for name in ("rest.pt", "tensors.json", "digests.json"):
        (copied / "checkpoints" / "step-000004" / name).unlink()
    assert steps_of(again("training.steps=5"))[5]["loss"] == steps_of(one)[5]["loss"]


def test_ones_own_loop_reads_the_checkpoint_of_a_run(done: tuple[Path, Path]) -> None:
    path, run_dir = done
    settings = load_settings(path)
    made = run_dir / "checkpoints" / "step-000004"
    plain, _ = load_model(made)
    model = build_model(settings.model, plain.config.vocab_size, seed=5)
    batch = torch.zeros(4, 17, dtype=torch.long)
    job = stretto.capture(model, batch, next_token_loss, stretto.Parallel(pp=2, microbatches=2))

    def work(runner: stretto.Runner) -> dict[str, torch.Tensor]:
        optimizer = make_optimizer(runner, settings.optimizer)
        assert stretto.load(made, runner, optimizer) is None
        assert {int(state["step"]) for state in optimizer.state.values()} == {4}
        return runner.state_dict()

    plan = stretto.plan(job, stretto.Cluster())
    found = stretto.run_threads(plan, lambda _: copy.deepcopy(model), work)[1]
    assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items())


# One run in a folder.


def test_a_second_run_in_the_folder_is_told_whose_it_is(folder: Path) -> None:
    path = write_settings(folder, steps=2, run="twice")
    run_dir = load_settings(path).run_dir
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run_dir)], env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        told = (
            rf"another run is at work in .*twice: process {holder.pid} on host .*, since 20.*; ?|\. Wait for"
        )
        with pytest.raises(UsageError, match=told) as caught:
            train(path)
        assert "or set output.run_dir to a folder of this run's own" in str(caught.value)
        assert not (run_dir / "metrics.jsonl").exists()
        with pytest.raises(UsageError, match="another run is at work"):
            launcher.start(load_settings(path, ["parallel.pp=2"]), ["nothing"])
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert (run_dir / OWNER).exists()  # it could not say that it is gone
    train(path)
    assert sorted(steps_of(run_dir)) == [1, 2]
    assert not (run_dir / OWNER).exists()


def test_checkpoints_elsewhere_are_locked_too(tmp_path: Path) -> None:
    path = write_settings(tmp_path, run="a")
    elsewhere = tmp_path / "elsewhere"
    both = [
        load_settings(path, [f"checkpoint.dir={elsewhere}", f"output.run_dir={tmp_path / name}"])
        for name in "ab"
    ]
    assert folders_of(load_settings(path)) == [("output.run_dir", tmp_path / "a")]
    one, two = RunLock(), RunLock()
    one.take(folders_of(both[0]))
    with pytest.raises(UsageError, match=r"at work in .*elsewhere: .* set checkpoint\.dir to a folder"):
        two.take(folders_of(both[1]))
    assert not (tmp_path / "b" / OWNER).exists()  # what it had locked before it was refused is free
    one.release()
    two.take(folders_of(both[1]))
    two.release()


def test_looking_for_a_lock_makes_no_folder(tmp_path: Path) -> None:
    refuse_if_locked([("output.run_dir", tmp_path / "none")])
    assert list(tmp_path.iterdir()) == []


def test_two_at_once_and_one_goes_on(tmp_path: Path) -> None:
    """Whoever is first; the other is told, and mixes nothing in."""
    locks, won, told = [RunLock() for _ in range(8)], [], []
    ready = threading.Barrier(8)

    def attempt(lock: RunLock) -> None:
        ready.wait()
        try:
            lock.take([("output.run_dir", tmp_path)])
            won.append(lock)
        except UsageError as error:
            told.append(str(error))

    threads = [threading.Thread(target=attempt, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert sum("another run is at work" in one for one in told) == 7
    won[0].release()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(stretto.StrettoError, match=r"cannot lock .*set output\.run_dir to a folder"):
        train(write_settings(tmp_path, run="nowhere"), f"output.run_dir={tmp_path / 'file' / 'x'}")
