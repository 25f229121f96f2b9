"""Sums of what several stages make stand where their messages cost least; no bit changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.capturing.split import place
from stretto.capturing.stages import cut
from stretto.capturing.trace import Traced, trace
from stretto.config import Parallel
from stretto.ir.action import Phase
from stretto.ir.costs import Link
from stretto.ir.program import Job
from stretto.ir.stage_maps import PLACES
from stretto.passes.placed_sums import placed_sums
from stretto.planning.choose import choose_schedule
from stretto.planning.lower import lower
from stretto.planning.make_plan import make_plan
from stretto.verifying import verify
from tests.passes.steps import after
from tests.passes.test_handed_on import BATCH, MICROBATCHES, WIDTH, decoder, loss_of
from tests.random_stages import batch_of
from tests.random_stages import loss_of as kinds_loss
from tests.runtime.equality import (
    FAMILIES,
    assert_equal,
    assert_same_bits,
    made_up_costs,
    plain,
    run,
)
from tests.test_equality_graphs import drawn
from tests.verifying.plans import hand_schedule

LOOPED = hand_schedule(
    (0, 1, 0, 1), MICROBATCHES,
    "0F0 0F1 2F0 2F1 0F2 2F2 2B0 2B1 2B2 0B0 0B1 0B2",
    "1F0 1F1 3F0 3B0 3F1 3B1 1F2 3F2 3B2 1B0 1B1 1B2",
)  # fmt: skip


def messages(job: Job, ranks: Sequence[int], phase: Phase) -> int:
    """For a microbatch, each value once to a rank."""
    return len(
        {
            (edge.value, ranks[edge.target])
            for edge in job.edges
            if edge.phase is phase and ranks[edge.source] != ranks[edge.target]
        }
    )


def adds(job: Job, phase: Phase) -> list[int]:
    """The stages of sums, in order."""
    return [s.index for s in job.stages for op in s.ops[phase] if op.target == "aten.add.Tensor"]


def test_parts_of_one_rank_are_summed_before_they_go_on() -> None:
    """A gradient has a part of each of four stages on two ranks, of which the last is the first's own."""
    _, job = decoder()
    made = after(placed_sums, job, made_up_costs(job), LOOPED)[0]
    ranks = LOOPED.stage_ranks
    assert messages(made, ranks, Phase.I) < messages(job, ranks, Phase.I)
    assert len(adds(made, Phase.I)) == len(adds(job, Phase.I))
    assert after(placed_sums, made, made_up_costs(made), LOOPED)[0] is made


def test_what_each_rank_has_one_part_of_goes_from_part_to_part() -> None:
    """Every rank adds its part to what it is sent: one message a rank, which no other place beats."""
    _, job = decoder()
    assert after(placed_sums, job, made_up_costs(job))[0] is job


def test_links_decide() -> None:
    """The link between ranks 3 and 0 is quick, and that from 3 to 2 slow."""
    _, job = decoder()
    costs = made_up_costs(job)
    [near, far] = Link(1.0, 1e6), Link(500.0, 1.0)
    made = after(placed_sums, job, replace(costs, links={(3, 2): far, (3, 1): near}))[0]
    ends = {(e.source, e.target) for e in made.edges if e.phase is Phase.I and "add" in e.value}
    assert (3, 1) in {(e.source, e.target) for e in made.edges if e.phase is Phase.I}
    assert ends
    assert made is not job


