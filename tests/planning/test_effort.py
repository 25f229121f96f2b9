"""Planning takes as long as it can save over the run, is told about, and ends at Ctrl-C with what it has."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import stretto
from stretto.ir.plan import Plan
from stretto.ir.serialize import plan_to_text
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.order import search as order_search
from stretto.order.whole_step import WholeStepOrders, order_together
from stretto.passes.step import LEAST_US, MOST_US, SEARCH_S, STEPS, Effort, Watch
from stretto.planning import choose, windows
from stretto.planning import make_plan as making
from stretto.planning.schedules import choose_schedule, one_window
from stretto.verifying import verify
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
    """What people try first: 4 layers of width 64 on two tensor-parallel ranks."""
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
    assert Effort(10**9).worth_us(2_000.0) == MOST_US, "nobody waits for ever"
    assert Effort(search_s=10.0).worth_us(1.0) == Effort(search_s=10.0).worth_us(1e9) == 200_000.0
    assert Effort(search_s=1e4).worth_us(1.0) > MOST_US, "who says so does"
    assert 0.0 < Effort(1).part(20_000.0) < Effort(STEPS).part(20_000.0) < Effort(10**6).part(20_000.0) == 1.0
    monkeypatch.setenv(SEARCH_S, "10")
    assert Effort().worth_us(1.0) == Effort(search_s=10.0).worth_us(1.0)
    assert Effort(search_s=1.0).worth_us(1.0) == 20_000.0
    monkeypatch.setenv(SEARCH_S, "soon")
    with pytest.raises(stretto.UsageError, match=SEARCH_S):
        Effort().worth_us(1.0)


@pytest.mark.parametrize("given", [{"steps": 0}, {"steps": 2.5}, {"steps": True}])
def test_steps_that_are_none_are_refused(given: dict[str, Any]) -> None:
    job, costs = job_of(microbatches=4, blocks=1)
    with pytest.raises(stretto.UsageError, match="number of steps that the plan is for"):
        making.make_plan(job, costs, **given)


@pytest.mark.parametrize("search_s", [0, -1.0, float("nan"), float("inf"), True, "2"])
def test_a_time_that_is_none_is_refused(search_s: Any) -> None:
    job, costs = job_of(microbatches=4, blocks=1)
    with pytest.raises(stretto.UsageError, match=r"search_s = .*order = 'list' searches for nothing"):
        making.make_plan(job, costs, search_s=search_s)


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many walks searches of whole steps were allowed."""
    walks: list[int] = []

    def counted(*given: Any) -> WholeStepOrders | None:
        found = order_together(*given)
        walks.append(found.allowed if found is not None else 0)
        return found

    monkeypatch.setattr(windows, "order_together", counted)
    return walks


def test_longer_runs_are_planned_for_longer_and_alike_each_time(allowed: list[int]) -> None:
    job, costs = job_of(microbatches=4, blocks=1)

    def planned(**given: Any) -> Plan:
        return making.make_plan(job, costs, schedule="1f1b", overlap="window", **given)

    shorter, longer = planned(steps=5_000), planned(search_s=0.5)
    assert plan_to_text(planned(steps=5_000)) == plan_to_text(shorter)
    assert plan_to_text(planned(search_s=0.5)) == plan_to_text(longer)
    planned(steps=10_000)
    planned(search_s=1.0)
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


def test_a_step_that_is_hardly_ever_walked_in_its_time_is_not_searched_as_a_whole(allowed: list[int]) -> None:
    job, costs = job_of(microbatches=4, blocks=1)
    many = replace(job, microbatches=200)
    plan = making.make_plan(many, costs, schedule="1f1b", overlap="window", steps=1)
    assert allowed == []
    assert plan.overlap == "window", "pairs are there"
    making.make_plan(job, costs, schedule="1f1b", overlap="window", steps=1)
    assert len(allowed) == 1


def test_what_is_tried_is_told() -> None:
    job, costs = job_of(microbatches=4, blocks=1)
    lines: list[str] = []
    making.make_plan(job, costs, schedule="1f1b", overlap="window", say=lines.append)
    assert lines[0] == "variant 1, at_once"
    assert any(line.endswith(" of the bound") and "one_window, whole_step; best" in line for line in lines)
    assert lines[-1].endswith(": messages and proof")


@pytest.mark.parametrize("schedule", ["1f1b", "auto"])
def test_times_of_a_shorter_step_say_so(schedule: str) -> None:
    """Beside the plan's own time, which is of all microbatches, others could not be compared."""
    job, costs = job_of(microbatches=16, blocks=1)
    lines: list[str] = []
    plan = making.make_plan(job, costs, schedule=schedule, overlap="window", steps=1, say=lines.append)
    times = [line for line in lines if " ms" in line and "orders walked" not in line]
    assert times
    assert all(" ms for 8 of 16 microbatches" in line for line in times), times
    assert plan.prediction is not None
    told_us = [1000 * float(line.partition(" ms")[0].split()[-1]) for line in times]
    assert max(told_us) < 0.9 * plan.prediction.step_us


