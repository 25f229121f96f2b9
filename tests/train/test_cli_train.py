"""`stretto train` as a user meets it: options, progress on a terminal, a disk that fills up."""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from tests.train.tiny import run, steps_of, write_settings
from typer.testing import CliRunner

from stretto.cli.main import app
from stretto.errors import UsageError
from stretto.ir.costs import Peak
from stretto.ir.work import Work
from stretto.train.metrics import speed_line
from stretto.train.progress import Progress, duration


def test_options_change_settings(tmp_path: Path) -> None:
    config = write_settings(tmp_path, steps=50)
    with pytest.raises(UsageError, match="--resume: there is no whole checkpoint in"):
        CliRunner().invoke(app, ["train", str(config), "--resume"], catch_exceptions=False)
    command = ["train", str(config), "--steps", "4", "--set", "training.log_every=2"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "step 2/4" in result.output
    assert "step 4/4" in result.output
    assert sorted(steps_of(tmp_path / "run")) == [1, 2, 3, 4]
    again = CliRunner().invoke(app, [*command[:2], "--steps", "6", "--resume"])
    assert "resumed from" in again.output
    assert sorted(steps_of(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]
    anew = CliRunner().invoke(app, [*command[:2], "--steps", "2", "--no-resume"])
    assert "started anew" in anew.output
    assert sorted(steps_of(tmp_path / "run")) == [1, 2]


def test_a_wrong_setting_names_its_origin(tmp_path: Path) -> None:
    error = CliRunner().invoke(app, ["train", str(write_settings(tmp_path)), "--steps", "0"]).exception
    assert isinstance(error, UsageError)
    assert str(error).startswith("--set training.steps=0: training.steps = 0")


def line_of(step: int) -> dict[str, float]:
    return {"step": step, "loss": 1.25, "lr": 1e-3, "grad_norm": 0.5, "tokens_per_s": 12345.0, "step_s": 0.02}


def test_a_line_tells_the_speed_of_a_device() -> None:
    out = io.StringIO()
    progress = Progress(console=Console(file=out, width=200, soft_wrap=True))
    progress.steps = 20
    progress.show(line_of(2) | speed_line("tokens", 6000, 0.5, 4, Work(4e9, 0.0, Peak(1e5, "a sheet"))), None)
    progress.show(line_of(3) | speed_line("tokens", 6000, 0.5, 1, Work(4e9, 0.0)), None)
    several, alone = out.getvalue().splitlines()
    assert "12,000 tokens/s (3,000 a device)  MFU 8.0 %" in several
    assert "12,000 tokens/s  500 ms a step" in alone


def shown(terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, soft_wrap=True)
    progress = Progress(console=console)
    progress.steps, progress.log_every = 20, 5
    for step in range(1, 21):
        progress.show(line_of(step), 0.034)
        if step == 10:
            progress.say("a line that stays")
    progress.stop()
    progress.say("after")
    return out.getvalue()


def test_without_a_terminal_there_are_plain_lines_now_and_then() -> None:
    lines = shown(terminal=False).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step")] == [
        "5/20",
        "10/20",
        "15/20",
        "20/20",
    ]
    assert "\x1b" not in shown(terminal=False)
    expected = ("step  5/20", "loss 1.2500", "12,345 tokens/s", "exposed 3.4 %", "20 ms a step", "lr 0.001")
    assert lines[0] == "  ".join((*expected, "grad norm 0.50", "0 s left"))


def test_on_a_terminal_one_line_is_drawn_over_and_the_last_step_is_shown() -> None:
    text = shown(terminal=True)
    assert "step 20/20" in text
    assert "a line that stays" in text
    assert "\x1b[" in text  # moves the cursor back
    assert text.index("step 20/20") < text.index("after")


@pytest.mark.parametrize("phase", [True, False], ids=["before", "after"])
def test_a_process_that_ends_in_another_thread_gives_the_cursor_back(phase: bool) -> None:
    """Before the first step, and after it."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=200, soft_wrap=True)
    progress = Progress(console=console)
    if phase:
        progress.begin("planning")
    else:
        progress.show(line_of(1), None)
    hidden, shown_again = "\x1b[?25l", "\x1b[?25h"
    assert out.getvalue().rindex(hidden) > out.getvalue().rfind(shown_again)
    progress.let_go()
    assert out.getvalue().rindex(shown_again) > out.getvalue().rindex(hidden)
    progress.stop()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (185, "3:05 min"), (7800, "2:10:00 h")]
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1.5 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mount.returncode:
        pytest.skip(f"cannot mount a small file system: {mount.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
def test_a_disk_that_fills_up_ends_the_run_with_the_last_checkpoint_whole(
    tmp_path: Path, small_disk: Path
) -> None:
    config = write_settings(tmp_path, pp=2, steps=30, every=5)
    status, _, err = run("train", config, "--set", f"checkpoint.dir={small_disk}")
    assert status == 1
    assert err.count("\n") == 1
    assert "could not be written: the disk is full; free some space, or set checkpoint.dir" in err
    left = sorted(p.name for p in small_disk.iterdir() if p.is_dir())
    assert left
    assert not any(name.endswith(".tmp") for name in left)
    status, out, err = run(
        "train", config, "--set", f"checkpoint.resume={small_disk / left[-1]}", "--steps", "30"
    )
    assert (status, err) == (0, "")
    assert f"resumed from {small_disk / left[-1]}" in out


@pytest.mark.slow
def test_memory_stays_flat_over_five_hundred_steps(tmp_path: Path) -> None:
    from stretto.config import load_settings
    from stretto.train.trainer import Trainer
    from stretto.train.world import World

    config = write_settings(tmp_path, steps=600, every=100)
    trainer = Trainer(load_settings(config, ["training.eval_every=50"]), World())
    resident_bytes: dict[int, int] = {}
    original = trainer._usual_step_s

    def watched() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident_bytes[trainer.step] = pages * os.sysconf("SC_PAGE_SIZE")
        return original()

    trainer._usual_step_s = watched  # type: ignore[method-assign]
    trainer.run()
    warm, end = resident_bytes[100], resident_bytes[600]
    assert end - warm < 4 * 2**20, f"{(end - warm) / 2**20:.1f} MiB more after 500 steps"
