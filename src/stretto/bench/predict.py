"""Predicted against measured, over a grid of GPTs, layouts and rates of the network.

    1. A cell is a shape of GPT, a layout (pp, tp) and a rate. Cells of one layout and rate share a lab, one
       rank on each host; ranks share the machine's cores equally.
    2. In each cell the ranks capture, measure their costs together, plan, and run. The machine's speed goes
       up and down, by a fifth within seconds on some days, which is no error of a prediction: ops are
       measured again before every step, and communication after the last. The plan, simulated with what both
       took on average, stands beside what steps took on average: time, exposed communication, peak memory.
       What was predicted when it was made is kept too. Steps go on for as many rounds as are asked for, and
       then until they and their ops are `known`, or for `MOST_TIMES` as many.
    3. Cells of shapes and rates that no measurement knows are predicted once more from others alone
       (`stretto.bench.transfer`): op times from the jobs of calibrated shapes and a sweep of linear layers,
       measured in the same minutes (`bench.visits`, `bench.layers`), communication from calibrated cells.

A worker (this module as a program, once on each host) does step 2, and keeps for step 3 what it needs.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import stretto
from stretto.bench.costs_now import CostsNow, with_costs
from stretto.bench.kept import Keep, keep_run
from stretto.bench.layers import Layers
from stretto.bench.visits import Visits, calibration_of
from stretto.ir.program import Job, OverlapMode
from stretto.ir.timeline import SpanKind, Timeline
from stretto.measure.profile import typical
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.price.calibration import Calibration, save_calibration

CPU = torch.device("cpu")

WARM_UPS = 2
"""Steps that do not count: first messages open connections, first steps fill caches."""

ROUND_US = 3_000_000.0
MOST_STEPS = 4
"""A round has as many steps as take this long, at least one and at most `MOST_STEPS`."""

KNOWN_TO = 0.02
"""The standard error of the steps' mean and of the mean of what their ops took in visits, together, as a
share, up to which they count as known: a quarter of the error that a prediction may have."""

EVERY = 2
"""What prices a cell is visited before every second step of a round, which takes half of the time; before the
first at least."""

MOST_TIMES = 3
"""A cell has at most as many times the rounds that were asked for."""

FIGURES = "figures.json"
"""What a worker writes of a cell into its folder, beside what ran: its `Found`."""

CALIBRATION = "calibration.json"
"""And there, for a cell that is not calibrated, the op times of those that are."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A GPT and its batch. microbatch: rows; the step has `microbatches` of them."""

    name: str
    hidden: int
    layers: int
    heads: int
    sequence: int
    vocab: int
    microbatch: int
    microbatches: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One place of the grid. rate: as `tc` writes it, or "unlimited"; overlap: as in `stretto.plan`."""

    shape: Shape
    pp: int
    tp: int
    rate: str
    sequence_parallel: bool = False
    overlap: OverlapMode = "window"

    @property
    def world(self) -> int:
        return self.pp * self.tp

    def folder(self, root: Path) -> Path:
        """Where a grid keeps what it found of this cell."""
        return root / str(self).replace(" ", "-")

    def __str__(self) -> str:
        sp = " sp" if self.sequence_parallel else ""
        return f"{self.shape.name} pp={self.pp} tp={self.tp}{sp} {self.rate}"


@dataclass(frozen=True, slots=True)
class Found:
    """A cell's figures. Shares are of the step, the mean over places; peaks by place.

    planned_ms: what the plan said when it was made; predicted_ms: with what ops and communication took
    meanwhile; measured_ms: of steps, the same mean as of ops; rounds_ms: the median of each round.
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
    def error(self) -> float:
        """Predicted over measured step, less one."""
        return self.predicted_ms / self.measured_ms - 1.0

    @property
    def exposed_points(self) -> float:
        """Difference of exposed shares, in percent of the step."""
        return 100.0 * (self.exposed_predicted - self.exposed_measured)

    @property
    def peak_error(self) -> float:
        """The largest relative error of a place's peak memory, with its sign."""
        errors = [p / m - 1.0 for p, m in zip(self.peak_predicted, self.peak_measured, strict=True) if m]
        return max(errors, key=abs, default=0.0)


