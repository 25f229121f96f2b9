"""`auto` in a plan: never slower than the best family, within memory, and it says what it chose from."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import stretto
from stretto.errors import UsageError
from stretto.ir.costs import Costs
from stretto.ir.plan import Plan
from stretto.ir.program import Job
from stretto.planning.make_plan import make_plan
from stretto.planning.pair import of_stages
from stretto.schedule.families import FAMILIES, make_schedule
from stretto.verifying import verify
from tests.planning.test_messages import skips_job
from tests.synthetic import ACTIVATION, WEIGHT, make_costs, make_job


def uneven(job: Job, seed: int) -> Costs:
    """Each stage and phase has a time of its own, and messages are up to as long as a forward."""
    draw = random.Random(seed)
    costs = make_costs(job, latency_us=5.0, bytes_per_us=ACTIVATION.nbytes / draw.uniform(5.0, 100.0))
    factor = {(stage.index, phase): draw.uniform(0.5, 1.5) for stage in job.stages for phase in stage.ops}
    times = {
        (stage.index, op.name): costs.op_us[stage.index, op.name] * factor[stage.index, phase]
        for stage in job.stages
        for phase, ops in stage.ops.items()
        for op in ops
    }
    return replace(costs, op_us=times)


def step_us(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_us


def families_of(job: Job) -> list[str]:
    assert job.pp is not None
    each = len(job.stages) // job.pp
    return [name for name, family in FAMILIES.items() if family.places.allow(each)]


@pytest.mark.parametrize(
    "seed", [pytest.param(k, marks=() if k in (3, 4) else pytest.mark.slow) for k in range(20)]
)
def test_a_plan_is_never_slower_than_that_of_the_best_family(seed: int) -> None:
    draw = random.Random(1000 + seed)
    ranks, each, microbatches = draw.randint(2, 4), draw.choice((1, 2)), draw.randint(2, 10)
    make = skips_job if seed % 5 == 4 else make_job
    job = replace(make(ranks * each, microbatches), pp=ranks, schedule="auto")
    costs = uneven(job, seed)
    found = make_plan(job, costs)
    verify(found)
    assert found.schedule_why
    assert f"schedule         {found.schedule.family}: auto" in str(found)
    families = {name: make_plan(job, costs, schedule=name) for name in families_of(job)}
    assert step_us(found) <= min(map(step_us, families.values())) * (1 + 1e-9)
    assert found.prediction is not None
    assert found.prediction.step_us >= found.prediction.bound_us * (1 - 1e-9)


def test_memory_is_kept_and_what_does_not_fit_is_refused() -> None:
    job = replace(make_job(3, 8), pp=3, schedule="auto")
    costs = make_costs(job, latency_us=10.0)
    peaks = {
        name: max(made.prediction.peak_bytes)
        for name in families_of(job)
        if (made := make_plan(job, costs, schedule=name)).prediction is not None
    }
    for most in (peaks["zb-h2"], peaks["1f1b"]):
        made = make_plan(job, costs, max_bytes=most)
        assert made.prediction is not None
        assert max(made.prediction.peak_bytes) <= most
    assert step_us(make_plan(job, costs, max_bytes=peaks["1f1b"])) <= step_us(
        make_plan(job, costs, schedule="1f1b")
    )
    with pytest.raises(stretto.PlanError, match="more than the limit"):
        make_plan(job, costs, max_bytes=WEIGHT.nbytes)


def test_orders_that_overlap_within_memory_come_before_faster_ones_that_do_not() -> None:
    """The fastest order keeps more than a rank may: its plan waits for messages, which takes longer."""
    job = replace(make_job(4, 6), pp=2)
    costs = uneven(job, 2)
    most = 23 * ACTIVATION.nbytes + ACTIVATION.nbytes // 2
    family = make_plan(job, costs, schedule="interleaved-1f1b", max_bytes=most)
    found = make_plan(replace(job, schedule="auto"), costs, max_bytes=most)
    assert found.prediction is not None
    assert max(found.prediction.peak_bytes) <= most
    assert step_us(found) <= step_us(family) * (1 + 1e-9)


def test_ranks_are_balanced_where_stages_are_finer_than_they() -> None:
    """The first stage takes six times as long: ranks with equally many stages would be uneven."""
    job = replace(make_job(8, 8), pp=2)
    costs = make_costs(job, latency_us=5.0)
    slow = {key: us * (6.0 if key[0] == 0 else 1.0) for key, us in costs.op_us.items()}
    costs = replace(costs, op_us=slow)
    made = make_plan(replace(job, schedule="auto"), costs)
    assert sorted(made.schedule.stage_ranks) == [0] * 2 + [1] * 6
    assert step_us(made) < 0.9 * step_us(make_plan(job, costs, schedule="interleaved-1f1b"))
    balanced = of_stages(make_schedule("zb-h2", 2, 8), ((0,), (1, 2, 3, 4, 5, 6, 7)))
    assert step_us(made) < 0.97 * step_us(make_plan(job, costs, schedule=balanced))


def test_ranks_may_have_unequally_many_stages() -> None:
    job = replace(make_job(7, 6), pp=2, schedule="auto")
    costs = uneven(job, 7)
    made = make_plan(job, costs)
    verify(made)
    counts = {made.schedule.stage_ranks.count(rank) for rank in (0, 1)}
    assert sum(counts) == 7
    with pytest.raises(UsageError, match="7 stages"):
        make_plan(job, costs, schedule="interleaved-1f1b")


def test_an_interrupt_takes_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(make_job(2, 4), pp=2, schedule="auto")
    costs = make_costs(job)
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if sum("whole plan" in one for one in lines) == 2:
            raise KeyboardInterrupt

    made = make_plan(job, costs, say=say)
    assert made.prediction is not None
    verify(made)

    def at_once(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_plan(job, costs, say=at_once)
