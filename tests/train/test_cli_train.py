"""`stretto train` and `stretto plan` as a user meets them: options, progress on a terminal, memory."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.clusters import cores_file
from tests.train.tiny import steps_of, write_settings
from typer.testing import CliRunner

import stretto
from stretto.cli.main import app
from stretto.config import load_settings
from stretto.errors import UsageError
from stretto.ir.costs import Peak
from stretto.ir.work import Work
from stretto.train.progress import Progress, duration
from stretto.train.results import speed_line
from stretto.train.trainer import Trainer
from stretto.train.world import World


def test_options_change_settings(tmp_path: Path) -> None:
    config = str(write_settings(tmp_path, steps=50))
    with pytest.raises(UsageError, match="--resume"):
        CliRunner().invoke(app, ["train", config, "--resume"], catch_exceptions=False)
    error = CliRunner().invoke(app, ["train", config, "--steps", "0"]).exception
    assert str(error).startswith("--set training.steps=0: ")
    for options, words, steps in (
        (["--steps", "4", "--set", "training.log_every=2"], ["step 2/4", "step 4/4"], 4),
        (["--steps", "6", "--resume"], ["resumed from"], 6),
        (["--steps", "2", "--no-resume"], ["started again"], 2),
    ):
        result = CliRunner().invoke(app, ["train", config, *options])
        assert result.exit_code == 0, result.output
        assert all(word in result.output for word in words)
        assert sorted(steps_of(tmp_path / "run")) == list(range(1, steps + 1))


def progress_to(out: io.StringIO, terminal: bool) -> Progress:
    progress = Progress(console=Console(file=out, force_terminal=terminal, width=200, soft_wrap=True))
    progress.steps, progress.log_every = 20, 5
    return progress


def line_of(step: int) -> dict[str, float]:
    return {"step": step, "loss": 1.25, "lr": 1e-3, "grad_norm": 0.5, "tokens_per_s": 12345.0, "step_s": 0.02}


def test_a_line_has_the_speed_of_a_device() -> None:
    progress = progress_to(out := io.StringIO(), terminal=False)
    progress.show(line_of(5) | speed_line("tokens", 6000, 0.5, 4, Work(4e9, 0.0, Peak(1e5, "a sheet"))), None)
    progress.show(line_of(10) | speed_line("tokens", 6000, 0.5, 1, Work(4e9, 0.0)), None)
    several, alone = out.getvalue().splitlines()
    assert "12,000 tokens/s (3,000 a device)  MFU 8.0 %" in several
    assert "12,000 tokens/s  500 ms a step" in alone


def test_a_narrow_terminal_has_what_is_needed_most() -> None:
    progress = progress_to(out := io.StringIO(), terminal=True)
    progress.console.width = 80
    speed = speed_line("tokens", 60000, 5.0, 2, Work(4e9, 0.0))
    progress.show(line_of(5) | speed, 0.034)
    progress.stop()
    text = out.getvalue()
    assert "step  5/20  loss 1.2500  12,000 tokens/s  exposed 3.4 %  5.00 s a step  1:15 min left" not in text
    assert "step  5/20  loss 1.2500  12,000 tokens/s  exposed 3.4 %  1:15 min left" in text


@pytest.mark.parametrize("terminal", [False, True])
def test_steps_are_lines_now_and_then_or_one_that_is_drawn_over(terminal: bool) -> None:
    progress = progress_to(out := io.StringIO(), terminal)
    for step in range(1, 21):
        progress.show(line_of(step), 0.034)
        if step == 10:
            progress.say("a line that stays")
    progress.stop()
    progress.say("after")
    text = out.getvalue()
    assert text.index("a line that stays") < text.index("step 20/20") < text.index("after")
    assert ("\x1b[" in text) == terminal  # moves the cursor back
    if not terminal:
        steps = [line.split()[1] for line in text.splitlines() if line.startswith("step")]
        assert steps == ["5/20", "10/20", "15/20", "20/20"]
        words = ("loss 1.2500", "12,345 tokens/s", "exposed 3.4 %", "20 ms a step", "lr 0.001", "0 s left")
        assert all(word in text.splitlines()[0] for word in words)


@pytest.mark.parametrize("phase", [True, False], ids=["before the first step", "after"])
def test_a_process_that_ends_in_another_thread_gives_the_cursor_back(phase: bool) -> None:
    progress = progress_to(out := io.StringIO(), terminal=True)
    if phase:
        progress.begin("planning")
    else:
        progress.show(line_of(1), None)
    hidden, shown_again = "\x1b[?25l", "\x1b[?25h"
    assert out.getvalue().rindex(hidden) > out.getvalue().rfind(shown_again)
    progress.let_go()
    assert out.getvalue().rindex(shown_again) > out.getvalue().rindex(hidden)
    progress.stop()


def test_durations_are_for_people() -> None:
    assert [*map(duration, (0.4, 59.4, 185, 7800))] == ["0 s", "59 s", "3:05 min", "2:10:00 h"]


@pytest.mark.slow
def test_memory_stays_flat_over_five_hundred_steps(tmp_path: Path) -> None:
    trainer = Trainer(
        load_settings(write_settings(tmp_path, steps=600, every=100), ["training.eval_every=50"]), World()
    )
    resident_bytes: dict[int, int] = {}
    original = trainer._look

    def watched(line: dict[str, Any]) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident_bytes[trainer.step] = pages * os.sysconf("SC_PAGE_SIZE")
        original(line)

    trainer._look = watched  # type: ignore[method-assign]
    trainer.run()
    warm, end = resident_bytes[100], resident_bytes[600]
    assert end - warm < 4 * 2**20, f"{(end - warm) / 2**20:.1f} MiB more after 500 steps"


# `stretto plan`.


def test_a_described_cluster_gives_the_same_file_each_time(tmp_path: Path) -> None:
    config = write_settings(tmp_path)
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(cores_file(link_gbps=0.0125, latency_us=50.0))
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        command = ["plan", str(config), "-o", str(file), "--cluster", str(cluster), "--set", "parallel.pp=2"]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        assert "predicted step" in result.output
        assert not (tmp_path / "cache").exists(), "a tokenizer that is not there yet is not needed"
    assert files[0].read_bytes() == files[1].read_bytes()
    plan = stretto.load_plan(files[0])
    stretto.verify(plan)
    assert plan.ranks == 2
    assert plan.costs.default_link.bytes_per_us == 12.5


def test_this_machine_is_measured(tmp_path: Path) -> None:
    config = write_settings(tmp_path)
    result = CliRunner().invoke(app, ["plan", str(config), "-o", str(tmp_path / "plan.json")])
    assert result.exit_code == 0, result.output
    assert "measured on this processor, 1 thread" in result.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["give a cluster file"]),
        ("latency_us = [", ["is not TOML"]),
        ("latencyus = 3\n", ["cluster.toml", "latencyus", "latency_us"]),
    ],
)
def test_a_wrong_cluster_is_refused_with_its_file(tmp_path: Path, text: str | None, words: list[str]) -> None:
    config, cluster = write_settings(tmp_path), tmp_path / "cluster.toml"
    if text is not None:
        cluster.write_text(text)
    error = CliRunner().invoke(app, ["plan", str(config), "--cluster", str(cluster)]).exception
    assert isinstance(error, UsageError)
    assert all(word in str(error) for word in words)
