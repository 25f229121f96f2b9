"""What crosses stages is in one piece: no copy where a view does, else one that has a price."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.capturing import capture
from stretto.config import Parallel
from stretto.ir.action import Phase
from stretto.ir.collectives import KINDS
from stretto.ir.costs import Costs
from stretto.ir.program import Edge, Job, Op, Ref, Stage, TensorSpec
from stretto.passes.messages import COPY, dense_messages
from stretto.planning.lower import lower
from stretto.planning.make_plan import make_plan
from stretto.schedule.families import make_schedule
from tests.passes.steps import after, costs_of
from tests.runtime.equality import assert_equal, assert_same_bits, made_up_costs, plain, run

PIECE, WIDTH = 4, 6
"""Rows of a microbatch, and numbers of a row."""

Form = Callable[[Tensor], Tensor]


class Crossing(nn.Module):
    """One value of the first stage, in another form, is read in the second."""

    def __init__(self, form: Form, back: Form) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = (nn.Linear(WIDTH, WIDTH).double() for _ in range(2))
        self.form, self.back = form, back

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        crosses = self.form(hidden * 2.0)
        last = self.last(hidden)
        found: Tensor = (self.back(crosses) * last).square().mean()
        return found


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch)
    return found


BATCH = torch.randn(PIECE * 2, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def job_of(form: Form, back: Form) -> tuple[nn.Module, Job]:
    model = Crossing(form, back)
    return model, capture(model, BATCH, loss_of, Parallel(pp=2, microbatches=2, split=["last"]))


def strided(job: Job) -> list[Edge]:
    return [edge for edge in job.edges if edge.spec.stride is not None]


def of_messages(job: Job) -> list[Op]:
    """The forward's ops that messages are made of."""
    ops = (op for stage in job.stages for op in stage.ops[Phase.F])
    return [op for op in ops if "_sent" in op.name or "_at_" in op.name]


FORMS: Mapping[str, tuple[Form, Form, list[str], list[int]]] = {
    "turned": (lambda x: x.t(), lambda x: x.sin().t(), ["permute", "permute"], [PIECE * WIDTH]),
    "turned in parts": (
        *(lambda x: x.view(-1, 2, 3).permute(2, 0, 1), lambda x: x.sin().permute(1, 2, 0).reshape(-1, WIDTH)),
        *(["permute", "permute"], [PIECE * WIDTH]),
    ),
    "expanded": (*(lambda x: x[:, :1].cos().expand(-1, WIDTH), lambda x: x, ["slice", "expand"], [PIECE]),),
    "a slice": (lambda x: x[:, 1:3], lambda x: x.repeat(1, 3), ["clone"], [PIECE * 2]),
    "a slice, turned": (
        *(
            lambda x: x[:, ::2].t(),
            lambda x: x.sin().t().repeat(1, 2),
            ["permute", "clone", "permute"],
            [PIECE * 3],
        ),
    ),
}
"""Form -> what makes it, what reads it, the ops of its message, and how many elements that has."""


def capture_forms(name: str) -> tuple[nn.Module, Job, Job]:
    form, back, *_ = FORMS[name]
    model, job = job_of(form, back)
    return model, job, after(dense_messages, job, made_up_costs(job))[0]


@pytest.mark.parametrize("name", FORMS)
def test_a_message_is_views_and_a_copy_only_where_there_are_gaps(name: str) -> None:
    _, job, made = capture_forms(name)
    *_, targets, elements = FORMS[name]
    [edge] = [edge for edge in strided(job) if edge.phase is Phase.F]
    assert strided(made) == []
    ops = of_messages(made)
    assert [op.target.split(".")[1] for op in ops] == targets
    assert [op.alias is None for op in ops] == [op.target == COPY for op in ops]
    assert [e.spec.numel for e in made.edges if e.index == edge.index] == elements
    assert after(dense_messages, made, made_up_costs(made))[0] is made, "nothing is left to do"


