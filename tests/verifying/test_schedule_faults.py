"""Every refusal of a schedule, by its message; and that what the families make is accepted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import PlanError
from stretto.ir.action import Schedule, parse_slot
from stretto.schedule.families import FAMILIES, make_schedule
from stretto.verifying import Fault, schedule_faults, verify


def schedule(
    *orders: str, stages: int | None = None, microbatches: int = 2, ranks: tuple[int, ...] | None = None
) -> Schedule:
    """A schedule from tokens: one text a rank."""
    stage_ranks = ranks if ranks is not None else tuple(range(len(orders)))
    return Schedule(
        "hand",
        len(stage_ranks) if stages is None else stages,
        microbatches,
        stage_ranks,
        tuple(tuple(parse_slot(token) for token in order.split()) for order in orders),
    )


GOOD = "1F0 1B0 1F1 1B1"

REFUSED = [
    # (schedule, the whole message of its only fault)
    (
        schedule("0F0 0F1 0F0 0B0 0B1", GOOD),
        "rank 0, 0F0: runs twice, at positions 0 and 2. Remove one of them",
    ),
    (
        schedule("0F0 0B0 0B1", GOOD),
        "rank 0, 0F1: missing: no forward of microbatches 1. Add 0F for each",
    ),
    (
        schedule("0F0 0F1 0B0", GOOD),
        "rank 0, 0B1: missing: no backward of microbatches 1. Add 0B, or 0I and 0W, for each",
    ),
    (
        schedule("0F0 0F1 0B0 0B1 0F2", GOOD),
        "rank 0, 0F2: there is no microbatch 2. Microbatches count from 0 to 1",
    ),
    (
        schedule("0F0 0F1 0B0 0B1 2F0", GOOD),
        "rank 0, 2F0: there is no stage 2. Stages count from 0 to 1",
    ),
    (
        schedule("0F0 0F1 0B0 0B1 1F0", "1F0 1B0 1F1 1B1"),
        "rank 0, 1F0: stage 1 is on rank 1. Move it to rank 1",
    ),
    (
        schedule("0F0 0F1 0B0 0I1 0B1 0W1", GOOD),
        "rank 0, 0B1: runs as well as 0I1, and would count a gradient twice. Keep B, or keep I and W",
    ),
    (
        schedule("0F0 0F1 0B0 0W1 0B1", GOOD),
        "rank 0, 0B1: runs as well as 0W1, and would count a gradient twice. Keep B, or keep I and W",
    ),
    (
        schedule("0F0 0F1 0B0 0I1", GOOD),
        "rank 0, 0I1: 0W1 is missing. Add 0W1 after it, or use 0B1",
    ),
    (
        schedule("0F0 0F1 0B0 0W1", GOOD),
        "rank 0, 0W1: 0I1 is missing. Add 0I1 before it, or use 0B1",
    ),
    (
        schedule("0F0 0F1 0B0 0B1", "1F0 1B0 1B1 1F1"),
        "rank 1, 1B1: backward before forward of microbatch 1 (1F1 comes later at position 3). "
        "Put 1F1 before it",
    ),
    (
        schedule("0F0 0F1 0B0 0W1 0I1", GOOD),
        "rank 0, 0W1: weight gradient before input gradient of microbatch 1 (0I1 comes later at position 4). "
        "Put 0I1 before it",
    ),
    (
        schedule("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"),
        "rank 0, 0B0: deadlock: 0B0 waits for 1B0, which rank 1 runs after 1F1; "
        "1F1 waits for 0F1, which rank 0 runs after 0B0. Move one of the awaited actions forward",
    ),
    (
        schedule("1F0 0F0 0B0 1B0", microbatches=1, ranks=(0, 0)),
        "rank 0, 1F0: deadlock: 1F0 waits for 0F0, which rank 0 runs after 1F0. "
        "Move one of the awaited actions forward",
    ),
    (
        schedule("0F0 0B0", stages=2, microbatches=1),
        "schedule: 2 stages, but ranks for 1. Give every stage one rank",
    ),
    (
        schedule("0F0 0B0", microbatches=1, ranks=(3,)),
        "stage 0: placed on rank 3, but there are 1 ranks. Ranks count from 0 to 0",
    ),
    (
        schedule("", microbatches=0),
        "schedule: 1 stages and 0 microbatches. A schedule needs at least one of each",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED, ids=[message[:50] for _, message in REFUSED])
def test_refusals(wrong: Schedule, message: str) -> None:
    assert [str(fault) for fault in schedule_faults(wrong)] == [message]


def test_a_cycle_over_three_ranks_is_named_once() -> None:
    wrong = schedule(
        "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F1 2F0 2B0 2B1"
    )  # 2F1 needs 1F1, which rank 1 runs after 1B0, which needs 2B0
    [fault] = schedule_faults(wrong)
    assert str(fault).startswith(
        "rank 1, 1B0: deadlock: 1B0 waits for 2B0, which rank 2 runs after 2F1; 2F1 waits "
    )


def test_all_faults_are_listed() -> None:
    with pytest.raises(PlanError, match="the schedule cannot run: 3 faults") as caught:
        verify(schedule("0F0 0F0 0B0", microbatches=2))
    assert [fault.action for fault in caught.value.faults if isinstance(fault, Fault)] == [
        "0F0",
        "0F1",
        "0B1",
    ]


def test_long_lists_are_shortened() -> None:
    [forward, _] = schedule_faults(schedule("", microbatches=10**9))
    assert forward.what == "missing: no forward of microbatches 0, 1, 2, 3, 4 and more"


def test_virtual_stages_and_overlap_are_accepted() -> None:
    verify(schedule("0F0 1F0 1B0 0B0", microbatches=1, ranks=(0, 0)))
    verify(schedule("0F0 0F1 0B0 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1"))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(FAMILIES)), st.integers(1, 6), st.integers(1, 12))
def test_families_are_accepted(family: str, ranks: int, microbatches: int) -> None:
    assert schedule_faults(make_schedule(family, ranks, microbatches)) == []


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(list(FAMILIES)),
    st.integers(1, 4),
    st.integers(1, 5),
    st.data(),
    st.sampled_from(["drop", "twice"]),
)
def test_any_action_dropped_or_doubled_is_refused(
    family: str, ranks: int, microbatches: int, data: st.DataObject, how: str
) -> None:
    good = make_schedule(family, ranks, microbatches)
    rank = data.draw(st.integers(0, good.ranks - 1))
    order = list(good.orders[rank])
    at = data.draw(st.integers(0, len(order) - 1))
    if how == "drop":
        del order[at]
    else:
        order.insert(data.draw(st.integers(0, len(order))), order[at])
    orders = (*good.orders[:rank], tuple(order), *good.orders[rank + 1 :])
    bad = Schedule(good.family, good.stages, microbatches, good.stage_ranks, orders)
    assert schedule_faults(bad)
