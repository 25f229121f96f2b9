"""The table of one race of `stretto bench tensor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from stretto.cli.bench import NOISY

COLUMNS = ("system", "step s", "vs off", "vs torch", "vs bound", "predicted", "exposed s", "hidden", "of W")


def print_race(race: dict[str, Any]) -> None:
    """Print the race as a table, and say when it was disturbed."""
    setup, rows = race["setup"], race["rows"]
    sp = " with sequence parallelism" if setup["sequence_parallel"] else ""
    table = Table(
        title=f"hidden {setup['hidden']}, {setup['layers']} layers, pp={setup['pp']} tp={setup['tp']}{sp}, "
        f"{setup['rate']}: communication takes {setup['communication_over_compute']:.2f} of compute",
        caption=f"{setup['microbatches']} microbatches, medians of {setup['rounds']} rounds; lower bound "
        f"{setup['bound_s']:.3f} s: {setup['binds']}",
    )
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "system" else "right")
    for row in rows:
        table.add_row(
            _name(row),
            f"{row['step_s']:.3f}",
            f"{row['speedup_vs_off']:.3f}",
            f"{row['speedup_vs_torch']:.3f}",
            f"{row['ratio_to_bound']:.3f}",
            "" if "predicted_s" not in row else f"{100 * (row['predicted_over_measured'] - 1):+.1f} %",
            "" if "exposed_s" not in row else f"{max(row['exposed_s']):.3f}",
            _shares(row.get("hidden", ())),
            _shares(row.get("hidden_of_w", ())) if row["system"] == "local" else "",
        )
    Console(width=110).print(table)
    noisy = [row["system"] for row in rows if max(row["rounds_s"]) > NOISY * min(row["rounds_s"])]
    if noisy:
        Console(width=110, stderr=True).print(
            f"The rounds of {', '.join(noisy)} spread by more than {100 * (NOISY - 1):.0f} %: something else "
            "was running. Quote nothing of this; run again on a quiet machine."
        )


def _name(row: dict[str, Any]) -> str:
    """The system; where planning found that less overlap is faster, what it took."""
    chosen = row.get("overlap", row["system"])
    return str(row["system"]) if chosen == row["system"] else f"{row['system']} (as {chosen})"


def _shares(by_place: Sequence[float | None]) -> str:
    """The share that was hidden at each place of the pipeline."""
    return ", ".join("" if share is None else f"{100 * share:.0f} %" for share in by_place)
