"""Training steps that others measured, predicted; and the few factors that are fitted on half of them.

The rows are vTrain's (Bang et al., MICRO 2024): single-node and multi-node steps of GPT models. A row's time
is predicted by `stretto.bench.analytic` with the catalogue's figures; what no sheet says (launches, shortest
kernels, the framework's own time) is fitted on every second single-node row. Reads the package's data files.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources

from stretto.bench.analytic import MEGATRON_DEEPSPEED, Layout, Software, Transformer, step_time
from stretto.price.collectives import CollectiveModel
from stretto.price.devices import GB_PER_S, device
from stretto.price.efficiency import Roof

STEP_DEVICE = "a100-80gb"
"""vTrain says A100 and no more; its 39.1B rows with 16 stages of tp 1 hold 44 GB of parameters, gradients and
optimizer state on a device, which 40 GB do not."""

MULTI_NIC_GBIT = 100.0
"""vTrain's multi-node cluster: 800 Gb/s for a node of 8."""

FACTORS: Mapping[str, tuple[float, float]] = {
    # name: (least, most) that is credible
    "kernel_us": (1.0, 10.0),
    "launch_us": (2.0, 40.0),
    "unaligned": (0.1, 1.0),
    "backward_launches": (30.0, 120.0),
    "collective_launches": (0.5, 20.0),
    "message_us": (10.0, 2000.0),
    "step_us": (100.0, 20_000.0),
}
"""What is fitted on the steps; all else is the catalogue's."""

START = {
    "kernel_us": 2.0,
    "launch_us": 10.0,
    "unaligned": 0.5,
    "backward_launches": 60.0,
    "collective_launches": 4.0,
    "message_us": 50.0,
    "step_us": 1000.0,
}
"""Where the fit begins: round numbers."""


@dataclass(frozen=True, slots=True)
class Row:
    """A measured step."""

    model: Transformer
    layout: Layout
    us: float


@dataclass(frozen=True, slots=True)
class Factors:
    """A set of fitted factors, applied to the device and the software that they belong to."""

    values: Mapping[str, float]

    def roof(self) -> Roof:
        roof = device(STEP_DEVICE).roof()
        mine = {name: us for name, us in self.values.items() if hasattr(roof.efficiency, name)}
        return replace(roof, efficiency=replace(roof.efficiency, **mine))

    def software(self) -> Software:
        mine = {name: v for name, v in self.values.items() if hasattr(MEGATRON_DEEPSPEED, name)}
        return replace(MEGATRON_DEEPSPEED, **mine)


def shipped() -> Factors:
    """The factors that the catalogue and `MEGATRON_DEEPSPEED` carry."""
    reach = device(STEP_DEVICE).roof().efficiency
    found = {name: getattr(reach, name, None) for name in FACTORS}
    return Factors({name: getattr(MEGATRON_DEEPSPEED, name) if v is None else v for name, v in found.items()})


def records(name: str) -> Iterator[dict[str, str]]:
    """The rows of a packaged data file."""
    text = resources.files("stretto.price").joinpath(f"data/{name}").read_text(encoding="utf-8")
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


def errors(rows: Iterable[Row], factors: Factors, nic_gbit: float | None = None) -> list[float]:
    """Predicted over measured time, less 1, of each row; nic_gbit: network of a device, the catalogue's by
    default."""
    fabric = device(STEP_DEVICE).fabric()
    if nic_gbit is not None:
        fabric = replace(fabric, nic_bytes_per_us=nic_gbit / 8 * GB_PER_S)
    links, roof, software = CollectiveModel(fabric, {}), factors.roof(), factors.software()
    return [step_time(row.model, row.layout, roof, links, software).total_us / row.us - 1 for row in rows]


def mean_error(rows: Iterable[Row], factors: Factors, nic_gbit: float | None = None) -> float:
    """Mean absolute error: 0.05 is 5 %."""
    return statistics.fmean(map(abs, errors(rows, factors, nic_gbit)))


def fit(rows: Sequence[Row], start: Mapping[str, float] = START) -> Factors:
    """The factors of least mean error on `rows`: one at a time up and down by a part that is halved when
    nothing helps, until it is under 1 %. Deterministic."""
    values, part = dict(start), 0.4
    least = mean_error(rows, Factors(values))
    while part > 0.01:
        better = False
        for name, (low, high) in FACTORS.items():
            for factor in (1 + part, 1 / (1 + part)):
                tried = {**values, name: min(max(values[name] * factor, low), high)}
                error = mean_error(rows, Factors(tried))
                if error < least - 1e-6:
                    values, least, better = tried, error, True
                    break
        if not better:
            part /= 2
    return Factors(values)


def steps_report() -> dict[str, object]:
    """Fit on every second single-node row; errors on the others and on the multi-node rows, in percent."""
    single, multi = step_rows("single"), step_rows("multi")
    fitted = fit(single[::2])
    return {
        "fitted_on_rows": len(single[::2]),
        "factors": {name: round(value, 4) for name, value in fitted.values.items()},
        "single_fitted_percent": 100 * mean_error(single[::2], fitted),
        "single_held_out_percent": 100 * mean_error(single[1::2], fitted),
        "multi_percent": 100 * mean_error(multi, fitted, MULTI_NIC_GBIT),
        "shipped_single_held_out_percent": 100 * mean_error(single[1::2], shipped()),
        "shipped_multi_percent": 100 * mean_error(multi, shipped(), MULTI_NIC_GBIT),
    }
