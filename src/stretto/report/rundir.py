"""What a run left behind: reads a run directory, or a plan file, into one object for tables and pages.

A run directory holds settings.json, plan.json, figures.json, metrics.jsonl, measured.json, simulated.json,
observed.json and summary.json. Any may be missing, or be of another version than this Stretto writes; the
report says which. What it says of a step needs no more than timelines and figures, so that a run outlives the
version of its plan file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.errors import UsageError
from stretto.files.near import near_path
from stretto.files.parse import parse_json
from stretto.files.typed_file import TypedFile
from stretto.ir.costs import Prediction
from stretto.ir.metrics import ObservedRun
from stretto.ir.plan import Plan
from stretto.ir.serialize import FILE as PLAN
from stretto.ir.serialize import load_plan
from stretto.ir.timeline import Timeline
from stretto.report.figures import FIGURES, Figures
from stretto.report.jsonfile import FILE as TIMELINE
from stretto.report.jsonfile import OBSERVED
from stretto.simulating import predict, simulate
from stretto.simulating.predict import accounts_of
from stretto.verifying import verify

SUMMARY = "summary.json"


@dataclass(slots=True)
class Run:
    """What is known of a run. `notes` says in words what is missing, or was made up for."""

    path: Path
    settings: dict[str, Any] | None = None
    plan: Plan | None = None
    figures: Figures | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)
    measured: Timeline | None = None
    simulated: Timeline | None = None
    observed: ObservedRun | None = None
    summary: dict[str, Any] | None = None
    prediction: Prediction | None = None
    notes: list[str] = field(default_factory=list)


def load_run(path: str | Path) -> Run:
    """Read a run directory or a plan file.

    Raises UsageError when `path` is neither, or a file in it cannot be read (the message names it and, for
    metrics.jsonl, the line); PlanError when its plan is refused.
    """
    path = Path(path)
    if path.is_file():
        run = Run(path, plan=_load_plan(path))
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
        if run.simulated is None:
            run.simulated = simulate(run.plan)
            if path.is_dir():
                run.notes.append(
                    "The predicted timeline was not saved; it was simulated again from plan.json."
                )
        run.figures = Figures.of(run.plan)
        run.prediction = run.plan.prediction or predict(run.plan, run.simulated)
    elif run.figures is not None:
        run.prediction = run.figures.prediction
    if run.prediction is None and run.simulated is not None:
        run.prediction = accounts_of(run.simulated)
        run.notes.append("The lower bound is not known: neither plan.json nor figures.json says it.")
    return run


def _load_directory(path: Path) -> Run:
    run = Run(path)
    found = 0
    for name, (what, read) in FILES.items():
        if (path / name).is_file():
            found += 1
            try:
                setattr(run, Path(name).stem, read(path / name))
            except UsageError:
                version = KINDS[name].other_version(path / name) if name in KINDS else None
                if version is None:
                    raise
                run.notes.append(
                    f"{name} is of version {version}, and this Stretto reads version {KINDS[name].version}. "
                    f"Left out: {LEFT_OUT.get(name, what)}."
                )
        elif name not in MAY_LACK:
            run.notes.append(f"{name} is missing. Left out: {what}.")
    if not found:
        raise UsageError(f"cannot report on {path}: it holds none of {', '.join(FILES)}")
    return run


def _load_plan(path: Path) -> Plan:
    """A report says that a plan was edited, and computes nothing of it."""
    return load_plan(path, edited=True)


def _load_object(path: Path) -> dict[str, Any]:
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    if not isinstance(data, dict):
        raise UsageError(f"cannot read {path}: expected a JSON object, found {type(data).__name__}")
    return data


def _load_lines(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            data = parse_json(line.decode())
        except ValueError as error:
            # A run that was killed may have left half a line at the end.
            if number == len(lines):
                break
            why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
            raise UsageError(
                f"cannot read {path}, line {number}: {why}; mend the line, or remove it"
            ) from None
        if not isinstance(data, dict):
            raise UsageError(f"cannot read {path}, line {number}: expected a JSON object")
        found.append(data)
    return found


FILES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "settings.json": ("the settings", _load_object),
    "plan.json": ("the plan", _load_plan),
    "figures.json": ("the plan's figures", FIGURES.load),
    "metrics.jsonl": ("the loss and speed of each step", _load_lines),
    "measured.json": ("the measured timeline", TIMELINE.load),
    "simulated.json": ("the predicted timeline", TIMELINE.load),
    "observed.json": ("what the model let see", OBSERVED.load),
    SUMMARY: ("the summary", _load_object),
}
"""Name -> what it holds, and what reads it into the field of `Run` of that name."""

KINDS: dict[str, TypedFile[Any]] = {
    "plan.json": PLAN,
    "figures.json": FIGURES,
    "measured.json": TIMELINE,
    "simulated.json": TIMELINE,
    "observed.json": OBSERVED,
}
"""Those that have a version. A run whose file is of another one is reported without it."""

LEFT_OUT = {"plan.json": "ops inside actions, the costliest ops, and what would help by the plan's settings"}
"""Of what stands for more than it holds, what is not in the report without it."""

MAY_LACK = ("simulated.json", "observed.json", "figures.json")
"""The first is made again, as are figures; of a model that lets see nothing there is no other."""
