"""What a model let see of its steps, in tables and sentences: loads by expert, and whatever else it observes.

Of a layer with experts (a module that observes `rows`) tables show shares, of any other metric its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.ir.metrics import BUFFER, DROPPED, ROWS, Observed, ObservedRun
from stretto.report.grid import Grid, format_share

MOST_NAMED = 6
"""Experts that a cell names."""


@dataclass(frozen=True, slots=True)
class Load:
    """A layer's experts over some steps, as shares of the rows that its router sends.

    shares, least, most: by expert, in the mean of the steps, in the step with the least and the most of it.
    dropped: share of the rows; None where none can be. buffer: as `ir.metrics.BUFFER`, the most.
    """

    module: str
    steps: int
    rows: float
    shares: tuple[float, ...]
    least: tuple[float, ...]
    most: tuple[float, ...]
    dropped: float | None
    buffer: float | None

    @property
    def busiest(self) -> int:
        """The expert with the most rows."""
        return max(range(len(self.shares)), key=lambda e: self.shares[e])

    @property
    def idlest(self) -> int:
        """That with the fewest."""
        return min(range(len(self.shares)), key=lambda e: self.shares[e])

    @property
    def without(self) -> tuple[int, ...]:
        """Experts that got none in any step."""
        return tuple(e for e, share in enumerate(self.most) if share == 0.0)


def loads_of(observed: Sequence[Observed]) -> tuple[Load, ...]:
    """Of all layers with experts, in the model's order."""
    by_name = {(one.module, one.name): one for one in observed}
    result: list[Load] = []
    for one in observed:
        total = sum(one.mean)
        if one.name != ROWS or not total:
            continue
        dropped, buffer = by_name.get((one.module, DROPPED)), by_name.get((one.module, BUFFER))
        shares, least, most = (
            tuple(count / total for count in counts) for counts in (one.mean, one.least, one.most)
        )
        result.append(
            Load(
                one.module,
                one.steps,
                total,
                shares,
                least,
                most,
                None if dropped is None else sum(dropped.mean) / total,
                None if buffer is None else buffer.most[0],
            )
        )
    return tuple(result)


def load_grid(run: ObservedRun) -> Grid | None:
    """A row for each layer with experts; None for a model without."""
    loads = loads_of(run.end)
    if not loads:
        return None
    of_all_steps = {load.module: load for load in loads_of(run.all)}
    rows = []
    for load in loads:
        without = ", ".join(map(str, load.without[:MOST_NAMED]))
        if len(load.without) > MOST_NAMED:
            without += f" and {len(load.without) - MOST_NAMED} more"
        buffer = of_all_steps[load.module].buffer
        rows.append(
            (
                load.module,
                f"{format_share(load.shares[load.idlest])} ({load.idlest})",
                f"{format_share(load.shares[load.busiest])} ({load.busiest})",
                f"{format_share(min(load.least))} to {format_share(max(load.most))}",
                without or "-",
                "-" if load.dropped is None else format_share(load.dropped),
                "-" if buffer is None else f"{buffer:.2f}",
            )
        )
    head = ("", "fewest", "most", "in single steps", "none", "dropped", "buffer")
    even = " or ".join(dict.fromkeys(format_share(1 / len(load.shares)) for load in loads))
    caption = (
        f"Shares of the rows (a token's choices) that a layer's router sends; {even} would be even. fewest, "
        "most: in the mean of the steps, with the expert's number. none: experts without any."
    )
    if any(load.dropped is not None for load in loads):
        caption += " dropped: rows that found no room."
    if any(load.buffer is not None for load in of_all_steps.values()):
        caption += (
            " buffer: rows for the rank that was sent most, over the mean, in any of "
            f"{loads_of(run.all)[0].steps} steps; an ep_buffer of as much has room for them."
        )
    return Grid(f"Load by expert, steps {run.first} to {run.last}", head, rows, (0, 4), caption)


def others_grid(run: ObservedRun) -> Grid | None:
    """All other metrics: of each the mean of the steps, and how far its elements were from it; None for a
    model without."""
    known = {load.module for load in loads_of(run.end)}
    rows = [
        (
            f"{one.module} {one.name}".strip(),
            str(len(one.mean)),
            f"{sum(one.mean) / len(one.mean):.4g}",
            f"{min(one.least):.4g}",
            f"{max(one.most):.4g}",
        )
        for one in run.end
        if one.mean and not (one.module in known and one.name in (ROWS, DROPPED, BUFFER))
    ]
    if not rows:
        return None
    head = ("", "elements", "mean", "least", "most")
    return Grid(f"What the model lets see, steps {run.first} to {run.last}", head, rows)


def dropped_words(observed: Sequence[Observed]) -> str:
    """`1.2% of the rows for experts found no room`, of all layers; "" where none were dropped."""
    loads = loads_of(observed)
    rows = sum(load.rows for load in loads)
    dropped = sum((load.dropped or 0.0) * load.rows for load in loads)
    return f"{format_share(dropped / rows)} of the rows for experts found no room" if dropped else ""


def load_findings(run: ObservedRun) -> list[str]:
    """What is worth saying of loads, in sentences."""
    loads = loads_of(run.end)
    if not loads:
        return []
    worst = max(loads, key=lambda load: max(load.shares) * len(load.shares))
    times = max(worst.shares) * len(worst.shares)
    said = [
        f"The busiest expert is number {worst.busiest} of {worst.module}: {times:.2f} times the even share, "
        f"in the mean of the steps {run.first} to {run.last}."
    ]
    idle = [load for load in loads if load.without]
    if idle:
        count = sum(len(load.without) for load in idle)
        first = f"number {idle[0].without[0]} of {idle[0].module}"
        said.append(
            f"{count} experts got no rows, as {first}." if count > 1 else f"Expert {first} got no rows."
        )
    for words, where in (
        (dropped_words(run.end), f"In the steps {run.first} to {run.last}"),
        (dropped_words(run.evaluation), "In the last evaluation"),
    ):
        if words:
            said.append(f"{where} {words}, and were dropped.")
    return said
