"""What happens at the borders of stages: views, terms, ties and batches that plain models bring along."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from stretto.capturing.evaluation import capture_evaluation
from stretto.ir.action import Schedule, parse_slot
from stretto.planning.make_plan import make_plan

Loss = Callable[[nn.Module, Any], torch.Tensor]


def mean_square(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def check_equal(model: nn.Module, batch: Any, parallel: stretto.Parallel, loss: Loss = mean_square) -> None:
    """The planned step's loss and gradients on threads are those of the plain model, in float64."""
    model = model.double()
    job = stretto.capture(model, batch, loss=loss, parallel=parallel)
    plan = stretto.plan(job, stretto.Cluster())
    models = [copy.deepcopy(model) for _ in range(plan.ranks)]

    def work(runner: stretto.Runner) -> tuple[float, dict[str, torch.Tensor | None]]:
        value = float(runner.step(batch))
        return value, {name: p.grad for name, p in runner.named_parameters()}

    results = stretto.run_threads(plan, models.__getitem__, work)
    model.zero_grad()
    plain = loss(model, batch)
    plain.backward()
    expected = dict(model.named_parameters(remove_duplicate=False))
    seen: set[str] = set()
    for value, grads in results:
        assert value == pytest.approx(plain.item(), rel=1e-10)
        for name, grad in grads.items():
            seen.add(name)
            want = expected[name].grad
            if want is None:
                assert grad is None, name
            else:
                assert grad is not None, name
                assert (grad - want).norm() <= 1e-10 * want.norm(), name
    assert {expected[name].data_ptr() for name in seen} == {p.data_ptr() for p in model.parameters()}


