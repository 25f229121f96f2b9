"""A planned step is the plain model's, whatever its model, layout, schedule, microbatches, dtype and overlap.

The loss and every gradient equal those of the plain model in one process on the full batch, within the
tolerance of regrouped sums. Cells are drawn so that each pair of values that can meet does so in one. Ranks
are threads; processes on Gloo run enough of the cells that each value is among them, and give the same bits.
This file is also the program that the processes run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules

import stretto
from stretto.ir.action import Schedule
from stretto.ir.costs import CollectiveCost
from stretto.ir.curve import Curve
from stretto.ir.plan import Plan
from stretto.ir.program import Job, OverlapMode
from stretto.ir.serialize import load_plan
from stretto.ir.transfers import tied_ranks
from stretto.planning.make_plan import make_plan
from stretto.runtime import Runner
from stretto.schedule.csv import from_csv
from tests.families import ONE_STAGE, SEVERAL
from tests.runtime import equality
from tests.runtime.equality import (
    TOLERANCE,
    Loss,
    Result,
    assert_equal,
    assert_same_bits,
    joined,
    made_up_costs,
    plain,
    rank_result,
    run_sharded,
    tokens,
)
from tests.runtime.launch import launch

COLUMNS = 8
"""Tokens of a row: two tensor-parallel ranks have half of them each."""

COUNTED = "llama counted"
"""Its loss is a sum over a count of labels, of which microbatches have unequally many."""

MODELS = ("gpt tied", "gpt", "llama", "llama tied", "gpt2", "qwen2", COUNTED)

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "sp2": {"tp": 2, "sequence_parallel": True},
    "pp2 dp2": {"pp": 2, "dp": 2},
    "pp2 sp2": {"pp": 2, "tp": 2, "sequence_parallel": True},
    "pp2 dp2 tp2": {"pp": 2, "dp": 2, "tp": 2},
}
OF_PYTORCH = (
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleDualPipeV",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
)
"""Read from the CSV files that PyTorch writes: four stages on two ranks, four microbatches."""

SCHEDULES = (*ONE_STAGE, *SEVERAL, *OF_PYTORCH)

VALUES: tuple[tuple[Any, ...], ...] = (
    MODELS,
    tuple(LAYOUTS),
    SCHEDULES,
    (1, 2, 4, 5, 8),
    (torch.float64, torch.float32),
    ("off", "local", "window"),
)


@dataclass(frozen=True)
class Cell:
    """One step: `str()` is the test's name."""

    model: str
    layout: str
    schedule: str
    microbatches: int
    dtype: torch.dtype
    overlap: str

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.model}, {self.layout}, {self.schedule}, {self.microbatches}, {dtype}, {self.overlap}"

    @property
    def values(self) -> tuple[Any, ...]:
        return self.model, self.layout, self.schedule, self.microbatches, self.dtype, self.overlap

    @property
    def ranks(self) -> int:
        layout = LAYOUTS[self.layout]
        return int(layout.get("pp", 1) * layout.get("dp", 1) * layout.get("tp", 1))

    @property
    def is_possible(self) -> bool:
        """Several stages a rank are tried on two pipeline ranks: a model of three layers has few more."""
        if self.schedule in OF_PYTORCH and self.microbatches != 4:
            return False
        return self.schedule in ONE_STAGE or LAYOUTS[self.layout].get("pp") == 2

    def pairs(self) -> Iterator[tuple[tuple[int, Any], tuple[int, Any]]]:
        return combinations(enumerate(self.values), 2)


def drawn() -> list[Cell]:
    """Cells that cover all pairs: greedy, over a shuffled list, those with most new pairs first.

    Schedule by schedule, each until its own pairs are covered, then what is left: one that is added behind
    the others leaves their cells as they are. In an order that depends on each cell alone."""
    possible: dict[str, list[Cell]] = {schedule: [] for schedule in SCHEDULES}
    for values in product(*VALUES):
        if (cell := Cell(*values)).is_possible:
            possible[cell.schedule].append(cell)
    seen: set[Any] = set()
    cells: list[Cell] = []
    for of_all, schedule in product((False, True), SCHEDULES):
        Random(schedule).shuffle(possible[schedule])
        for least, cell in product((15, 11, 7, 4, 1), possible[schedule]):
            new = set(cell.pairs()) - seen
            if len(new) >= least and (of_all or any((2, schedule) in pair for pair in new)):
                cells.append(cell)
                seen |= new
    return sorted(cells, key=lambda cell: Random(str(cell)).random())


CELLS = drawn()


