"""The tables of `stretto bench`: of each race's JSON, the one that is printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from stretto.report.grid import Grid

NOISY = 1.15
"""Slowest over fastest round of one system from which the race calls itself disturbed. Measured on a quiet
machine of 2 cores: 1.03 to 1.08."""


def pipeline_table(result: dict[str, Any]) -> Grid:
    """Of `bench.pipeline`."""
    setup, rows = result["setup"], result["rows"]
    cells = []
    for row in rows:
        error = None if row["predicted_s"] is None else row["predicted_s"] / row["step_s"] - 1
        cells.append(
            (
                row["system"],
                f"{row['step_s']:.3f}",
                f"{row['speedup_vs_torch_1f1b']:.3f}",
                f"{row['ratio_to_bound']:.3f}",
                _number(row["exposed_s"]),
                _number(row["predicted_s"]),
                _change(error),
            )
        )
    return Grid(
        f"{setup['rate']}, {setup['microbatches']} microbatches, medians of {setup['rounds']} rounds",
        ("system", "step s", "vs torch 1f1b", "vs bound", "exposed s", "predicted s", "error"),
        cells,
        caption=_bound(setup),
    )


def tensor_table(race: dict[str, Any]) -> Grid:
    """Of one race of `bench.tensor`."""
    setup = race["setup"]
    sp = " with sequence parallelism" if setup["sequence_parallel"] else ""
    cells = []
    for row in race["rows"]:
        # Where planning found that less overlap is faster, what it took.
        taken = row.get("overlap", row["system"])
        cells.append(
            (
                row["system"] if taken == row["system"] else f"{row['system']} (as {taken})",
                f"{row['step_s']:.3f}",
                f"{row['speedup_vs_off']:.3f}",
                f"{row['speedup_vs_torch']:.3f}",
                f"{row['ratio_to_bound']:.3f}",
                _change(row["predicted_over_measured"] - 1 if "predicted_s" in row else None),
                _number(max(row["exposed_s"]) if "exposed_s" in row else None),
                ", ".join("" if one is None else f"{100 * one:.0f} %" for one in row.get("hidden", ())),
            )
        )
    return Grid(
        f"hidden {setup['hidden']}, {setup['layers']} layers, pp={setup['pp']} tp={setup['tp']}{sp}, "
        f"{setup['rate']}: communication takes {setup['communication_over_compute']:.2f} of compute",
        ("system", "step s", "vs off", "vs torch", "vs bound", "predicted", "exposed s", "hidden"),
        cells,
        caption=f"{setup['microbatches']} microbatches, medians of {setup['rounds']} rounds; {_bound(setup)}",
    )


def predict_table(result: dict[str, Any]) -> Grid:
    """Of `bench.predict`."""
    return Grid(
        "",
        ("cell", "measured ms", "predicted", "planned", "exposed %", "predicted", "peak"),
        [
            (
                row["cell"],
                f"{row['measured_ms']:.0f}",
                f"{row['error_pct']:+.1f} %",
                _change(row["planned_ms"] / row["measured_ms"] - 1),
                f"{row['exposed_measured_pct']:.1f}",
                f"{row['exposed_predicted_pct']:.1f}",
                f"{row['peak_error_pct']:+.1f} %",
            )
            for row in result["rows"]
        ],
        caption="\n".join(
            f"{name.replace('_', ' ')} {value:.1f}" for name, value in result["summary"].items()
        ),
    )


def reshard_table(result: dict[str, Any]) -> Grid:
    """Of `bench.reshard`."""
    setup = result["setup"]
    return Grid(
        f"{setup['mib']} MiB at {setup['rate']}, medians of {setup['rounds']} rounds",
        ("reshard", "mode", "senders, order", "bound s", "predicted s", "measured s", "error", "of bound"),
        [
            (
                row["case"],
                row["mode"].replace("_", " "),
                row["choice"],
                f"{row['bound_s']:.3f}",
                f"{row['predicted_s']:.3f}",
                f"{row['measured_s']:.3f}",
                _change(1 / row["measured_over_predicted"] - 1),
                f"{row['ratio_to_bound']:.2f}",
            )
            for row in result["rows"]
        ],
        words=(0, 1, 2),
        caption=f"at most {setup['in_flight_bytes'] >> 20} MiB under way on a rank",
    )


def compute_table(result: dict[str, Any]) -> Grid:
    """Of `bench.compute`."""
    setup, sections = result["setup"], set()
    rows: list[tuple[str, ...]] = []
    for cell in result["cells"]:
        sections.add(len(rows))
        for number, row in enumerate(cell["rows"]):
            rows.append(
                (
                    cell["cell"]["model"] if not number else "",
                    row["system"],
                    str(cell["cell"]["threads"]) if not number else "",
                    f"{1e3 * row['step_s']:.1f}",
                    f"{row['ratio_to_eager']:.3f}",
                    f"{row['error']:.0e}",
                    "" if row["compile_s"] is None else f"{row['compile_s']:.0f}",
                )
            )
    return Grid(
        f"sequence {setup['sequence']}, {setup['dtype']}, medians of {setup['rounds']} rounds",
        ("model", "system", "threads", "step ms", "vs eager", "error", "compiled in s"),
        rows,
        words=(0, 1),
        caption="vs eager: the median over rounds of a step's time over eager's in the same round",
        sections=frozenset(sections),
    )


def published_table(result: dict[str, Any]) -> Grid:
    """Of `bench.published`."""
    rows = [
        (f"{part}: {name.replace('_', ' ')}", _value(value))
        for part, figures in result.items()
        for name, value in figures.items()
    ]
    return Grid("", ("figure", "value"), rows, words=(0, 1))


def warn_of_noise(rows: Sequence[dict[str, Any]]) -> None:
    """Say on standard error when a race was disturbed."""
    noisy = [row["system"] for row in rows if max(row["rounds_s"]) > NOISY * min(row["rounds_s"])]
    if noisy:
        Console(width=110, stderr=True).print(
            f"The rounds of {', '.join(noisy)} spread by more than {100 * (NOISY - 1):.0f} %: something else "
            "was running. Quote nothing of this; run again on a quiet machine."
        )


def _bound(setup: dict[str, Any]) -> str:
    return f"lower bound {setup['bound_s']:.3f} s: {setup['binds']}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _change(share: float | None) -> str:
    return "" if share is None else f"{100 * share:+.1f} %"


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_value(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_value, value)) or "none"
    return str(value)