@pytest.mark.parametrize("cut", ["1", "2", "3"])
def test_linears_on_three_dims_are_cut_between_views(cut: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    check_equal(model, x, stretto.Parallel(pp=2, microbatches=4, split=[cut], schedule="zb-h1"))


def test_linears_on_three_dims_in_four_automatic_stages() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    check_equal(model, x, stretto.Parallel(pp=4, microbatches=4))


class Positions(nn.Module):
    """Adds a parameter at the end of a stage: its gradient is the message that comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.positions = nn.Parameter(torch.randn(1, 5, 8))
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) + self.positions)


def test_a_term_at_the_end_of_a_stage_keeps_its_gradient_there() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    check_equal(Positions(), x, stretto.Parallel(pp=2, microbatches=4, split=["last"]))


class Tied(nn.Module):
    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.detached = detached
        self.embedding = nn.Embedding(16, 8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.hidden(self.embedding(tokens))
        return nn.functional.linear(x, self.head.weight.detach()) if self.detached else self.head(x)


@pytest.mark.parametrize(("detached", "frozen"), [(False, False), (True, False), (False, True)])
def test_tied_weights_that_one_stage_or_none_trains(detached: bool, frozen: bool) -> None:
    torch.manual_seed(0)
    model = Tied(detached)
    model.embedding.weight.requires_grad_(not frozen)
    tokens = torch.randint(0, 16, (4, 5))
    check_equal(model, tokens, stretto.Parallel(pp=2, microbatches=4, split=["hidden"]))


def test_slices_of_one_tensor_as_inputs_and_targets() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    tokens = torch.randint(0, 16, (4, 6))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model(batch["x"])
        return nn.functional.cross_entropy(logits.reshape(-1, 16), batch["y"].reshape(-1))

    batch = {"x": tokens[:, :-1], "y": tokens[:, 1:]}
    check_equal(model, batch, stretto.Parallel(pp=2, microbatches=2), loss)


def scaled(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["x"]).square().mean() * batch["scale"]


def test_constants_of_the_batch_must_stay_what_they_were() -> None:
    model = nn.Linear(4, 4)
    batch = {"x": torch.randn(2, 4), "scale": 2.0}
    job = stretto.capture(model, batch, loss=scaled, parallel=stretto.Parallel(microbatches=2))
    runner = stretto.Runner(stretto.plan(job, stretto.Cluster()), model)
    runner.step(batch)
    runner.step({"scale": 2.0, "x": torch.randn(2, 4)})  # the order of keys says nothing
    with pytest.raises(
        stretto.UsageError, match=r"batch leaf 'scale' is 5\.0, but the plan was captured with 2"
    ):
        runner.step({"x": batch["x"], "scale": 5.0})


def test_replaced_and_frozen_parameters() -> None:
    model = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    job = stretto.capture(model, x, loss=mean_square, parallel=stretto.Parallel(microbatches=2))
    runner = stretto.Runner(stretto.plan(job, stretto.Cluster()), model)
    model.bias.requires_grad_(False)
    runner.step(x)
    assert model.bias.grad is None
    assert model.weight.grad is not None
    model.weight.data = torch.randn(4, 4)
    with pytest.raises(stretto.UsageError, match="parameter 'weight' has got another tensor"):
        runner.step(x)


def test_capture_works_where_gradients_are_off() -> None:
    with torch.no_grad():
        job = stretto.capture(
            nn.Linear(4, 4), torch.randn(2, 4), loss=mean_square, parallel=stretto.Parallel(microbatches=2)
        )
    assert all(parameter.grads for parameter in job.parameters)


FOUR = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
NAMES = ["1", "2", "3"]


def own_order(text: tuple[str, str]) -> Schedule:
    orders = tuple(tuple(parse_slot(token) for token in order.split()) for order in text)
    return Schedule("by hand", 4, 2, (0, 1, 0, 1), orders)


LOOPED = own_order(
    (
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1",
    )
)


def test_stages_that_are_not_one_a_rank_need_a_schedule_of_ones_own() -> None:
    parallel = stretto.Parallel(pp=2, microbatches=2, split=NAMES, schedule="1f1b")
    job = stretto.capture(FOUR, torch.randn(2, 4), loss=mean_square, parallel=parallel)
    with pytest.raises(
        stretto.UsageError,
        match="2 on each of pp = 2 ranks, and schedule '1f1b' has 1 stage a rank: capture with 2 stages",
    ):
        stretto.plan(job, stretto.Cluster())
    assert stretto.plan(job, stretto.Cluster(), schedule=LOOPED).ranks == 2
    with pytest.raises(stretto.UsageError, match="is for 2 ranks, but pp = 4: give pp = 2"):
        stretto.plan(replace(job, pp=4), stretto.Cluster(), schedule=LOOPED)
    with pytest.raises(stretto.UsageError, match="keeps 2 microbatches live on a stage, but max_live = 1"):
        stretto.plan(replace(job, max_live=1), stretto.Cluster(), schedule=LOOPED)


def test_evaluation_stays_on_the_ranks_of_the_training() -> None:
    x = torch.randn(2, 4)
    parallel = stretto.Parallel(pp=2, microbatches=2, split=NAMES)
    job = stretto.capture(FOUR, x, loss=mean_square, parallel=parallel)
    training = stretto.plan(job, stretto.Cluster(), schedule=LOOPED)
    evaluation = capture_evaluation(FOUR, x, mean_square, job)
    plan = stretto.plan(evaluation, stretto.Cluster(), schedule=training.schedule)
    assert plan.schedule.stage_ranks == (0, 1, 0, 1)
    results = stretto.run_threads(plan, lambda _: FOUR, lambda runner: float(runner.step(x)))
    assert results == pytest.approx([mean_square(FOUR, x).item()] * 2, rel=1e-5)


def test_a_plan_that_needs_more_memory_than_there_is() -> None:
    job = stretto.capture(
        FOUR, torch.randn(2, 4), loss=mean_square, parallel=stretto.Parallel(microbatches=2)
    )
    with pytest.raises(stretto.PlanError, match="bytes"):
        make_plan(job, stretto.plan(job, stretto.Cluster()).costs, max_bytes=100)
    with pytest.raises(stretto.PlanError, match="bytes"):
        stretto.plan(job, stretto.Cluster(memory_bytes=100))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stretto.Parallel(ep=2), "dp = 1 is no multiple"),
        (lambda: stretto.Parallel(microbatch=2), "unknown argument microbatch; did you mean microbatches?"),
        (lambda: stretto.Parallel(pp=0), "pp = 0"),
        (lambda: stretto.Cluster(bandwidth=3), "unknown argument bandwidth"),
        (lambda: stretto.plan("plan.json"), "plan takes a job, not str"),
        (lambda: stretto.Runner("plan.json", FOUR), "Runner takes a plan, not str"),
        (
            lambda: stretto.capture(
                FOUR, torch.randn(2, 4), loss=mean_square, parallel=stretto.Parallel(), precision="fp16"
            ),
            "unknown precision 'fp16': give 'float32' or 'bf16'",
        ),
    ],
)
def test_mistakes_are_told_in_words(call: Callable[[], object], message: str) -> None:
    with pytest.raises(stretto.UsageError) as caught:
        call()
    assert message in str(caught.value)


def test_planning_leaves_the_generator_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    job = stretto.capture(
        model, torch.randn(2, 4), loss=mean_square, parallel=stretto.Parallel(microbatches=2)
    )
    before = torch.get_rng_state()
    stretto.plan(job)
    assert torch.equal(before, torch.get_rng_state())


def test_different_models_do_not_agree() -> None:
    from stretto.ir.serialize import plan_to_text

    def plan(hidden: int) -> str:
        model = nn.Sequential(nn.Linear(hidden, hidden), nn.Linear(hidden, hidden))
        job = stretto.capture(
            model, torch.randn(2, hidden), loss=mean_square, parallel=stretto.Parallel(microbatches=2)
        )
        return plan_to_text(stretto.plan(job, stretto.Cluster()))

    assert plan(4) != plan(8)
