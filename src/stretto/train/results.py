"""What a run leaves in its folder besides checkpoints, and what is printed at its end; by rank 0.

The files: settings.json, plan.json, metrics.jsonl (a line a step, which TensorBoard gets too), measured.json,
observed.json, trace.perfetto-trace, summary.json, report.html.
`stretto report` reads them.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stretto.config import TrainSettings
from stretto.files.parse import parse_json
from stretto.files.whole_file import saving, write_file
from stretto.ir.metrics import Observed, ObservedRun
from stretto.ir.plan import Plan
from stretto.ir.timeline import Timeline
from stretto.ir.work import Work
from stretto.report.files import OBSERVED
from stretto.report.findings import stalls_grid
from stretto.report.html import REPORT, write_page
from stretto.report.load import load_grid
from stretto.report.rundir import SUMMARY, load_run
from stretto.report.tables import comparison_grid
from stretto.runtime.rank_tensors import full_spec
from stretto.train.callbacks import RunStart
from stretto.train.checkpoint import load_model
from stretto.train.checkpoint_files import keep_earlier, set_aside
from stretto.train.progress import duration
from stretto.train.task import Task

TRACE = "trace.perfetto-trace"
METRICS = "metrics.jsonl"
SEEN = "observed.json"
RESULTS = ("measured.json", SEEN, TRACE, SUMMARY, REPORT)
"""What a run leaves at its end."""
BEGINNING = ("settings.json", "plan.json", METRICS, "tensorboard")
"""What it has from its beginning."""
LARGEST_SAMPLED_BYTES = 2 * 1000**3
"""A model above this is not built on one rank just for a report: it may not fit beside the stages."""


@dataclass(frozen=True, slots=True)
class Results:
    """What a run came to. losses, step_s: of the steps done by this process; held_out_loss: of text, nats a
    token; timelines: of the last steps, as traced; seen: what the model lets see, if anything; started_at_s:
    when the command was started, in seconds of the clock."""

    settings: TrainSettings
    plan: Plan
    task: Task
    steps: int
    losses: tuple[float, ...]
    step_s: tuple[float, ...]
    held_out_loss: float
    timelines: tuple[Timeline, ...]
    seen: ObservedRun | None
    checkpoint: Path | None
    started_at_s: float

    @property
    def measured(self) -> Timeline | None:
        """The traced step of median length."""
        ordered = sorted(self.timelines, key=lambda t: t.step_us)
        return ordered[len(ordered) // 2] if ordered else None


def finish(results: Results, say: Callable[[str], None]) -> None:
    """Say how it went, let the task report, and leave summary and report in the run's folder."""
    run_dir = results.settings.run_dir
    unit, compared = results.task.held_out_words
    measured, prediction = results.measured, results.plan.prediction
    # Files first: they are not lost where no one reads what is printed any more.
    reported: list[str] = []
    summary = _summary(results, _report(results, reported.append))
    with saving(run_dir):
        if measured is not None:
            measured.save(run_dir / "measured.json")
            measured.save(run_dir / TRACE)
        if results.seen is not None:
            OBSERVED.save(results.seen, run_dir / SEEN)
        run = load_run(run_dir)
        run.summary, run.notes = summary, [note for note in run.notes if not note.startswith(SUMMARY)]
        write_page(run)
        # Last: with it the run has come to its end.
        write_file(run_dir / SUMMARY, json.dumps(summary, indent=1) + "\n")
    say("")
    say(f"held-out loss {results.held_out_loss:.4f}{unit} after step {results.steps}{compared}")
    for line in reported:
        say(line)
    if measured is not None and prediction is not None:
        say("")
        comparison_grid(prediction, measured).print()
    if results.seen is not None and (loads := load_grid(results.seen)) is not None:
        loads.print()
        # Who waits for whom and why.
        stalls = None if measured is None else stalls_grid(measured)
        if stalls is not None:
            stalls.print()
    say("")
    files = [("report", run_dir / REPORT)]
    if measured is not None:
        files.append(("trace", run_dir / TRACE))
    files += [("plan", run_dir / "plan.json"), ("metrics", run_dir / METRICS)]
    if results.checkpoint is not None:
        files.append(("checkpoint", results.checkpoint))
    for what, path in files:
        note = " (open it at https://ui.perfetto.dev)" if what == "trace" else ""
        say(f"{what:<11}{path}{note}")
    say(f"done in {duration(time.time() - results.started_at_s)}")


def _report(results: Results, say: Callable[[str], None]) -> Mapping[str, Any]:
    """What the task reports of the trained model, for the summary."""
    report = results.task.report
    if report is None or results.checkpoint is None:
        return {}
    job = results.plan.job
    size_bytes = sum(full_spec(job, p).numel * 4 for p in job.parameters if p.name == p.tied_to)
    if size_bytes > LARGEST_SAMPLED_BYTES:
        say(
            f"no sample: the model has {size_bytes / 1e9:.1f} GB of weights, and above "
            f"{LARGEST_SAMPLED_BYTES / 1e9:.0f} GB it is not put together on one rank; see `stretto export`"
        )
        return {}
    own = results.settings.task
    model, _ = load_model(results.checkpoint, None if own is None else own.file)
    with torch.no_grad():
        return report(model, results.settings.run_dir, say)


