"""Losses and gradients are the same bits, whatever the backward computes again, and under what it runs."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.ir.costs import Costs
from stretto.ir.flow import PHASES
from stretto.ir.plan import ItemKind, Plan
from stretto.ir.program import WAIT, Job
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.passes.recompute import is_repeated
from stretto.passes.recompute_choice import recomputed
from stretto.planning.make_plan import listed, make_plan
from stretto.planning.schedules import choose_schedule
from stretto.runtime.local import run_threads
from stretto.runtime.runner import Runner
from stretto.verifying import verify
from stretto.verifying.memory import peak_bytes
from tests.cells import slow
from tests.order.test_order_equality import assert_same, costs_of, numbers
from tests.parallelize.equality import MODELS, batch_of, gpt, loss_of
from tests.passes.steps import after
from tests.runtime.equality import lowered, made_up_costs

DROPPING = GPTConfig(vocab_size=64, layers=2, hidden=32, heads=4, context=8, dropout=0.2)

LAYOUTS = {
    "one rank": {},
    "pp": {"pp": 2},
    "tp": {"tp": 2},
    "tp sp": {"tp": 2, "sequence_parallel": True},
    "pp tp": {"pp": 2, "tp": 2, "schedule": "1f1b"},
    "pp tp sp": {"pp": 2, "tp": 2, "sequence_parallel": True},
}

EVERY = ("selective", "full", "gathers", "halfway")
CASES = [
    ("dropping", "pp", "1f1b", ("selective", "full", "halfway")),
    ("dropping", "tp sp", "zb-h1", ("gathers",)),
    *(
        slow(*case, EVERY)
        for case in (
            ("dropping", "tp sp", "zb-h1"),
            ("llama", "tp sp", "zb-h1"),
            ("dropping", "one rank", "1f1b"),
            ("dropping", "pp tp sp", "zb-h1"),
            ("dropping", "pp", "zb-h1"),
            ("dropping", "tp", "1f1b"),
            ("llama", "pp", "1f1b"),
            ("gpt2", "one rank", "zb-h1"),
            ("gpt2", "pp tp sp", "1f1b"),
            ("gpt tied, learned positions", "pp", "1f1b"),
        )
    ),
]


@functools.cache
def model_of(name: str) -> nn.Module:
    return GPT(DROPPING, seed=3) if name == "dropping" else MODELS[name]()


@functools.cache
def job_of(name: str, layout: str) -> Job:
    loss = next_token_loss if name == "dropping" else loss_of(name)
    parallel = Parallel(microbatches=4, **LAYOUTS[layout])
    return capture(model_of(name), batch_of(8), loss, parallel)


def peaks(job: Job, costs: Costs, schedule: str) -> list[int]:
    plan = replace(lowered(job, schedule), costs=costs)
    return [peak_bytes(plan, rank) for rank in range(plan.ranks)]


def changed(job: Job, schedule: str, choice: str | int) -> Job:
    costs, order = made_up_costs(job), choose_schedule(job, schedule=schedule)
    prices = listed(job, costs)
    wish = replace(job, recompute=choice)
    return after(recomputed, wish, costs, order, lambda made: peaks(made, prices.costs_of(made), schedule))[0]


def halfway(job: Job, schedule: str) -> list[int]:
    """A limit between what the job needs and what it needs when all of its blocks are repeated; none where
    one microbatch is live and the repeated block itself needs as much."""
    costs = made_up_costs(job)
    most = max(peaks(replace(job, recompute=2**50), costs, schedule))
    least = max(peaks(changed(job, schedule, "full"), costs, schedule))
    return [(most + least) // 2] if least < most else []


def results(job: Job, model: nn.Module, schedule: str) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """By rank, loss and gradients after two steps, whose draws differ."""
    plan = lowered(job, schedule)
    verify(plan)

    def work(runner: Runner) -> tuple[Tensor, dict[str, Tensor]]:
        for _ in range(2):
            loss = runner.step(batch_of(8))
        return loss, {n: p.grad for n, p in runner.named_parameters() if p.grad is not None}

    found: list[Any] = run_threads(plan, lambda _: copy.deepcopy(model), work)
    return found


def repeated(job: Job) -> int:
    return sum(is_repeated(op) for stage in job.stages for phase in PHASES for op in stage.ops[phase])


@pytest.mark.filterwarnings("ignore:.*is not sharded over tp:UserWarning")
@pytest.mark.parametrize(("name", "layout", "schedule", "choices"), CASES)
def test_the_same_bits(name: str, layout: str, schedule: str, choices: tuple[str, ...]) -> None:
    job, model = job_of(name, layout), model_of(name)
    expected = results(job, model, schedule)
    assert any(grads for _, grads in expected)
    limits = halfway(job, schedule) if "halfway" in choices else []
    words = [word for word in choices if word != "halfway" and (word != "gathers" or layout.endswith("sp"))]
    for choice in (*words, *limits):
        made = changed(job, schedule, choice)
        assert repeated(made), f"{choice} repeats nothing"
        assert_same(results(made, model, schedule), expected)


OVERLAPPED = [
    ("tp sp", "full", "window"),
    *(
        slow(*case)
        for case in (
            ("tp sp", "selective", "window"),
            ("tp sp", "gathers", "window"),
            ("pp tp", "full", "window"),
            ("tp sp", "full", "local"),
            ("tp sp", "gathers", "local"),
            ("pp tp", "full", "local"),
            ("pp tp", "selective", "window"),
        )
    ),
]


def again_under_collectives(plan: Plan) -> int:
    """How many repeated ops that take time are between a collective's start and its wait."""
    ops = {
        (stage.index, op.name): op for stage in plan.job.stages for made in stage.ops.values() for op in made
    }
    found = 0
    for window in plan.windows.values():
        flying: set[tuple[int, str]] = set()
        for item in window.items:
            if item.kind is not ItemKind.OP:
                continue
            key = (window.parts[item.part][0], str(item.ref))
            op = ops[key]
            if op.collective is not None:
                flying.add(key)
            elif op.target == WAIT:
                flying.discard((key[0], op.uses[0]))
            elif flying and is_repeated(op) and plan.costs.op_us.get(key):
                found += 1
    return found


@pytest.mark.parametrize(("layout", "choice", "mode"), OVERLAPPED)
def test_numbers_are_those_of_off_without_recomputation(layout: str, choice: str, mode: Any) -> None:
    model = gpt(dropout=0.1, layers=2 if "pp" in LAYOUTS[layout] else 1).double()
    microbatches = 4 if "pp" in LAYOUTS[layout] else 2
    parallel = Parallel(microbatches=microbatches, **LAYOUTS[layout])
    job = capture(model, batch_of(), next_token_loss, parallel)
    plain = make_plan(job, costs_of(job), overlap="off")
    assert not any(is_repeated(op) for stage in plain.job.stages for ops in stage.ops.values() for op in ops)
    plan = make_plan(replace(job, recompute=choice), costs_of(job), overlap=mode)
    verify(plan)
    assert plan.overlap == mode
    assert plan.job.recompute == choice
    if choice != "gathers":  # those are collectives themselves
        assert again_under_collectives(plan)
    assert_same(numbers(plan, model), numbers(plain, model))
