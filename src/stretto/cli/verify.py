"""`stretto verify`: prove a plan file or a schedule's CSV, or list every fault. Calls `stretto.verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.options import Edited
from stretto.errors import UsageError
from stretto.files.near import near_path

verify = typer.Typer(add_completion=False)


@verify.command()
def prove(
    path: Annotated[
        Path,
        typer.Argument(metavar="PLAN_OR_CSV", help="A plan (JSON) or a schedule (CSV); its content decides."),
    ],
    max_bytes: Annotated[
        int | None,
        typer.Option(min=1, metavar="BYTES", help="Memory of one rank; a plan that holds more is refused."),
    ] = None,
    edited: Edited = False,
) -> None:
    """Prove a plan or a schedule free of faults.

    Ends with status 0, or lists every fault and ends with status 1. A file that cannot be read is status 2.
    """
    from stretto.ir.serialize import plan_from_text
    from stretto.schedule.csv import read_csv
    from stretto.verifying import verify as prove_free
    from stretto.verifying.summary import plan_summary, schedule_summary

    text = _read(path)
    if text.lstrip().startswith(("{", "[")):
        plan = plan_from_text(text, str(path), edited)
        prove_free(plan, max_bytes)
        typer.echo(f"ok: {plan_summary(plan)}")
        return
    if max_bytes is not None:
        raise UsageError(
            f"--max-bytes: {path} is a schedule, which knows no tensors. Give a plan, or leave it out"
        )
    if edited:
        raise UsageError(
            f"--edited: {path} is a schedule, which has no programs. Give a plan, or leave it out"
        )
    schedule = read_csv(path)
    prove_free(schedule)
    typer.echo(f"ok: {schedule_summary(schedule)}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        near = near_path(path) if isinstance(error, FileNotFoundError) else ""
        raise UsageError(f"cannot read {path}: {error.strerror}{near}") from None
    except ValueError:
        raise UsageError(f"cannot read {path}: neither a plan (JSON) nor a schedule (CSV)") from None
