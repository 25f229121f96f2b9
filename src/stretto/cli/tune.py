"""`stretto tune`: choose how a run is spread over a cluster, by plans of what is most promising. Thin.

The choice is made in `stretto.tune`; here are its options, its tables, and the settings that are written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from stretto.cli.outputs import check_output, write_and_tell
from stretto.config import TrainSettings, load_settings
from stretto.convert.written import toml_value
from stretto.errors import StrettoError, UsageError
from stretto.files.edit_toml import edited
from stretto.files.typed_file import read_text
from stretto.files.whole_file import saving, write_file
from stretto.ir.compared import beside_bound
from stretto.ir.limits import MOST_RANKS
from stretto.price.calibration import Calibration
from stretto.price.cluster import Description, describe
from stretto.price.cluster_file import Hardware

if TYPE_CHECKING:
    from stretto.tune.work import Planned, Tuned

tune = typer.Typer(add_completion=False)

TELL_S = 30.0
"""How long it may take to tell and write what there is after Ctrl-C."""

SEEN = 1e-4
"""Of a step, what an axis exposes at least to be shown."""

REASONS = 12
"""Reasons that are listed; the rest are counted."""


@tune.command()
def run(
    config: Annotated[Path, typer.Argument(help="The settings, a TOML file.", show_default=False)],
    cluster: Annotated[
        str,
        typer.Option(
            help="For which cluster: a name such as h100x64, a cluster file (.toml) or a calibration."
        ),
    ],
    devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_RANKS,
            help="On how many of its devices; without it, on all that its description counts.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where the settings with the best choices are written."),
    ] = None,
    fix: Annotated[
        list[str] | None,
        typer.Option("--fix", metavar="KEY=VALUE", help="What is not to be chosen, such as tp=8."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a setting, such as training.global_batch=512."
        ),
    ] = None,
    max_seconds: Annotated[
        float, typer.Option(min=1.0, help="How long it may take; what it has by then is told and written.")
    ] = 840.0,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes that capture and plan; two without it, if cores are.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many plans the table shows.")] = 10,
) -> None:
    """Choose pp, tp, dp, ep, microbatches, schedule, recomputation and AMPipe's chunks for a cluster."""
    check_output("--output", output)
    settings = load_settings(config, changes or [])
    found = _described(cluster)
    count = _devices(cluster, found, devices, settings)
    from stretto.train.job import trained
    from stretto.tune.choices import Choices, read_fixed

    of = trained(settings)  # a task's file may register families, which are then chosen from
    fixed = read_fixed(fix or [])
    text = read_text(config, "settings file")
    _written(text, settings, changes or [], dict.fromkeys(("parallel.pp", "parallel.schedule"), 1))
    from stretto.train.interrupt import Interrupted, Interrupts, end_at_once
    from stretto.tune.search import Search
    from stretto.tune.work import Workers

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    choices = Choices(settings, count, fixed)
    search = Search(choices, found, max_seconds, console.print)
    many = processes or min(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
    ended: Interrupted | None = None
    with Interrupts(end_at_once) as interrupts:
        interrupts.stuck_s = TELL_S
        try:
            with Workers(many, settings, count, found, fixed) as workers:
                search.run(workers)
        except Interrupted as error:
            ended = error
        # What was asked for is told and written, however often one asks.
        interrupts.ending()
        tuned = search.result()
        if ended is not None:
            tuned.stopped = "it was interrupted"

        def write() -> None:
            if tuned.planned and output is not None:
                changed = {
                    f"parallel.{key}": value for key, value in tuned.planned[0].candidate.changes().items()
                }
                with saving(output):
                    write_file(output, _written(text, settings, changes or [], changed))

        a_device = of.size * settings.training.global_batch / count
        write_and_tell(write, partial(_tell, tuned, of.unit, a_device, top))
        if tuned.planned and output is not None:
            typer.echo(f"wrote {output}")
    if ended is not None:
        sys.stdout.flush()
        raise typer.Exit(ended.status)
    if not tuned.planned:
        raise StrettoError(_nothing(tuned, choices.devices, found))


def _described(cluster: str) -> Description:
    try:
        found = describe(cluster)
    except UsageError as error:
        raise UsageError(f"--cluster {cluster}: {error}") from None
    if found is None:
        raise UsageError(
            "--cluster local: measuring is for one layout, and a tuning compares hundreds: run `stretto "
            "calibrate` and give its file, or name a cluster, such as h100x64"
        )
    return found


def _devices(cluster: str, found: Description, asked: int | None, settings: TrainSettings) -> int:
    """How many to spread over."""
    there = found.count if isinstance(found, Hardware) else None
    if asked is None:
        return there or settings.parallel.world
    if there is not None and asked > there:
        raise UsageError(
            f"--devices {asked}: {cluster} has {there}; give as many or less, or a larger cluster"
        )
    return asked


def _written(text: str, settings: TrainSettings, overrides: Sequence[str], changes: dict[str, Any]) -> str:
    """The settings file with other values: those of --set, and what was chosen."""
    given: dict[str, Any] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        below: Any = settings
        for part in key.strip().split("."):
            below = below[part] if isinstance(below, dict) else getattr(below, part)
        given[key.strip()] = below if value.strip() else None
    return edited(text, {**given, **changes}, toml_value)


def _tell(tuned: Tuned, unit: str, a_device: float, top: int) -> None:
    """The ranked table, and why others are not in it. a_device: units of a step, a device."""
    from stretto.report.grid import grid_of
    from stretto.report.words import format_bytes, format_us
    from stretto.tune.work import Planned

    console = Console(width=140, highlight=False)

    def speed(one: Planned) -> str:
        return f"{a_device / one.step_us * 1e6:,.{0 if a_device > one.step_us / 1e5 else 3}f}"

    def exposed(one: Planned) -> str:
        seen = {axis: us for axis, us in one.exposed_us.items() if us >= SEEN * one.step_us}
        return " ".join(f"{axis} {format_us(us)}" for axis, us in seen.items()) or "nothing"

    columns = {
        "layout": ("layout", "{}"),
        "schedule": ("schedule", "{}"),
        "step": ("step", "{}"),
        f"{unit}/s/device": ("speed", "{}"),
        "exposed": ("exposed", "{}"),
        "bubble": ("bubble", "{}"),
        "peak": ("peak", "{}"),
        "bound": ("bound", "{}"),
        "gap": ("gap", "{}"),
        "order": ("order", "{}"),
    }
    rows = [
        {
            "layout": str(one.candidate.layout),
            "schedule": str(one.candidate).removeprefix(f"{one.candidate.layout} "),
            "step": format_us(one.step_us),
            "speed": speed(one),
            "exposed": exposed(one),
            "bubble": format_us(one.bubble_us),
            "peak": format_bytes(one.peak_bytes),
            "bound": format_us(one.bound_us),
            "gap": beside_bound(one.step_us, one.bound_us),
            "order": one.order,
        }
        for one in tuned.planned[:top]
    ]
    if rows:
        title = f"The fastest of {len(tuned.planned)} plans, of {tuned.layouts:,} layouts"
        grid_of(title, columns, rows, words=("layout", "schedule", "exposed")).print(console)
        best = tuned.planned[0]
        console.print(f"The fastest is bound by {best.binds}.")
        own = tuned.own
        if isinstance(own, Planned):
            console.print(
                f"As the settings are: {format_us(own.step_us)}, "
                f"{own.step_us / best.step_us:.2f} times the fastest."
            )
        elif own is not None:
            console.print(f"As the settings are, it is refused: {own.why}")
        if tuned.unseen_us == 0.0:
            console.print("Of some layouts that were not priced in the time nothing is known.")
        elif tuned.unseen_us is not None:
            console.print(
                "Of what was not planned and likely fits nothing is faster than "
                f"{format_us(tuned.unseen_us)} by its bound."
            )
    else:
        console.print("Nothing was planned.")
    if tuned.stopped:
        console.print(f"The search ended early: {tuned.stopped}.")
    if tuned.dropped:
        columns = {"count": ("count", "{:,}"), "why dropped": ("why", "{}"), "such as": ("example", "{}")}
        dropped = [
            {"count": count, "why": why, "example": tuned.examples.get(why, "")}
            for why, count in tuned.dropped.most_common(REASONS)
        ]
        more = len(tuned.dropped) - len(dropped)
        caption = f"and {more} more reasons" if more > 0 else ""
        words = ("why dropped", "such as")
        grid_of("Dropped", columns, dropped, words=words, caption=caption).print(console)


def _nothing(tuned: Tuned, devices: int, found: Description) -> str:
    """Why there is no plan at all."""
    from stretto.report.words import format_bytes
    from stretto.tune.work import limit_of

    if tuned.stopped:
        return (
            f"no plan was made, as {tuned.stopped}: give more with --max-seconds, or fix some of the choices"
        )
    limit = None if isinstance(found, Calibration) else limit_of(found)
    if tuned.least is not None and limit is not None:
        what, nbytes = tuned.least
        return (
            f"no layout of {devices} devices fits {format_bytes(limit)} a device: the nearest, {what}, needs "
            f"about {format_bytes(nbytes)} with the optimizer's state. Give more devices, or devices with as "
            "much memory, or a smaller batch"
        )
    why, _ = tuned.dropped.most_common(1)[0]
    return f"no plan can be made: {why}"
