"""`stretto rehearse`: one rank of a plan on one device. Thin: `stretto.runtime.rehearse` does it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.outputs import check_output, saving
from stretto.errors import UsageError
from stretto.ir.serialize import load_plan
from stretto.report.perfetto import ops_left_out, save_perfetto

DEVICES = ("cpu", "cuda")
"""What a plan can be captured for."""

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
    device: Annotated[
        str | None,
        typer.Option(metavar="cpu|cuda", help="What to run on; it must be what the plan was captured for."),
    ] = None,
) -> None:
    """Run one rank of a plan alone: real compute, communication that takes the predicted time."""
    check_output("--trace", trace)
    if device not in (None, *DEVICES):
        raise UsageError(f"--device {device}: give {' or '.join(DEVICES)}")
    loaded = load_plan(plan)
    if device is not None and device != loaded.job.device:
        raise UsageError(
            f"--device {device}: the plan was captured for {loaded.job.device}, whose kernels differ; "
            f"capture with device={device!r} and plan again"
        )

    from stretto.runtime.rehearse import rehearse as walk  # loads PyTorch: not for a wrong plan

    found = walk(loaded, rank, steps=steps)
    try:
        typer.echo(str(found))
    finally:  # a table that nobody can read is no reason to lose the trace
        if trace is not None:
            with saving(trace):
                save_perfetto(found.timeline, trace, loaded)
    if trace is not None:
        typer.echo(f"wrote {trace}{ops_left_out(found.timeline, loaded)}")
