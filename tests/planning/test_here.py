"""One rank plans, and sends the others its plan: what is kept, what is found again, and how it goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import stretto
from stretto.errors import LostRankError, PlanError, UsageError
from stretto.files.kept import Kept
from stretto.ir.costs import Costs
from stretto.ir.plan import Plan
from stretto.ir.serialize import job_text, plan_to_text
from stretto.measure import measured, running
from stretto.measure.running import costs_again
from stretto.order.policies import POLICIES
from stretto.planning import here, make_plan
from stretto.planning.here import plan_on_first
from stretto.schedule.families import make_schedule
from tests.planning.ranks import Threads, on_threads
from tests.synthetic import make_costs, make_job
from tests.synthetic import make_plan as synthetic_plan

CPU = torch.device("cpu")


def a_plan(microbatches: int = 2) -> Plan:
    return synthetic_plan(make_schedule("1f1b", 2, microbatches))


def test_one_rank_plans_and_all_hold_its_plan(tmp_path: Path) -> None:
    planned: list[int] = []

    def work(ranks: Threads) -> Plan:
        def make() -> Plan:
            planned.append(ranks.rank)
            return a_plan()

        return plan_on_first(ranks, {"job": "a"}, make, Kept(tmp_path))

    found = on_threads(3, work)
    assert planned == [0]
    assert {plan_to_text(plan) for plan in found} == {plan_to_text(a_plan())}
    assert on_threads(3, work) == found
    assert planned == [0], "found again"


def test_a_rank_that_is_to_plan_something_else_is_refused_by_all() -> None:
    def work(ranks: Threads) -> Plan:
        return plan_on_first(ranks, {"job": str(ranks.rank // 2), "order": "list"}, a_plan)

    found = on_threads(3, work)
    assert [type(error) for error in found] == [UsageError] * 3
    assert {str(error) for error in found} == {
        "the job to plan on rank 2 is another than on rank 0: start all ranks with the same model, settings, "
        "code and release of PyTorch"
    }


@pytest.mark.parametrize(
    "error", [PlanError("the schedule cannot work", ["rank 1: waits for itself"]), UsageError("does not fit")]
)
def test_what_the_planning_rank_refuses_all_refuse(error: Exception) -> None:
    def refuse() -> Plan:
        raise error

    found = on_threads(3, lambda ranks: plan_on_first(ranks, {"job": "a"}, refuse))
    assert [type(one) for one in found] == [type(error)] * 3
    assert {str(one) for one in found} == {str(error)}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), AssertionError("a defect")])
def test_what_else_ends_the_planning_rank_is_a_lost_rank_to_others(error: BaseException) -> None:
    def end() -> Plan:
        raise error

    first, *others = on_threads(3, lambda ranks: plan_on_first(ranks, {"job": "a"}, end))
    assert first is error
    for other in others:
        assert isinstance(other, LostRankError)
        assert other.lost == 0
        assert str(other) == f"rank 0, which plans for all ranks, was ended by {type(error).__name__}"


def test_a_plan_is_found_by_all_that_it_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    def make() -> Plan:
        nonlocal made
        made += 1
        return a_plan()

    def find(**wishes: str) -> bool:
        before = made
        plan_on_first(running.Running(), {"job": "a", "costs": "b", **wishes}, make, Kept(tmp_path))
        return made == before

    assert not find()
    assert find()
    assert not find(job="other")
    assert not find(costs="other")
    assert not find(order="list")
    with monkeypatch.context() as patch:
        patch.setattr(here, "code_digest", lambda: "other code")
        assert not find()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9")
        assert not find()
    assert find()


def test_a_kept_plan_that_is_damaged_is_made_anew(tmp_path: Path) -> None:
    said: list[str] = []
    kept = Kept(tmp_path, say=said.append)

    def planned() -> Plan:
        return plan_on_first(running.Running(), {"job": "a"}, a_plan, kept)

    planned()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    assert planned() == a_plan()
    assert not said
    assert planned() == a_plan()
    assert said == [f"plan: made here 0 s ago for this job and these costs, kept in {tmp_path}"]


Planned = Callable[..., Plan]


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planned:
    """`stretto.plan` of a job, where measuring gives other costs each time."""
    count = 0

    def measure(job: stretto.Job, *_: object) -> Costs:
        nonlocal count
        count += 1
        return make_costs(job, bytes_per_us=100.0 + count)

    monkeypatch.setattr(measured, "_measured", measure)

    def plan(microbatches: int = 2, *, kept: bool = True, renew: bool = False, **more: object) -> Plan:
        where = Kept(tmp_path, renew) if kept else None
        job = make_job(2, microbatches)
        return stretto.plan(job, kept=where, **more)  # type: ignore[arg-type]

    return plan


def test_costs_that_were_measured_here_are_used_again_and_so_is_the_plan(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = planned()
    with monkeypatch.context() as patch:
        patch.setattr(make_plan, "_fastest", lambda *_: pytest.fail("plans again"))
        assert planned() == first
    assert planned(4).costs != first.costs, "of another job"
    assert planned(schedule="gpipe").costs == first.costs, "stages are at the same places"
    assert planned(kept=False).costs != first.costs
    new = planned(renew=True)
    assert new.costs != first.costs
    assert planned() == new


def test_costs_of_another_machine_are_not_taken(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    first = planned()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert planned().costs != first.costs
    finally:
        torch.set_num_threads(threads)
    assert planned() == first
    for how in ("NCCL_ALGO", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES"):
        with monkeypatch.context() as patch:
            patch.setenv(how, "other")
            assert planned().costs != first.costs, how
    products = torch.backends.cuda.matmul
    precision = products.fp32_precision
    products.fp32_precision = "tf32"
    try:
        assert planned().costs != first.costs
    finally:
        products.fp32_precision = precision
    assert planned() == first
    monkeypatch.setattr(running, "machines", lambda *_: None)
    assert planned().costs != first.costs, "emulated hosts"


def counted_plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Those that are made from now on."""
    made: list[Plan] = []

    def counted(*of: object) -> Plan:
        made.append(fastest(*of))
        return made[-1]

    fastest: Callable[..., Plan] = make_plan._fastest
    monkeypatch.setattr(make_plan, "_fastest", counted)
    return made


def test_plans_with_a_policy_of_the_users_own_are_not_kept(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICIES, "of-this-test", POLICIES["captured"])
    made = counted_plans(monkeypatch)
    for order, times in (("captured", 1), ("of-this-test", 2)):
        made.clear()
        planned(order=order)
        planned(order=order)
        assert len(made) == times, order
    assert made[0].costs == made[1].costs, "costs are"


def test_rank_0_decides_what_is_found(tmp_path: Path) -> None:
    """Each host has its own cache."""
    job = make_job(2, 2)
    measured_on: list[int] = []

    def work(ranks: Threads) -> Costs:
        def measure() -> Costs:
            measured_on.append(ranks.rank)
            return make_costs(job)

        kept = Kept(tmp_path / str(ranks.rank))
        return costs_again(ranks, CPU, lambda: [job_text(job)], measure, kept)

    found = on_threads(2, work)
    assert sorted(measured_on) == [0, 1]
    assert not (tmp_path / "1").exists()
    assert on_threads(2, work) == found
    assert len(measured_on) == 2
    (path,) = (tmp_path / "0").iterdir()
    (tmp_path / "1").mkdir()
    path.rename(tmp_path / "1" / path.name)
    on_threads(2, work)
    assert len(measured_on) == 4, "what other hosts have does not count"