def firsts(cells: list[Cell], skipped: tuple[Any, ...] = ()) -> list[Cell]:
    """The first cells with each value but those skipped."""
    found: dict[Any, Cell] = {}
    for cell in cells:
        for at, value in enumerate(cell.values):
            if value not in skipped:
                found.setdefault((at, value), cell)
    return list(dict.fromkeys(found.values()))


FEWEST_RANKS = sorted((cell for cell in CELLS if cell.ranks <= 4), key=lambda cell: cell.ranks)
FAST = firsts(FEWEST_RANKS, skipped=(*SCHEDULES, "tp2", "pp2 sp2"))
"""Cells of the shorter run. It has most schedules in `SAME_BITS`, and these layouts in
`tests/parallelize/test_tensor_equality.py`."""


def on_processes(ranks: int) -> list[Cell]:
    return firsts([cell for cell in CELLS if cell.ranks == ranks])


def batch_of(cell: Cell) -> Any:
    """One row for each microbatch of each data-parallel copy."""
    rows = cell.microbatches * LAYOUTS[cell.layout].get("dp", 1)
    if cell.model in ("gpt", "gpt tied"):
        return tokens(rows, columns=COLUMNS + 1)
    ids = tokens(rows, columns=COLUMNS)
    labels = ids.clone()
    if cell.model == COUNTED:
        counted = torch.tensor([COLUMNS, 2, 7, 1, 3])[torch.arange(rows) % 5]
        labels = ids.masked_fill(torch.arange(COLUMNS) >= counted[:, None], -100)
    return {"input_ids": ids, "labels": labels}


def model_of(cell: Cell) -> nn.Module:
    return equality.model_of("llama tied" if cell.model == COUNTED else cell.model, cell.dtype)


