"""`stretto bench reshard`: plans of resharding carried out in the lab, against what they predict. Thin."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from stretto.cli.figures import JsonOut, check_json, write_json
from stretto.errors import UsageError


def reshard(
    rate: Annotated[str, typer.Option(help="Rate of each host's link: 200mbit.")] = "200mbit",
    mib: Annotated[int, typer.Option(min=1, help="Size of the tensor.")] = 64,
    rounds: Annotated[int, typer.Option(help="Counted rounds; every case takes one turn in each.")] = 3,
    parts: Annotated[
        str, typer.Option("--cases", help="fan-out, devices, layouts, meshes.")
    ] = "fan-out,devices,layouts",
    in_flight_mib: Annotated[
        int, typer.Option(min=1, help="What a rank may have under way before it waits.")
    ] = 4,
    json_out: JsonOut = None,
) -> None:
    """A tensor from one or two of four hosts to others: measured makespan against the plan and the bound.

    Each host has two ranks.
    """
    from stretto.bench.in_lab import result_of
    from stretto.bench.reshard import Setup, link_bytes_per_s
    from stretto.bench.reshard_cases import HOSTS, RANKS_PER_HOST, cases
    from stretto.lab import Lab

    if rounds < 3:
        raise UsageError(f"--rounds {rounds}: a median on a noisy machine wants 3 rounds or more")
    check_json(json_out)
    link_bytes_per_s(rate)  # before the lab is up
    chosen = tuple(word.strip() for word in parts.split(","))
    cases(chosen)
    setup = Setup(rate, mib, rounds, chosen, in_flight_mib << 20)
    lab = Lab(hosts=HOSTS, rate=rate, ranks_per_host=RANKS_PER_HOST)
    result = result_of(lab, "stretto.bench.reshard", asdict(setup))
    print_race(result)
    write_json(result, json_out)


def print_race(result: dict[str, Any]) -> None:
    """Print the race as a table."""
    setup = result["setup"]
    table = Table(
        title=f"{setup['mib']} MiB at {setup['rate']}, medians of {setup['rounds']} rounds",
        caption=f"at most {setup['in_flight_bytes'] >> 20} MiB under way on a rank",
    )
    for column in (
        "reshard",
        "mode",
        "senders, order",
        "bound s",
        "predicted s",
        "measured s",
        "error",
        "of bound",
    ):
        table.add_column(
            column,
            justify="left" if column in ("reshard", "mode", "senders, order") else "right",
            no_wrap=column in ("reshard", "mode"),
        )
    for row in result["rows"]:
        table.add_row(
            row["case"],
            row["mode"].replace("_", " "),
            row["choice"],
            f"{row['bound_s']:.3f}",
            f"{row['predicted_s']:.3f}",
            f"{row['measured_s']:.3f}",
            f"{100 * (1 / row['measured_over_predicted'] - 1):+.1f} %",
            f"{row['ratio_to_bound']:.2f}",
        )
    Console(width=110).print(table)
