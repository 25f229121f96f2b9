"""Within a limit of memory parameters and gradients stay full for longer, and numbers are those of the plain
model; the plan says what was chosen, and from what."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stretto.ir.action import Phase
from stretto.ir.plan import Plan
from stretto.ir.program import GRAD, PARAM
from stretto.ir.serialize import load_plan
from stretto.passes import stays
from tests.parallelize.zero import ZeroCell, plain_training, training, worst_error

MUCH_BYTES = 2**40
SLOW = {"link_gbps": 0.01}
"""Links that are slow enough for a gather to be exposed."""


@pytest.fixture(autouse=True)
def _buckets_of_a_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.passes.flat.LARGE_BYTES", 2**9)


@cache
def plan_within(cell: ZeroCell, memory_bytes: int | None) -> Plan:
    return cell.plan(figures={**SLOW, "memory_bytes": memory_bytes}, overlap="local")


def peak(plan: Plan) -> int:
    assert plan.prediction is not None
    return max(plan.prediction.peak_bytes)


def between(cell: ZeroCell) -> int:
    """A limit that allows a part of what may stay."""
    return (peak(plan_within(cell, None)) + peak(plan_within(cell, MUCH_BYTES))) // 2


def full_for_the_step(plan: Plan) -> tuple[int, int]:
    """How many parameters are gathered once a step, and how many gradients are scattered then."""
    once = [op for rank in range(plan.ranks) for op in plan.once(rank)]
    gathered = {name for op in once for name in op.writes if name.startswith(PARAM)}
    added = {GRAD + p.name for p in plan.job.parameters if p.grads and not p.scattered}
    return len(gathered), len(added)


def gathers(plan: Plan, *phases: Phase) -> int:
    """Collectives of these programs that gather."""
    ops = (op for stage in plan.job.stages for phase in phases for op in stage.ops[phase])
    return sum(".unshard." in op.name and op.kind is not None for op in ops)


SEVERAL = (
    ZeroCell(3, tied=True),
    ZeroCell(3, pp=2, schedule="interleaved-1f1b", frozen=True, dp_shard=2, recompute="full"),
    ZeroCell(2, pp=2, tied=True),
)


@pytest.mark.parametrize(
    "cell", [SEVERAL[0], *(pytest.param(cell, marks=pytest.mark.slow) for cell in SEVERAL[1:])], ids=str
)
def test_a_part_stays_where_there_is_memory_for_a_part(cell: ZeroCell) -> None:
    none, some, every = (plan_within(cell, limit) for limit in (None, between(cell), MUCH_BYTES))
    assert peak(some) <= between(cell)
    assert sum(full_for_the_step(none)) < sum(full_for_the_step(some)) < sum(full_for_the_step(every))
    assert "stay full until the end of the step: " in some.zero_why
    assert none.zero_why == "nothing stays full: no limit of memory is known"
    error, name = worst_error(training(cell, some), plain_training(cell))
    assert error <= 1e-10, f"{name} differs by {error:.1e}"


def test_a_rank_without_room_takes_none_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = ZeroCell(3, pp=2)
    bare: list[Sequence[int]] = []
    most = stays._most

    def counted(may: Any, peaks: Any, limit: int) -> Sequence[float]:
        bare.append(peaks([0.0, 0.0]))
        return most(may, peaks, limit)

    monkeypatch.setattr(stays, "_most", counted)
    plan_within(cell, MUCH_BYTES)
    first, second = bare[-1]
    assert first > second, "more microbatches are live on the first"
    some = plan_within(cell, first - 1)
    assert peak(some) < first
    gathered = [
        {name for op in some.once(rank) for name in op.writes if name.startswith(PARAM)} for rank in (0, 1)
    ]
    assert not gathered[0]
    assert gathered[1]
    error, name = worst_error(training(cell, some), plain_training(cell))
    assert error <= 1e-10, f"{name} differs by {error:.1e}"


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_of_one_microbatch_the_forward_gathers_for_the_backward(recompute: str) -> None:
    cell = ZeroCell(3, microbatches=1, recompute=recompute)
    none, every = plan_within(cell, None), plan_within(cell, MUCH_BYTES)
    backward = (Phase.I, Phase.W)
    assert gathers(every, *backward) < gathers(none, *backward)
    assert gathers(every, Phase.F) == gathers(none, Phase.F)
    assert full_for_the_step(every) == (0, 0)
    error, name = worst_error(training(cell, every), plain_training(cell))
    assert error <= 1e-10, f"{name} differs by {error:.1e}"


def test_auto_takes_the_fastest_that_fits_and_says_what_else_there_was(tmp_path: Path) -> None:
    free = plan_within(ZeroCell("auto"), MUCH_BYTES)
    assert free.job.zero == 1
    assert free.zero_why.startswith("auto: ")
    assert f"zero             1: {free.zero_why}" in str(free)
    free.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").zero_why == free.zero_why
    limit = 9 * peak(free) // 10
    short = plan_within(ZeroCell("auto"), limit)
    assert short.job.zero in (2, 3)
    assert peak(short) <= limit
    assert "; 1: needs " in short.zero_why
