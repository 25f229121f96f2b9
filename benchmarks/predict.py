"""Measured against predicted, over a grid of GPTs, layouts and rates of the network.

    1. A cell is a shape of GPT, a layout (pp, tp) and a rate. Cells of one layout and rate share a lab, one
       rank on each host; ranks share the machine's cores equally.
    2. In each cell the ranks capture, measure their costs together, plan, run some steps, and measure their
       costs again. The plan, simulated with these (`kept`), is compared with what steps took on
       average: time, exposed communication, peak memory. What was predicted when it was made is kept too.

A worker (`run_worker`, once on each host) does step 2.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import stretto
from benchmarks.labs import CORES, lab_of, result_of
from benchmarks.racing import (
    drop_gradients,
    is_first,
    keep_run,
    prediction_of,
    say_on_first,
    timed,
    with_costs,
)
from benchmarks.work import GPTWork
from stretto.ir.compared import against, signed
from stretto.ir.plan import Plan
from stretto.ir.program import OverlapMode
from stretto.ir.timeline import SpanKind, Timeline
from stretto.measure.measured import measured_costs
from stretto.measure.profile import typical
from stretto.schedule.once import without_once

WARM_UPS = 2
"""Steps that do not count: first messages open connections, first steps fill caches."""

ROUND_US = 3_000_000.0
MOST_STEPS = 4
"""A round has as many steps as take this long, at least one and at most `MOST_STEPS`."""


@dataclass(frozen=True, slots=True)
class GridCell(GPTWork):
    """One place of the grid. overlap: as in `stretto.plan`."""

    name: str = ""
    overlap: OverlapMode = "window"

    def folder(self, root: Path) -> Path:
        """Where a grid keeps what it found of this cell."""
        return root / str(self).replace(" ", "-")

    def __str__(self) -> str:
        return f"{self.name} {self.layout} {self.rate}"


@dataclass(frozen=True, slots=True)
class CellResult:
    """A cell's figures. Shares are of the step, the mean over places; peaks by place.

    planned_ms: what the plan said when it was made; predicted_ms: with costs measured again after the steps;
    measured_ms: of steps; rounds_ms: the median of each round.
    """

    cell: str
    planned_ms: float
    predicted_ms: float
    measured_ms: float
    rounds_ms: tuple[float, ...]
    exposed_predicted: float
    exposed_measured: float
    peak_predicted: tuple[int, ...]
    peak_measured: tuple[int, ...]

    @property
    def difference(self) -> float:
        """Of the measured step against the predicted (`stretto.ir.compared`)."""
        return against(self.measured_ms, self.predicted_ms) or 0.0

    @property
    def planned_difference(self) -> float:
        """Of the measured step against the planned."""
        return against(self.measured_ms, self.planned_ms) or 0.0

    @property
    def exposed_points(self) -> float:
        """Of exposed shares, measured less predicted, in percent of the step."""
        return 100.0 * (self.exposed_measured - self.exposed_predicted)

    @property
    def peak_difference(self) -> float:
        """Of a place's measured peak memory against its predicted, the largest."""
        pairs = zip(self.peak_measured, self.peak_predicted, strict=True)
        return max((against(m, p) or 0.0 for m, p in pairs if m), key=abs, default=0.0)


@dataclass(frozen=True, slots=True)
class GridLab:
    """What the ranks of a lab are asked. cells: as data; folder: what ran is kept there."""

    cells: list[dict[str, Any]]
    rounds: int
    folder: str
    world: int
    threads_per_rank: int = 1

    def made(self) -> list[GridCell]:
        return [GridCell(**data) for data in self.cells]


_SHAPE = GridCell(microbatch=1, microbatches=4)
SHAPES = (
    replace(_SHAPE, name="wide", hidden=1024, layers=2, heads=16, sequence=128, vocab=2048),
    replace(_SHAPE, name="deep", hidden=512, layers=6, heads=8, sequence=128, vocab=1024),
    replace(_SHAPE, name="long", hidden=1024, layers=2, heads=16, sequence=256, vocab=2048, microbatches=3),
    replace(_SHAPE, name="rows", hidden=640, layers=4, heads=10, sequence=64, vocab=4096, microbatch=3),
)
"""Small enough for half a core a rank, and different in what takes their time."""

RATES = ("50mbit", "100mbit", "200mbit", "1gbit", "unlimited")
LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2))


def grid(rates: tuple[str, ...] = RATES, overlap: OverlapMode = "window") -> list[GridCell]:
    """All cells; one rank alone has no network, and one rate. Every other shape has sequence parallelism."""
    return [
        replace(shape, pp=pp, tp=tp, rate=rate, sequence_parallel=tp > 1 and number % 2 == 1, overlap=overlap)
        for pp, tp in LAYOUTS
        for rate in (rates if pp * tp > 1 else ("unlimited",))
        for number, shape in enumerate(SHAPES)
    ]


# --- the worker: step 2 --------------------------------------------------------------------------------


