"""`stretto report`: show a finished run, or a plan. Thin: everything is done in `stretto.report`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stretto.cli.outputs import check_output, write_and_tell
from stretto.errors import UsageError
from stretto.files.whole_file import saving, write_file
from stretto.ir.timeline import Timeline
from stretto.report.costliest import costliest_ops
from stretto.report.findings import findings
from stretto.report.html import (
    REPORT,
    advice_of,
    grids_of_ranks,
    lacks_page,
    more_findings,
    rates_of,
    render,
    write_page,
)
from stretto.report.perfetto import ops_left_out, save_perfetto
from stretto.report.rundir import Run, load_run
from stretto.report.svg import draw
from stretto.report.tables import comparison_grid, costliest_grid, ranks_grid, summary_grid, traffic_grid
from stretto.report.text import timeline_text

WIDTH = 100
"""Columns of the terminal that are used at most, so that a report can be pasted anywhere."""

COSTLIEST = 8

TRACE = ".perfetto-trace"

report = typer.Typer(add_completion=False)


@report.command()
def run(
    path: Annotated[Path, typer.Argument(help="A run directory, or a plan file.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the report into this file: .html (one page that needs no network), "
            ".perfetto-trace (for ui.perfetto.dev, ops inside actions), or .svg (the timelines).",
        ),
    ] = None,
) -> None:
    """Show a run, or a plan: measured against predicted, what is hidden, the bound, the costliest ops."""
    writers: dict[str, Callable[[Run, Path], object]] = {
        ".html": lambda run, path: write_file(path, render(run)),
        TRACE: lambda run, path: save_perfetto(_timelines(run), path, run.plan),
        ".svg": lambda run, path: write_file(path, draw(_timelines(run))),
    }
    if output is not None and output.suffix not in writers:
        raise UsageError(f"--output {output}: its suffix says the kind: give one of {', '.join(writers)}")
    check_output("--output", output)
    found = load_run(path)
    made: list[Path] = []

    def write() -> None:
        if output is not None:
            with saving(output):
                writers[output.suffix](found, output)
        if lacks_page(path):
            with suppress(OSError):  # of a run of somebody else
                write_page(found)
                made.append(path / REPORT)

    write_and_tell(write, lambda: _print(found))
    for page in made:
        Console().print("The run was killed before it wrote its page.")
        Console().print(f"wrote {page}", highlight=False, soft_wrap=True)
    if output is not None:
        left_out = ops_left_out(_timelines(found), found.plan) if output.suffix == TRACE else ""
        Console().print(f"wrote {output}{left_out}", highlight=False, soft_wrap=True)


def _print(found: Run) -> None:
    usual = Console()
    console = Console(width=min(WIDTH, usual.width))
    timelines = [t for t in (found.simulated, found.measured) if t is not None]
    if found.prediction is not None and found.measured is not None:
        console.print(comparison_grid(found.prediction, found.measured).rich())
    elif found.prediction is not None and found.simulated is not None:
        console.print(summary_grid(found.simulated, found.prediction).rich())
    said = findings(found.prediction, found.simulated, found.measured)
    for words in (*said, *more_findings(found)):
        console.print(f"- {words}", highlight=False)
    for timeline in timelines[-1:]:
        console.print(ranks_grid(timeline).rich())
    traffic = [traffic_grid([timeline]) for timeline in timelines[-1:]]
    for grid in (*traffic, advice_of(found), rates_of(found), *grids_of_ranks(found)):
        if grid is not None and grid.rows:
            console.print(grid.rich())
    if found.plan is not None:
        costliest = costliest_ops(found.plan, most=COSTLIEST, by_inputs=False)
        if costliest:
            console.print(costliest_grid(costliest).rich())
    for timeline in timelines:
        console.print(timeline_text(timeline, console.width), highlight=False)
    for note in found.notes:
        console.print(note, style="dim", highlight=False)


def _timelines(found: Run) -> list[Timeline]:
    timelines = [t for t in (found.simulated, found.measured) if t is not None]
    if not timelines:
        raise UsageError(f"{found.path} has neither a plan nor a timeline: there is nothing to draw")
    return timelines
