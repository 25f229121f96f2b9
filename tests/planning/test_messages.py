"""Receives of several messages a microbatch: posted as far ahead as pays, within memory, never in the way.

The job is a chain whose stages hand on six values each, as those of a U-Net that is cut in its decoder: the
last of a stage is the first that the next one reads. Six messages take as long as one and a half forwards.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

import stretto
from stretto.ir.action import Phase
from stretto.ir.costs import Costs
from stretto.ir.plan import Plan
from stretto.ir.program import Edge, Job, Op, Parameter, Ref, Stage, TensorSpec
from stretto.planning import finish as waiting
from stretto.planning.lower import lower
from stretto.planning.make_plan import make_plan
from stretto.schedule.families import make_schedule
from stretto.verifying import plan_faults
from stretto.verifying.memory import peak_bytes
from tests.families import ONE_STAGE
from tests.synthetic import ACTIVATION, WEIGHT, WORK, make_costs, make_job

VALUES = 6
MESSAGES = 1.5
"""What a microbatch's messages of one border take, in forwards."""


def skips_job(stages: int, microbatches: int) -> Job:
    """Op k of a stage reads value 5 - k of the stage before, and its own op k - 1."""
    made: list[Stage] = []
    edges: list[Edge] = []
    parameters: list[Parameter] = []
    last = stages - 1

    def op(name: str, *uses: str, spec: TensorSpec = ACTIVATION) -> Op:
        return Op(name, WORK, tuple(Ref(use) for use in uses), (), (spec,), flops=1000)

    for s in range(stages):
        forward, into = [], []
        for k in range(VALUES):
            given = [f"y{s - 1}.{VALUES - 1 - k}"] if s else ["batch/x"]
            forward.append(op(f"y{s}.{k}", *given, *([f"y{s}.{k - 1}"] if k else [f"param/w{s}"])))
        if s == last:
            forward.append(op("loss", f"y{s}.{VALUES - 1}", spec=TensorSpec((), "float32")))
        for k in reversed(range(VALUES)):
            own = [f"d{s}.{k + 1}"] if k < VALUES - 1 else []
            given = [f"d{s + 1}.{VALUES - 1 - k}"] if s < last else ([] if own else ["tangent"])
            into.append(op(f"d{s}.{k}", f"y{s}.{k}", *given, *own))
        weight = op(f"dw{s}", f"d{s}.0", f"y{s}.0", spec=WEIGHT)
        made.append(Stage(s, {Phase.F: tuple(forward), Phase.I: tuple(into), Phase.W: (weight,)}))
        parameters.append(Parameter(f"w{s}", WEIGHT, (s,), ((s, Phase.W, weight.name),), f"w{s}"))
    for s in range(last):
        for k in range(VALUES):
            edges.append(Edge(len(edges), f"y{s}.{k}", s, Phase.F, s + 1, Phase.F, ACTIVATION))
            edges.append(Edge(len(edges), f"d{s + 1}.{k}", s + 1, Phase.I, s, Phase.I, ACTIVATION))
    return Job(
        *("six values a border", microbatches, tuple(made), tuple(edges), tuple(parameters), (), ()),
        *((("x", ACTIVATION),), (last, "loss")),
        optimizer="sgd",
    )


def costs_of(job: Job, messages: float = MESSAGES) -> Costs:
    """Forward, input and weight gradients take 10 us each."""
    rate = VALUES * ACTIVATION.nbytes / (messages * 10.0)
    return make_costs(job, f_us=10.0, i_us=10.0, w_us=10.0, bytes_per_us=rate)


def figures(plan: Plan) -> tuple[float, int]:
    """(step in microseconds, bytes of the rank with most)."""
    assert plan.prediction is not None
    return plan.prediction.step_us, max(plan.prediction.peak_bytes)


@pytest.mark.parametrize(
    ("stages", "family", "before_us", "after_us"),
    [(2, "eager-1f1b", 625.8, 513.3), (2, "1f1b", 625.8, 536.7), (4, "eager-1f1b", 781.7, 591.7)],
)
def test_messages_of_the_next_microbatch_travel_under_this_ones_work(
    stages: int, family: str, before_us: float, after_us: float
) -> None:
    job = skips_job(stages, 16)
    plan = make_plan(job, costs_of(job), schedule=family)
    before = stretto.simulate(lower(job, plan.schedule, costs_of(job)))
    assert before.step_us == pytest.approx(before_us, abs=0.1)
    assert figures(plan)[0] == pytest.approx(after_us, abs=0.1)


@pytest.mark.parametrize("messages", [0.01, 1.5, 4.0])
def test_buffers_are_counted_and_taken_only_where_they_pay(messages: float) -> None:
    job = skips_job(3, 6)
    costs = costs_of(job, messages)
    plan = make_plan(job, costs, schedule="1f1b")
    step_us, resident = figures(plan)
    proved = max(peak_bytes(plan, rank) for rank in range(plan.ranks))
    assert resident <= proved <= resident + VALUES * ACTIVATION.nbytes
    drafts = [lower(job, plan.schedule, costs, ahead=ahead) for ahead in range(waiting.MOST + 1)]
    times = [stretto.simulate(draft).step_us for draft in drafts]
    assert step_us <= min(times) * 1.005
    pays = times[0] > min(times) / waiting.WORTH
    assert pays is (messages == MESSAGES), "quick messages need no buffers, and of slow ones the link is full"
    assert (posted(plan) != posted(drafts[0])) is pays


def posted(plan: Plan) -> list[list[str]]:
    """Receives and runs of each rank, in order."""
    return [[str(i) for i in order if not str(i).startswith("sent")] for order in plan.orders]


def test_memory_has_the_last_word() -> None:
    job = skips_job(2, 8)
    costs = costs_of(job)
    free = make_plan(job, costs, schedule="1f1b")
    most = max(peak_bytes(free, rank) for rank in range(2))
    assert posted(make_plan(job, costs, schedule="1f1b", max_bytes=most)) == posted(free)
    kept = make_plan(job, costs, schedule="1f1b", max_bytes=most - 1)
    assert kept.overlap == "local", "no refusal, but fewer buffers"
    assert max(peak_bytes(kept, rank) for rank in range(2)) < most
    assert figures(kept)[0] > figures(free)[0]


def test_one_message_a_microbatch_is_as_it_was() -> None:
    job = make_job(3, 8)
    costs = make_costs(job, bytes_per_us=5000.0)
    for family in ONE_STAGE:
        schedule = make_schedule(family, 3, 8)
        for ahead in range(1, waiting.MOST + 1):
            assert lower(job, schedule, costs, ahead=ahead) == lower(job, schedule, costs)


NO_HANG = [pytest.param(stages, marks=[] if stages == 2 else [pytest.mark.slow]) for stages in range(2, 9)]


@pytest.mark.parametrize("stages", NO_HANG)
@pytest.mark.parametrize("job_of", [skips_job, make_job])
def test_no_rank_waits_for_ever(job_of: Callable[[int, int], Job], stages: int) -> None:
    """With sends that buffer and with sends that wait for their receive, however far ahead receives are."""
    for microbatches in (1, 2, 3):
        job = job_of(stages, microbatches)
        costs = make_costs(job)
        for family in ONE_STAGE:
            schedule = make_schedule(family, stages, microbatches)
            for ahead in range(waiting.MOST + 1):
                assert plan_faults(lower(job, schedule, costs, ahead=ahead)) == []