SHAPES = (
    Shape("wide", hidden=1024, layers=2, heads=16, sequence=128, vocab=2048, microbatch=1, microbatches=4),
    Shape("deep", hidden=512, layers=6, heads=8, sequence=128, vocab=1024, microbatch=1, microbatches=4),
    Shape("long", hidden=1024, layers=2, heads=16, sequence=256, vocab=2048, microbatch=1, microbatches=3),
    Shape("rows", hidden=640, layers=4, heads=10, sequence=64, vocab=4096, microbatch=3, microbatches=4),
)
"""Small enough for half a core a rank, and different in what takes their time. `deep` and `long`, which price
the others (`bench.predict_grid`), have the least and the most rows and weights: beyond what it is made from a
fit of products is off."""

RATES = ("50mbit", "100mbit", "200mbit", "1gbit", "unlimited")
LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2))


def grid(
    shapes: tuple[Shape, ...] = SHAPES, rates: tuple[str, ...] = RATES, overlap: OverlapMode = "window"
) -> list[Cell]:
    """All cells; one rank alone has no network, and one rate. Every other shape has sequence parallelism."""
    cells = []
    for pp, tp in LAYOUTS:
        for rate in rates if pp * tp > 1 else ("unlimited",):
            for number, shape in enumerate(shapes):
                sp = tp > 1 and number % 2 == 1
                cells.append(Cell(shape, pp, tp, rate, sequence_parallel=sp, overlap=overlap))
    return cells


def captured(cell: Cell) -> tuple[GPT, dict[str, torch.Tensor], Job]:
    """The cell's model, a batch and the job; equal on all ranks, and in every process."""
    shape = cell.shape
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=shape.vocab,
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        context=shape.sequence,
    )
    model = GPT(config)
    rows = shape.microbatch * shape.microbatches
    batch = {
        "input_ids": torch.randint(0, shape.vocab, (rows, shape.sequence)),
        "labels": torch.randint(0, shape.vocab, (rows, shape.sequence)),
    }
    parallel = stretto.Parallel(
        pp=cell.pp,
        tp=cell.tp,
        sequence_parallel=cell.sequence_parallel,
        microbatches=shape.microbatches,
        schedule="1f1b",
        overlap=cell.overlap,
    )
    return model, batch, stretto.capture(model, batch, loss=next_token_loss, parallel=parallel)


def run_cell(
    cell: Cell,
    rounds: int,
    keep: Keep | None = None,
    others: Sequence[Cell] = (),
    layers: Layers | None = None,
) -> tuple[Found, Calibration]:
    """Step 2 on one rank; every rank of the cell calls it.

    keep: is given what ran (`bench.kept`). others: of the same layout; what the ops of their jobs took
    meanwhile, and `layers`, is the calibration (the cell's own, if it is one of them).
    """
    model, batch, job = captured(cell)
    plan = stretto.plan(job, "local")
    runner = stretto.Runner(plan, model)
    planned = plan.prediction
    assert planned is not None
    timelines: list[Timeline] = []

    def step() -> float:
        for parameter in runner.parameters():
            parameter.grad = None
        _together()
        start = time.perf_counter()
        runner.step(batch)
        took = _longest(time.perf_counter() - start)
        timelines.append(runner.timeline())
        return took * 1e3

    for _ in range(WARM_UPS):
        step()
    timelines.clear()
    steps = max(1, min(MOST_STEPS, math.ceil(ROUND_US / planned.step_us)))
    times: list[list[float]] = []
    now = CostsNow(plan)
    beside = [Visits(captured(other)[2], now.stages) for other in others if other.shape != cell.shape]
    visited_us: list[Sequence[float]] = []
    while len(times) < rounds or (len(times) < MOST_TIMES * rounds and not known(times, visited_us)):
        times.append([])
        for at in range(steps):
            if at % EVERY == 0:
                for visits in beside:
                    visits.visit()
                if layers is not None:
                    layers.visit()
            visited_us.append(_by_place(now.visit(), cell.pp))
            times[-1].append(step())
    runner.close()
    now.measure_communication()
    now_known = with_costs(plan, now.agreed())
    if keep is not None:
        keep(plan, now_known, timelines)
    prediction = now_known.prediction
    assert prediction is not None
    calibrated = [(visits.job, visits.agreed().op_us) for visits in beside]
    if any(other.shape == cell.shape for other in others):
        calibrated.append((job, now_known.costs.op_us))
    peak = timelines[-1].peak_bytes
    exposed = [
        statistics.mean(us / timeline.step_us for us in timeline.by_rank(SpanKind.EXPOSED))
        for timeline in timelines
    ]
    found = Found(
        cell=str(cell),
        planned_ms=planned.step_us / 1e3,
        predicted_ms=prediction.step_us / 1e3,
        measured_ms=typical([ms for together in times for ms in together]),
        rounds_ms=tuple(statistics.median(together) for together in times),
        exposed_predicted=statistics.mean(us / prediction.step_us for us in prediction.exposed_us),
        exposed_measured=statistics.median(exposed),
        peak_predicted=prediction.peak_bytes,
        peak_measured=peak,
    )
    return found, calibration_of(calibrated, layers.agreed() if layers is not None else None)


