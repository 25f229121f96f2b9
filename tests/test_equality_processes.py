"""The same numbers from processes on Gloo: equal to the plain model, and to threads bit by bit.

One launch for each number of ranks runs all cases, so that imports are paid once; this file is also the
program that the processes run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stretto.ir.action import Schedule
from stretto.ir.plan import Plan
from stretto.ir.serialize import load_plan
from stretto.runtime import Runner
from stretto.schedule.csv import read_csv
from tests.runtime.equality import (
    FAMILIES,
    assert_equal,
    assert_same_bits,
    batch_of,
    gather,
    job_of,
    loss_of,
    model_of,
    plain,
    plan_of,
    run,
    traced,
)
from tests.runtime.launch import launch

DTYPE = torch.float64

INTERLEAVED = """0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1,0F2,0F3,2F2,2F3,2I2,2I3,0I2,0I3,2W2,2W3,0W2,0W3
1F0,1F1,3F0,3F1,3B0,3B1,1B0,1B1,1F2,1F3,3F2,3F3,3I2,3I3,1I2,1I3,3W2,3W3,1W2,1W3
"""
"""Four stages on two ranks, whole backwards first and split ones then."""

Case = tuple[str, int, str]
"""(model, microbatches, schedule)."""

CASES: dict[int, tuple[Case, ...]] = {
    2: (
        *(("gpt tied", 5, family) for family in FAMILIES),
        *(("llama", 2, family) for family in ("1f1b", "zb-h2")),
        ("gpt2", 8, "eager-1f1b"),
        ("gpt", 4, "interleaved"),
        ("llama tied", 4, "interleaved"),
    ),
    4: (
        *(("gpt", 5, family) for family in FAMILIES),
        ("llama tied", 8, "zb-h1"),
        ("qwen2", 2, "eager-1f1b"),
    ),
}


def plan_for(case: Case, ranks: int) -> Plan:
    name, microbatches, family = case
    schedule: str | Schedule = read_csv(INTERLEAVED) if family == "interleaved" else family
    stages = 4 if family == "interleaved" else ranks
    return plan_of(job_of(traced(name, DTYPE), stages, microbatches), schedule)


def launched(folder: Path) -> None:
    """One rank: run all cases of this world's size, each with the plan from its file; save what came."""
    dist.init_process_group("gloo")
    found = []
    for at, case in enumerate(CASES[dist.get_world_size()]):
        runner = Runner(load_plan(folder / f"plan{at}.json"), model_of(case[0], DTYPE))
        loss = runner.step(batch_of(case[0], case[1]))
        found.append((loss, {n: p.grad for n, p in runner.named_parameters() if p.grad is not None}))
        for parameter in runner.parameters():
            parameter.grad = None
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


# Processes in the shorter run are those of `test_equality_tensor_processes.py`.
@pytest.mark.slow
@pytest.mark.parametrize("ranks", CASES)
def test_processes_equal_the_plain_model_and_threads(ranks: int, tmp_path: Path) -> None:
    plans = [plan_for(case, ranks) for case in CASES[ranks]]
    for at, plan in enumerate(plans):
        plan.save(tmp_path / f"plan{at}.json")
    launch(ranks, "tests.test_equality_processes", str(tmp_path))
    saved = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    for at, case in enumerate(CASES[ranks]):
        name, microbatches, _ = case
        model = model_of(name, DTYPE)
        batch = batch_of(name, microbatches)
        found = gather(model, [rank[at] for rank in saved])
        assert_equal(found, plain(model, batch, loss_of(name, DTYPE)), 1e-10)
        assert_same_bits(found, run(plans[at], model, batch))


if __name__ == "__main__":
    launched(Path(sys.argv[1]))
