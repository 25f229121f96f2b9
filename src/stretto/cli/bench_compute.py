"""`stretto bench compute`: our compute against eager PyTorch's, on one rank. Thin."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from stretto.cli.figures import JsonOut, check_json, write_json
from stretto.errors import UsageError


def compute(
    models: Annotated[str, typer.Option(help="Models, with commas between; all by default.")] = "",
    threads: Annotated[str, typer.Option(help="Numbers of threads, with commas between.")] = "1,2",
    rounds: Annotated[int, typer.Option(help="Counted rounds; every system takes one turn in each.")] = 9,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Race the compiled systems too (Inductor).")
    ] = True,
    json_out: JsonOut = None,
) -> None:
    """Our window functions against eager PyTorch and torch.compile: one rank, no communication."""
    from stretto.bench.compute import MODELS
    from stretto.bench.compute import compute as race

    if rounds < 5:
        raise UsageError(f"--rounds {rounds}: a median on a noisy machine wants 5 rounds or more")
    check_json(json_out)
    counts = [word.strip() for word in threads.split(",")]
    if not all(word.isdecimal() and int(word) for word in counts):
        raise UsageError(f"--threads {threads}: give numbers from 1 on, with commas between")
    names = [word.strip() for word in models.split(",")] if models else list(MODELS)
    progress = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        result = race(
            names,
            [int(word) for word in counts],
            rounds,
            Path(folder),
            compile=compiled,
            say=progress.print,
        )
    _print(result)
    write_json(result, json_out)


def _print(result: dict[str, Any]) -> None:
    setup = result["setup"]
    table = Table(
        title=f"sequence {setup['sequence']}, {setup['dtype']}, medians of {setup['rounds']} rounds",
        caption="vs eager: the median over rounds of a step's time over eager's in the same round",
    )
    for column in ("model", "threads", "system", "step ms", "vs eager", "error", "compiled in s"):
        table.add_column(column, justify="left" if column in ("model", "system") else "right")
    for cell in result["cells"]:
        for number, row in enumerate(cell["rows"]):
            head = [cell["cell"]["model"], str(cell["cell"]["threads"])] if not number else ["", ""]
            table.add_row(
                *head,
                row["system"],
                f"{1e3 * row['step_s']:.1f}",
                f"{row['ratio_to_eager']:.3f}",
                f"{row['error']:.0e}",
                "" if row["compile_s"] is None else f"{row['compile_s']:.0f}",
            )
        table.add_section()
    Console(width=110).print(table)
