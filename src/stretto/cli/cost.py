"""`stretto cost`: a plan's costliest ops and communications, what they take, and how that is known.

Thin: ops are grouped by `stretto.report.costliest`; communications are read off the predicted timeline here.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stretto.errors import UsageError
from stretto.ir.plan import Plan
from stretto.ir.timeline import SpanKind, Timeline
from stretto.ir.transfers import SUM
from stretto.report.costliest import OpGroup, costliest_ops
from stretto.report.grid import WIDTH, Columns, Row, grid_of
from stretto.report.rundir import load_run
from stretto.report.traffic import communication_of
from stretto.report.words import format_bytes, format_share, format_us

cost = typer.Typer(add_completion=False)


@cost.command()
def run(
    plan: Annotated[Path, typer.Argument(help="A plan file, or a run directory.", show_default=False)],
    measured: Annotated[
        Path | None, typer.Option("--run", help="A run directory of this plan, for measured times.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many ops, and how many communications.")] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in the place of tables.")] = False,
) -> None:
    """List a plan's costliest ops and communications: each, total, share, source, measured where known."""
    planned = load_run(plan)
    if planned.plan is None:
        raise UsageError(f"{plan}: the run directory holds no plan.json; give the plan file")
    ran = planned if measured is None else load_run(measured)
    if measured is not None and ran.plan is not None and ran.plan.job != planned.plan.job:
        raise UsageError(f"--run {measured}: its plan is of another job than {plan}; give a run of this plan")
    ops = [_op_row(op) for op in costliest_ops(planned.plan, top)]
    assert planned.simulated is not None
    communications = communications_of(planned.plan, planned.simulated, ran.measured)[:top]
    costs = planned.plan.costs
    if as_json:
        document = {"source": costs.source, "ops": ops, "communications": communications}
        typer.echo(json.dumps(document, indent=1))
        return
    console = Console(width=WIDTH)
    # Where none is known by itself, the source of all, under the table, says the same of each op.
    columns = {head: of for head, of in OPS.items() if head != "known" or costs.op_how}
    words = [head for head in ("op", "phase", "known", "reads → makes") if head in columns]
    _print(console, "Costliest ops: all stages and microbatches", columns, ops, words)
    if communications:
        title = "Costliest communications: total and measured are a rank's mean"
        _print(console, title, COMMUNICATIONS, communications, ("axis", "kind", "source"))
    console.print(f"Op times: {costs.source}.", highlight=False)
    if measured is not None and ran.measured is None:
        console.print(f"{measured} holds no measured timeline.", style="dim", highlight=False)


def communications_of(plan: Plan, predicted: Timeline, measured: Timeline | None) -> list[Row]:
    """Communications of the step by axis, kind and bytes, those that take most time first.

    count: over all ranks of the pipeline; each_us: predicted mean; alone_us: if nothing else used the links
    (None where no curve says); total_us: a rank's mean in the step; share: of all communication; measured_us:
    a rank's mean in a run; source: of the cost.
    """
    groups = _grouped(predicted)
    taken = _grouped(measured) if measured is not None else {}
    everything = sum(sum(times) for times in groups.values()) or 1.0
    found: list[Row] = []
    for (axis, kind, nbytes), times in groups.items():
        curve = plan.costs.collectives.get((axis, SUM if kind == "gradients" else kind))
        link = next(iter(plan.costs.links.values()), plan.costs.default_link)
        ran = taken.get((axis, kind, nbytes))
        found.append(
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
    return sorted(found, key=lambda one: (-one["total_us"], one["axis"], one["kind"], one["nbytes"]))


def _grouped(timeline: Timeline) -> dict[tuple[str, str, int], list[float]]:
    """(axis, kind, bytes) -> durations of its communications, microseconds."""
    found: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for span in timeline.spans:
        if span.kind is SpanKind.MESSAGE:
            found[*communication_of(span.name), span.nbytes].append(span.duration_us)
    return found


def _op_row(op: OpGroup) -> Row:
    return {
        "target": op.target,
        "reads": op.shapes,
        "makes": op.made,
        "phases": op.phases,
        "calls": op.calls,
        "each_us": op.total_us / op.calls,
        "total_us": op.total_us,
        "share": op.share,
        "source": op.source,
    }


def _print(console: Console, title: str, columns: Columns, rows: Sequence[Row], words: Sequence[str]) -> None:
    """A table, with what was measured if anything was."""
    measured = any(row.get("measured_us") is not None for row in rows)
    shown = {head: of for head, of in columns.items() if head != "measured" or measured}
    grid_of(title, shown, rows, words=words, absent="-").print(console)


OPS: Columns = {
    "op": (lambda row: row["target"].removeprefix("aten."), "{}"),
    "phase": ("phases", "{}"),
    "calls": ("calls", "{:,}"),
    "each": ("each_us", format_us),
    "total": ("total_us", format_us),
    "share": ("share", format_share),
    "known": ("source", "{}"),
    "reads → makes": (lambda row: f"{row['reads']} → {row['makes']}", "{}"),
}
COMMUNICATIONS: Columns = {
    "axis": ("axis", "{}"),
    "kind": ("kind", "{}"),
    "bytes": ("nbytes", format_bytes),
    "number": ("count", "{:,}"),
    "each": ("each_us", format_us),
    "alone": ("alone_us", format_us),
    "total": ("total_us", format_us),
    "share": ("share", format_share),
    "measured": ("measured_us", format_us),
    "source": ("source", "{}"),
}
