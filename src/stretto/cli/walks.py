"""`stretto simulate`, `rehearse` and `verify`: a plan file walked with no device, on one, or proved."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stretto.cli.common import Edited, PlanFile, Trace, check_output, command, write_and_print
from stretto.errors import UsageError
from stretto.files.typed_file import read_text


@command
def simulate(
    plan: PlanFile,
    trace: Trace = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the timeline into this SVG file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the timeline as JSON.")] = None,
    edited: Edited = False,
) -> None:
    """Walk a plan with no device: how long it takes, what stays exposed, and how far it is from the best."""
    from stretto.ir.serialize import load_plan
    from stretto.report.files import save_json
    from stretto.report.perfetto import ops_left_out, save_perfetto
    from stretto.report.svg import save_svg
    from stretto.report.tables import ranks_grid, summary_grid
    from stretto.simulating import predict
    from stretto.simulating import simulate as expected_step
    from stretto.verifying import verify as prove

    for option, path in (("--trace", trace), ("--svg", svg), ("--json", json)):
        check_output(option, path)
    loaded = load_plan(plan, edited=edited)
    prove(loaded)  # what is not proved may be a plan of nothing
    timeline = expected_step(loaded)
    prediction = predict(loaded, timeline)

    def show() -> None:
        console = Console()
        summary_grid(timeline, prediction).print(console)
        console.print(f"What binds the bound: {prediction.binds}.", highlight=False)
        ranks_grid(timeline).print(console)

    savers = ((trace, partial(save_perfetto, timeline, plan=loaded)), (svg, partial(save_svg, timeline)))
    write_and_print(
        [*savers, (json, partial(save_json, timeline))],
        show,
        lambda path: ops_left_out(timeline, loaded) if path is trace else "",
    )


@command
def rehearse(
    plan: PlanFile,
    rank: Annotated[int, typer.Option(help="The rank of the run, from 0.", show_default=False)],
    steps: Annotated[int, typer.Option(help="Steps that count, after one to warm up.")] = 3,
    trace: Trace = None,
    edited: Edited = False,
) -> None:
    """Run one rank of a plan alone: real compute, communication that takes the predicted time."""
    from stretto.ir.serialize import load_plan

    check_output("--trace", trace)
    loaded = load_plan(plan, edited=edited)
    from stretto.report.perfetto import ops_left_out, save_perfetto
    from stretto.runtime.rehearse import rehearse as walk  # loads PyTorch: not for a wrong plan

    rehearsal = walk(loaded, rank, steps=steps)
    write_and_print(
        [(trace, partial(save_perfetto, rehearsal.timeline, plan=loaded))],
        lambda: typer.echo(str(rehearsal)),
        lambda path: ops_left_out(rehearsal.timeline, loaded),
    )


@command
def verify(
    path: Annotated[
        Path,
        typer.Argument(metavar="PLAN_OR_CSV", help="A plan (JSON) or a schedule (CSV); its content decides."),
    ],
    max_bytes: Annotated[
        int | None,
        typer.Option(min=1, metavar="BYTES", help="Memory of one rank; a plan that needs more is refused."),
    ] = None,
    edited: Edited = False,
) -> None:
    """Prove a plan or a schedule free of faults.

    Ends with status 0, or lists every fault and ends with status 1. A file that cannot be read is status 2.
    """
    from stretto.ir.serialize import plan_from_text
    from stretto.schedule.csv import read_csv
    from stretto.verifying import verify as prove
    from stretto.verifying.summary import plan_summary, schedule_summary

    text = read_text(path)
    if text.lstrip().startswith(("{", "[")):
        plan = plan_from_text(text, str(path), edited)
        prove(plan, max_bytes)
        typer.echo(f"ok: {plan_summary(plan)}")
        return
    for option, given, why in (
        ("--max-bytes", max_bytes is not None, "knows no tensors"),
        ("--edited", edited, "has no programs"),
    ):
        if given:
            raise UsageError(f"{option}: {path} is a schedule, which {why}. Give a plan, or leave it out")
    schedule = read_csv(path)
    prove(schedule)
    typer.echo(f"ok: {schedule_summary(schedule)}")
