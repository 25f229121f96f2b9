"""The tables of `python -m benchmarks`: of each race's JSON, the one that is printed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

from stretto.ir.compared import SHOWN, against, signed
from stretto.report.grid import Columns, Grid, Row, grid_of

NOISY = 1.15
"""Slowest over fastest round of one system from which the race calls itself disturbed. Measured on a quiet
machine of 2 cores: 1.03 to 1.08."""

SECONDS = "{:.3f}"


def pipeline_table(race: Row) -> Grid:
    """Of one race of `benchmarks.pipeline`."""
    setup = race["setup"]
    columns: Columns = {
        "system": ("system", "{}"),
        "step s": ("step_s", SECONDS),
        "vs torch 1f1b": ("speedup_vs_torch_1f1b", SECONDS),
        "vs torch's best": ("speedup_vs_torch_best", SECONDS),
        "vs bound": ("ratio_to_bound", SECONDS),
        "exposed s": (lambda row: row.get("exposed_s"), SECONDS),
        "vs predicted": _against("step_s", "predicted_s"),
        "peak MiB": (lambda row: max(row["peak_bytes"]) / 2**20 if "peak_bytes" in row else None, "{:.0f}"),
    }
    return grid_of(
        f"{setup['world']} hosts, {setup['rate']}, {setup['layers']} blocks, "
        f"{setup['microbatches']} microbatches, medians of {setup['rounds']} rounds",
        columns,
        race["rows"],
        caption=f"PyTorch's best is {setup['torch_best']}; {_bound(race)}",
    )


def tensor_table(race: Row) -> Grid:
    """Of one race of `benchmarks.tensor`."""

    def name(row: Row) -> str:
        """The system; where planning found that less overlap is faster, what it took."""
        taken = row.get("overlap", row["system"])
        return str(row["system"]) if taken == row["system"] else f"{row['system']} (as {taken})"

    columns: Columns = {
        "system": (name, "{}"),
        "step s": ("step_s", SECONDS),
        "vs off": ("speedup_vs_off", SECONDS),
        "vs torch": ("speedup_vs_torch", SECONDS),
        "vs bound": ("ratio_to_bound", SECONDS),
        "vs predicted": _against("step_s", "predicted_s"),
        "exposed s": (lambda row: max(row["exposed_s"]) if "exposed_s" in row else None, SECONDS),
        "hidden": (
            lambda row: ", ".join("" if one is None else f"{one:.0%}" for one in row.get("hidden", ())),
            "{}",
        ),
    }
    setup = race["setup"]
    sp = " with sequence parallelism" if setup["sequence_parallel"] else ""
    return grid_of(
        f"hidden {setup['hidden']}, {setup['layers']} layers, pp={setup['pp']} tp={setup['tp']}{sp}, "
        f"{setup['rate']}: communication takes {setup['communication_over_compute']:.2f} of compute",
        columns,
        race["rows"],
        caption=f"{setup['microbatches']} microbatches, medians of {setup['rounds']} rounds; {_bound(race)}",
    )


def moe_table(race: Row) -> Grid:
    """Of one race of `benchmarks.moe`."""

    def name(row: Row) -> str:
        """The system; of what planning chose, what that was."""
        took = f"{row['chunks']} chunks, {row['overlap']}"
        return f"{row['system']} ({took})" if row["system"] == "auto" else str(row["system"])

    setup = race["setup"]
    columns: Columns = {
        "system": (name, "{}"),
        "step ms": (lambda row: 1e3 * row["step_s"], "{:.0f}"),
        "x serial": ("speedup_vs_serial", "{:.2f}"),
        "x MLP-only": ("speedup_vs_mlp_only", "{:.2f}"),
        "hidden": ("hidden", "{:.0%}"),
        "bound ms": (lambda row: 1e3 * row["bound_s"], "{:.0f}"),
        "vs bound": ("ratio_to_bound", "{:.2f}"),
        "vs planned": _against("step_s", "planned_s"),
    }
    chosen = "balanced assignment" if setup["routing"] == "balanced" else "the router's own assignment"
    return grid_of(
        f"ep={setup['ep']}, {chosen}, {setup['rate']}: communication takes "
        f"{setup['communication_over_compute']:.2f} of compute",
        columns,
        race["rows"],
        caption=f"{setup['layers']} blocks, {setup['microbatches']} microbatches a rank, medians of "
        f"{setup['rounds']} rounds; {_bound(race)}",
    )


def context_table(race: Row) -> Grid:
    """Of one race of `benchmarks.context`."""
    columns: Columns = {
        "system": ("system", "{}"),
        "step ms": (lambda row: 1e3 * row["step_s"], "{:.0f}"),
        "x blocking": ("speedup_vs_blocking", "{:.2f}"),
        "x torch ring": ("speedup_vs_torch_ring", "{:.2f}"),
        "vs bound": ("ratio_to_bound", "{:.2f}"),
        "exposed ms": (lambda row: 1e3 * row["exposed_s"] if "exposed_s" in row else None, "{:.0f}"),
        "of messages": (
            lambda row: 1e3 * row["exposed_messages_s"] if "exposed_messages_s" in row else None,
            "{:.0f}",
        ),
        "hidden": (lambda row: row.get("hidden"), "{:.0%}"),
        "vs planned": _against("step_s", "planned_s"),
    }
    setup = race["setup"]
    return grid_of(
        f"cp={setup['cp']}, {setup['sequence']} tokens, hidden {setup['hidden']}, {setup['rate']}: "
        f"communication takes {setup['communication_over_compute']:.2f} of compute",
        columns,
        race["rows"],
        caption=f"{setup['layers']} layers, {setup['microbatches']} microbatches, medians of "
        f"{setup['rounds']} rounds; {_bound(race)}",
    )


def dp_table(race: Row) -> Grid:
    """Of one race of `benchmarks.dp`."""
    columns: Columns = {
        "system": ("system", "{}"),
        "step ms": (lambda row: 1e3 * row["step_s"], "{:.0f}"),
        "x fsdp2": ("speedup_vs_fsdp2", "{:.2f}"),
        "x kept": ("speedup_vs_fsdp2_kept", "{:.2f}"),
        "x ddp": ("speedup_vs_ddp", "{:.2f}"),
        "vs own bound": ("ratio_to_own_bound", "{:.2f}"),
        "exposed ms": (lambda row: 1e3 * row["exposed_s"] if "exposed_s" in row else None, "{:.0f}"),
        "hidden": (lambda row: row.get("hidden"), "{:.0%}"),
        "vs planned": _against("step_s", "planned_s"),
        "peak MiB": (lambda row: row["peak_bytes"] / 2**20 if "peak_bytes" in row else None, "{:.0f}"),
    }
    setup = race["setup"]
    return grid_of(
        f"dp={setup['dp']}, hidden {setup['hidden']}, {setup['layers']} layers, {setup['rate']}: two gathers "
        f"and a scatter take {setup['communication_over_compute']:.2f} of compute",
        columns,
        race["rows"],
        caption=f"{setup['microbatches']} microbatches of {setup['microbatch']} a rank, medians of "
        f"{setup['rounds']} rounds; {_bound(race)}",
    )


def unet_table(race: Row) -> Grid:
    """Of one race of `benchmarks.unet`."""

    def name(row: Row) -> str:
        """The system; of what planning chose, what that was."""
        return f"{row['system']} ({row['schedule']})" if row["system"] == "auto" else str(row["system"])

    columns: Columns = {
        "system": (name, "{}"),
        "step ms": (lambda row: 1e3 * row["step_s"], "{:.0f}"),
        "x blocking": ("speedup_vs_blocking_1f1b", "{:.2f}"),
        "x torch 1f1b": ("speedup_vs_torch_1f1b", "{:.2f}"),
        "vs bound": ("ratio_to_bound", "{:.2f}"),
        "exposed ms": (lambda row: 1e3 * max(row["exposed_s"]) if "exposed_s" in row else None, "{:.0f}"),
        "vs planned": _against("step_s", "planned_s"),
    }
    setup = race["setup"]
    forward = max(work["compute_us"] for work in setup["forward"]) / 1e3
    return grid_of(
        f"{setup['channels']} channels, images of {setup['image']}, {setup['rate']}: a forward takes "
        f"{forward:.0f} ms",
        columns,
        race["rows"],
        caption=f"{setup['microbatches']} microbatches of {setup['microbatch']}, medians of "
        f"{setup['rounds']} rounds; {_bound(race)}",
    )


def predict_table(result: Row) -> Grid:
    """Of `benchmarks.predict`."""
    columns: Columns = {
        "cell": ("cell", "{}"),
        "measured ms": ("measured_ms", "{:.0f}"),
        "vs predicted": _against("measured_ms", "predicted_ms"),
        "vs planned": _against("measured_ms", "planned_ms"),
        "exposed %": ("exposed_measured_pct", "{:.1f}"),
        "predicted exposed %": ("exposed_predicted_pct", "{:.1f}"),
        "peak vs predicted": (lambda row: signed(row["peak_difference_pct"] / 100), "{}"),
    }
    summary = (f"{name.replace('_', ' ')} {value:.1f}" for name, value in result["summary"].items())
    return grid_of("", columns, result["rows"], caption="\n".join(summary))


def reshard_table(result: Row) -> Grid:
    """Of `benchmarks.reshard`."""
    columns: Columns = {
        "reshard": ("case", "{}"),
        "mode": (lambda row: row["mode"].replace("_", " "), "{}"),
        "senders, order": ("choice", "{}"),
        "bound s": ("bound_s", SECONDS),
        "predicted s": ("predicted_s", SECONDS),
        "measured s": ("measured_s", SECONDS),
        "vs predicted": _against("measured_s", "predicted_s"),
        "of bound": ("ratio_to_bound", "{:.2f}"),
    }
    setup = result["setup"]
    title = f"{setup['mib']} MiB at {setup['rate']}, medians of {setup['rounds']} rounds"
    caption = f"at most {setup['in_flight_bytes'] >> 20} MiB under way on a rank"
    return grid_of(
        title, columns, result["rows"], words=("reshard", "mode", "senders, order"), caption=caption
    )


def compute_table(result: Row) -> Grid:
    """Of `benchmarks.compute`."""
    columns: Columns = {
        "model": ("model", "{}"),
        "system": ("system", "{}"),
        "threads": ("threads", "{}"),
        "step ms": (lambda row: 1e3 * row["step_s"], "{:.1f}"),
        "vs eager": ("ratio_to_eager", SECONDS),
        "error": ("error", "{:.0e}"),
        "compiled in s": ("compile_s", "{:.0f}"),
    }
    setup = result["setup"]
    title = f"sequence {setup['sequence']}, {setup['dtype']}, medians of {setup['rounds']} rounds"
    caption = "vs eager: the median over rounds of a step's time over eager's in the same round"
    rows = [{**cell["cell"], **row} for cell in result["cells"] for row in cell["rows"]]
    return grid_of(title, columns, rows, words=("model", "system"), caption=caption)


def published_table(result: Row) -> Grid:
    """Of `benchmarks.published`."""
    rows = [
        (f"{part}: {name.replace('_', ' ')}", _value(value))
        for part, figures in result.items()
        for name, value in figures.items()
    ]
    return Grid("", ("figure", "value"), rows, words=(0, 1))


def warn_of_noise(rows: Sequence[Row]) -> None:
    """Say on standard error when a race was disturbed."""
    noisy = [row["system"] for row in rows if max(row["rounds_s"]) > NOISY * min(row["rounds_s"])]
    if noisy:
        Console(width=110, stderr=True).print(
            f"The rounds of {', '.join(noisy)} spread by more than {100 * (NOISY - 1):.0f} %: something else "
            "was running. Quote nothing of this; run again on a quiet machine."
        )


def _against(measured: str, predicted: str) -> tuple[Callable[[Row], str | None], str]:
    """The column of what was measured against what was predicted, where that is known."""

    def cell(row: Row) -> str | None:
        return signed(against(row[measured], row[predicted])) if predicted in row else None

    return cell, "{}"


def _bound(race: Row) -> str:
    """The bound, and who was faster than it, which costs that are right let no one be."""
    setup = race["setup"]
    words = f"lower bound {setup['bound_s']:.3f} s: {setup['binds']}"
    below = [row["system"] for row in race["rows"] if row.get("ratio_to_bound", 1.0) < 1.0 - SHOWN]
    return f"{words}; below it, as its costs are too high: {', '.join(below)}" if below else words


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_value(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_value, value)) or "none"
    return str(value)
