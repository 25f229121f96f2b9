"""`stretto report`, `show` and `cost`: a finished run or a plan, the ops of one phase, what costs most. Thin.

Communications are read off the predicted timeline here; all else is done in `stretto.report`.
"""

from __future__ import annotations

import json as json_text
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from stretto.cli.common import AsJson, PlanFile, check_output, command, write_and_print
from stretto.errors import UsageError
from stretto.files.whole_file import write_file
from stretto.ir.action import ONCE_PHASES, Phase
from stretto.ir.plan import Plan
from stretto.ir.serialize import load_plan
from stretto.ir.timeline import SpanKind, Timeline
from stretto.report.grid import (
    Columns,
    Grid,
    Row,
    console_of,
    format_bytes,
    format_flops,
    format_share,
    format_us,
    grid_of,
)
from stretto.report.html import accounts_grid, render, run_findings, run_grids
from stretto.report.ops import OpLine, costliest_ops, notes_of, program_lines, totals_of
from stretto.report.perfetto import ops_left_out, save_perfetto
from stretto.report.rundir import Run, load_run
from stretto.report.svg import draw
from stretto.report.tables import communication_of, costliest_grid, ranks_grid
from stretto.report.text import timeline_text

MOST_COLUMNS = 100
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
    files = [] if output is None else [(output, lambda out: writers[out.suffix](result, out))]
    write_and_print(
        files,
        lambda: _print(result),
        lambda out: ops_left_out(_timelines(result), result.plan) if out.suffix == TRACE else "",
    )


def _print(found: Run) -> None:
    usual = Console()
    console = Console(width=min(MOST_COLUMNS, usual.width))
    accounts, last = accounts_grid(found), found.timelines[-1:]
    if accounts is not None:
        accounts.print(console)
    for words in run_findings(found):
        console.print(f"- {words}", highlight=False)
    grids = [*map(ranks_grid, last), *run_grids(found, last)]
    if found.plan is not None:
        grids.append(costliest_grid(costliest_ops(found.plan, most=COSTLIEST, by_inputs=False)))
    for grid in grids:
        if grid.rows:
            grid.print(console)
    for timeline in found.timelines:
        console.print(timeline_text(timeline, console.width), highlight=False)
    for note in found.notes:
        console.print(note, style="dim", highlight=False)


def _timelines(found: Run) -> list[Timeline]:
    if not found.timelines:
        raise UsageError(f"{found.path} has neither a plan nor a timeline: there is nothing to draw")
    return found.timelines


PIPED_WIDTH = 180
"""Columns when the output goes into a file or a pipe, where lines should not be broken."""


@command
def show(
    plan: PlanFile,
    stage: Annotated[int, typer.Option(help="The stage.", show_default=False)],
    phase: Annotated[
        Literal["F", "I", "W", "B", "UNSHARD", "REDUCE_GRAD"],
        typer.Option(
            help="B is I and W together; the last two run once a step.",
            case_sensitive=False,
            show_default=False,
        ),
    ],
    module: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Only ops of modules like this (*.attention*, or a part)."),
    ] = None,
    json: AsJson = False,
) -> None:
    """List a stage's ops: shapes, bytes, flops, predicted time, what is saved for later, what is freed."""
    wanted = Phase(phase)
    loaded = load_plan(plan, edited=True)  # nothing is computed of it
    lines = program_lines(loaded, stage, wanted, module)
    totals = totals_of(lines)
    if json:
        document = {"stage": stage, "phase": wanted.value, "ops": [line.to_data() for line in lines]}
        typer.echo(json_text.dumps({**document, "totals": totals}, indent=1))
        return
    console = console_of(PIPED_WIDTH)
    whose = f"stage {stage}"
    if wanted in ONCE_PHASES:
        whose = f"pipeline rank {loaded.rank_of(stage)}, once a step"
    _ops_grid(lines, f"{stage}{wanted}: {wanted.meaning} of {whose}").print(console)
    saved, freed = format_bytes(totals["saved_bytes"]), format_bytes(totals["freed_bytes"])
    lanes = f"{format_us(totals['predicted_us'])} on the compute lane"
    if totals["collectives"]:
        lanes += f", {format_us(totals['collective_us'])} in {totals['collectives']} collectives"
    console.print(
        f"{totals['ops']} ops, {format_flops(totals['flops'])}: {lanes} (costs: {loaded.costs.source})\n"
        f"makes {format_bytes(totals['bytes'])}, of which {saved} are saved for later; frees {freed}",
        highlight=False,
    )