class Late(nn.Module):
    """c = a + b, where a and b are of one layer, or of two, and `c` is read by another."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[0](x)
        a, b = hidden.sin(), hidden.cos()
        between = self.layers[2](self.layers[1](hidden).tanh())
        found: Tensor = (self.layers[3](between) * (a + b)).square().mean()
        return found


def test_a_sum_goes_to_those_who_make_its_parts() -> None:
    """Two values of stage 0 are read by nothing but their sum in stage 3: one message instead of two."""
    model = Late()
    split = [f"layers.{k}" for k in (1, 2, 3)]
    job = capture(model, BATCH, loss_of, Parallel(pp=4, microbatches=MICROBATCHES, split=split))
    made = after(placed_sums, job, made_up_costs(job))[0]
    assert messages(job, range(4), Phase.F) - messages(made, range(4), Phase.F) == 1
    assert adds(made, Phase.F)[0] == 0
    assert_equal(run(make_plan(job, made_up_costs(job)), model, BATCH), plain(model, BATCH, loss_of), 1e-10)


class Anyhow(nn.Module):
    """c = a + b, a and b of layers i and j, is read by layer k as well; one matrix is used in all three."""

    def __init__(self, i: int, j: int, k: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(6))
        self.shared = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.i, self.j, self.k = i, j, k

    def forward(self, x: Tensor) -> Tensor:
        values: dict[int, Tensor] = {}
        hidden, kept = x, x.new_zeros(())
        for at, layer in enumerate(self.layers):
            hidden = layer(hidden).tanh() + kept
            if at in (self.i, self.j, self.k):
                values[at] = hidden @ self.shared
            if at == self.k:
                kept = sum(values.values(), x.new_zeros(())).cos()
        c = values[self.i] + values[self.j]
        found: Tensor = (hidden * c + values[self.k]).square().mean()
        return found


@cache
def traced(i: int, j: int, k: int) -> tuple[nn.Module, Traced]:
    model = Anyhow(i, j, k)
    return model, trace(model, BATCH, loss_of, microbatches=MICROBATCHES)


READERS = {0: "before", 2: "between", 4: "after"}


@pytest.mark.parametrize(
    ("family", "k"),
    [
        # Every family with one reader, and every reader with a third of them.
        pytest.param(
            family, k, id=f"{family}-{READERS[k]}", marks=() if at % 3 == k // 2 else pytest.mark.slow
        )
        for at, family in enumerate((*FAMILIES, *PLACES))
        for k in READERS
    ],
)
def test_sums_are_right_wherever_their_reader_is(family: str, k: int) -> None:
    """Layers 1 and 3 make a and b. Every layer is a stage, or two are one, on three ranks."""
    model, found = traced(1, 3, k)
    stages = 6 if family in PLACES else 3
    starts = [found.segments.index(f"layers.{at}") for at in range(6)]
    at = [starts[number * 6 // stages] for number in range(1, stages)]
    job = replace(cut(found, place(found, stages, at), stages, MICROBATCHES), pp=3)
    plan = make_plan(job, made_up_costs(job, latency_us=200.0), schedule=family)
    verify(plan)
    result = run(plan, model, BATCH)
    assert_equal(result, plain(model, BATCH, loss_of), 1e-10)
    left = lower(job, choose_schedule(job, schedule=family), made_up_costs(job))
    assert_same_bits(result, run(left, model, BATCH))


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(s, marks=pytest.mark.slow) for s in range(6, 80))]
)
def test_random_graphs_of_stages(seed: int) -> None:
    """Messages take no longer, all plans are proved, and the bits are those of sums that stay."""
    model, job, schedules = drawn(seed)
    draw = Random(seed)
    schedule = choose_schedule(job, schedule=schedules[-1])
    ranks = schedule.stage_ranks
    pairs = [(a, b) for a in range(schedule.ranks) for b in range(schedule.ranks) if a != b]
    links = {pair: Link(draw.choice((1.0, 100.0)), draw.choice((1.0, 1000.0))) for pair in pairs}
    costs = replace(made_up_costs(job), links=links)
    made = after(placed_sums, job, costs, schedule)[0]
    batch = batch_of(2 * job.microbatches)
    plan = lower(made, schedule, replace(made_up_costs(made), links=links))
    verify(plan)
    found = run(plan, model, batch)
    assert_equal(found, plain(model, batch, kinds_loss), 1e-10)
    assert_same_bits(found, run(lower(job, schedule, costs), model, batch))
    assert len(adds(made, Phase.I)) == len(adds(job, Phase.I))
    assert messages(made, ranks, Phase.F) <= messages(job, ranks, Phase.F)
