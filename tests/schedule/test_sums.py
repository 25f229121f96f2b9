"""The programs that run once a step: what is summed together, over what, and in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.synthetic_comm import reduced
from tests.verifying.comm_plans import comm_job

from stretto.ir.action import Phase
from stretto.ir.program import STEP_LOSS, WAIT, Job, Op
from stretto.schedule.families import make_schedule
from stretto.schedule.once import with_once

AXES = (("dp", 2), ("tp", 2))


def program(job: Job, place: int = 0) -> tuple[Op, ...]:
    schedule = make_schedule("1f1b", len(job.stages), job.microbatches)
    return with_once(job, schedule).stages[place].ops[Phase.REDUCE_GRAD]


def starts(job: Job) -> list[tuple[str, tuple[str, ...]]]:
    groups = reduced(program(job))
    return [(op.lane, groups[op.name]) for op in program(job) if op.name in groups]


def test_a_gradient_is_summed_over_parts_then_ties_then_copies() -> None:
    found = starts(comm_job(2, 2, AXES, sequence=True, tied=True))
    assert found[0] == ("loss", (STEP_LOSS,))
    assert [lane for lane, groups in found if "n0" in groups] == ["tp", "tied n0", "dp"]
    assert [lane for lane, groups in found if "w0.0" in groups] == ["tied w0.0", "dp"]


def test_every_start_is_waited_for_before_the_next_sum_of_its_gradients() -> None:
    ops = program(comm_job(2, 2, AXES, sequence=True, tied=True))
    under_way: dict[str, tuple[str, ...]] = {}
    for op in ops:
        if op.target == WAIT:
            del under_way[op.uses[0]]
        elif op.kind is not None:
            groups = reduced(ops)[op.name]
            assert not {*groups} & {name for others in under_way.values() for name in others}
            under_way[op.name] = groups
    assert not under_way


def test_gradients_of_one_dtype_share_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.passes.flat.LARGE_BYTES", 2**30)
    job = comm_job(1, 2, (("dp", 2),), blocks=2)
    [together] = [groups for lane, groups in starts(job) if lane == "dp"]
    assert len(together) == len(job.parameters)
    mixed = tuple(replace(p, own_dtype="float64") if p.name.startswith("n") else p for p in job.parameters)
    apart = [op for op in program(replace(job, parameters=mixed)) if op.lane == "dp" and op.kind]
    assert [op.outputs[0].dtype for op in apart if op.outputs[0]] == ["float32", "float64"]
    groups = reduced(program(replace(job, parameters=mixed)))
    assert sorted(name for op in apart for name in groups.get(op.name, ())) == sorted(together)


def test_it_is_made_anew_for_another_placement() -> None:
    job = comm_job(2, 2, AXES, sequence=True, tied=True)
    once = with_once(job, make_schedule("1f1b", 2, 2))
    assert with_once(once, make_schedule("1f1b", 2, 2)) == once
    assert once != job
