"""Planning: which schedule, where sends are waited for, and that equal input gives an equal plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto
from stretto.capturing.trace import trace
from stretto.ir.action import Phase
from stretto.ir.plan import InstructionKind, Plan
from stretto.ir.program import Job
from stretto.models.moe import moe_token_sum
from stretto.planning.lower import lower
from stretto.planning.make_plan import make_plan
from tests.clusters import cores
from tests.families import ONE_STAGE
from tests.parallelize.mixtures import FEW, batch, model_of
from tests.runtime.equality import (
    assert_equal,
    evenly,
    job_of,
    made_up_costs,
    plain,
    plan_of,
    run,
    traced,
)
from tests.synthetic_comm import make_comm_costs
from tests.verifying.comm_plans import comm_job


def job_for(microbatches: int, stages: int = 2) -> Job:
    return job_of(traced("gpt", torch.float32), stages, microbatches)


def waits_for_sends(plan: Plan, rank: int) -> tuple[int, int]:
    """(all, those after the rank's last run)."""
    kinds = [instruction.kind for instruction in plan.orders[rank]]
    last_run = max(at for at, kind in enumerate(kinds) if kind is InstructionKind.RUN)
    sent = [at for at, kind in enumerate(kinds) if kind is InstructionKind.SENT]
    return len(sent), sum(at > last_run for at in sent)


@pytest.mark.parametrize("family", ONE_STAGE)
def test_sends_are_waited_for_soon_after_they_have_left(family: str) -> None:
    """So that their buffers go: what piles up does not grow with the microbatches."""
    for rank in (0, 1):
        plan = plan_of(job_for(24), family)
        every, late = waits_for_sends(plan, rank)
        assert every == 24
        assert late <= 3


def test_memory_does_not_grow_with_microbatches() -> None:
    peaks = [plan_of(job_for(m), "1f1b").prediction.peak_bytes for m in (8, 16, 64)]  # type: ignore[union-attr]
    # What a microbatch more takes is its loss, four bytes; an activation would be 448.
    assert max(peaks[2]) - max(peaks[0]) <= 8 * 56
    assert max(peaks[1]) - max(peaks[0]) <= 8 * 56


def test_a_wait_for_a_send_never_stands_in_the_way() -> None:
    """On a slow link the waits come later, and the step is no longer than with all of them at the end."""
    job = job_for(12)
    for bytes_per_us in (1000.0, 1.0, 0.1):
        costs = made_up_costs(job, bytes_per_us=bytes_per_us)
        plan = make_plan(job, costs, schedule="eager-1f1b")
        late = lower(job, plan.schedule, plan.costs)
        assert late.orders != plan.orders
        assert stretto.simulate(plan).step_us <= stretto.simulate(late).step_us * 1.0001


@pytest.mark.parametrize("family", ONE_STAGE)
@pytest.mark.parametrize("op_us", [0.0, 10.0])
def test_runs_that_take_no_time_are_planned(family: str, op_us: float) -> None:
    """Stages without weight gradients have W runs without ops; costs of your own may be zero."""
    model = torch.nn.Sequential(*[torch.nn.Tanh() for _ in range(4)], torch.nn.Linear(8, 2))
    batch = torch.zeros(6, 8)
    shift = torch.nn.Sequential(torch.nn.Linear(8, 8), model)
    found = trace(shift, batch, lambda m, b: m(b).square().mean(), microbatches=6)
    job = evenly(found, 4, 6)
    assert any(not stage.ops[Phase.W] for stage in job.stages)
    costs = made_up_costs(job)
    costs = replace(costs, op_us=dict.fromkeys(costs.op_us, op_us), action_us=0.0)
    plan = make_plan(job, costs, schedule=family)
    assert_equal(
        run(plan, shift, torch.ones(6, 8)),
        plain(shift, torch.ones(6, 8), lambda m, b: m(b).square().mean()),
        1e-5,
    )


def test_equal_input_gives_equal_files(tmp_path: Path) -> None:
    for name in ("one", "other"):
        plan_of(job_for(4), "zb-h1").save(tmp_path / f"{name}.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "other.json").read_bytes()


def test_what_is_wished_for() -> None:
    job = job_for(4)
    assert plan_of(job, "zb-h2").schedule.family == "zb-h2"
    assert make_plan(job, made_up_costs(job)).schedule.family == "1f1b", "the job's own wish"
    with pytest.raises(stretto.UsageError, match="unknown schedule family 'zz'; choose one of: gpipe"):
        plan_of(job, "zz")
    with pytest.raises(stretto.UsageError, match=r"unknown cluster .here.: .*known devices are a100"):
        stretto.plan(job, cluster="here")


@pytest.mark.slow
@pytest.mark.parametrize("takes", [{2: 2}, {1: 1, 4: 2}])
def test_auto_takes_a_number_of_chunks_that_fits(takes: dict[int, int]) -> None:
    """takes: how many, in the memory that so many alone need."""
    job = stretto.capture(model_of(FEW), batch(), moe_token_sum, stretto.Parallel(ampipe_degree="auto"))
    alone = [stretto.plan(replace(one, forms=()), cores(), order="list") for one in (job, *job.forms)]
    peaks = {plan.job.chunks: max(plan.prediction.peak_bytes) for plan in alone if plan.prediction}
    assert peaks[2] < peaks[4] < peaks[1]
    for chunks, taken in takes.items():
        made = stretto.plan(job, cores(memory_bytes=peaks[chunks]), order="list")
        assert made.job.chunks == taken
    with pytest.raises(stretto.PlanError, match="fault"):
        stretto.plan(job, cores(memory_bytes=peaks[2] // 2), order="list")


def test_memory_that_overlap_exceeds_is_kept_by_waiting_at_once() -> None:
    """Without collectives too, where messages alone could overlap."""
    job = job_for(8)
    costs = made_up_costs(job, bytes_per_us=1.0)
    off, local = (make_plan(job, costs, schedule="eager-1f1b", overlap=mode) for mode in ("off", "local"))
    assert off.prediction is not None
    assert local.prediction is not None
    most = max(off.prediction.peak_bytes)
    assert most < max(local.prediction.peak_bytes)
    made = make_plan(job, costs, schedule="eager-1f1b", overlap="local", max_bytes=most)
    assert made == replace(off, overlap_why=made.overlap_why)
    assert made.overlap_why.startswith("local is refused: rank ")
    with pytest.raises(stretto.PlanError, match="fault"):
        make_plan(job, costs, schedule="eager-1f1b", overlap="local", max_bytes=most - 1)


def test_a_plan_carries_its_prediction_and_its_bound() -> None:
    plan = plan_of(job_for(8), "zb-h1")
    found = plan.prediction
    assert found is not None
    assert found.bound_us <= found.step_us
    assert found.step_us == pytest.approx(stretto.simulate(plan).step_us)
    for rank in range(2):
        parts = found.compute_us[rank] + found.exposed_us[rank] + found.bubble_us[rank]
        assert parts == pytest.approx(found.step_us, rel=1e-6)
    text = str(plan)
    for word in ("predicted step", "exposed by rank", "bubble by rank", "lower bound", "gap"):
        assert word in text


def test_what_is_no_schedule_is_said() -> None:
    wrong: Any = 3
    with pytest.raises(stretto.UsageError, match=r"a schedule is a name, .* not int"):
        stretto.plan(job_for(2), schedule=wrong)


@pytest.mark.parametrize("stages", [1, 2])
def test_more_microbatches_than_a_plan_can_list_are_refused(stages: int) -> None:
    job = comm_job(stages, 4, (("tp", 2),))
    most = 100_000 // (2 * stages)
    words = rf"microbatches = 99,999 on {stages} stages? are too many for a plan.*give {most:,} or fewer"
    with pytest.raises(stretto.UsageError, match=words):
        make_plan(replace(job, microbatches=99_999), make_comm_costs(job))
