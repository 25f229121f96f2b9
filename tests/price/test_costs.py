"""Costs: op times that add up to what runs, links from measured points, and described clusters."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch

import stretto
from stretto.capturing.trace import trace
from stretto.ir.action import Phase
from stretto.ir.costs import Costs
from stretto.ir.flow import PHASES
from stretto.ir.program import Job
from stretto.ir.storage import partial_sums
from stretto.ir.transfers import message_us, sum_time
from stretto.measure import messages, profile
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.price.cluster import flat_link
from stretto.price.shared import ACTION_US, ring_cost
from stretto.schedule.families import make_schedule
from tests.capturing.zoo import EQUAL, BatchNorm, Dropout, mean_square, rows
from tests.clusters import cores
from tests.price.comm_job import comm_job, costs_on
from tests.runtime.equality import evenly, job_of, tokens, traced

CPU = torch.device("cpu")


def gpt_job(stages: int, hidden: int = 128) -> tuple[GPT, torch.Tensor, Job]:
    model = GPT(GPTConfig(vocab_size=61, layers=4, hidden=hidden, heads=4, context=64), seed=0)
    batch = tokens(4, columns=65)
    found = trace(model, batch, next_token_loss, microbatches=4)
    names = [f"blocks.{4 * k // stages}" for k in range(1, stages)]
    return model, batch, job_of(found, stages, 4, names)


@pytest.mark.quiet
def test_op_times_add_up_to_a_measured_run() -> None:
    """The sum over ops, for each microbatch, against the compute time of full steps. Loose: the machine may
    be shared, and the profile is of one microbatch alone."""
    model, batch, job = gpt_job(1)
    found = profile.profile(job, CPU)  # looked at again below, as the machine may be busy now and not then
    assert set(found.op_us) == {(0, op.name) for phase in PHASES for op in job.stages[0].ops[phase]}
    assert all(us >= 0 for us in found.op_us.values())
    runner = stretto.Runner(stretto.plan(job, cluster=cores(), schedule="1f1b"), model)
    ratios = []
    for _ in range(5):
        times = []
        for _ in range(6):
            start = time.perf_counter()
            runner.step(batch)
            times.append((time.perf_counter() - start) * 1e6)
        ratios.append(sum(profile.profile(job, CPU).op_us.values()) * 4 / min(times[1:]))
        if 0.4 < ratios[-1] < 2.5:
            return
    pytest.fail(f"five measurements, none near the run: {ratios}")


def test_gradients_are_added_as_the_runtime_adds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that is a gradient and nothing else is never there by itself once its sum has begun."""
    _, _, job = gpt_job(1)
    made = partial_sums(job, 0)
    products = [value for value, of in made.items() if of[0].product]
    assert 0 < len(products) < len(made), "and other gradients"
    added, original = [], torch.addmm

    def addmm(kept: torch.Tensor, *args: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        assert kept is out
        added.append(kept.shape)
        return original(kept, *args, out=out)

    monkeypatch.setattr(torch, "addmm", addmm)
    found = profile.profile(job, CPU)
    rounds = len(next(iter(found.rounds[0].totals.values())))
    # The round for warmth begins the sums; each of the others runs with a clock around each op, and without.
    assert len(added) == 2 * rounds * len(products)
    assert set(added[: len(products)]) == {
        op.outputs[0].shape for op in job.stages[0].ops[Phase.W] if op.name in products
    }


def test_equal_stages_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, job = gpt_job(4, 32)
    measured: list[int] = []
    measure = profile._measure

    def counted(job: Job, stage, device, rounds):
        measured.append(stage.index)
        return measure(job, stage, device, rounds)

    monkeypatch.setattr(profile, "_measure", counted)
    found = profile.profile(job, CPU)
    assert measured == [0, 1, 3], "the two in the middle are equal"
    names = [[op.name for phase in PHASES for op in job.stages[s].ops[phase]] for s in (1, 2)]
    assert [found.op_us[1, a] for a in names[0]] == [found.op_us[2, b] for b in names[1]]


def test_only_the_stages_that_are_asked_for_are_measured() -> None:
    _, _, job = gpt_job(2, 32)
    assert {stage for stage, _ in profile.profile(job, CPU, [1]).op_us} == {1}


def test_a_second_visit_counts_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "LEAST_ROUND_US", 0.0)  # as many rounds in each visit, however fast they are
    job = comm_job(2, tp=2)
    first = profile.profile(job, CPU, [1])
    counts = {phase: len(totals) for phase, totals in first.rounds[1].totals.items()}
    slow = {phase: [us + 1e6 for us in totals] for phase, totals in first.rounds[1].totals.items()}
    first.rounds[1].totals.update(slow)
    both = profile.profile(job, CPU, [1], first)
    assert all(len(both.rounds[1].totals[phase]) > count for phase, count in counts.items())
    # All count: none took more than twice the median, which is between the two visits.
    assert 0.5e6 < sum(both.op_us.values()) < 1.5e6
    assert first.rounds.keys() == both.rounds.keys() == {1}


