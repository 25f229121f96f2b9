"""Schedules of one's own, from PyTorch's CSV files: several stages on a rank, V shapes, overlapped actions.

The files are written by PyTorch itself; job, plan and run go the way of a user's program.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules

import stretto
from stretto.ir.plan import Plan
from stretto.models.gpt import next_token_loss
from tests.clusters import cores
from tests.runtime.equality import assert_equal, assert_same_bits, gather, gpt, plain, run, tokens

STAGES, RANKS, MICROBATCHES = 4, 2, 4

ASCENDING = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleDualPipeV")
"""Schedules that do their backwards in the order of the microbatches on every stage."""


def dumped(name: str, folder: Path) -> str:
    """The path of PyTorch's own file of a schedule; no process group is needed for that."""
    held = [0, 3] if "V" in name else [0, 2]
    stages = [
        SimpleNamespace(
            num_stages=STAGES,
            group_size=RANKS,
            group_rank=0,
            stage_index=stage,
            has_backward=True,
            is_last=stage == STAGES - 1,
            submod=nn.Identity(),
        )
        for stage in held
    ]
    schedule = getattr(torch_schedules, name)(stages, MICROBATCHES, loss_fn=nn.MSELoss())
    path = folder / f"{name}.csv"
    schedule._dump_csv(str(path), format="compute_only")
    return str(path)


def plan_for(model: nn.Module, batch: torch.Tensor, schedule: str) -> Plan:
    parallel = stretto.Parallel(pp=RANKS, microbatches=MICROBATCHES, schedule=schedule)
    job = stretto.capture(model, batch, loss=next_token_loss, parallel=parallel, stages=STAGES)
    return stretto.plan(job, cluster=cores())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", [*ASCENDING, "ScheduleLoopedBFS", "ScheduleZBVZeroBubble"])
def test_pytorchs_schedules_equal_the_plain_model(name: str, tied: bool, tmp_path: Path) -> None:
    model, batch = gpt(tied).double(), tokens(MICROBATCHES, columns=8)
    plan = plan_for(model, batch, dumped(name, tmp_path))
    assert plan.ranks == RANKS
    assert len(plan.job.stages) == STAGES
    assert_equal(run(plan, model, batch), plain(model, batch, next_token_loss), 1e-10)


def test_those_that_sum_in_one_order_are_equal_bit_by_bit(tmp_path: Path) -> None:
    model, batch = gpt(False), tokens(MICROBATCHES, columns=8)
    first, *others = (run(plan_for(model, batch, dumped(name, tmp_path)), model, batch) for name in ASCENDING)
    for other in others:
        assert_same_bits(first, other)


def test_a_plan_that_waits_for_every_message_has_the_same_numbers(tmp_path: Path) -> None:
    model, batch = gpt(True), tokens(MICROBATCHES, columns=8)
    parallel = stretto.Parallel(pp=RANKS, microbatches=MICROBATCHES, schedule="1f1b")
    job = stretto.capture(model, batch, loss=next_token_loss, parallel=parallel)
    plans = [stretto.plan(job, cluster=cores(), overlap=overlap) for overlap in ("local", "off")]
    assert plans[0].orders != plans[1].orders
    assert_same_bits(*(run(plan, model, batch) for plan in plans))


def test_a_csv_for_another_number_of_stages_is_refused(tmp_path: Path) -> None:
    model, batch = gpt(False), tokens(MICROBATCHES, columns=8)
    parallel = stretto.Parallel(
        pp=2, microbatches=MICROBATCHES, schedule=dumped("ScheduleInterleaved1F1B", tmp_path)
    )
    job = stretto.capture(model, batch, loss=next_token_loss, parallel=parallel)
    with pytest.raises(stretto.UsageError, match="has 4 stages, but the job has 2"):
        stretto.plan(job, cluster=cores())


def test_a_rank_without_actions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "idle.csv"
    path.write_text("0F0,0F1,0B0,0B1\n\n1F0,1B0,1F1,1B1\n")
    parallel = stretto.Parallel(pp=3, microbatches=2, schedule=str(path))
    job = stretto.capture(gpt(True), tokens(2, columns=8), next_token_loss, parallel, stages=2)
    with pytest.raises(stretto.UsageError, match="rank 1 of the schedule 'csv' has no stage"):
        stretto.plan(job, cluster=cores())


def test_a_schedule_that_deadlocks_is_refused_before_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "stuck.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1F0,1B1,1B0\n")
    model, batch = gpt(False), tokens(2, columns=8)
    parallel = stretto.Parallel(pp=2, microbatches=2, schedule=str(path))
    job = stretto.capture(model, batch, loss=next_token_loss, parallel=parallel)
    with pytest.raises(stretto.PlanError, match="1F1"):
        stretto.plan(job, cluster=cores())


def test_each_rank_reads_only_what_its_stages_use(tmp_path: Path) -> None:
    """A rank needs no more of the model than its stages: the rest may be dropped."""
    model, batch = gpt(False), tokens(MICROBATCHES, columns=8)
    parallel = stretto.Parallel(pp=2, microbatches=MICROBATCHES, schedule="zb-h1")
    job = stretto.capture(model, batch, loss=next_token_loss, parallel=parallel)
    plan = stretto.plan(job, cluster=cores())

    def only(rank: int) -> nn.Module:
        part = copy.deepcopy(model)
        needed = {p.name for p in job.parameters if rank in p.stages}
        for name, parameter in list(part.named_parameters()):
            if name not in needed:
                owner, _, last = name.rpartition(".")
                module = part.get_submodule(owner)
                setattr(module, last, nn.Parameter(torch.empty_like(parameter, device="meta")))
        return part

    def work(runner: stretto.Runner) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = runner.step(batch)
        return loss, {n: p.grad for n, p in runner.named_parameters() if p.grad is not None}

    found = gather(model, stretto.run_threads(plan, only, work))
    assert_same_bits(found, run(plan, model, batch))
