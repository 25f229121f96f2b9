"""The grid of `stretto bench predict`: labs one after the other, cells predicted from others, the summary.

Needs root, as every lab does. Touches the lab, the worker's files, and nothing while a lab is up.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from stretto.bench.in_lab import CORES, lab_of, run_worker
from stretto.bench.predict import CALIBRATION, FIGURES, Cell, Found
from stretto.bench.transfer import transferred
from stretto.errors import PlanError, UsageError
from stretto.ir.plan import Plan
from stretto.ir.serialize import load_plan
from stretto.lab.rates import parse_rate
from stretto.price.calibration import load_calibration

CALIBRATED_SHAPES = ("deep", "long")
CALIBRATED_RATES = ("100mbit", "1gbit", "unlimited")
"""Cells of these shapes at these rates price the others; no other cell's costs are used for that."""


def run_grid(
    cells: Sequence[Cell],
    rounds: int,
    folder: Path,
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Measure all cells, predict those again that are not calibrated, and sum up.

    Returns {"setup", "rows", "summary"}. folder: every cell has one in it (`bench.kept`). keep: is given as
    much after each lab, of the cells so far and without what is predicted from others, so that an end before
    the last loses none. Raises RunError when a lab's ranks fail.
    """
    labs: dict[tuple[int, int, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        labs[cell.pp, cell.tp, cell.rate].append(cell)
    done: dict[Cell, Found] = {}
    for number, ((pp, tp, rate), together) in enumerate(labs.items(), 1):
        say(f"lab {number} of {len(labs)}: pp={pp} tp={tp} {rate}, {len(together)} shapes")
        _run_lab([(cell, beside(cell, cells)) for cell in together], rounds, folder)
        done |= {cell: Found(**json.loads((cell.folder(folder) / FIGURES).read_text())) for cell in together}
        keep(_result(done, rounds, {}))
    say("predicting the cells that were not calibrated")
    return _result({cell: done[cell] for cell in cells}, rounds, _transfer(cells, folder, say))


def _result(done: Mapping[Cell, Found], rounds: int, predicted: Mapping[Cell, Plan]) -> dict[str, Any]:
    """predicted: cells that were predicted from others."""
    return {
        "setup": {
            "rounds": rounds,
            "overlap": next(iter(done)).overlap,
            "cores": CORES,
            "torch": torch.__version__,
            "calibrated_shapes": list(CALIBRATED_SHAPES),
            "calibrated_rates": [
                rate for rate in CALIBRATED_RATES if any(cell.rate == rate for cell in done)
            ],
            "shapes": [asdict(shape) for shape in dict.fromkeys(cell.shape for cell in done)],
        },
        "rows": [_row(cell, found, predicted.get(cell)) for cell, found in done.items()],
        "summary": _summary(done, predicted),
    }


def _run_lab(cells: Sequence[tuple[Cell, Sequence[Cell]]], rounds: int, folder: Path) -> None:
    """cells: with those whose ops are measured beside each."""
    data = json.dumps([[asdict(cell), [asdict(other) for other in others]] for cell, others in cells])
    first = cells[0][0]
    run_worker(
        lab_of(first.world, first.rate),
        "stretto.bench.predict",
        [data, str(rounds), str(folder)],
        1,
        str(first),
    )


def beside(cell: Cell, cells: Sequence[Cell]) -> list[Cell]:
    """One cell of each calibrated shape in the cell's layout, whose ops price the cell; none for one that is
    calibrated itself."""
    if is_calibrated(cell):
        return []
    return list({other.shape: other for other in _pricing(cell, cells)}.values())


def _pricing(cell: Cell, cells: Sequence[Cell]) -> list[Cell]:
    """The calibrated cells of a cell's layout."""
    return [other for other in cells if is_calibrated(other) and (other.pp, other.tp) == (cell.pp, cell.tp)]


def is_calibrated(cell: Cell) -> bool:
    """Whether the cell prices others; the rate of one rank alone does not matter."""
    return cell.shape.name in CALIBRATED_SHAPES and (cell.world == 1 or cell.rate in CALIBRATED_RATES)


def bits_per_s(rate: str) -> float:
    """A rate as a number, `inf` for no limit."""
    found = parse_rate(rate)
    return math.inf if found is None else float(found)


def _transfer(cells: Sequence[Cell], folder: Path, say: Callable[[str], None]) -> dict[Cell, Plan]:
    """Cell -> its plan from others, for cells that are not calibrated.

    Sequence parallelism has other collectives than its absence: a cell is priced by calibrated cells of its
    own layout, in which each kind of both occurs. One that they cannot price is told, and left out.
    """
    plans = {cell: load_plan(cell.folder(folder) / "plan.json") for cell in cells}
    found: dict[Cell, Plan] = {}
    for cell in (cell for cell in cells if not is_calibrated(cell)):
        known: dict[float, list[Plan]] = defaultdict(list)
        for other in _pricing(cell, cells):
            known[bits_per_s(other.rate)].append(plans[other])
        if not known:
            say(f"{cell}: no calibrated cell of its layout")
            continue
        try:
            calibration = load_calibration(cell.folder(folder) / CALIBRATION)
            found[cell] = transferred(plans[cell], bits_per_s(cell.rate), calibration, known)
        except (PlanError, UsageError) as error:
            say(f"{cell}: no calibrated cell prices it: {error}")
    return found


def _row(cell: Cell, found: Found, plan: Plan | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "cell": str(cell),
        "calibrated": is_calibrated(cell),
        "measured_ms": found.measured_ms,
        "planned_ms": found.planned_ms,
        "predicted_ms": found.predicted_ms,
        "error_pct": 100.0 * found.error,
        "exposed_measured_pct": 100.0 * found.exposed_measured,
        "exposed_predicted_pct": 100.0 * found.exposed_predicted,
        "peak_error_pct": 100.0 * found.peak_error,
        "rounds_ms": list(found.rounds_ms),
    }
    if plan is not None and plan.prediction is not None:
        step_us = plan.prediction.step_us
        row["transferred_ms"] = step_us / 1e3
        row["transferred_error_pct"] = 100.0 * (step_us / 1e3 / found.measured_ms - 1.0)
        exposed = statistics.mean(us / step_us for us in plan.prediction.exposed_us)
        row["transferred_exposed_pct"] = 100.0 * exposed
    return row


def _summary(done: Mapping[Cell, Found], predicted: Mapping[Cell, Plan]) -> dict[str, float]:
    """Mean and worst magnitudes, in percent (of the step, of the peak) and in points of exposed share."""
    rows = list(done.values())
    transferred_rows = [
        _row(cell, found, predicted[cell]) for cell, found in done.items() if cell in predicted
    ]
    figures: dict[str, list[float]] = {
        "step_error_pct": [100.0 * found.error for found in rows],
        "planned_step_error_pct": [100.0 * (f.planned_ms / f.measured_ms - 1.0) for f in rows],
        "exposed_points": [found.exposed_points for found in rows],
        "peak_error_pct": [100.0 * found.peak_error for found in rows],
        "transferred_step_error_pct": [row["transferred_error_pct"] for row in transferred_rows],
        "transferred_exposed_points": [
            row["transferred_exposed_pct"] - row["exposed_measured_pct"] for row in transferred_rows
        ],
        "spread_pct": [100.0 * (max(f.rounds_ms) / min(f.rounds_ms) - 1.0) for f in rows],
    }
    summary: dict[str, float] = {"cells": float(len(rows)), "transferred_cells": float(len(transferred_rows))}
    for name, values in figures.items():
        if values:
            summary[f"mean_{name}"] = statistics.mean(map(abs, values))
            summary[f"worst_{name}"] = max(values, key=abs)
    return summary
