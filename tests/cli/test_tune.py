"""`stretto tune`: from settings and a cluster to a table and settings that are used unchanged."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stretto.cli.main import app
from stretto.config import load_settings
from stretto.errors import UsageError
from stretto.ir.stage_maps import STAGE_MAPS
from stretto.schedule.families import FAMILIES
from tests.train.tiny import environment
from tests.tune.small import write_cluster, write_settings

FIXED = ("schedule=1f1b", "sequence_parallel=false", "microbatches=2", "recompute=none")


def command(folder: Path, *more: str, devices: int = 4, fixed: tuple[str, ...] = FIXED) -> list[str]:
    """The command over a small choice."""
    config, cluster = write_settings(folder, layers=2), folder / "cluster.toml"
    if not cluster.exists():
        write_cluster(folder)
    named = [text for one in fixed for text in ("--fix", one)]
    return ["tune", str(config), "--cluster", str(cluster), "--devices", str(devices), *named, *more]


def test_a_choice_is_made_told_and_written(tmp_path: Path) -> None:
    out = tmp_path / "tuned.toml"
    result = CliRunner().invoke(app, command(tmp_path, "-o", str(out), devices=2))
    assert result.exit_code == 0, result.output
    for words in ("The fastest of", "tokens/s/device", "is bound by", "Dropped", f"wrote {out}"):
        assert words in result.output
    # Words of the settings' own checks, however the table breaks them.
    assert "model.kind" in " ".join(re.findall(r"[\w.]+", result.output))
    text = out.read_text(encoding="utf-8")
    assert text.startswith("# a small run\n")
    assert "[parallel]  # how it was run before" in text
    made = load_settings(out)
    assert made.parallel.world == 2
    assert made.parallel.schedule == "1f1b"
    assert made.model == load_settings(tmp_path / "small.toml").model
    planned = CliRunner().invoke(app, ["plan", str(out), "--cluster", str(tmp_path / "cluster.toml")])
    assert planned.exit_code == 0, planned.output
    # The plan of the settings that were written is the first of the table.
    (step,) = re.findall(r"predicted step +([\d.]+) ms", planned.output)
    row = next(line for line in result.output.splitlines() if " ms " in line)
    assert f"{float(step):.3g}"[:3] in row


TASK = """
from tests.train.own_task import task
from stretto import schedule

schedule.register("of-this-task", lambda w: schedule.make_schedule("1f1b", w.ranks, w.microbatches))
"""


def test_a_family_that_the_tasks_file_registers_is_chosen_from(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK, encoding="utf-8")
    config, out = tmp_path / "task.toml", tmp_path / "tuned.toml"
    config.write_text(
        f'[task]\nfile = "{tmp_path}/mine.py"\nconfig = {{ width = 8 }}\n[training]\nglobal_batch = 8\n',
        encoding="utf-8",
    )
    write_cluster(tmp_path)
    fixed = ("pp=2", "schedule=of-this-task", "microbatches=2", "recompute=none")
    named = [text for one in fixed for text in ("--fix", one)]
    given = ["tune", str(config), "--cluster", str(tmp_path / "cluster.toml"), "--devices", "2", *named]
    try:
        result = CliRunner().invoke(app, [*given, "--processes", "1", "-o", str(out)])
        assert result.exit_code == 0, f"{result.output}{result.exception}"
        sizes = ("--ranks", "2", "--microbatches", "2")
        drawn = CliRunner().invoke(
            app, ["schedule", "--settings", str(config), "--family", "of-this-task", *sizes]
        )
        assert drawn.stdout.startswith("Timeline, of-this-task"), f"{drawn.output}{drawn.exception}"
    finally:
        FAMILIES.pop("of-this-task", None)
        STAGE_MAPS.pop("of-this-task", None)
    assert 'schedule = "of-this-task"' in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--cluster", "local"), "stretto calibrate"),
        (("--cluster", "h100x2"), "--devices 4: h100x2 has 2"),
        (("--cluster", "nothing"), "--cluster nothing: unknown cluster"),
        (("--fix", "zp=2"), "expected KEY=VALUE with a key of"),
        (("-o", "nowhere/tuned.toml"), "does not exist; create it"),
        (("--fix", "tp=3"), "no layout of 4 devices fits these settings"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_captured(
    tmp_path: Path, more: tuple[str, ...], said: str
) -> None:
    error = CliRunner().invoke(app, [*command(tmp_path), *more]).exception
    assert isinstance(error, UsageError)
    assert said in str(error)


def processes_of(pid: int) -> list[int]:
    """A process and those that it has started."""
    below = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8")
    return [pid, *map(int, below.split())]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.slow
def test_it_is_stopped_and_writes_what_it_has(tmp_path: Path, signum: signal.Signals) -> None:
    out = tmp_path / "tuned.toml"
    given = command(tmp_path, "-o", str(out), devices=2, fixed=())
    process = subprocess.Popen(
        [sys.executable, "-m", "stretto.cli.main", *given],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    told: list[tuple[float, str]] = []
    for line in process.stderr:
        told.append((time.monotonic(), line))
        if "best" in line:
            break
    assert all(after - before < 4.0 for (before, _), (after, _) in pairwise(told[1:]))
    started = processes_of(process.pid)
    assert len(started) >= 3, told
    if signum != signal.SIGKILL:  # a terminal, or a scheduler, sends it to all of them
        os.killpg(process.pid, signum)
    else:
        process.send_signal(signum)
    output, errors = process.communicate(timeout=60)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in started) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [pid for pid in started if Path(f"/proc/{pid}").exists()] == []
    if signum == signal.SIGKILL:
        assert not out.exists()
        return
    assert process.returncode == 128 + signum, errors
    assert "The search ended early: it was interrupted." in output
    assert "Traceback" not in errors
    assert load_settings(out).parallel.world == 2
