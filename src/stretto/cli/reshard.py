"""`stretto reshard`: how a tensor goes from one mesh to another, in each mode, and what that takes. Thin."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import prod
from typing import Annotated

import torch
import typer

from stretto.cli.common import AsJson, command
from stretto.errors import UsageError
from stretto.files.parse import LARGEST
from stretto.lab.network import parse_rate
from stretto.report.grid import Columns, Grid, Row, console_of, format_bytes, format_us, grid_of
from stretto.tensor.reshard.arguments import HELP, between_meshes, read
from stretto.tensor.reshard.plan import Choice, ReshardPlan, plan_reshards
from stretto.tensor.reshard.tasks import MODES, Hosts, Mode, Tensor

SHOWN = 64
"""Transfers that are listed at most; `--json` lists all."""

CHOICES: tuple[Choice, ...] = ("naive", "balanced")
NAMES = {"broadcast": "broadcast", "point_to_point": "point to point"}


@command
def reshard(
    shape: Annotated[str, typer.Option(help="Of the full tensor: 1024,1024,512.", show_default=False)],
    src: Annotated[
        str, typer.Option(help="Mesh and layout before: hosts x devices, a letter a dim.", show_default=False)
    ],
    dst: Annotated[
        str,
        typer.Option(help="Mesh and layout after, on the hosts after those of --src.", show_default=False),
    ],
    dtype: Annotated[str, typer.Option(help="PyTorch's name of it.")] = "float32",
    rate: Annotated[str, typer.Option(help="Of a host's link, in each direction.")] = "100gbit",
    latency_us: Annotated[float, typer.Option(min=0, help="Between hosts, microseconds.")] = 0.0,
    mode: Annotated[Mode | None, typer.Option(help="List this mode's transfers.")] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a tensor's way from one mesh to another: tasks, bytes, makespan and bound in each mode.

    Times are also given in units of the full tensor over the link of one host.
    """
    sizes, itemsize_bytes = _shape(shape), _itemsize(dtype)
    for option, text in (("--src", src), ("--dst", dst)):
        if read(text).dims != len(sizes):
            raise UsageError(
                f"{option} {text} is of {read(text).dims} dims, but --shape {shape} has {len(sizes)}; {HELP}"
            )
    bits_per_s = parse_rate(rate)
    if bits_per_s is None:
        raise UsageError("--rate unlimited: nothing would take time; give a rate such as 100gbit")
    source, target, hosts = between_meshes(src, dst, Hosts((), bits_per_s / 8, latency_us))

    def planned(mode: Mode, choice: Choice) -> ReshardPlan:
        tensor = Tensor(tuple(sizes), itemsize_bytes, source, target)
        return plan_reshards([tensor], hosts, mode, choice=choice)

    modes = MODES if mode is None else (mode,)
    plans = [(choice, planned(name, choice)) for name in modes for choice in CHOICES]
    rows = [{"choice": choice, **{name: getattr(plan, name) for name in FIGURES}} for choice, plan in plans]
    if as_json:
        document = {
            "shape": list(sizes),
            "dtype": dtype,
            "src": src,
            "dst": dst,
            "link_bytes_per_s": hosts.link_bytes_per_s,
            "latency_us": hosts.latency_us,
            "host_of": list(hosts.host_of),
            "plans": [{**row, "transfers": [asdict(one) for one in row["transfers"]]} for row in rows],
        }
        typer.echo(json.dumps(document, indent=1))
        return
    console = console_of()
    title = f"{shape} {dtype}: {src} to {dst}"
    grid_of(title, COLUMNS, rows, words=("mode", "senders, order"), absent="-").print(console)
    console.print(
        f"A unit is the full tensor over the link of one host: {format_us(rows[0]['full_us'])}. "
        f"Ranks need {format_bytes(rows[0]['needed_bytes'])} that they do not have.",
        style="dim",
        highlight=False,
    )
    if mode is not None:
        _transfers(*plans[-1], hosts).print(console)


def _shape(text: str) -> tuple[int, ...]:
    try:
        result = tuple(int(size) for size in text.split(",")) if text else ()
    except ValueError:
        raise UsageError(
            f"--shape {text[:60]!r}: give sizes with commas between, such as 1024,1024,512"
        ) from None
    if any(size < 0 for size in result) or prod(result) > LARGEST:
        raise UsageError(f"--shape {text[:60]!r}: give sizes from 0 whose product has 63 bits at most")
    return result


def _itemsize(name: str) -> int:
    result = getattr(torch, name, None)
    if not isinstance(result, torch.dtype):
        raise UsageError(f"--dtype {name!r} is none of PyTorch's; give one such as float32 or bfloat16")
    return result.itemsize


def _over(row: Row, key: str, unit: str) -> float | None:
    """A time in another; None where that is nothing."""
    return row[key] / row[unit] if row[unit] else None


FIGURES = (
    *("mode", "tasks", "makespan_us", "bound_us", "full_us", "needed_bytes", "bytes_sent", "link_bytes"),
    *("sent_bytes", "received_bytes", "piece_bytes", "transfers"),
)
"""Of a plan, as `--json` has them."""

COLUMNS: Columns = {
    "mode": (lambda row: NAMES[row["mode"]], "{}"),
    "senders, order": ("choice", "{}"),
    "tasks": ("tasks", "{:,}"),
    "transfers": (lambda row: len(row["transfers"]), "{:,}"),
    "between hosts": ("link_bytes", format_bytes),
    "makespan": ("makespan_us", format_us),
    "units": (lambda row: _over(row, "makespan_us", "full_us"), "{:.3f}"),
    "bound": (lambda row: _over(row, "bound_us", "full_us"), "{:.3f}"),
    "of bound": (lambda row: _over(row, "makespan_us", "bound_us"), "{:.2f}"),
}


def _transfers(choice: Choice, plan: ReshardPlan, hosts: Hosts) -> Grid:
    more = len(plan.transfers) - SHOWN
    return Grid(
        f"{NAMES[plan.mode]}, {choice}: transfers in order; rank@host",
        ("start", "end", "from", "along", "box", "bytes"),
        [
            (
                format_us(one.start_us),
                format_us(one.end_us),
                f"{one.sender}@{hosts[one.sender]}",
                " ".join(f"{rank}@{hosts[rank]}" for rank in one.receivers),
                ", ".join(f"{start}:{stop}" for start, stop in one.region) or "the number",
                format_bytes(one.nbytes),
            )
            for one in plan.transfers[:SHOWN]
        ],
        words=(3, 4),
        caption=f"and {more:,} more; --json lists all" if more > 0 else "",
    )
