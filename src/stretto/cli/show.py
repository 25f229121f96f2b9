"""`stretto show`: the ops of one phase of one stage of a plan. Thin: `stretto.report.program` does it."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stretto.errors import UsageError
from stretto.ir.action import Phase
from stretto.ir.serialize import load_plan
from stretto.report.grid import Grid
from stretto.report.program import Line, notes_of, program_lines, totals_of
from stretto.report.words import format_bytes, format_flops, format_us

PIPED_WIDTH = 180
"""Columns when the output goes into a file or a pipe, where lines should not be broken."""

show = typer.Typer(add_completion=False)


@show.command()
def run(
    plan: Annotated[Path, typer.Argument(help="A plan file.", show_default=False)],
    stage: Annotated[int, typer.Option(help="The stage.", show_default=False)],
    phase: Annotated[
        str, typer.Option(help="F, I, W, or B (I and W together).", metavar="F|I|W|B", show_default=False)
    ],
    module: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Only ops of modules like this (*.attention*, or a part)."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List a stage's ops: shapes, bytes, flops, predicted time, what is saved for later, what is freed."""
    if phase.upper() not in ("F", "I", "W", "B"):
        raise UsageError(f"--phase {phase}: there is no such phase; give one of F, I, W, B")
    wanted = Phase(phase.upper())
    loaded = load_plan(plan, edited=True)  # nothing is computed of it
    lines = program_lines(loaded, stage, wanted, module)
    totals = totals_of(lines)
    if json:
        document = {"stage": stage, "phase": wanted.value, "ops": [line.to_data() for line in lines]}
        typer.echo(json_text.dumps({**document, "totals": totals}, indent=1))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH)
    console.print(_table(lines, f"{stage}{wanted}: {wanted.meaning} of stage {stage}").rich())
    saved, freed = format_bytes(totals["saved_bytes"]), format_bytes(totals["freed_bytes"])
    lanes = f"{format_us(totals['predicted_us'])} on the compute lane"
    if totals["collectives"]:
        lanes += f", {format_us(totals['collective_us'])} in {totals['collectives']} collectives"
    console.print(
        f"{totals['ops']} ops, {format_flops(totals['flops'])}: {lanes} (costs: {loaded.costs.source})\n"
        f"makes {format_bytes(totals['bytes'])}, of which {saved} are saved for later; frees {freed}",
        highlight=False,
    )


def _predicted(line: Line) -> str:
    """A collective's time on its lane, else the op's on the compute lane."""
    us = line.row.us if line.collective_us is None else line.collective_us
    return format_us(us) if us else "-"


def _table(lines: list[Line], title: str) -> Grid:
    rows = []
    for line in lines:
        op = line.row.op
        rows.append(
            (
                op.name,
                op.target.removeprefix("aten."),
                f"{line.reads} → {line.makes}",
                "; ".join(notes_of(line)),
                format_bytes(op.nbytes) if op.nbytes else "view" if op.alias is not None else "-",
                format_flops(op.flops) if op.flops else "-",
                op.lane,
                _predicted(line),
            )
        )
    head = ("name", "op", "reads → makes", "memory", "bytes", "flops", "lane", "predicted")
    return Grid(title, head, rows, words=range(4))
