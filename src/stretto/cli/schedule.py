"""`stretto schedule`: print, draw or time a schedule. Thin: `stretto.schedule` does it."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from stretto.cli.common import check_output, command, echo_file
from stretto.config import load_settings
from stretto.errors import UsageError
from stretto.files.whole_file import saving, write_file
from stretto.ir.action import Schedule
from stretto.ir.stage_maps import AUTO, virtual_stages_of
from stretto.report.grid import UNBROKEN, console_of
from stretto.report.svg import draw_schedule
from stretto.report.text import schedule_text
from stretto.schedule.csv import read_csv, to_csv
from stretto.schedule.draw import describe_search, describe_timing, to_json
from stretto.schedule.families import FAMILIES, check_count, make_schedule
from stretto.schedule.list_schedule import Room
from stretto.schedule.search import Searched, Sought, search
from stretto.schedule.timing import UNIT_TIMES, PhaseTimes, parse_times, time_schedule

Format = Literal["ascii", "csv", "svg", "json"]


@command
def schedule(
    family: Annotated[
        str | None,
        typer.Option(help="Family of schedules, or auto for the fastest found; --list shows them."),
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Number of pipeline ranks.")] = None,
    stages: Annotated[
        int | None, typer.Option(help="Number of stages of all ranks together, instead of --ranks.")
    ] = None,
    virtual_stages: Annotated[
        int | None, typer.Option(help="Stages on each rank; without it, what the family needs.")
    ] = None,
    microbatches: Annotated[int | None, typer.Option(help="Number of microbatches.")] = None,
    max_live: Annotated[
        int | None, typer.Option(help="Memory limit: microbatches live on a stage at once (with --family).")
    ] = None,
    group: Annotated[
        int | None,
        typer.Option(
            help="Microbatches that go through one of a rank's stages before its next begins (interleaved)."
        ),
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(
            help="Memory limit of a rank, in microbatches live on all its stages (auto); without it, twice "
            "that of 1f1b."
        ),
    ] = None,
    weight_share: Annotated[
        float,
        typer.Option(help="Memory of a microbatch that waits only for W, as a share of one's (auto)."),
    ] = 1.0,
    csv: Annotated[
        Path | None,
        typer.Option(help="Read the schedule from a CSV file in PyTorch's form, not from a family."),
    ] = None,
    times: Annotated[
        str | None,
        typer.Option(
            help="Times of the phases and of a message, in any one unit: F=18.5,I=18.1,W=9.3,message=0.6; "
            "one for each stage: F=10:12:12:14. Without it, drawings take 1 a phase and 0 a message."
        ),
    ] = None,
    blocking: Annotated[
        bool, typer.Option("--blocking", help="A rank computes nothing while it receives a message.")
    ] = False,
    form: Annotated[
        Format | None,
        typer.Option("--format", help="What to print; the default is the output file's ending, else ascii."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file, not to the terminal.")
    ] = None,
    settings: Annotated[
        Path | None, typer.Option(help="Settings of a run whose task registers families: they are known too.")
    ] = None,
    list_families: Annotated[bool, typer.Option("--list", help="List the families and end.")] = False,
) -> None:
    """Print, draw or time a schedule."""
    numbers = {
        "--ranks": ranks,
        "--stages": stages,
        "--virtual-stages": virtual_stages,
        "--microbatches": microbatches,
        "--max-live": max_live,
        "--group": group,
    }
    if settings is not None and (run := load_settings(settings)).task is not None:
        from stretto.train.task import own_task

        own_task(run.task, run.training.seed)
    if list_families:
        others = (*numbers.values(), family, csv, times, form, output, *_of_auto(memory, weight_share))
        if blocking or any(other is not None for other in others):
            raise UsageError("--list takes no other options: drop them")
        _list_families()
        return
    check_output("--output", output)
    ending = output.suffix.lstrip(".").lower() if output is not None else ""
    form = form or next((one for one in get_args(Format) if one == ending), "ascii")
    if blocking and times is None:
        raise UsageError("--blocking is about messages: give --times with message=..., or drop it")
    clock = UNIT_TIMES if times is None else replace(parse_times(times), blocking=blocking)
    searched = None
    if family == AUTO and csv is None:
        searched = _search(numbers, clock, memory, weight_share)
        chosen = searched.best.schedule
    else:
        chosen = _choose(family, csv, numbers, _of_auto(memory, weight_share))
    # A CSV without times needs no clock: a schedule that cannot be timed can still be rewritten.
    timing = None if times is None and form == "csv" else time_schedule(chosen, clock)
    asked = timing if times is not None else None
    summary = "" if asked is None else describe_timing(asked)
    if searched is not None:
        summary += describe_search(searched)

    if form == "csv":
        text = to_csv(chosen)
    elif form == "json":
        text = to_json(chosen, asked)
    elif form == "svg":
        assert timing is not None
        text = draw_schedule(chosen, timing)
    else:
        assert timing is not None
        to_terminal = output is None and sys.stdout.isatty()
        columns = shutil.get_terminal_size().columns if to_terminal else None
        text = f"{schedule_text(chosen, timing, columns).plain}\n"
        text += f"\n{summary}" if summary else ""

    if output is not None:
        with saving(output):
            write_file(output, text)
        typer.echo(summary, nl=False)
    elif form == "ascii":
        typer.echo(text, nl=False)
    else:
        echo_file(text)
        typer.echo(summary, nl=False, err=True)


def _choose(
    family: str | None, csv: Path | None, numbers: Mapping[str, int | None], others: Sequence[str]
) -> Schedule:
    """The schedule that the options name. Raises UsageError if they name none, or more than one. others:
    given options that only `auto` has."""
    if family is None and csv is None:
        raise UsageError("no schedule named: give --family NAME --ranks N --microbatches M, or --csv FILE")
    if family is not None and csv is not None:
        raise UsageError("--family and --csv both name a schedule: give one of them")
    if csv is not None:
        extra = [*(name for name, value in numbers.items() if value is not None), *others]
        if extra:
            raise UsageError(f"{', '.join(extra)} cannot change a CSV file: drop it, or use --family")
        return read_csv(csv)
    assert family is not None
    if others:
        raise UsageError(f"{', '.join(others)} is of --family auto: drop it, or use that")
    ranks, each, microbatches = _sizes(family, numbers)
    return make_schedule(
        family,
        ranks,
        microbatches,
        virtual_stages=each,
        max_live=numbers["--max-live"],
        group=numbers["--group"],
    )


def _of_auto(memory: float | None, weight_share: float) -> list[str]:
    """Given options that only `auto` has."""
    return ["--memory"] * (memory is not None) + ["--weight-share"] * (weight_share != 1.0)


def _sizes(family: str, numbers: Mapping[str, int | None]) -> tuple[int, int, int]:
    """Ranks, stages on each, and microbatches. Raises UsageError for numbers that do not fit."""
    ranks, stages, microbatches = numbers["--ranks"], numbers["--stages"], numbers["--microbatches"]
    if family in (AUTO, *FAMILIES) and ((ranks is None and stages is None) or microbatches is None):
        raise UsageError(f"--family {family} needs --ranks N (or --stages N) and --microbatches M")
    for name, value in numbers.items():
        if name != "--max-live" and value is not None and value < 1:
            raise UsageError(f"{name} is {value}; a schedule needs at least 1")
    given = numbers["--virtual-stages"]
    each = (given or 1) if family == AUTO else virtual_stages_of(family, given)
    if stages is not None:
        if ranks is not None and stages != ranks * each:
            raise UsageError(
                f"--ranks {ranks} with {each} stages each are {ranks * each} stages, not {stages}: give "
                "one of --ranks and --stages"
            )
        if stages % each:
            raise UsageError(
                f"--stages {stages} is no multiple of the {each} stages that {family} has on each rank: give "
                f"--stages {each * max(1, stages // each)}"
            )
        ranks = stages // each
    return ranks or 0, each, microbatches or 0


def _search(
    numbers: Mapping[str, int | None], times: PhaseTimes, memory: float | None, weight_share: float
) -> Searched:
    ranks, each, microbatches = _sizes(AUTO, numbers)
    check_count(ranks * each, microbatches)
    if not 0.0 <= weight_share <= 1.0:
        raise UsageError(f"--weight-share {weight_share} must be from 0 to 1")
    limit = 2.0 * ranks if memory is None else memory
    return search(
        Sought(
            *(ranks, each, microbatches, times),
            room=lambda stage_ranks: Room.even(ranks, len(stage_ranks), limit, weight_share),
            max_live=numbers["--max-live"],
            group=numbers["--group"],
            from_own_begin=True,
        )
    )


def _list_families() -> None:
    wide = max(len(name) for name in FAMILIES)
    words = {AUTO: "the fastest of all families and of a search, for the times given with --times"}
    words |= {one.name: f"{one.description} ({one.source})" for one in FAMILIES.values()}
    columns = console_of(UNBROKEN).width
    for name, text in words.items():
        head, behind = f"{name:{wide}}  ", " " * (wide + 2)
        typer.echo(textwrap.fill(text, columns, initial_indent=head, subsequent_indent=behind))
