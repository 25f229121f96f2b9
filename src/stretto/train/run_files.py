"""What a run leaves in its folder beside metrics and checkpoints, and the paths to tell the user.

Rank 0 writes: settings.json, plan.json, figures.json, simulated.json, measured.json, observed.json,
trace.perfetto-trace, summary.json, report.html. `stretto report` reads them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stretto.config import TrainSettings
from stretto.files.parse import parse_json
from stretto.files.whole_file import write_file
from stretto.ir.metrics import ObservedRun
from stretto.ir.plan import Plan
from stretto.ir.timeline import Timeline
from stretto.report.figures import FIGURES, Figures
from stretto.report.html import REPORT, write_page
from stretto.report.jsonfile import OBSERVED
from stretto.report.rundir import SUMMARY, load_run
from stretto.simulating import simulate
from stretto.train.checkpoint_files import earlier_in
from stretto.train.metrics import writing

TRACE = "trace.perfetto-trace"
METRICS = "metrics.jsonl"
SEEN = "observed.json"
PLANNED = "planned.json"
RESULTS = ("measured.json", SEEN, TRACE, SUMMARY, REPORT, PLANNED)
"""What a run leaves at its end."""
BEGINNING = ("settings.json", "plan.json", "figures.json", "simulated.json", METRICS, "tensorboard")
"""What it has from its beginning."""


def is_finished(run_dir: Path, steps: int) -> bool:
    """Whether a run that came to its end, after `steps` steps or more, has left its summary here."""
    try:
        summary = parse_json((run_dir / SUMMARY).read_text(encoding="utf-8"))
        return int(summary["steps"]) >= steps
    except (ArithmeticError, LookupError, OSError, TypeError, ValueError):
        return False


def keep_earlier(run_dir: Path, moved: Sequence[str], copied: Sequence[str] = ()) -> Path | None:
    """Put what an earlier run left here into a folder of its own, before this one writes its own; None if it
    left neither lines nor a summary. moved, copied: names in the folder. Raises StrettoError."""
    old = [path for path in (run_dir / name for name in (*moved, *copied)) if path.exists()]
    if not any(path.stat().st_size for path in old if path.name in (SUMMARY, METRICS)):
        return None
    with writing(run_dir):
        place = earlier_in(run_dir)
        for path in old:
            if path.name in moved:
                path.rename(place / path.name)
            else:
                shutil.copy2(path, place / path.name)
    return place


def begin_run(run_dir: Path, settings: TrainSettings, plan: Plan) -> None:
    """What is known before the first step. Raises StrettoError when it cannot be written."""
    with writing(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        write_file(run_dir / "settings.json", settings.model_dump_json(indent=1) + "\n")
        write_plan(run_dir, plan)
        # Those of an earlier run would be taken for this one's.
        for name in RESULTS:
            (run_dir / name).unlink(missing_ok=True)


def write_plan(run_dir: Path, plan: Plan) -> None:
    """The plan, and what reports say of it. Raises OSError."""
    plan.save(run_dir / "plan.json")
    FIGURES.save(Figures.of(plan), run_dir / "figures.json")
    simulate(plan).save(run_dir / "simulated.json")


def end_run(
    run_dir: Path, measured: Timeline | None, seen: ObservedRun | None, summary: dict[str, Any]
) -> None:
    """What is known after the last step, and the report. Raises StrettoError when it cannot be written."""
    with writing(run_dir):
        if measured is not None:
            measured.save(run_dir / "measured.json")
            measured.save(run_dir / TRACE)
        if seen is not None:
            OBSERVED.save(seen, run_dir / SEEN)
        write_file(run_dir / SUMMARY, json.dumps(summary, indent=1) + "\n")
        write_page(load_run(run_dir))
