"""`stretto cluster list|show`: the clusters that can be planned for, and what is known of each. Thin."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from stretto.cli.common import NamedGroup, check_output, write_and_print
from stretto.errors import UsageError
from stretto.price.cluster_file import Hardware, find_cluster, save_cluster
from stretto.price.devices import GB_PER_S, Device, Figure, devices
from stretto.report.grid import Grid, console_of

if TYPE_CHECKING:
    from stretto.price.calibration import Calibration
    from stretto.price.cluster import Cluster, Description

UNITS = {
    "peak_tflops": "TFLOP/s",
    "fp8_tflops": "TFLOP/s, fp8",
    "memory_gb": "GB",
    "memory_tbps": "TB/s",
    "link_gbps": "GB/s",
    "peer_gbps": "GB/s",
    "ring_gbps": "GB/s, 2 devices and more",
    "nic_gbit": "Gbit/s",
    "kernel_us": "us",
    "launch_us": "us",
}

cluster = typer.Typer(
    cls=NamedGroup, add_completion=False, no_args_is_help=True, help="Clusters that can be planned for."
)


@cluster.command("list")
def list_devices() -> None:
    """List the devices of the catalogue; <device>x<count> names a cluster of them."""
    figures = ("peak_tflops", "memory_gb", "memory_tbps", "node_devices", "topology", "link_gbps", "nic_gbit")
    Grid(
        "devices; a cluster is <device>x<count>, for example h100x1024",
        ("device", "what", "TFLOP/s", "GB", "TB/s", "node", "links", "GB/s", "NIC Gbit/s"),
        [(one.key, one.name, *(_cell(one, figure) for figure in figures)) for one in devices().values()],
        words=(0, 1, 6),
        caption="~ inferred or recalled, ? assumed; `stretto cluster show NAME` prints every source",
    ).print()


@cluster.command()
def show(
    name: Annotated[
        str,
        typer.Argument(help="<device>x<count>, a cluster file (.toml), or a calibration (.json)."),
    ],
    save: Annotated[Path | None, typer.Option(help="Write it as a cluster file to start from.")] = None,
) -> None:
    """Show what can be planned for: nodes, devices, links, and where every figure is from."""
    check_output("--save", save)
    console = console_of()
    result = _found(name)
    if not isinstance(result, Hardware):
        if save is not None:
            raise UsageError(f"--save writes clusters of the catalogue's devices; {name} is none")
        _print_other(console, name, result)
        return

    write_and_print(
        [(save, lambda path: save_cluster(result, path))], lambda: _print_cluster(console, result)
    )


def _print_cluster(console: Console, found: Hardware) -> None:
    device, nodes = found.device, found.nodes
    each = min(found.count, device.node_devices)
    within = found.fabric.bus_bytes_per_us(max(each, 2)) / GB_PER_S
    between = found.fabric.nic_bytes_per_us * found.fabric.nic_efficiency / GB_PER_S
    console.print(
        f"{found.name}: {found.count} x {device.name}, {nodes} node{'s' if nodes > 1 else ''} of {each}, "
        f"{within:.0f} GB/s bus rate in a node, {between:.1f} GB/s a device between nodes"
    )
    rows = [
        (field, f"{_text(figure)} {UNITS.get(field, '')}".strip(), figure.status, figure.source)
        for field, figure in found.device.figures.items()
    ]
    rows += [
        (f"{kind} of {size}", f"{len(curve.points)} points", "measured", "nccl-tests")
        for (kind, size), curve in sorted(found.measured.items())
    ]
    Grid("", ("figure", "value", "known", "source"), rows, words=(0, 2, 3)).print(console)


def _found(name: str) -> Description:
    if not name.endswith((".toml", ".json")) and name != "local":
        return find_cluster(name)
    from stretto.price.cluster import describe  # here, as it loads PyTorch

    result = describe(name)
    if result is None:
        raise UsageError("local is this machine: `stretto calibrate` measures it, and writes a file to show")
    return result


def _print_other(console: Console, name: str, found: Cluster | Calibration) -> None:
    """Equal devices and links by their fields, or what was measured."""
    from stretto.price.cluster import Cluster

    if isinstance(found, Cluster):
        console.print(f"{name}: equal devices joined by equal links", markup=False)
        rows = [
            (
                field,
                str(getattr(found, field)),
                "given" if field in found.model_fields_set else "by default",
                about.description or "",
            )
            for field, about in Cluster.model_fields.items()
        ]
        Grid("", ("figure", "value", "known", "what"), rows, words=range(4)).print(console)
        return
    console.print(f"{name}: measured on {found.machine}", highlight=False, markup=False)
    console.print(f"{len(found.ops)} ops measured, {len(found.traced)} traced", highlight=False)
    print_communication(console, found)


def print_communication(console: Console, calibration: Calibration) -> None:
    """Collectives and messages, as far as they were measured."""
    collectives = [
        (
            one.kind,
            str(one.members),
            str(one.stride),
            str(one.hosts),
            f"{one.cost.curve.us(2**20) / 1000:.2f} ms",
            f"{one.cost.lost_us(10**6) / 1000:.2f} ms"
            + (f", {100 * one.cost.slowdown:.0f} %" if one.cost.slowdown else ""),
            f"{100 * one.spread:.0f} %",
        )
        for one in calibration.collectives
    ]
    messages = []
    for link in calibration.links:
        ways = (link.link,) if link.back is None else (link.link, link.back)
        messages.append(
            (
                f"{link.stride} apart",
                str(link.hosts),
                " / ".join(f"{way.latency_us + way.start_us:.0f}" for way in ways) + " us",
                " / ".join(f"{way.start_us:.0f}" for way in ways) + " us",
                " / ".join(f"{way.bytes_per_us:.1f}" for way in ways) + " MB/s",
                f"{link.link.processor_us_per_mb / 1000:.2f} ms",
                f"{100 * link.spread:.0f} %",
            )
        )
    for head, rows in (
        (("collective", "ranks", "apart", "hosts", "1 MiB", "compute loses, 1 MB", "noise"), collectives),
        (("messages", "hosts", "latency", "each more", "rate", "compute loses, 1 MB", "noise"), messages),
    ):
        if rows:
            Grid("", head, rows).print(console)


def _cell(device: Device, field: str) -> str:
    figure = device.figures[field]
    mark = {"inferred": "~", "recalled": "~", "assumed": "?"}.get(figure.status, "")
    return f"{_text(figure)}{mark}"


def _text(figure: Figure) -> str:
    value = figure.value
    if isinstance(value, list):
        return ", ".join(f"{item:g}" for item in value)
    return value if isinstance(value, str) else f"{value:g}"
