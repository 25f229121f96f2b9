"""From the command to the first step: how long it takes, and that it is never silent.

python -m tests.train.test_first_step FOLDER    # says how long, with what FOLDER keeps from before
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from tests.train.tiny import run_ranks, write_settings

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gpt_text_tp.toml"

FROM_NOTHING_S, FROM_KEPT_S = 45.0, 20.0
"""On two cores that do nothing else."""
SILENT_S = 2.0

Lines = list[tuple[float, str]]


def until_first_step(config: Path, folder: Path, *more: str) -> Lines:
    """(seconds since the command began, line), up to the line that tells of the first step. The run is then
    interrupted. folder: has the run and what is kept."""
    lines, _, _ = until(config, folder, "first step: ", *more)
    return lines


def until(config: Path, folder: Path, start: str, *more: str) -> tuple[Lines, str, int]:
    """The same up to a line that begins so; what was said after that, and the exit status."""
    kept = {name: value for name, value in os.environ.items() if name != "STRETTO_REUSE"}
    began_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "stretto", "train", str(config), f"output.run_dir={folder / 'run'}", *more],
        env={**kept, "XDG_CACHE_HOME": str(folder / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
    )
    assert process.stdout is not None
    lines: Lines = []
    try:
        for line in process.stdout:
            lines.append((time.monotonic() - began_s, line.rstrip("\n")))
            if line.startswith(start):
                process.send_signal(signal.SIGINT)
                break
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert lines, "nothing was said"
    assert lines[-1][1].startswith(start), "\n".join(line for _, line in lines)
    return lines, rest, process.returncode


def silence_s(lines: Lines) -> tuple[float, str]:
    """The longest time without a line, and the line before."""
    return max(
        (after - before, said) for (before, said), (after, _) in pairwise([(0.0, "the start"), *lines])
    )


@pytest.mark.slow
@pytest.mark.quiet
def test_the_first_step_comes_soon_and_is_not_silent(tmp_path: Path) -> None:
    nothing = until_first_step(EXAMPLE, tmp_path)
    kept = until_first_step(EXAMPLE, tmp_path, "--no-resume")
    for lines, most_s in ((nothing, FROM_NOTHING_S), (kept, FROM_KEPT_S)):
        said = "\n".join(f"{at_s:6.1f} {line}" for at_s, line in lines)
        assert lines[-1][0] <= most_s, said
        assert silence_s(lines)[0] <= SILENT_S, said


def told(lines: list[str]) -> list[str]:
    """What was found again of an earlier run."""
    return [line.partition(":")[0] for line in lines if line.startswith(("costs: ", "plan: "))]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_second_run_takes_costs_and_plan_of_the_first(ranks: int, tmp_path: Path) -> None:
    command = ["train", write_settings(tmp_path, pp=ranks, steps=1), "--no-resume"]
    runs = []
    for more in ([], [], ["--fresh"]):
        (status, out, err), *_ = run_ranks(
            *[[*command, *more]] * ranks, STRETTO_REUSE="", XDG_CACHE_HOME=str(tmp_path / "cache")
        )
        assert status == 0, err
        runs.append(out.splitlines())
    assert [told(lines) for lines in runs] == [[], ["costs", "plan"], []]
    predicted = [next(line for line in lines if "predicted step" in line) for lines in runs[:2]]
    assert predicted[0] == predicted[1]
    assert "  the first step" in runs[0]


def test_an_interrupt_before_the_first_step_ends_all_ranks_with_one_message(tmp_path: Path) -> None:
    config = write_settings(tmp_path, steps=3)
    # Planning for an hour: however late the signal comes, the first step is not made.
    lines, rest, status = until(config, tmp_path, "  planning", "parallel.tp=2", "planning.search_s=3600")
    said = "\n".join(line for _, line in lines)
    phases = ("loading PyTorch", "starting 2 ranks", "capturing the model", "planning")
    assert all(f"\n  {phase}" in f"\n{said}" for phase in phases), said
    assert status == 128 + signal.SIGINT, rest
    ended = [line for line in rest.splitlines() if not line.startswith("  ")]
    assert ended == ["stretto: interrupted at step 0; there is no checkpoint yet"], rest


if __name__ == "__main__":
    for at_s, line in (found := until_first_step(EXAMPLE, Path(sys.argv[1]), "--no-resume", *sys.argv[2:])):
        print(f"{at_s:6.1f}  {line}")
    print(f"first step after {found[-1][0]:.1f} s; longest silence {silence_s(found)[0]:.1f} s")
