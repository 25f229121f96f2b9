"""The cost model against what others measured: collectives, training steps, printed rates.

    collectives   the all-reduce sweeps: a curve fitted on every second size predicts the others, both ways
                  round; and the topology model, whose few constants all sweeps share
    steps         vTrain's measured steps (`benchmarks.published`)
    rates         Megatron's count of arithmetic gives the rates that its papers print, to their digits

Reads the files of `data/`, touches no device.
"""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.analytic import (
    MEGATRON_DEEPSPEED,
    Software,
    TrainLayout,
    Transformer,
    megatron_flops,
    step_time,
)
from stretto.ir.collectives import ALL_REDUCE
from stretto.ir.compared import against
from stretto.ir.curve import Curve
from stretto.price.collectives import Group, collective_curve
from stretto.price.devices import GB_PER_S, device
from stretto.price.efficiency import Roof

STEP_DEVICE = "a100-80gb"
"""vTrain says A100 and no more; its 39.1B rows with 16 stages of tp 1 need 44 GB of parameters, gradients and
optimizer state on a device, which 40 GB do not."""

MULTI_NIC_GBIT = 100.0
"""vTrain's multi-node cluster: 800 Gb/s for a node of 8."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A measured step."""

    model: Transformer
    layout: TrainLayout
    us: float


def records(name: str) -> Iterator[dict[str, str]]:
    """The rows of a file of `data/`."""
    text = (Path(__file__).parent / "data" / name).read_text(encoding="utf-8")
    return csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))


def sizes(record: Mapping[str, str]) -> tuple[Transformer, TrainLayout]:
    """The model and the layout that a row names."""
    model = Transformer(*(int(record[key]) for key in ("layers", "hidden", "heads", "seq", "vocab")))
    keys = ("tp", "pp", "dp", "micro_batch", "global_batch")
    tp, pp, dp, micro_batch, global_batch = (int(record[key]) for key in keys)
    return model, TrainLayout(tp, pp, dp, micro_batch, global_batch, recompute=True)


def step_rows(which: str) -> list[MeasuredStep]:
    """vTrain's rows, `single` or `multi`."""
    return [
        MeasuredStep(*sizes(r), float(r["ms"]) * 1000.0) for r in records("steps.csv") if r["set"] == which
    ]


def errors(
    rows: Iterable[MeasuredStep],
    nic_gbit: float | None = None,
    roof: Roof | None = None,
    software: Software = MEGATRON_DEEPSPEED,
) -> list[float]:
    """Predicted over measured time, less 1, of each row; nic_gbit: network of a device, and roof: the
    catalogue's by default."""
    fabric = device(STEP_DEVICE).fabric()
    if nic_gbit is not None:
        fabric = replace(fabric, nic_bytes_per_us=nic_gbit / 8 * GB_PER_S)
    roof = roof or device(STEP_DEVICE).roof()
    return [step_time(row.model, row.layout, roof, fabric, software).total_us / row.us - 1 for row in rows]


def mean_error(rows: Iterable[MeasuredStep], nic_gbit: float | None = None) -> float:
    """Mean absolute error: 0.05 is 5 %."""
    return statistics.fmean(map(abs, errors(rows, nic_gbit)))


def steps_report() -> dict[str, object]:
    """Errors on the single-node rows that were not fitted, and on the multi-node rows, in percent."""
    return {
        "single_held_out_percent": 100 * mean_error(step_rows("single")[1::2]),
        "multi_percent": 100 * mean_error(step_rows("multi"), MULTI_NIC_GBIT),
    }


def sweeps() -> dict[tuple[str, str, int], list[tuple[float, float]]]:
    """The all-reduce sweeps: (source, device, ranks) -> (bytes, us), ascending."""
    result: dict[tuple[str, str, int], list[tuple[float, float]]] = defaultdict(list)
    for r in records("all_reduce.csv"):
        result[r["source"], r["device"], int(r["ranks"])].append((float(r["bytes"]), float(r["us"])))
    return {key: sorted(points) for key, points in result.items()}


def _sweep_errors(curve: Curve, points: Sequence[tuple[float, float]]) -> list[float]:
    return [abs(curve.us(nbytes) / us - 1) for nbytes, us in points]