def token_losses(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The sum over labels, and how many count."""
    labels = batch["labels"][:, 1:]
    logits = model(batch["input_ids"]).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def token_mean(model: nn.Module, batch: Any) -> Tensor:
    total, count = token_losses(model, batch)
    return total / count


def losses_of(cell: Cell) -> tuple[Any, Loss]:
    """The loss of a microbatch, and that of the full batch."""
    if cell.model == COUNTED:
        return token_losses, token_mean
    loss = equality.loss_of(cell.model, cell.dtype)
    return loss, loss


@cache
def of_pytorch(name: str) -> Schedule:
    """PyTorch's own file of a schedule; no process group is needed for that."""
    kept = [0, 3] if "V" in name else [0, 2]
    stages = [
        SimpleNamespace(
            num_stages=4,
            group_size=2,
            group_rank=0,
            stage_index=stage,
            has_backward=True,
            is_last=stage == 3,
            submod=nn.Identity(),
        )
        for stage in kept
    ]
    schedule = getattr(torch_schedules, name)(stages, 4, loss_fn=nn.MSELoss())
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.csv"
        schedule._dump_csv(str(path), format="compute_only")
        return from_csv(path.read_text())


def job_of(cell: Cell) -> Job:
    parallel = stretto.Parallel(**LAYOUTS[cell.layout], microbatches=cell.microbatches)
    stages = parallel.pp * (1 if cell.schedule in ONE_STAGE else 2)
    return stretto.capture(model_of(cell), batch_of(cell), losses_of(cell)[0], parallel, stages=stages)


def plan_for(cell: Cell) -> Plan:
    """Proved. Collectives take about as long as some ops."""
    schedule = of_pytorch(cell.schedule) if cell.schedule in OF_PYTORCH else cell.schedule
    job = replace(job_of(cell), overlap=cell.overlap)
    cost = CollectiveCost(Curve(((0.0, 100.0),)))
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    collectives = {(axis, kind): cost for axis, _ in job.axes for kind in kinds}
    return make_plan(job, replace(made_up_costs(job), collectives=collectives), schedule=schedule)


def expected_of(cell: Cell) -> Result:
    return plain(model_of(cell), batch_of(cell), losses_of(cell)[1])


def test_every_pair_of_values_is_in_a_cell() -> None:
    possible = (Cell(*values) for values in product(*VALUES))
    pairs = {pair for cell in possible if cell.is_possible for pair in cell.pairs()}
    assert {pair for cell in CELLS for pair in cell.pairs()} == pairs
    assert set(VALUES[5]) == set(get_args(OverlapMode))
    in_processes = {value for ranks in (2, 4) for cell in on_processes(ranks) for value in cell.values}
    assert in_processes >= {*MODELS, *SCHEDULES, *LAYOUTS} - {"one", "pp2 dp2 tp2"}


@pytest.mark.filterwarnings("ignore:.*is not sharded:UserWarning")
@pytest.mark.parametrize(
    "cell", [pytest.param(c, marks=[] if c in FAST else [pytest.mark.slow], id=str(c)) for c in CELLS]
)
def test_a_planned_step_equals_the_plain_model(cell: Cell) -> None:
    found = run_sharded(plan_for(cell), model_of(cell), batch_of(cell))
    assert_equal(found, expected_of(cell), TOLERANCE[cell.dtype])


def launched(folder: Path) -> None:
    """One rank: a step of every cell of this world's size, each with the plan from its file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = []
    for at, cell in enumerate(on_processes(dist.get_world_size())):
        runner = Runner(load_plan(folder / f"plan{at}.json"), model_of(cell))
        results.append(rank_result(runner, batch_of(cell)))
        for parameter in runner.parameters():
            parameter.grad = None
        runner.close()
    torch.save(results, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is not sharded:UserWarning")
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_equal_threads_to_the_bit(ranks: int, tmp_path: Path) -> None:
    """No group of these layouts has more than two members that add up."""
    cells = on_processes(ranks)
    plans = [plan_for(cell) for cell in cells]
    for at, plan in enumerate(plans):
        plan.save(tmp_path / f"plan{at}.json")
    launch(ranks, "tests.test_equality", str(tmp_path))
    saved = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    for at, (cell, plan) in enumerate(zip(cells, plans, strict=True)):
        found = joined(plan, [results[at] for results in saved])
        assert_equal(found, expected_of(cell), TOLERANCE[cell.dtype])
        assert_same_bits(found, run_sharded(plan, model_of(cell), batch_of(cell)))


# What the order of work must not change at all.

FLAT = Cell("gpt tied", "pp2", "gpipe", 5, torch.float32, "local")
SAME_BITS: dict[str, list[Cell]] = {
    "families": [replace(FLAT, schedule=family) for family in ONE_STAGE],
    "families with several stages a rank": [
        replace(FLAT, schedule=family, microbatches=3) for family in SEVERAL
    ],
    "schedules of PyTorch with backwards in one order": [
        replace(FLAT, model="gpt", schedule=name, microbatches=4) for name in OF_PYTORCH[:3]
    ],
    "sums over counts": [replace(FLAT, model=COUNTED, schedule=family) for family in ("gpipe", "zb-h2")],
    "overlap": [replace(FLAT, overlap=overlap) for overlap in VALUES[5]],
    "the same plan twice": [replace(FLAT, schedule="zb-h1")] * 2,
    "cuts of a model without ties": [
        replace(FLAT, model="llama", layout=layout) for layout in ("one", "pp2", "pp4")
    ],
}


@pytest.mark.parametrize("cells", SAME_BITS.values(), ids=list(SAME_BITS))
def test_the_order_of_work_changes_no_bit(cells: list[Cell]) -> None:
    first, *others = (run_sharded(plan_for(cell), model_of(cell), batch_of(cell)) for cell in cells)
    assert_equal(first, expected_of(cells[0]), TOLERANCE[cells[0].dtype])
    for other in others:
        assert_same_bits(first, other)


def test_a_tied_gradient_is_the_sum_on_each_holder() -> None:
    cell = replace(FLAT, layout="pp4", schedule="zb-h1", dtype=torch.float64)
    job = job_of(cell)
    [(tie, owners)] = tied_ranks(job, range(len(job.stages))).items()
    assert owners == (0, 3)
    expected = expected_of(cell).grads[tie]
    found = run_sharded(plan_for(cell), model_of(cell), batch_of(cell))
    resident = [rank[tie] for rank in found.by_rank if tie in rank]
    assert len(resident) == 2
    assert expected is not None
    for grad in resident:
        assert (grad - expected).norm() <= 1e-10 * expected.norm()


def test_a_wrong_gradient_is_seen() -> None:
    """The comparison itself: one element of one gradient off by a thousandth is reported by name."""
    expected = expected_of(replace(FLAT, model="gpt", dtype=torch.float64))
    name = "blocks.1.mlp.up.weight"
    wrong = {n: None if g is None else g.clone() for n, g in expected.grads.items()}
    grad = wrong[name]
    assert grad is not None
    grad.view(-1)[3] += 1e-3 * grad.norm()
    with pytest.raises(AssertionError, match=rf"{name} differs by 1.0e-03"):
        assert_equal(Result(expected.loss, wrong), expected, 1e-5)


if __name__ == "__main__":
    launched(Path(sys.argv[1]))