def _ops_grid(lines: list[OpLine], title: str) -> Grid:
    rows = []
    for line in lines:
        op = line.row.op
        # A collective's time on its lane, else the op's on the compute lane.
        us = line.row.us if line.collective_us is None else line.collective_us
        rows.append(
            (
                op.name,
                op.target.removeprefix("aten."),
                f"{line.shown['reads']} → {line.shown['makes']}",
                "; ".join(notes_of(line)),
                format_bytes(op.nbytes) if op.nbytes else "view" if op.alias is not None else "-",
                format_flops(op.flops) if op.flops else "-",
                op.lane,
                format_us(us) if us else "-",
            )
        )
    head = ("name", "op", "reads → makes", "memory", "bytes", "flops", "lane", "predicted")
    return Grid(title, head, rows, words=range(4))


@command
def cost(
    plan: Annotated[Path, typer.Argument(help="A plan file, or a run directory.", show_default=False)],
    measured: Annotated[
        Path | None, typer.Option("--run", help="A run directory of this plan, for measured times.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many ops, and how many communications.")] = 15,
    as_json: AsJson = False,
) -> None:
    """List a plan's costliest ops and communications: each, total, share, source, measured where known."""
    planned = load_run(plan)
    if planned.plan is None:
        raise UsageError(f"{plan}: the run directory has no plan.json; give the plan file")
    ran = planned if measured is None else load_run(measured)
    if measured is not None and ran.plan is not None and ran.plan.job != planned.plan.job:
        raise UsageError(f"--run {measured}: its plan is of another job than {plan}; give a run of this plan")
    ops = costliest_ops(planned.plan, top)
    assert planned.simulated is not None
    communications = communications_of(planned.plan, planned.simulated, ran.measured)[:top]
    costs = planned.plan.costs
    if as_json:
        rows = [{**asdict(op), "each_us": op.each_us} for op in ops]
        document = {"source": costs.source, "ops": rows, "communications": communications}
        typer.echo(json_text.dumps(document, indent=1))
        return
    console = console_of()
    # Where each is known as all are, the line under the table says so once.
    known = any(op.source != costs.source for op in ops)
    costliest_grid(ops, reads=True, known=known).print(console)
    if communications:
        _communications_grid(communications).print(console)
    console.print(f"Op times: {costs.source}.", highlight=False)
    if measured is not None and ran.measured is None:
        console.print(f"{measured} has no measured timeline.", style="dim", highlight=False)


def communications_of(plan: Plan, predicted: Timeline, measured: Timeline | None) -> list[Row]:
    """Communications of the step by axis, kind and bytes, those that take most time first.

    count: over all ranks of the pipeline; each_us: predicted mean; alone_us: if nothing else used the links
    (None without a curve); total_us: a rank's mean in the step; share: of all communication; measured_us:
    a rank's mean in a run; source: of the cost.
    """
    groups = _grouped(predicted)
    kinds = {op.label: op.collective.kind for _, op in plan.job.all_ops if op.collective is not None}
    messages = [span for span in predicted.spans if span.name in kinds]
    called = {(*communication_of(span.name), span.nbytes): kinds[span.name] for span in messages}
    taken = _grouped(measured) if measured is not None else {}
    everything = sum(sum(times) for times in groups.values()) or 1.0
    rows: list[Row] = []
    for (axis, kind, nbytes), times in groups.items():
        curve = plan.costs.collectives.get((axis, called.get((axis, kind, nbytes), kind)))
        link = next(iter(plan.costs.links.values()), plan.costs.default_link)
        ran = taken.get((axis, kind, nbytes))
        rows.append(
            {
                "axis": axis,
                "kind": kind,
                "nbytes": nbytes,
                "count": len(times),
                "each_us": sum(times) / len(times),
                "alone_us": None if curve is None else curve.curve.us(nbytes),
                "total_us": sum(times) / predicted.ranks,
                "share": sum(times) / everything,
                "measured_us": sum(ran) / measured.ranks if ran and measured is not None else None,
                "source": (curve or link).source,
            }
        )
    return sorted(rows, key=lambda one: (-one["total_us"], one["axis"], one["kind"], one["nbytes"]))


def _grouped(timeline: Timeline) -> dict[tuple[str, str, int], list[float]]:
    """(axis, kind, bytes) -> durations of its communications, microseconds."""
    groups: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for span in timeline.spans:
        if span.kind is SpanKind.MESSAGE:
            groups[*communication_of(span.name), span.nbytes].append(span.duration_us)
    return groups


def _communications_grid(rows: Sequence[Row]) -> Grid:
    measured = any(row["measured_us"] is not None for row in rows)
    columns: Columns = {
        "axis": ("axis", "{}"),
        "kind": ("kind", "{}"),
        "bytes": ("nbytes", format_bytes),
        "number": ("count", "{:,}"),
        "each": ("each_us", format_us),
        "alone": ("alone_us", format_us),
        "total": ("total_us", format_us),
        "share": ("share", format_share),
        **({"measured": ("measured_us", format_us)} if measured else {}),
        "source": ("source", "{}"),
    }
    title = "Costliest communications: total and measured are a rank's mean"
    return grid_of(title, columns, rows, words=("axis", "kind", "source"), absent="-")