def topology_curve(name: str, ranks: int) -> Curve:
    """The all-reduce of the first `ranks` devices, by the catalogue's figures alone."""
    fabric = device(name).fabric()
    per_node = min(ranks, fabric.node_devices)
    return collective_curve(ALL_REDUCE.name, Group(per_node, ranks // per_node), fabric)


def collectives_report() -> dict[str, object]:
    """Errors in percent: of curves fitted on one half of a sweep on its other half; of the topology model."""

    def held_out(first: int) -> dict[tuple[str, str, int], list[float]]:
        return {
            key: _sweep_errors(Curve.fitted(points[first::2]), points[1 - first :: 2])
            for key, points in sweeps().items()
        }

    def mean(errors: Mapping[tuple[str, str, int], list[float]], only: str = "") -> float:
        return 100 * statistics.fmean(e for key, es in errors.items() if only in key[1] for e in es)

    def worst(errors: Mapping[tuple[str, str, int], list[float]]) -> str:
        key = max(errors, key=lambda k: statistics.fmean(errors[k]))
        return f"{key[0]}, {key[2]} {key[1]}: {100 * statistics.fmean(errors[key]):.1f} %"

    even, odd = held_out(0), held_out(1)
    plain = {key: _sweep_errors(topology_curve(*key[1:]), points) for key, points in sweeps().items()}
    return {
        "sweeps": len(even),
        "fitted_held_out_percent": mean(even),
        "fitted_held_out_swapped_percent": mean(odd),
        "fitted_worst": worst(even),
        "fitted_worst_swapped": worst(odd),
        "topology_percent": mean(plain),
        "topology_a100_percent": mean(plain, "a100"),
        "topology_v100_percent": mean(plain, "v100"),
        "topology_worst": worst(plain),
    }


@dataclass(frozen=True, slots=True)
class Rate:
    """A printed figure, and the least and most that the formula gives for inputs rounded as printed."""

    what: str
    printed: float
    low: float
    high: float
    half_digit: float

    @property
    def agrees(self) -> bool:
        return self.low - self.half_digit <= self.printed <= self.high + self.half_digit


def rates() -> list[Rate]:
    """Every rate of the papers that follows from printed inputs by `megatron_flops`."""
    result: list[Rate] = []
    for r in records("rates.csv"):
        model, layout = sizes(r)
        count, tflops = int(r["devices"]), float(r["tflops"])
        step = megatron_flops(model, layout.global_batch)
        what = f"{r['source']}, {model.layers} x {model.hidden} on {count}"

        if r["seconds"]:
            seconds = float(r["seconds"])
            low, high = (step / ((seconds + half) * count) / 1e12 for half in (0.05, -0.05))
            result.append(Rate(f"{what}: TFLOP/s", tflops, low, high, 0.5))
        if r["pflops"]:
            low, high = ((tflops + half) * count / 1000 for half in (-0.5, 0.5))
            result.append(Rate(f"{what}: PFLOP/s", float(r["pflops"]), low, high, 0.05))
        if r["days"]:
            token = step / (layout.global_batch * model.seq)
            low, high = (300e9 * token / (count * (tflops + half) * 1e12) / 86400 for half in (0.5, -0.5))
            result.append(Rate(f"{what}: days", float(r["days"]), low, high, 0.5))
    return result


def table1_differences() -> dict[str, float]:
    """Other users's steps, fitted on nothing of theirs: SC21's table 1 where the schedule is 1F1B. Measured
    against predicted time, in percent (`stretto.ir.compared`); the time is the printed rate's."""
    result: dict[str, float] = {}
    for r in records("rates.csv"):
        if r["source"] == "table1" and r["interleaved"] == "0":
            model, layout = sizes(r)
            us = megatron_flops(model, layout.global_batch) / (float(r["tflops"]) * 1e6 * layout.devices)
            (error,) = errors([MeasuredStep(model, layout, us)])
            difference = against(us, us * (1.0 + error)) or 0.0
            result[f"{model.layers} x {model.hidden} on {layout.devices}"] = 100 * difference
    return result


def published() -> dict[str, Mapping[str, object]]:
    """All comparisons, as `benchmarks/results/published.json` has them."""
    checked = rates()
    full: dict[str, Mapping[str, object]] = {
        "collectives": collectives_report(),
        "steps": steps_report(),
        "rates": {
            "checked": len(checked),
            "agree": sum(rate.agrees for rate in checked),
            "disagree": [rate.what for rate in checked if not rate.agrees],
        },
        "sc21_table1_difference_percent": table1_differences(),
    }
    return {
        part: {name: round(v, 4) if isinstance(v, float) else v for name, v in figures.items()}
        for part, figures in full.items()
    }