def test_a_long_search_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    job, costs = job_of(microbatches=4, blocks=1)
    now_s = iter(range(10**9))
    monkeypatch.setattr(time, "monotonic", lambda: next(now_s) / 10)
    lines: list[str] = []
    making.make_plan(job, costs, schedule="1f1b", overlap="window", steps=10**6, say=lines.append)
    far = [line for line in lines if "orders walked, best " in line]
    assert far
    assert all(" of the bound" in line for line in far if line.startswith("30 "))


class InterruptedAt:
    """Calls of a function, of which one raises what Ctrl-C does."""

    def __init__(self, call: Callable[..., Any], at: int) -> None:
        self.call, self.at, self.calls = call, at, 0

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return self.call(*given, **named)


def planned(say: Callable[[str], None] | None) -> Plan:
    job, costs = job_of(microbatches=4, blocks=1)
    return making.make_plan(job, costs, schedule="1f1b", overlap="window", say=say)


def silent(line: str) -> None:
    pass


@pytest.mark.parametrize("at", [2, 3, 5])
def test_an_interrupt_between_variants_takes_the_best_so_far(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = planned(silent)
    interrupted = InterruptedAt(choose.reduced_best, at)
    monkeypatch.setattr(choose, "reduced_best", interrupted)
    plan = planned(silent)
    assert interrupted.calls == at, "nothing more is tried"
    verify(plan)
    assert plan.prediction is not None
    assert whole.prediction is not None
    assert plan.prediction.step_us >= whole.prediction.step_us
    assert (plan.overlap == "off") is (at == 2), "only the baseline was there"


def test_an_interrupt_before_there_is_anything_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "reduced_best", InterruptedAt(choose.reduced_best, 1))
    with pytest.raises(KeyboardInterrupt):
        planned(silent)


def test_who_is_told_nothing_is_interrupted_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "reduced_best", InterruptedAt(choose.reduced_best, 3))
    with pytest.raises(KeyboardInterrupt):
        planned(None)


def test_a_search_that_is_interrupted_counts_with_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[WholeStepOrders] = []

    def kept(*given: Any) -> WholeStepOrders | None:
        walk = InterruptedAt(order_search.walk, 40)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(order_search, "walk", walk)
            one = order_together(*given)
        assert walk.calls == 40
        assert one is not None
        found.append(one)
        return one

    monkeypatch.setattr(windows, "order_together", kept)
    plan = planned(silent)
    verify(plan)
    assert len(found) == 1
    assert {name: plan.windows[name].items for name in found[0].windows} == {
        name: window.items for name, window in found[0].windows.items()
    }


def test_an_interrupt_while_a_plan_is_proved_is_for_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = planned(silent)
    proof = InterruptedAt(making._finished, 1)
    monkeypatch.setattr(making, "_finished", proof)
    assert planned(silent) == whole
    assert proof.calls == 2


def test_a_second_interrupt_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "reduced_best", InterruptedAt(choose.reduced_best, 3))
    monkeypatch.setattr(making, "_finished", InterruptedAt(making._finished, 1))
    with pytest.raises(KeyboardInterrupt):
        planned(silent)


def test_nothing_is_told_once_it_is_stopped() -> None:
    lines: list[str] = []
    watch = Watch(lines.append)
    watch.tell("one")
    watch.stop(KeyboardInterrupt())
    watch.tell("two")
    assert lines == ["one"]
    assert not watch.shown
    with pytest.raises(KeyboardInterrupt):
        watch.stop(KeyboardInterrupt())


@pytest.mark.parametrize(("stops", "searches"), [(False, 3), (True, 1)])
def test_no_other_order_is_searched_for_after_an_interrupt_that_left_none(
    stops: bool, searches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whole steps, that hold too much with any number of microbatches live."""
    job, costs = job_of(microbatches=16, blocks=1)
    watch = Watch(silent)
    wished = making._Wished("window", "improve", Effort(), watch)
    begun = making._begun(job, choose_schedule(job, schedule="1f1b"), making.listed(job, costs), wished, None)
    searched: list[object] = []

    def too_much(*given: object) -> None:
        searched.append(given)
        if stops:
            watch.stop(KeyboardInterrupt())
        raise windows._HoldsTooMuchError("too much")

    monkeypatch.setattr(windows, "_together", too_much)
    with pytest.raises(windows._HoldsTooMuchError):
        windows.whole_step(one_window(begun.first, begun.context), begun.context)
    assert len(searched) == searches
