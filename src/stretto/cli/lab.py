"""`stretto lab`: run a command on an emulated cluster, or list what this machine can emulate. Thin."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stretto.cli.common import NamedGroup
from stretto.errors import UsageError
from stretto.lab.cluster import Lab, examine
from stretto.train.interrupt import Stops

lab = typer.Typer(
    cls=NamedGroup, add_completion=False, no_args_is_help=True, help="Emulate a slow cluster on this machine."
)


@lab.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND", help="What each host runs; put -- before it.", show_default=False),
    ] = None,
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 2,
    rate: Annotated[
        str, typer.Option(help="Rate of each link in each direction: 100mbit, 2.5gbit, or unlimited.")
    ] = "unlimited",
    cpus: Annotated[
        float | None, typer.Option(help="Processors of each host, such as 0.5; no limit without it.")
    ] = None,
    delay: Annotated[
        float, typer.Option(help="One-way delay between hosts, in milliseconds; needs the kernel's netem.")
    ] = 0.0,
    pin: Annotated[bool, typer.Option("--pin", help="Keep host i on core i modulo the cores.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="Write host i's output to OUTPUT/host-<i>.log, not to the terminal.")
    ] = None,
    quiet_others: Annotated[
        bool, typer.Option("--quiet-others", help="Print rank 0 only; the others if they fail.")
    ] = False,
    grace: Annotated[
        float, typer.Option(help="Seconds that the others have to end when one has failed.")
    ] = 30.0,
    ranks_per_host: Annotated[
        int, typer.Option(help="How often each host runs COMMAND, as torchrun's --nproc-per-node.")
    ] = 1,
) -> None:
    """Run COMMAND on each host; ends with the status of the first that failed, or 0.

    Every rank has RANK, WORLD_SIZE, MASTER_ADDR and their kin, as torchrun sets them, and STRETTO_LAB.
    """
    if not command:
        raise UsageError("no command given: for example `stretto lab run --hosts 2 -- python train.py`")
    if grace < 0:
        raise UsageError(f"--grace {grace:g}: give seconds, 0 or more")
    if output is not None and quiet_others:
        raise UsageError("--output and --quiet-others: with --output nothing is printed; leave one out")
    emulated = Lab(hosts, rate, cpus, delay_ms=delay, pin=pin, ranks_per_host=ranks_per_host)
    cores = len(emulated.cores)
    if cpus is not None and hosts * cpus > cores:
        print(
            f"stretto lab: {hosts} hosts with {cpus:g} cpus each want {hosts * cpus:g}, this machine has "
            f"{cores}: they will slow each other down; lower --hosts or --cpus until they fit",
            file=sys.stderr,
        )
    with Stops(raises=False) as stops, emulated:
        statuses = emulated.run(
            command, output=output, quiet_others=quiet_others, grace_s=grace, signals=stops.numbers
        )
    if statuses.stopped_by is not None:
        print(f"stretto lab: stopped by {signal.Signals(statuses.stopped_by).name}", file=sys.stderr)
    elif statuses.first_failed is not None:
        failed = statuses.first_failed
        print(
            f"stretto lab: {emulated.name_of(failed)} failed first, with status {statuses[failed]}",
            file=sys.stderr,
        )
    raise typer.Exit(statuses.exit_status)


@lab.command()
def check() -> None:
    """Try what this machine can emulate; ends with 0 if the lab can run."""
    console = Console(highlight=False, soft_wrap=True)
    able = True
    for finding in examine():
        mark = "[green]ok[/]" if finding.ok else "[red]missing[/]" if finding.required else "[yellow]no[/]"
        console.print(f"{mark:<17} {finding.what:<20}", end="")
        console.print(finding.says, markup=False)
        able = able and (finding.ok or not finding.required)
    console.print(
        "The lab can run on this machine." if able else "The lab cannot run on this machine as it is."
    )
    raise typer.Exit(0 if able else 1)
