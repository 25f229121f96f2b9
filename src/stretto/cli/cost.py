"""`stretto cost`: a plan's dearest ops and communications, what they take, and how that is known.

Thin: ops are grouped by `stretto.report.costliest`; communications are read off the predicted timeline here.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from stretto.errors import UsageError
from stretto.ir.plan import Plan
from stretto.ir.timeline import SpanKind, Timeline
from stretto.ir.transfers import SUM
from stretto.report.costliest import Dear, costliest_ops
from stretto.report.rundir import load_run
from stretto.report.traffic import communication_of
from stretto.report.words import format_bytes, format_share, format_us

WIDTH = 120
"""Columns of the tables, wherever they are printed."""

cost = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Communication:
    """Communications of one axis, kind and size. count: over all ranks of the pipeline; each_us: predicted
    mean; alone_us: if nothing else used the links (None where no curve says); total_us: a rank's mean in the
    step; share: of all communication; measured_us: a rank's mean in a run; source: of the cost."""

    axis: str
    kind: str
    nbytes: int
    count: int
    each_us: float
    alone_us: float | None
    total_us: float
    share: float
    measured_us: float | None
    source: str


@cost.command()
def run(
    plan: Annotated[Path, typer.Argument(help="A plan file, or a run directory.", show_default=False)],
    measured: Annotated[
        Path | None, typer.Option("--run", help="A run directory of this plan, for measured times.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many ops, and how many communications.")] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in the place of tables.")] = False,
) -> None:
    """List a plan's dearest ops and communications: each, total, share, source, measured where known."""
    planned = load_run(plan)
    if planned.plan is None:
        raise UsageError(f"{plan}: the run directory holds no plan.json; give the plan file")
    ran = planned if measured is None else load_run(measured)
    if measured is not None and ran.plan is not None and ran.plan.job != planned.plan.job:
        raise UsageError(f"--run {measured}: its plan is of another job than {plan}; give a run of this plan")
    ops = costliest_ops(planned.plan, ran.measured, top)
    assert planned.simulated is not None
    communications = dearest_communications(planned.plan, planned.simulated, ran.measured)[:top]
    if as_json:
        typer.echo(json.dumps(_document(planned.plan, ops, communications), indent=1))
        return
    console = Console(width=WIDTH)
    console.print(_ops_table(planned.plan, ops))
    if communications:
        console.print(_communications_table(communications))
    console.print(f"Op times: {planned.plan.costs.source}.", highlight=False)
    if measured is not None and ran.measured is None:
        console.print(f"{measured} holds no measured timeline.", style="dim", highlight=False)


def dearest_communications(plan: Plan, predicted: Timeline, measured: Timeline | None) -> list[Communication]:
    """Communications of the step by axis, kind and bytes, those that take most time first."""
    groups = _grouped(predicted)
    taken = _grouped(measured) if measured is not None else {}
    everything = sum(sum(times) for times in groups.values()) or 1.0
    found = []
    for (axis, kind, nbytes), times in groups.items():
        curve = plan.costs.collectives.get((axis, SUM if kind == "gradients" else kind))
        if curve is not None:
            source, alone = curve.source, curve.curve.us(nbytes)
        else:
            source, alone = next(iter(plan.costs.links.values()), plan.costs.default_link).source, None
        ran = taken.get((axis, kind, nbytes))
        found.append(
            Communication(
                axis,
                kind,
                nbytes,
                len(times),
                sum(times) / len(times),
                alone,
                sum(times) / predicted.ranks,
                sum(times) / everything,
                sum(ran) / measured.ranks if ran is not None and measured is not None else None,
                source,
            )
        )
    return sorted(found, key=lambda c: (-c.total_us, c.axis, c.kind, c.nbytes))


def _grouped(timeline: Timeline) -> dict[tuple[str, str, int], list[float]]:
    """(axis, kind, bytes) -> durations of its communications, microseconds."""
    found: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for span in timeline.spans:
        if span.kind is SpanKind.MESSAGE:
            found[*communication_of(span.name), span.nbytes].append(span.duration_us)
    return found


def _ops_table(plan: Plan, ops: Sequence[Dear]) -> Table:
    measured = any(op.measured_us is not None for op in ops)
    table = Table(title="Dearest ops: all stages and microbatches")
    for column in ("op", "phase", "calls", "each", "total", "share", *(["measured"] if measured else [])):
        table.add_column(column, justify="left" if column in ("op", "phase") else "right")
    if plan.costs.op_how:
        table.add_column("known")
    table.add_column("reads → makes", overflow="fold")
    for op in ops:
        row = [op.target.removeprefix("aten."), op.phases, f"{op.calls:,}", format_us(op.total_us / op.calls)]
        row += [format_us(op.total_us), format_share(op.share)]
        if measured:
            row.append("-" if op.measured_us is None else format_us(op.measured_us))
        # Where none is told apart, the source of all, under the table, tells the same of each op.
        known = [op.source] if plan.costs.op_how else []
        table.add_row(*row, *known, f"{op.shapes} → {op.made}")
    return table


def _communications_table(found: Sequence[Communication]) -> Table:
    measured = any(one.measured_us is not None for one in found)
    table = Table(title="Dearest communications: total and measured are a rank's mean")
    head = ("axis", "kind", "bytes", "number", "each", "alone", "total", "share")
    for column in (*head, *(["measured"] if measured else [])):
        table.add_column(column, justify="left" if column in ("axis", "kind") else "right")
    table.add_column("source", overflow="fold")
    for one in found:
        row = [one.axis, one.kind, format_bytes(one.nbytes), f"{one.count:,}", format_us(one.each_us)]
        row += ["-" if one.alone_us is None else format_us(one.alone_us), format_us(one.total_us)]
        row.append(format_share(one.share))
        if measured:
            row.append("-" if one.measured_us is None else format_us(one.measured_us))
        table.add_row(*row, one.source)
    return table


def _document(plan: Plan, ops: Sequence[Dear], found: Sequence[Communication]) -> dict[str, Any]:
    return {
        "source": plan.costs.source,
        "ops": [
            {
                "target": op.target,
                "reads": op.shapes,
                "makes": op.made,
                "phases": op.phases,
                "calls": op.calls,
                "each_us": op.total_us / op.calls,
                "total_us": op.total_us,
                "share": op.share,
                "measured_us": op.measured_us,
                "source": op.source,
            }
            for op in ops
        ],
        "communications": [asdict(one) for one in found],
    }