def run_cell(cell: GridCell, rounds: int) -> tuple[CellResult, Plan, Plan, list[Timeline]]:
    """Step 2 on one rank; every rank of the cell calls it. Returns its figures, the plan as it was made, the
    plan with the costs after its steps, and all counted steps."""
    model, batch = cell.build()
    plan = stretto.plan(cell.capture(model, batch, overlap=cell.overlap), "local", optimizer="sgd")
    runner = stretto.Runner(plan, model)
    timelines: list[Timeline] = []

    def step() -> float:
        drop_gradients(runner.parameters())
        took_s = timed(lambda: runner.step(batch))
        timelines.append(runner.timeline())
        return took_s * 1e3

    for _ in range(WARM_UPS):
        step()
    timelines.clear()
    steps = max(1, min(MOST_STEPS, math.ceil(ROUND_US / prediction_of(plan).step_us)))
    times = [[step() for _ in range(steps)] for _ in range(rounds)]
    runner.close()
    again = with_costs(plan, measured_costs(without_once(plan.job), plan.schedule))
    prediction = prediction_of(again)
    exposed = [
        statistics.mean(us / timeline.step_us for us in timeline.by_rank(SpanKind.EXPOSED))
        for timeline in timelines
    ]
    result = CellResult(
        cell=str(cell),
        planned_ms=prediction_of(plan).step_us / 1e3,
        predicted_ms=prediction.step_us / 1e3,
        measured_ms=typical([ms for together in times for ms in together]),
        rounds_ms=tuple(statistics.median(together) for together in times),
        exposed_predicted=statistics.mean(us / prediction.step_us for us in prediction.exposed_us),
        exposed_measured=statistics.median(exposed),
        peak_predicted=prediction.peak_bytes,
        peak_measured=timelines[-1].peak_bytes,
    )
    return result, plan, again, timelines


def run_worker(setup: GridLab) -> list[dict[str, Any]]:
    """Step 2 of all cells of a lab; rank 0 keeps what ran of each."""
    figures = []
    for cell in setup.made():
        result, planned, plan, timelines = run_cell(cell, setup.rounds)
        if is_first():
            keep_run(cell.folder(Path(setup.folder)), planned, plan, timelines)
        figures.append(asdict(result))
        say_on_first(f"{cell}: {signed(result.difference)} against predicted")
    return figures


# --- the grid: step 1 ----------------------------------------------------------------------------------


def run_grid(
    cells: Sequence[GridCell],
    rounds: int,
    folder: Path,
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Measure all cells, and sum up. Needs root, as every lab does.

    Returns {"setup", "rows", "summary"}. folder: every cell has one in it (`kept`). keep: is given as
    much after each lab, of the cells so far, so that an end before the last loses none. Raises RunError when
    a lab's ranks fail.
    """
    labs: dict[tuple[int, int, str], list[GridCell]] = defaultdict(list)
    for cell in cells:
        labs[cell.pp, cell.tp, cell.rate].append(cell)
    done: dict[GridCell, CellResult] = {}
    for number, ((pp, tp, rate), together) in enumerate(labs.items(), 1):
        say(f"lab {number} of {len(labs)}: pp={pp} tp={tp} {rate}, {len(together)} shapes")
        setup = GridLab([asdict(cell) for cell in together], rounds, str(folder), pp * tp)
        figures = result_of(lab_of(pp * tp, rate), "predict", asdict(setup), what=str(together[0]))
        done |= {cell: CellResult(**one) for cell, one in zip(together, figures, strict=True)}
        keep(_result(done, rounds))
    return _result({cell: done[cell] for cell in cells}, rounds)


def _result(done: Mapping[GridCell, CellResult], rounds: int) -> dict[str, Any]:
    shapes = {cell.name: asdict(cell) for cell in SHAPES}
    return {
        "setup": {
            "rounds": rounds,
            "overlap": next(iter(done)).overlap,
            "cores": CORES,
            "torch": torch.__version__,
            "shapes": [shapes[name] for name in dict.fromkeys(cell.name for cell in done)],
        },
        "rows": [_row(result) for result in done.values()],
        "summary": _summary(list(done.values())),
    }


def _row(found: CellResult) -> dict[str, Any]:
    return {
        "cell": found.cell,
        "measured_ms": found.measured_ms,
        "planned_ms": found.planned_ms,
        "predicted_ms": found.predicted_ms,
        "difference_pct": 100.0 * found.difference,
        "exposed_measured_pct": 100.0 * found.exposed_measured,
        "exposed_predicted_pct": 100.0 * found.exposed_predicted,
        "peak_difference_pct": 100.0 * found.peak_difference,
        "rounds_ms": list(found.rounds_ms),
    }


def _summary(rows: Sequence[CellResult]) -> dict[str, float]:
    """Mean and worst magnitudes, in percent (of the step, of the peak) and in points of exposed share."""
    figures: dict[str, list[float]] = {
        "step_difference_pct": [100.0 * result.difference for result in rows],
        "planned_step_difference_pct": [100.0 * result.planned_difference for result in rows],
        "exposed_points": [result.exposed_points for result in rows],
        "peak_difference_pct": [100.0 * result.peak_difference for result in rows],
        "spread_pct": [100.0 * (max(f.rounds_ms) / min(f.rounds_ms) - 1.0) for f in rows],
    }
    summary = {"cells": float(len(rows))}
    for name, values in figures.items():
        summary[f"mean_{name}"] = statistics.mean(map(abs, values))
        summary[f"worst_{name}"] = max(values, key=abs)
    return summary


SETUP = GridLab
"""What a worker of this module takes."""