SOON = ("Masked", "Sorts", "ViewOfAView", "Convolutions", "Complex", "Constants", "Dropout", "BatchNorm")
"""Those of the most kinds of inputs; the others in the longer run."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in SOON else pytest.mark.slow)
        for name in (*EQUAL, "Dropout", "BatchNorm")
    ],
)
def test_whatever_is_captured_can_be_measured(name: str) -> None:
    """Made-up inputs must be valid for every op: indices, layouts, masks."""
    kind = {"Dropout": Dropout, "BatchNorm": BatchNorm, **EQUAL}[name]
    model = kind()
    job = evenly(trace(model, rows(), mean_square, microbatches=2), 2, 2)
    op_us = profile.profile(job, CPU).op_us
    assert len(op_us) == sum(len(ops) for stage in job.stages for ops in stage.ops.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_models_of_transformers_can_be_measured(name: str) -> None:
    job = job_of(traced(name, torch.float32), 2, 2)
    assert sum(profile.profile(job, CPU).op_us.values()) > 0


@pytest.mark.parametrize(
    ("latency_us", "bytes_per_us", "noise", "rel"),
    [
        (50.0, 1000.0, (1, 1, 1, 1), 0.02),
        (2_000.0, 12.5, (1, 1, 1, 1), 0.02),
        (5.0, 20_000.0, (1, 1, 1, 1), 0.02),
        (100.0, 100.0, (1.1, 0.9, 1.1, 0.95), 0.4),
    ],
)
def test_a_link_is_fitted_from_its_points(
    latency_us: float, bytes_per_us: float, noise: tuple[float, ...], rel: float
) -> None:
    """Round trips of a message and an empty answer give the link back."""
    points = [
        (n, (2 * latency_us + n / bytes_per_us) * a) for n, a in zip(messages.SIZES, noise, strict=True)
    ]
    assert messages._fit(points) == pytest.approx((latency_us, bytes_per_us), rel=rel)
    latency, rate = messages._fit([(size, 100.0 - size * 1e-6) for size in messages.SIZES])
    assert latency >= 0
    assert 0 < rate < float("inf"), "faster than it can be measured"


def test_a_described_cluster_is_a_roofline() -> None:
    _, _, job = gpt_job(2, 32)
    cluster = cores(
        peak_tflops=0.0001,
        memory_gbps=0.4,
        op_overhead_us=2.0,
        latency_us=7.0,
        link_gbps=0.05,
        processor_us_per_mb=3.0,
    )
    costs = costs_on(job, make_schedule("1f1b", 2, 4), cluster)
    sizes = {f"param/{p.name}": p.spec.nbytes for p in job.parameters}
    for stage in job.stages:
        sizes |= {op.name: op.outputs[0].nbytes for ops in stage.ops.values() for op in ops if op.outputs[0]}
    seen: Counter[str] = Counter()
    for stage in job.stages:
        for op in (op for ops in stage.ops.values() for op in ops):
            us = costs.op_us[stage.index, op.name]
            if op.target == "getitem":
                assert us == 0
            elif op.alias is not None:
                assert us == 2.0
            elif op.target in ("aten.mm.default", "aten.mul.Tensor") and set(op.uses) <= sizes.keys():
                # Everything read and written passes through memory once.
                arithmetic = op.flops / 100.0
                memory = (op.nbytes + sum(sizes[name] for name in op.uses)) / 400.0
                assert us == pytest.approx(2.0 + max(arithmetic, memory))
                seen["arithmetic" if arithmetic > memory else "memory"] += 1
    assert min(seen["arithmetic"], seen["memory"]) >= 5
    link = costs.link(0, 1)
    assert message_us(link, 5000) == pytest.approx(7.0 + 100.0)
    assert link.processor_us_per_mb == 3.0
    assert costs.action_us == ACTION_US


def test_what_each_message_keeps_its_link_for_is_taken_by_each_step_of_a_collective() -> None:
    """A ring of 4 gathers in three messages, one behind another; the loss is reported by one at least."""
    link = flat_link(cores(latency_us=7.0, message_us=18.0, link_gbps=0.05))
    assert message_us(link, 5000) == pytest.approx(7.0 + 18.0 + 100.0)
    assert ring_cost(link, "all_gather", 4).curve.us(0) == pytest.approx(3 * (7.0 + 18.0))
    told = sum_time(Costs({}, {}, link, 0.0, "made up"), (0, 1), 0)
    assert told.us == message_us(link, 0)
