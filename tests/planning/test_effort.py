"""Planning takes as long as it can save over the run; `test_auto` has what Ctrl-C does to it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import stretto
from stretto.ir.plan import Plan
from stretto.ir.serialize import plan_to_text
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.order.whole_step import order_together
from stretto.passes.step import LEAST_US, MOST_US, SEARCH_S, STEPS, Effort
from stretto.planning import make_plan as making
from stretto.planning import windows
from tests.clusters import cores
from tests.order.test_whole_step import job_of

CORES = cores(
    peak_tflops=0.085,
    memory_gbps=10.0,
    op_overhead_us=3.0,
    latency_us=100.0,
    link_gbps=0.125,
)


def toy(**parallel: Any) -> stretto.Job:
    """What users try first: 4 layers of width 64 on two tensor-parallel ranks."""
    shape = GPTConfig(vocab_size=512, layers=4, hidden=64, heads=4, context=64)
    with torch.device("meta"):
        model = GPT(shape)
    tokens = torch.zeros(8, shape.context + 1, dtype=torch.int64)
    layout = stretto.Parallel(**{"tp": 2, "microbatches": 2, **parallel})
    return stretto.capture(model, tokens, loss=next_token_loss, parallel=layout)


def test_a_search_is_worth_what_it_saves_over_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Effort().worth_us(20_000.0) == 20_000.0
    assert Effort(10 * STEPS).worth_us(2_000.0) == 20_000.0
    assert Effort(1).worth_us(2_000.0) == LEAST_US, "a quarter of a second"
    assert Effort(10**9).worth_us(2_000.0) == MOST_US, "no one waits forever"
    assert Effort(search_s=10.0).worth_us(1.0) == Effort(search_s=10.0).worth_us(1e9) == 200_000.0
    assert Effort(search_s=1e4).worth_us(1.0) > MOST_US, "who says so does"
    assert 0.0 < Effort(1).part(20_000.0) < Effort(STEPS).part(20_000.0) < Effort(10**6).part(20_000.0) == 1.0
    monkeypatch.setenv(SEARCH_S, "10")
    assert Effort().worth_us(1.0) == Effort(search_s=10.0).worth_us(1.0)
    assert Effort(search_s=1.0).worth_us(1.0) == 20_000.0
    monkeypatch.setenv(SEARCH_S, "soon")
    with pytest.raises(stretto.UsageError, match=SEARCH_S):
        Effort().worth_us(1.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("steps", one) for one in (0, 2.5, True)),
        *(("search_s", one) for one in (0, -1.0, float("nan"), float("inf"), True, "2")),
    ],
)
def test_what_is_no_number_of_steps_or_seconds_is_refused(key: str, value: Any) -> None:
    job, costs = job_of(microbatches=4, blocks=1)
    with pytest.raises(stretto.UsageError, match=f"{key} = |number of steps"):
        making.make_plan(job, costs, **{key: value})


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many walks searches of full steps were allowed."""
    walks: list[int] = []

    def counted(*given: Any) -> Any:
        found = order_together(*given)
        walks.append(found[1].allowed if found is not None else 0)
        return found

    monkeypatch.setattr(windows, "order_together", counted)
    return walks


@pytest.mark.slow
def test_longer_runs_are_planned_for_longer_and_alike_each_time(
    allowed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.passes.step.LEAST_US", 500.0)  # so that short runs differ
    job, costs = job_of(microbatches=4, blocks=1)

    def planned(**given: Any) -> Plan:
        return making.make_plan(job, costs, schedule="1f1b", overlap="window", **given)

    shorter, longer = planned(steps=1_000), planned(search_s=0.05)
    assert plan_to_text(planned(steps=1_000)) == plan_to_text(shorter)
    assert plan_to_text(planned(search_s=0.05)) == plan_to_text(longer)
    planned(steps=2_000)
    planned(search_s=0.1)
    assert allowed[0] == allowed[2] < allowed[4]
    assert allowed[1] == allowed[3] < allowed[5]


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        pytest.param({"pp": 2, "microbatches": 4}, marks=pytest.mark.slow),
        pytest.param({"sequence_parallel": True}, marks=pytest.mark.slow),
    ],
)
def test_toys_are_planned_in_a_second_or_two(parallel: dict[str, Any]) -> None:
    job = toy(**parallel)
    begin_s = time.process_time()
    plan = stretto.plan(job, CORES, steps=300)
    assert time.process_time() - begin_s < 4.0  # twice what it takes: processors differ
    quick = stretto.plan(job, CORES, order="list")
    assert plan.prediction is not None
    assert quick.prediction is not None
    assert plan.prediction.step_us <= quick.prediction.step_us
