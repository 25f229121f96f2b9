"""`stretto tune`: choose how a run is laid out on a cluster, by plans of what is most promising. Thin.

The choice is made in `stretto.tune`; here are its options, its tables, and the settings that are written.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from stretto.cli.common import Changes, Config, check_output, command, write_and_print
from stretto.cli.plan import read_cluster
from stretto.config import TrainSettings, load_settings
from stretto.errors import StrettoError, UsageError
from stretto.files.settings_file import edited, parse_value
from stretto.files.typed_file import read_text
from stretto.files.whole_file import write_file
from stretto.ir.compared import beside_bound
from stretto.ir.limits import MOST_RANKS
from stretto.price.cluster import Description
from stretto.price.cluster_file import Hardware
from stretto.processor.control_groups import usable_cores
from stretto.train.interrupt import Stops

if TYPE_CHECKING:
    from stretto.ir.parameters import Zero
    from stretto.tune.work import Planned, Tuned


SEEN = 1e-4
"""Of a step, what an axis exposes at least to be shown."""

REASONS = 12
"""Reasons that are listed; the rest are counted."""


@command
def tune(
    config: Config,
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
    changes: Changes = None,
    max_seconds: Annotated[
        float, typer.Option(min=1.0, help="How long it may take; what it has by then is printed and written.")
    ] = 840.0,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes that capture and plan; two without it, if cores are.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many plans the table shows.")] = 10,
) -> None:
    """Choose pp, tp, dp, ep, zero, microbatches, schedule, recomputation, AMPipe's chunks for a cluster."""
    check_output("--output", output)
    settings = load_settings(config, changes or [])
    result = read_cluster(cluster)
    if isinstance(result, str):
        raise UsageError(
            "--cluster local: measuring is for one layout, and a tuning compares hundreds: run `stretto "
            "calibrate` and give its file, or name a cluster, such as h100x64"
        )
    count = _devices(cluster, result, devices, settings)
    from stretto.train.job import trained
    from stretto.tune.choices import Choices, node_of, read_fixed

    of = trained(settings)  # a task's file may register families, which are then chosen from
    fixed = read_fixed(fix or [])
    text = read_text(config, "settings file")
    _written(text, changes or [], dict.fromkeys(("parallel.pp", "parallel.schedule"), 1))
    from stretto.tune.search import Search
    from stretto.tune.work import Workers

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    choices = Choices(settings, count, fixed, node_of(result))
    search = Search(choices, result, max_seconds, console.print)
    many = processes or min(2, len(usable_cores()))
    with Stops() as stops:
        try:
            with Workers(many, settings, count, result, fixed) as workers:
                search.run(workers)
        except KeyboardInterrupt:
            pass
        stops.ignore()  # what there is is printed and written, however often one interrupts
        tuned = search.result()
        if stops.numbers:
            tuned.stopped = "it was interrupted"

        def write(path: Path) -> None:
            chosen = tuned.planned[0].candidate.changes().items()
            changed = {f"parallel.{key}": value for key, value in chosen}
            write_file(path, _written(text, changes or [], changed))

        a_device = of.size * settings.training.global_batch / count
        files = [(output if tuned.planned else None, write)]
        write_and_print(files, partial(_print, tuned, of.unit, a_device, top))
    if stops.numbers:
        sys.stdout.flush()
        raise typer.Exit(stops.status)
    if not tuned.planned:
        raise StrettoError(_nothing(tuned, choices.devices, result, choices.zero))


def _devices(cluster: str, found: Description, asked: int | None, settings: TrainSettings) -> int:
    there = found.count if isinstance(found, Hardware) else None
    if asked is None:
        return there or settings.parallel.world
    if there is not None and asked > there:
        raise UsageError(
            f"--devices {asked}: {cluster} has {there}; give as many or less, or a larger cluster"
        )
    return asked


def _written(text: str, overrides: Sequence[str], changes: dict[str, Any]) -> str:
    """The settings file with other values: those of --set, and what was chosen."""
    given: dict[str, Any] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        given[key.strip()] = parse_value(value) if value.strip() else None
    return edited(text, {**given, **changes})


def _print(tuned: Tuned, unit: str, a_device: float, top: int) -> None:
    """The ranked table, and why others are not in it. a_device: units of a step, a device."""
    from stretto.report.grid import Grid, console_of, format_bytes, format_us
    from stretto.tune.work import Planned

    console = console_of(140, highlight=False)
    if tuned.planned:
        title = f"The fastest of {len(tuned.planned)} plans, of {tuned.layouts:,} layouts"
        speed = f"{unit}/s/device"
        accounts = ("exposed", "bubble", "peak", "bound", "gap", "order")
        head = ("layout", "schedule", "zero", "step", speed, *accounts)
        rows = [_cells(one, a_device) for one in tuned.planned[:top]]
        Grid(title, head, rows, words=(0, 1, 5)).print(console)
        best, own = tuned.planned[0], tuned.own
        console.print(f"The fastest is bound by {best.made.binds}.")
        for dealt, nbytes in tuned.larger.get(best.candidate, {}).items():
            console.print(f"With zero = {dealt} it is too large: about {format_bytes(nbytes)} a device.")
        if isinstance(own, Planned):
            times = f"{own.step_us / best.step_us:.2f} times the fastest"
            console.print(f"As the settings are: {format_us(own.step_us)}, {times}.")
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
        dropped = [
            (f"{count:,}", why, tuned.examples.get(why, ""))
            for why, count in tuned.dropped.most_common(REASONS)
        ]
        more = len(tuned.dropped) - len(dropped)
        caption = f"and {more} more reasons" if more > 0 else ""
        Grid("Dropped", ("count", "why dropped", "such as"), dropped, (1, 2), caption).print(console)


def _cells(one: Planned, a_device: float) -> tuple[str, ...]:
    from stretto.report.grid import format_bytes, format_us
    from stretto.tune.choices import COPIES

    seen = {axis: us for axis, us in one.exposed_us.items() if us >= SEEN * one.step_us}
    return (
        str(one.candidate.layout),
        str(replace(one.candidate, dealt=COPIES)).removeprefix(f"{one.candidate.layout} "),
        str(one.candidate.dealt),
        format_us(one.step_us),
        f"{a_device / one.step_us * 1e6:,.{0 if a_device > one.step_us / 1e5 else 3}f}",
        " ".join(f"{axis} {format_us(us)}" for axis, us in seen.items()) or "nothing",
        format_us(max(one.made.bubble_us)),
        format_bytes(max(one.made.peak_bytes)),
        format_us(one.made.bound_us),
        beside_bound(one.step_us, one.made.bound_us),
        one.order,
    )


def _nothing(tuned: Tuned, devices: int, found: Description, zero: Zero | None) -> str:
    from stretto.report.grid import format_bytes

    if tuned.stopped:
        return (
            f"no plan was made, as {tuned.stopped}: give more with --max-seconds, or fix some of the choices"
        )
    limit = found.memory_bytes
    if tuned.least is not None and limit is not None:
        what, nbytes = tuned.least
        dealt = "no parallel.zero, so that copies may share their state, or " if zero == 0 else ""
        return (
            f"no layout of {devices} devices fits {format_bytes(limit)} a device: the nearest, {what}, needs "
            f"about {format_bytes(nbytes)} with the optimizer's state. Give {dealt}more devices, or devices "
            "with as much memory, or a smaller batch"
        )
    why, _ = tuned.dropped.most_common(1)[0]
    return f"no plan can be made: {why}"
