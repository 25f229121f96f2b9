"""A plan for 1,024 accelerators from a laptop: time and memory, by the command that the docs show."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt3_175b.toml"

MOST_S = 120.0
MOST_BYTES = 8 * 10**9


VIRTUAL = ("--set", "parallel.virtual_stages=2", "--set")


@pytest.mark.slow
@pytest.mark.quiet
@pytest.mark.timeout(3 * MOST_S + 30)
@pytest.mark.parametrize(
    ("changes", "stages"),
    [
        ((), 16),
        ((*VIRTUAL, "parallel.schedule=interleaved-1f1b"), 32),
        ((*VIRTUAL, "parallel.schedule=auto"), 32),
    ],
    ids=["1f1b", "interleaved", "auto"],
)
def test_the_175b_example_is_planned_in_two_minutes_and_eight_gigabytes(
    changes: tuple[str, ...], stages: int, tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    arguments = ["plan", str(EXAMPLE), "--cluster", "h100x1024", "-o", str(out), *changes]
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "stretto", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    said, _ = process.communicate(timeout=3 * MOST_S)
    took_s = time.monotonic() - begin
    assert process.returncode == 0, said
    # Of all children of this process the largest; Linux shows kibibytes.
    most_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    assert took_s < MOST_S
    assert most_bytes < MOST_BYTES
    plan = json.loads(out.read_text())
    assert dict(plan["job"]["axes"]) == {"dp": 8, "tp": 8}
    assert len(plan["job"]["stages"]) == stages
    assert plan["prediction"]["bound_us"] < plan["prediction"]["step_us"]
    assert plan["overlap"] == "window"
