"""`stretto rehearse`: one rank of a plan on one device. Thin: `stretto.runtime.rehearse` does it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.options import Edited
from stretto.cli.outputs import check_output, write_and_tell
from stretto.files.whole_file import saving
from stretto.ir.serialize import load_plan
from stretto.report.perfetto import ops_left_out, save_perfetto

rehearse = typer.Typer(add_completion=False)


@rehearse.command()
def run(
    plan: Annotated[
        Path, typer.Argument(help="A plan file, as `stretto plan` writes it.", show_default=False)
    ],
    rank: Annotated[int, typer.Option(help="The rank of the run, from 0.", show_default=False)],
    steps: Annotated[int, typer.Option(help="Steps that count, after one to warm up.")] = 3,
    trace: Annotated[
        Path | None, typer.Option(help="Write the timeline as a trace for ui.perfetto.dev (.perfetto-trace).")
    ] = None,
    edited: Edited = False,
) -> None:
    """Run one rank of a plan alone: real compute, communication that takes the predicted time."""
    check_output("--trace", trace)
    loaded = load_plan(plan, edited=edited)

    from stretto.runtime.rehearse import rehearse as walk  # loads PyTorch: not for a wrong plan

    found = walk(loaded, rank, steps=steps)

    def write() -> None:
        if trace is not None:
            with saving(trace):
                save_perfetto(found.timeline, trace, loaded)

    write_and_tell(write, lambda: typer.echo(str(found)))
    if trace is not None:
        typer.echo(f"wrote {trace}{ops_left_out(found.timeline, loaded)}")