def known(times: Sequence[Sequence[float]], visited_us: Sequence[Sequence[float]]) -> bool:
    """Whether the steps of these rounds, and what their ops took in the visits beside, by place, are known to
    `KNOWN_TO`. The place that is known least counts: any of them may be the one that others wait for. Ranks
    know equal times, and so agree."""
    steps = [ms for together in times for ms in together]
    ops = max((uncertainty(place_us) for place_us in zip(*visited_us, strict=True)), default=math.inf)
    return math.hypot(uncertainty(steps), ops) <= KNOWN_TO


def uncertainty(times: Sequence[float]) -> float:
    """The standard error of their mean, as a share of it; a single time tells nothing, and is not known at
    all."""
    if len(times) < 2:
        return math.inf
    return statistics.stdev(times) / math.sqrt(len(times)) / statistics.fmean(times)


def _together() -> None:
    if dist.is_initialized():
        dist.barrier()


def _longest(seconds: float) -> float:
    if not dist.is_initialized():
        return seconds
    longest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


def _by_place(us: float, places: int) -> list[float]:
    """The mean over the ranks of each place of the pipeline; ranks are numbered place by place."""
    if not dist.is_initialized():
        return [us]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, us)
    each = len(found) // places
    return [statistics.fmean(found[place * each : (place + 1) * each]) for place in range(places)]


def cell_from(data: dict[str, Any]) -> Cell:
    """A cell from its JSON."""
    return Cell(**{**data, "shape": Shape(**data["shape"])})


def main() -> None:
    """The worker's entry: `python -m stretto.bench.predict CELLS_JSON ROUNDS FOLDER`, once on each host.

    CELLS_JSON: a list of [cell, the cells whose ops are measured beside it]. Rank 0 writes a cell's figures,
    and what it keeps of the cell, into the folder as soon as it has them.
    """
    cells, rounds, folder = json.loads(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    alone = cell_from(cells[0][0]).world == 1
    if not alone:
        dist.init_process_group("gloo")
    first = alone or dist.get_rank() == 0
    for data, beside in cells:
        cell, others = cell_from(data), [cell_from(other) for other in beside]
        kept = cell.folder(folder)
        found, calibration = run_cell(
            cell, rounds, partial(keep_run, kept) if first else None, others, Layers() if others else None
        )
        if first:
            if others:
                save_calibration(calibration, kept / CALIBRATION)
            (kept / FIGURES).write_text(json.dumps(asdict(found)))
            print(f"{cell}: {100 * found.error:+.1f} %", file=sys.stderr, flush=True)
    if not alone:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