def _summary(results: Results, reported: Mapping[str, Any]) -> dict[str, Any]:
    training, task = results.settings.training, results.task
    prediction, measured = results.plan.prediction, results.measured
    summary: dict[str, Any] = {
        "steps": results.steps,
        "held_out_loss": results.held_out_loss,
        **task.summary,
        "seconds": time.time() - results.started_at_s,
    }
    if results.losses:
        summary["loss"] = results.losses[-1]
        summary["step_s"] = statistics.median(results.step_s)
        count = training.global_batch * task.size
        summary |= speed_line(task.unit, count, summary["step_s"], results.plan.world, results.plan.work)
    if prediction is not None:
        summary["predicted_step_us"] = prediction.step_us
    if measured is not None:
        summary["measured_step_us"] = measured.step_us
        summary["measured_exposed_us"] = measured.exposed_us
    return {**summary, **reported}


# Files.


def set_earlier_aside(settings: TrainSettings, goes_on: bool, say: Callable[[str], None]) -> None:
    """What an earlier run left in the folders of this one is kept apart, by rank 0. goes_on: from one of its
    checkpoints. Raises StrettoError."""
    old = None if goes_on else set_aside(settings.checkpoint_dir)
    if old is not None:
        say(f"started again; the checkpoints of an earlier run are now in {old}")
    back = goes_on and settings.checkpoint.resume != "auto"  # to a step of the user's choice
    moved, copied = (
        [path for path in (settings.run_dir / name for name in names) if path.exists()]
        for names in (RESULTS if goes_on else (*RESULTS, *BEGINNING), (METRICS,) if back else ())
    )
    if not any(path.stat().st_size for path in (*moved, *copied) if path.name in (SUMMARY, METRICS)):
        return  # it left neither lines nor a summary
    with saving(settings.run_dir):
        say(f"what an earlier run measured is now in {keep_earlier(settings.run_dir, moved, copied)}")


def begin_run(run_dir: Path, settings: TrainSettings, plan: Plan) -> None:
    """What is known before the first step. Raises StrettoError when it cannot be written."""
    with saving(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        write_file(run_dir / "settings.json", settings.model_dump_json(indent=1) + "\n")
        plan.save(run_dir / "plan.json")
        # Those of an earlier run would be taken for this one's.
        for name in RESULTS:
            (run_dir / name).unlink(missing_ok=True)


# Lines of metrics.


def observed_line(seen: Sequence[Observed]) -> dict[str, dict[str, list[float]]]:
    """Metrics as a line has them, with six digits."""
    line: dict[str, dict[str, list[float]]] = {}
    for one in seen:
        line.setdefault(one.module, {})[one.name] = [float(f"{value:.6g}") for value in one.mean]
    return line


def speed_line(unit: str, count: int, step_s: float, world: int, work: Work) -> dict[str, float]:
    """How fast a step of `count` tokens, samples or the like (`unit`) was on `world` devices, the optimizer
    included: in all, by device, and as MFU where the device's peak is known (`stretto.ir.work`)."""
    per_s = count / step_s
    line = {"step_s": step_s, f"{unit}_per_s": per_s, f"{unit}_per_s_per_device": per_s / world}
    mfu = work.mfu(1e6 * step_s)
    return line if mfu is None else {**line, "mfu": mfu}


class Metrics:
    """Writes metrics.jsonl in a run's folder, as a callback."""

    def __init__(self, run_dir: Path, from_step: int) -> None:
        """from_step: steps done before this run; later lines of an earlier run are taken out.

        Raises StrettoError when the file cannot be written.
        """
        self._path = run_dir / METRICS
        with saving(self._path):
            kept = _lines_up_to(self._path, from_step)
            write_file(self._path, b"".join(line + b"\n" for line in kept))
            self._file = self._path.open("a", encoding="utf-8")

    def on_step(self, line: Mapping[str, Any]) -> None:
        """Add a line. Raises StrettoError when the disk is full."""
        with saving(self._path):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    on_eval = on_step

    def on_end(self, _: BaseException | None) -> None:
        """Close the file, also where it cannot be written to its end, which raises StrettoError."""
        with saving(self._path), self._file:
            pass


class Board:
    """Writes the numbers of lines as TensorBoard events, as a callback."""

    def on_start(self, run: RunStart) -> None:
        """Later events of an earlier run do not count."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step + 1)

    def on_step(self, line: Mapping[str, Any]) -> None:
        """Add a line."""
        for key, value in line.items():
            if isinstance(value, int | float) and key != "step":
                self._writer.add_scalar(key, value, line["step"])

    on_eval = on_step

    def on_end(self, _: BaseException | None) -> None:
        """Close the file."""
        self._writer.close()


def _lines_up_to(path: Path, step: int) -> list[bytes]:
    """The complete lines of steps that are not to be done again."""
    if step == 0 or not path.is_file():
        return []
    kept: list[bytes] = []
    for line in path.read_bytes().splitlines():
        # A run that was killed may have left half a line.
        with suppress(ArithmeticError, LookupError, TypeError, ValueError):
            if int(parse_json(line)["step"]) <= step:
                kept.append(line)
    return kept
