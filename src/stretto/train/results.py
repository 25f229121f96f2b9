"""The end of a run, on rank 0: what came out, in words, tables and files."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from stretto.config import TrainSettings
from stretto.ir.metrics import ObservedRun
from stretto.ir.plan import Plan
from stretto.ir.timeline import Timeline
from stretto.ir.work import work_of
from stretto.report.html import REPORT, lacks_page, write_page
from stretto.report.load import load_grid
from stretto.report.rundir import load_run
from stretto.report.stalls import stalls_grid
from stretto.report.tables import comparison_grid
from stretto.runtime.shards import full_spec
from stretto.train.metrics import speed_line, writing
from stretto.train.progress import duration
from stretto.train.run_files import TRACE, end_run
from stretto.train.task import Task
from stretto.train.whole import load_whole
from stretto.train.world import World

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
    # Files first: they are not lost where nobody reads what is said any more.
    reported: list[str] = []
    end_run(run_dir, measured, results.seen, _summary(results, _report(results, reported.append)))
    say("")
    say(f"held-out loss {results.held_out_loss:.4f}{unit} after step {results.steps}{compared}")
    for line in reported:
        say(line)
    if measured is not None and prediction is not None:
        say("")
        Console().print(comparison_grid(prediction, measured).rich())
    _print_seen(results)
    say("")
    told = [("report", run_dir / REPORT)]
    if measured is not None:
        told.append(("trace", run_dir / TRACE))
    told += [("plan", run_dir / "plan.json"), ("metrics", run_dir / "metrics.jsonl")]
    if results.checkpoint is not None:
        told.append(("checkpoint", results.checkpoint))
    for what, path in told:
        note = " (open it at https://ui.perfetto.dev)" if what == "trace" else ""
        say(f"{what:<11}{path}{note}")
    say(f"done in {duration(time.time() - results.started_at_s)}")


def report_again(world: World, run_dir: Path, say: Callable[[str], None]) -> None:
    """Rank 0 writes the report of a run that was killed between its summary and its report. Raises
    StrettoError when it cannot be written."""
    if world.rank == 0 and lacks_page(run_dir):
        with writing(run_dir):
            write_page(load_run(run_dir))
        say(f"the run had ended before its report: {run_dir / REPORT} is made now")


def _print_seen(results: Results) -> None:
    """Who waits for whom and why, where the model has experts."""
    loads = None if results.seen is None else load_grid(results.seen)
    if results.seen is None or loads is None:
        return
    measured = results.measured
    stalls = None if measured is None else stalls_grid(measured, results.plan, results.seen.end)
    for grid in (loads, stalls):
        if grid is not None:
            grid.print()


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
    model, _ = load_whole(results.checkpoint, None if own is None else own.file)
    with torch.no_grad():
        return report(model, results.settings.run_dir, say)


def _summary(results: Results, reported: Mapping[str, Any]) -> dict[str, Any]:
    training, task = results.settings.training, results.task
    prediction, measured = results.plan.prediction, results.measured
    found: dict[str, Any] = {
        "steps": results.steps,
        "held_out_loss": results.held_out_loss,
        **task.summary,
        "seconds": time.time() - results.started_at_s,
    }
    if results.losses:
        found["loss"] = results.losses[-1]
        found["step_s"] = statistics.median(results.step_s)
        count = training.global_batch * task.size
        found |= speed_line(task.unit, count, found["step_s"], results.plan.world, work_of(results.plan))
    if prediction is not None:
        found["predicted_step_us"] = prediction.step_us
    if measured is not None:
        found["measured_step_us"] = measured.step_us
        found["measured_exposed_us"] = measured.exposed_us
    return {**found, **reported}
