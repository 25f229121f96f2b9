"""`stretto report`: show a finished run, or a plan. Thin: everything is done in `stretto.report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stretto.errors import StrettoError
from stretto.report.html import render
from stretto.report.rundir import load_run
from stretto.report.tables import comparison_grid, ranks_grid, summary_grid

report = typer.Typer(add_completion=False)


@report.command()
def run(
    path: Annotated[Path, typer.Argument(help="A run directory, or a plan file.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the report to this file, as one HTML page.")
    ] = None,
) -> None:
    """Show a finished run: predicted against measured, by rank, with the bound and what is missing."""
    found = load_run(path)
    console = Console()
    if found.prediction is not None:
        if found.measured is not None:
            console.print(comparison_grid(found.prediction, found.measured).rich())
        elif found.simulated is not None:
            console.print(summary_grid(found.simulated, found.prediction).rich())
        console.print(f"What binds the bound: {found.prediction.binds}.", highlight=False)
    for timeline in (found.measured, found.simulated):
        if timeline is not None:
            console.print(ranks_grid(timeline).rich())
            break
    for note in found.notes:
        console.print(note, style="dim", highlight=False)
    if output is not None:
        try:
            output.write_text(render(found), encoding="utf-8")
        except OSError as error:
            raise StrettoError(f"cannot write {output}: {error.strerror}") from None
        console.print(f"wrote {output}", highlight=False, soft_wrap=True)
