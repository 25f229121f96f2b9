"""What several stages read is sent to each rank once, and handed on where planning finds that it pays."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.capturing import capture
from stretto.config import Parallel
from stretto.ir.action import Phase
from stretto.ir.costs import Costs, Link
from stretto.ir.plan import Plan
from stretto.ir.program import Job
from stretto.passes.messages import handed_on, sent_once
from stretto.planning.lower import lower
from stretto.planning.make_plan import make_plan
from stretto.schedule.families import make_schedule
from stretto.verifying import verify
from tests.cells import slow
from tests.passes.steps import after
from tests.runtime.equality import assert_equal, made_up_costs, plain, run
from tests.verifying.plans import hand_schedule

WIDTH, MICROBATCHES = 6, 3


class Decoder(nn.Module):
    """Every layer reads what the first has made, as those of a decoder read the encoder's output."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.encoder = nn.Linear(WIDTH, WIDTH).double()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(stages - 1))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.encoder(x).tanh()
        hidden = memory
        for layer in self.layers:
            hidden = (layer(hidden) * memory).tanh() + hidden
        found: Tensor = hidden.square().mean()
        return found


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch)
    return found


BATCH = torch.randn(2 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LOOPED = hand_schedule(
    (0, 1, 0, 1), MICROBATCHES,
    "0F0 0F1 2F0 2F1 0F2 2F2 2B0 2B1 2B2 0B0 0B1 0B2",
    "1F0 1F1 3F0 3B0 3F1 3B1 1F2 3F2 3B2 1B0 1B1 1B2",
)  # fmt: skip


@cache
def decoder(stages: int = 4) -> tuple[nn.Module, Job]:
    model = Decoder(stages)
    split = [f"layers.{k}" for k in range(stages - 1)]
    parallel = Parallel(pp=stages, microbatches=MICROBATCHES, split=split)
    return model, capture(model, BATCH, loss_of, parallel)


def fan_out(job: Job, ranks: tuple[int, ...], phase: Phase = Phase.F) -> Counter[int]:
    """By rank, messages that it sends in a phase for a microbatch."""
    return Counter(
        ranks[edge.source]
        for edge in job.edges
        if edge.phase is phase and ranks[edge.source] != ranks[edge.target]
    )


def test_each_stage_takes_it_from_the_one_before() -> None:
    _, job = decoder()
    ranks = tuple(range(4))
    made = after(handed_on, job, made_up_costs(job))[0]
    assert fan_out(job, ranks)[0] == 3
    assert fan_out(made, ranks)[0] == 1
    assert sum(fan_out(made, ranks).values()) == sum(fan_out(job, ranks).values())
    assert after(handed_on, made, made_up_costs(made))[0] is made
    assert after(sent_once, job, made_up_costs(job))[0] is job


def test_nearest_is_by_cost() -> None:
    """Stages 0 and 2 are near each other, and stage 3 is near stage 1."""
    _, job = decoder()
    costs = made_up_costs(job)
    quick = Link(1.0, 1e6)
    near = replace(costs, links={(0, 2): quick, (1, 3): quick})
    made = after(handed_on, job, near)[0]
    memory = {e.value for e in made.edges if e.phase is Phase.F and e.source == 0 and e.target == 1}
    ends = {(e.source, e.target) for e in made.edges if any(e.value.startswith(m) for m in memory)}
    assert {(0, 2), (1, 3)} <= ends
    assert (0, 3) not in ends


def test_a_rank_is_sent_a_value_once() -> None:
    _, job = decoder()
    ranks = LOOPED.stage_ranks
    made = after(sent_once, job, made_up_costs(job), LOOPED)[0]
    assert fan_out(job, ranks)[0] - fan_out(made, ranks)[0] == 1, "rank 1 has stages 1 and 3"
    assert fan_out(made, ranks)[1] == fan_out(job, ranks)[1]


def plan_of(job: Job, costs: Costs, **asked: object) -> Plan:
    plan = make_plan(job, costs, **asked)  # type: ignore[arg-type]
    verify(plan)
    return plan


def handed(plan: Plan) -> bool:
    return any("_from_" in edge.value and plan.rank_of(edge.source) != plan.rank_of(edge.target)
               for edge in plan.job.edges)  # fmt: skip


@pytest.mark.parametrize(("stages", "rate", "pays"), [(8, 0.5, True), (8, 1e6, False), (4, 0.5, False)])
def test_planning_hands_on_where_it_pays(stages: int, rate: float, pays: bool) -> None:
    """One rank sends to seven others, and the link is slow: it is busier than all others together. Of three
    others it is not, and what is handed on is late."""
    job = replace(decoder(stages)[1], microbatches=8)
    costs = made_up_costs(job, latency_us=1.0, bytes_per_us=rate)
    plan = plan_of(job, costs, schedule="1f1b")
    assert handed(plan) is pays
    direct = lower(job, make_schedule("1f1b", stages, 8), costs, ahead=3)
    assert plan.prediction is not None
    assert (plan.prediction.step_us < 0.85 * stretto.simulate(direct).step_us) is pays


def test_numbers_stay_where_ranks_hold_several_stages() -> None:
    model, job = decoder()
    plan = plan_of(replace(job, pp=None), made_up_costs(job), schedule=LOOPED)
    assert any("_from_" in edge.value for edge in plan.job.edges)
    assert_equal(run(plan, model, BATCH), plain(model, BATCH, loss_of), 1e-10)


@pytest.mark.parametrize(
    ("recompute", "overlap"),
    [("full", "off"), ("selective", "local"), slow("selective", "off"), slow("full", "local")],
)
def test_beside_other_passes(recompute: str, overlap: str) -> None:
    model, job = decoder(8)
    costs = made_up_costs(job, latency_us=1.0, bytes_per_us=0.5)
    plan = plan_of(replace(job, recompute=recompute), costs, overlap=overlap)
    assert handed(plan) or overlap == "off"
    assert_equal(run(plan, model, BATCH), plain(model, BATCH, loss_of), 1e-10)
