"""Which values become a gradient as they are, and which only as a copy."""

from __future__ import annotations

import pytest

from stretto.capturing.trace import trace
from stretto.ir.program import Job
from stretto.ir.storage import PartialSum, partial_sums
from tests.capturing.zoo import EQUAL, mean_square, rows
from tests.runtime.equality import assert_equal, evenly, job_of, lowered, plain, run


def job_with(name: str, stages: int, how: object = "auto") -> Job:
    """Microbatches of one row."""
    model, batch = EQUAL[name](), rows(4)
    return job_of(trace(model, batch, mean_square, microbatches=4), stages, 4, how)


def partial_sum_of(job: Job, parameter: str) -> PartialSum:
    [(stage, _, value)] = next(p for p in job.parameters if p.name == parameter).grads
    [found] = partial_sums(job, stage)[value]
    return found


def test_a_gradient_of_equal_elements_begins_as_a_copy() -> None:
    job = job_with("Penalised", 1)
    assert partial_sum_of(job, "scales").copied
    assert not partial_sum_of(job, "out.weight").copied


def test_a_gradient_that_is_a_message_begins_as_a_copy() -> None:
    """Others may read the message, and on its way from a stage of the same rank it is that stage's value."""
    job = job_with("AddedLast", 2, ["layers.2"])
    added = next(p for p in job.parameters if p.name == "added")
    [(stage, _, value)] = added.grads
    assert stage == 0
    ops = {op.name: op for made in job.stages[0].ops.values() for op in made}
    assert value not in ops or ops[value].alias in {edge.value for edge in job.edges if edge.target == 0}
    assert partial_sum_of(job, "added").copied


@pytest.mark.parametrize("name", ["Penalised", "AddedLast"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_several_microbatches_add_up(name: str, stages: int) -> None:
    model, batch = EQUAL[name](), rows(4)
    found = trace(model, batch, mean_square, microbatches=4)
    plan = lowered(evenly(found, stages, 4), "1f1b")
    assert_equal(run(plan, model, batch), plain(model, batch, mean_square), 1e-10)