@pytest.mark.parametrize("name", FORMS)
def test_numbers_stay(name: str) -> None:
    model, job, _ = capture_forms(name)
    plan = make_plan(job, made_up_costs(job), schedule="1f1b")
    left_alone = run(lower(job, plan.schedule, made_up_costs(job)), model, BATCH)
    found = run(plan, model, BATCH)
    assert strided(plan.job) == []
    assert_equal(found, plain(model, BATCH, loss_of), 1e-10)
    assert_same_bits(found, left_alone)


def test_a_copy_has_a_price_and_is_in_the_timeline() -> None:
    _, job, made = capture_forms("a slice")
    [copied] = of_messages(made)
    costs, schedule = replace(made_up_costs(made), action_us=0.0), make_schedule("1f1b", 2, 2)
    dearer = replace(costs, op_us={**costs.op_us, (0, copied.name): costs.op_us[0, copied.name] + 500.0})

    def compute_us(given: Costs) -> float:
        spans = stretto.simulate(lower(made, schedule, given)).spans
        return sum(span.end_us - span.start_us for span in spans if span.kind == "compute")

    assert compute_us(dearer) - compute_us(costs) == pytest.approx(2 * 500.0), "once a microbatch"
    assert (0, copied.name) in after(dense_messages, job, made_up_costs(job))[1].op_us


def test_who_reads_by_strides_of_its_own_finds_them() -> None:
    """Turned as it was, by a view."""
    model, job = job_of(lambda x: x.t(), lambda x: x.as_strided((PIECE, WIDTH), (WIDTH, 1)))
    assert strided(job)
    assert [op.alias is None for op in of_messages(after(dense_messages, job, made_up_costs(job))[0])] == [
        False
    ] * 2
    found = run(make_plan(job, made_up_costs(job), schedule="1f1b"), model, BATCH)
    parts = plain(model, BATCH, lambda m, b: torch.stack([m(part) for part in b.chunk(2)]).mean())
    assert_equal(found, parts, 1e-10)


def test_strides_over_gaps_are_refused() -> None:
    """What is in the gaps is not sent."""
    _, job = job_of(lambda x: x[:, ::2], lambda x: x.as_strided((PIECE, WIDTH), (WIDTH, 1)))
    with pytest.raises(stretto.PlanError, match=r"stage 1 reads .* of stage 0 by strides of its own"):
        make_plan(job, made_up_costs(job), schedule="1f1b")


def gathering(kind: str) -> Job:
    """One stage: what a rank has of the batch is turned, and communicated."""
    shape = TensorSpec((PIECE, WIDTH), "float64")
    turned = TensorSpec((WIDTH, PIECE), "float64", (1, WIDTH))
    row = KINDS[kind]
    how = ("sum",) if row.reductions else ()
    out = row.shape(turned.shape, 2, *how)
    assert out is not None
    result = TensorSpec(out, "float64")
    ops = (
        Op("turned", "aten.t.default", (Ref("batch/x"),), (), (turned,), "batch/x"),
        Op("start", row.target, (Ref("turned"), *how, "tp", 2), (), (result,)),
        Op("done", "comm.wait", (Ref("start"),), (), (result,), "start"),
        Op("picked", "aten.mul.Tensor", (Ref("done"), Ref("done")), (), (result,)),
        Op("loss", "aten.sum.default", (Ref("picked"),), (), (TensorSpec((), "float64"),)),
    )
    stage = Stage(0, {Phase.F: ops, Phase.I: (), Phase.W: ()})
    return Job(*("gathering", 1, (stage,), (), (), (), (), (("x", shape),), (0, "loss")), axes=(("tp", 2),))


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all"])
def test_a_collective_reads_a_copy_that_has_a_price(kind: str) -> None:
    job = gathering(kind)
    made, costs = after(dense_messages, job, costs_of(job, link=1.0, gather=1.0))
    [copied] = [op for op in made.stages[0].ops[Phase.F] if op.target == COPY]
    assert costs.op_us[0, copied.name] > 0.0
    [start] = [op for op in made.stages[0].ops[Phase.F] if op.name == "start"]
    assert start.args[0] == Ref(copied.name)


def test_a_collective_that_works_in_place_has_its_copy_in_its_price() -> None:
    job = gathering("all_reduce")
    costs = costs_of(job, link=1.0, gather=1.0)
    assert after(dense_messages, job, costs)[0] is job
