"""Passes of your own, of a graph, a job and a step: where they run, what they make, and what is refused."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto import passes
from stretto.files.kept import Kept
from stretto.ir.program import Job
from stretto.passes.layout.program import StepProgram
from stretto.passes.rewrite import with_uses
from stretto.passes.step import Context, LeftOutError, Step
from tests.clusters import cores

RELU = "aten.relu.default"


def relu_once(program: StepProgram, sharded: Collection[str]) -> StepProgram:
    """relu(relu(x)) = relu(x)."""
    made = {op.name: op for op, _ in program.ops}
    gone = {
        op.name: op.uses[0]
        for op, _ in program.ops
        if op.target == RELU and op.uses[0] in made and made[op.uses[0]].target == RELU
    }

    def now(name: str) -> str:
        return gone.get(name, name)

    left = ((with_uses(op, now), origin) for op, origin in program.ops if op.name not in gone)
    return program.with_ops(left, now) if gone else program


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(torch.relu(self.first(x))))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def captured(**more: Any) -> Job:
    x = torch.randn(8, 6, dtype=torch.float64)
    return stretto.capture(
        Twice().double(), x, loss, stretto.Parallel(pp=2, microbatches=4, split=["second"], **more)
    )


def relus(job: Job) -> int:
    return sum(op.target == RELU for _, op in job.all_ops)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    lists = passes.GRAPH_PASSES, passes.JOB_PASSES, passes.STEP_PASSES
    before = [list(one) for one in lists]
    yield
    for one, was in zip(lists, before, strict=True):
        one[:] = was  # type: ignore[assignment]
    passes.OWN.clear()


def test_a_pass_of_a_graph_changes_the_step_and_no_number() -> None:
    assert relus(captured()) == 2
    stretto.passes.register(relu_once, after="dead_ops")
    job = captured()
    assert relus(job) == 1
    x = torch.randn(8, 6, dtype=torch.float64)
    found = stretto.check(Twice().double(), x, loss, stretto.Parallel(pp=2, microbatches=4, split=["second"]))
    assert max(one.relative for one in found.differences) <= 1e-10


def test_it_runs_where_it_was_put_once_and_may_be_left_out() -> None:
    stretto.register_pass(relu_once, before="no_ops")
    assert relus(captured(skip_passes=("relu_once",))) == 2
    stretto.register_pass(relu_once, after="dead_ops")
    assert [one.__name__ for one in passes.GRAPH_PASSES].count("relu_once") == 1
    assert [one.__name__ for one in passes.GRAPH_PASSES[:2]] == ["dead_ops", "relu_once"]


def test_a_pass_of_a_job() -> None:
    def named(job: Job) -> Job:
        return replace(job, name="mine")

    stretto.register_pass(named, after="gradient_parts")
    assert captured().name == "mine"


@pytest.mark.parametrize("tried", [False, True])
def test_a_pass_of_a_step_is_planned_with_or_tried(tried: bool) -> None:
    seen: list[int] = []

    def early(step: Step, context: Context) -> Step:
        seen.append(step.ahead)
        if tried:
            raise LeftOutError("not here")
        return step

    stretto.register_pass(early, after="handed_on", tried=tried)
    plan = stretto.plan(captured(), cores())
    stretto.verify(plan)
    assert seen


def test_plans_with_passes_of_your_own_are_not_kept(tmp_path: Any) -> None:
    """Nothing shows whether their code has changed."""

    def plans() -> int:
        kept = Kept(tmp_path)
        stretto.plan(
            stretto.capture(Twice(), torch.randn(4, 6), loss, stretto.Parallel()), "local", kept=kept
        )
        return len([one for one in tmp_path.rglob("*") if one.is_file() and "plan" in one.name])

    stretto.register_pass(relu_once, after="dead_ops")
    assert plans() == 0
    as_registered = list(passes.GRAPH_PASSES)
    passes.GRAPH_PASSES.remove(next(one for one in as_registered if one.__name__ == "relu_once"))
    passes.OWN.clear()
    assert plans() > 0


def no_ops(program: StepProgram, sharded: Collection[str]) -> StepProgram:
    return program


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (((3,), {"after": "no_ops"}), "a pass is a function with a name, not 3"),
        (((lambda job: job,), {"after": "no_ops"}), "a pass is a function with a name"),
        (((no_ops,), {"after": "dead_ops"}), "Stretto has a pass 'no_ops': give yours another name"),
        (((relu_once,), {}), "pass 'relu_once': say where it runs"),
        (((relu_once,), {"after": "relu_once"}), "no pass is called 'relu_once'"),
        (((relu_once,), {"after": "no_ops", "before": "lower"}), "say where it runs"),
        (
            ((relu_once,), {"after": "no_op"}),
            "no pass is called 'no_op'; did you mean 'no_ops'? they",
        ),
        (
            ((relu_once,), {"after": "no_ops", "tried": True}),
            "tried=True is of passes of a step, and",
        ),
    ],
)
def test_what_cannot_be_registered(given: tuple[tuple[Any, ...], dict[str, Any]], message: str) -> None:
    with pytest.raises(stretto.UsageError) as error:
        stretto.register_pass(*given[0], **given[1])
    assert message in str(error.value)
    assert not passes.OWN


def fails(program: StepProgram, sharded: Collection[str]) -> StepProgram:
    raise KeyError("a")


def gives_none(program: StepProgram, sharded: Collection[str]) -> None:
    return None


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (fails, "pass 'fails': it fails with KeyError: 'a'"),
        (gives_none, "pass 'gives_none' gives None; give a StepProgram"),
    ],
)
def test_a_faulty_pass_is_named(own: Any, message: str) -> None:
    stretto.register_pass(own, after="no_ops")
    with pytest.raises(stretto.UsageError) as error:
        captured()
    assert message in str(error.value)
