"""`stretto report`: show a finished run, or a plan. Thin: everything is done in `stretto.report`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stretto.cli.common import check_output, command, write_and_print
from stretto.errors import UsageError
from stretto.files.whole_file import write_file
from stretto.ir.timeline import Timeline
from stretto.report.html import REPORT, accounts_grid, lacks_page, render, run_findings, run_grids, write_page
from stretto.report.ops import costliest_ops
from stretto.report.perfetto import ops_left_out, save_perfetto
from stretto.report.rundir import Run, load_run
from stretto.report.svg import draw
from stretto.report.tables import costliest_grid, ranks_grid
from stretto.report.text import timeline_text

WIDTH = 100
"""Columns of the terminal that are used at most, so that a report can be pasted anywhere."""

COSTLIEST = 8

TRACE = ".perfetto-trace"


@command
def report(
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
        raise UsageError(f"--output {output}: its suffix is the kind: give one of {', '.join(writers)}")
    check_output("--output", output)
    result = load_run(path)
    page = path / REPORT if lacks_page(path) else None
    if page is not None:
        with suppress(OSError):  # of a run of somebody else
            write_page(result)
    files = [] if output is None else [(output, lambda out: writers[out.suffix](result, out))]
    write_and_print(
        files,
        lambda: _print(result),
        lambda out: ops_left_out(_timelines(result), result.plan) if out.suffix == TRACE else "",
    )
    if page is not None and page.exists():
        typer.echo(f"The run was killed before it wrote its page.\nwrote {page}")


def _print(found: Run) -> None:
    usual = Console()
    console = Console(width=min(WIDTH, usual.width))
    accounts, last = accounts_grid(found), found.timelines[-1:]
    if accounts is not None:
        console.print(accounts.rich())
    for words in run_findings(found):
        console.print(f"- {words}", highlight=False)
    grids = [*map(ranks_grid, last), *run_grids(found, last)]
    if found.plan is not None:
        grids.append(costliest_grid(costliest_ops(found.plan, most=COSTLIEST, by_inputs=False)))
    for grid in grids:
        if grid.rows:
            console.print(grid.rich())
    for timeline in found.timelines:
        console.print(timeline_text(timeline, console.width), highlight=False)
    for note in found.notes:
        console.print(note, style="dim", highlight=False)


def _timelines(found: Run) -> list[Timeline]:
    if not found.timelines:
        raise UsageError(f"{found.path} has neither a plan nor a timeline: there is nothing to draw")
    return found.timelines
