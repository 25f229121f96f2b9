"""Training steps that others measured, predicted.

The rows are vTrain's (Bang et al., MICRO 2024): single-node and multi-node steps of GPT models. A row's time
is predicted by `analytic` with the catalogue's figures; what no sheet says (launches, shortest
kernels, the framework's own time) was fitted on every second single-node row by `fit_steps`.
Reads the files of `data/`.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.analytic import MEGATRON_DEEPSPEED, Layout, Software, Transformer, step_time
from stretto.price.collectives import CollectiveModel
from stretto.price.devices import GB_PER_S, device
from stretto.price.efficiency import Roof

STEP_DEVICE = "a100-80gb"
"""vTrain says A100 and no more; its 39.1B rows with 16 stages of tp 1 hold 44 GB of parameters, gradients and
optimizer state on a device, which 40 GB do not."""

MULTI_NIC_GBIT = 100.0
"""vTrain's multi-node cluster: 800 Gb/s for a node of 8."""


@dataclass(frozen=True, slots=True)
class Row:
    """A measured step."""

    model: Transformer
    layout: Layout
    us: float


def records(name: str) -> Iterator[dict[str, str]]:
    """The rows of a file of `data/`."""
    text = (Path(__file__).parent / "data" / name).read_text(encoding="utf-8")
    return csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))


def sizes(record: Mapping[str, str]) -> tuple[Transformer, Layout]:
    """The model and the layout that a row names."""
    model = Transformer(*(int(record[key]) for key in ("layers", "hidden", "heads", "seq", "vocab")))
    keys = ("tp", "pp", "dp", "micro_batch", "global_batch")
    tp, pp, dp, micro_batch, global_batch = (int(record[key]) for key in keys)
    return model, Layout(tp, pp, dp, micro_batch, global_batch, recompute=True)


def step_rows(which: str) -> list[Row]:
    """vTrain's rows, `single` or `multi`."""
    return [Row(*sizes(r), float(r["ms"]) * 1000.0) for r in records("steps.csv") if r["set"] == which]


def errors(
    rows: Iterable[Row],
    nic_gbit: float | None = None,
    roof: Roof | None = None,
    software: Software = MEGATRON_DEEPSPEED,
) -> list[float]:
    """Predicted over measured time, less 1, of each row; nic_gbit: network of a device, and roof: the
    catalogue's by default."""
    fabric = device(STEP_DEVICE).fabric()
    if nic_gbit is not None:
        fabric = replace(fabric, nic_bytes_per_us=nic_gbit / 8 * GB_PER_S)
    links, roof = CollectiveModel(fabric, {}), roof or device(STEP_DEVICE).roof()
    return [step_time(row.model, row.layout, roof, links, software).total_us / row.us - 1 for row in rows]


def mean_error(rows: Iterable[Row], nic_gbit: float | None = None) -> float:
    """Mean absolute error: 0.05 is 5 %."""
    return statistics.fmean(map(abs, errors(rows, nic_gbit)))


def steps_report() -> dict[str, object]:
    """Errors on the single-node rows that were not fitted, and on the multi-node rows, in percent."""
    return {
        "single_held_out_percent": 100 * mean_error(step_rows("single")[1::2]),
        "multi_percent": 100 * mean_error(step_rows("multi"), MULTI_NIC_GBIT),
    }
