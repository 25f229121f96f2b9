"""What a run left behind: reads a run directory, or a plan file, into one object for tables and pages.

Of the files of a run directory (`FILES`) any may be missing; the report states which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from stretto.errors import UsageError, near_path
from stretto.files.parse import parse_json
from stretto.files.typed_file import read_text
from stretto.ir.costs import Prediction
from stretto.ir.metrics import ObservedRun
from stretto.ir.plan import Plan
from stretto.ir.serialize import load_plan
from stretto.ir.timeline import Timeline
from stretto.report.files import OBSERVED, load_timeline
from stretto.simulating import predict, simulate
from stretto.verifying import verify

SUMMARY = "summary.json"

LOAD_PLAN = partial(load_plan, edited=True)
"""A report states that a plan was edited, and computes nothing of it."""


@dataclass(slots=True)
class Run:
    """What is known of a run. `notes` states what is missing."""

    path: Path
    settings: dict[str, Any] | None = None
    plan: Plan | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)
    measured: Timeline | None = None
    simulated: Timeline | None = None
    observed: ObservedRun | None = None
    summary: dict[str, Any] | None = None
    prediction: Prediction | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def timelines(self) -> list[Timeline]:
        """The predicted and the measured step, as far as they are there."""
        return [timeline for timeline in (self.simulated, self.measured) if timeline is not None]


def load_run(path: str | Path) -> Run:
    """Read a run directory or a plan file.

    Raises UsageError when `path` is neither, or a file in it cannot be read (the message names it and, for
    metrics.jsonl, the line); PlanError when its plan is refused.
    """
    path = Path(path)
    if path.is_file():
        run = Run(path, plan=LOAD_PLAN(path))
    elif path.is_dir():
        run = _load_directory(path)
    else:
        raise UsageError(
            f"cannot report on {path}: there is no such run directory or plan file{near_path(path)}"
        )
    if run.plan is not None:
        verify(run.plan)
        if run.plan.edited:
            run.notes.append("The plan's programs were edited after planning: they may compute another step.")
        run.simulated = simulate(run.plan)
        run.prediction = run.plan.prediction or predict(run.plan, run.simulated)
    return run


def _load_directory(path: Path) -> Run:
    run = Run(path)
    there = [name for name in FILES if (path / name).is_file()]
    if not there:
        raise UsageError(f"cannot report on {path}: it has none of {', '.join(FILES)}")
    for name, (read, what) in FILES.items():
        if name in there:
            setattr(run, Path(name).stem, read(path / name))
        elif what:
            run.notes.append(f"{name} is missing. Left out: {what}.")
    return run


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        data = parse_json(text)
    except ValueError as error:
        raise UsageError(f"cannot read {where}: {error}; mend it, or remove it") from None
    if not isinstance(data, dict):
        raise UsageError(f"cannot read {where}: expected a JSON object, found {type(data).__name__}")
    return data


def _load_object(path: Path) -> dict[str, Any]:
    return _object(read_text(path), str(path))


def _load_lines(path: Path) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = []
    lines = read_text(path).removesuffix("\n").split("\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                result.append(_object(line, f"{path}, line {number}"))
            except UsageError:
                if number < len(lines):  # a run that was killed may have left half a line at the end
                    raise
    return result


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "settings.json": (_load_object, "the settings"),
    "plan.json": (LOAD_PLAN, "the plan"),
    "metrics.jsonl": (_load_lines, "the loss and speed of each step"),
    "measured.json": (load_timeline, "the measured timeline"),
    "observed.json": (OBSERVED.load, ""),
    SUMMARY: (_load_object, "the summary"),
}
"""What reads each file of a run directory into the field of `Run` that is called as the file, and what a
report lacks without it; "" for what some runs only have."""
