"""Every refusal of a schedule, by its message; and that what the families make is accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import PlanError
from stretto.ir.action import Schedule
from stretto.schedule.families import FAMILIES, make_schedule
from stretto.verifying import Fault, schedule_faults, verify
from tests.verifying.plans import hand_schedule


def schedule(
    *orders: str, stages: int | None = None, microbatches: int = 2, ranks: tuple[int, ...] | None = None
) -> Schedule:
    """A schedule from tokens: one text a rank."""
    made = hand_schedule(tuple(range(len(orders))) if ranks is None else ranks, microbatches, *orders)
    return made if stages is None else replace(made, stages=stages)


GOOD = "1F0 1B0 1F1 1B1"

REFUSED = [
    # (schedule, the place and a key word of its first fault)
    (schedule("0F0 0F1 0F0 0B0 0B1", GOOD), "rank 0, 0F0", "runs twice"),
    (schedule("0F0 0B0 0B1", GOOD), "rank 0, 0F1", "no forward of microbatches 1"),
    (schedule("0F0 0F1 0B0", GOOD), "rank 0, 0B1", "no backward of microbatches 1"),
    (schedule("0F0 0F1 0B0 0B1 0F2", GOOD), "rank 0, 0F2", "no microbatch 2"),
    (schedule("0F0 0F1 0B0 0B1 2F0", GOOD), "rank 0, 2F0", "no stage 2"),
    (schedule("0F0 0F1 0B0 0B1 1F0", "1F0 1B0 1F1 1B1"), "rank 0, 1F0", "stage 1 is on rank 1"),
    (schedule("0F0 0F1 0B0 0I1 0B1 0W1", GOOD), "rank 0, 0B1", "as well as 0I1"),
    (schedule("0F0 0F1 0B0 0W1 0B1", GOOD), "rank 0, 0B1", "as well as 0W1"),
    (schedule("0F0 0F1 0B0 0I1", GOOD), "rank 0, 0I1", "0W1 is missing"),
    (schedule("0F0 0F1 0B0 0W1", GOOD), "rank 0, 0W1", "0I1 is missing"),
    (schedule("0F0 0F1 0B0 0B1", "1F0 1B0 1B1 1F1"), "rank 1, 1B1", "backward before forward"),
    (schedule("0F0 0F1 0B0 0W1 0I1", GOOD), "rank 0, 0W1", "before input gradient"),
    (
        schedule("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"),
        "rank 0, 0B0",
        "waits for 1B0, which rank 1 runs after 1F1",
    ),
    (
        schedule("1F0 0F0 0B0 1B0", microbatches=1, ranks=(0, 0)),
        "rank 0, 1F0",
        "waits for 0F0, which rank 0 runs after 1F0",
    ),
    (schedule("0F0 0B0", stages=2, microbatches=1), "schedule", "ranks for 1"),
    (schedule("0F0 0B0", microbatches=1, ranks=(3,)), "stage 0", "placed on rank 3"),
    (schedule("", microbatches=0), "schedule", "0 microbatches"),
]


@pytest.mark.parametrize(
    ("wrong", "where", "word"), REFUSED, ids=[f"{at}: {word}" for _, at, word in REFUSED]
)
def test_refusals(wrong: Schedule, where: str, word: str) -> None:
    fault, *_ = map(str, schedule_faults(wrong))
    assert fault.startswith(f"{where}: ")
    assert word in fault


def test_each_rank_that_waits_forever_is_named() -> None:
    """2F1 needs 1F1, which rank 1 runs after 1B0, which needs 2B0."""
    faults = schedule_faults(schedule("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F1 2F0 2B0 2B1"))
    assert [(fault.rank, fault.action) for fault in faults] == [(0, "0B0"), (1, "1B0"), (2, "2F1")]
    assert faults[1].what == "deadlock: waits for 2B0, which rank 2 runs after 2F1"


def test_all_faults_are_listed() -> None:
    with pytest.raises(PlanError, match="3 faults") as caught:
        verify(schedule("0F0 0F0 0B0", microbatches=2))
    faults = [fault for fault in caught.value.faults if isinstance(fault, Fault)]
    assert [fault.action for fault in faults] == ["0F0", "0F1", "0B1"]


def test_long_lists_are_shortened() -> None:
    [forward, _] = schedule_faults(schedule("", microbatches=10**9))
    assert forward.what == "missing: no forward of microbatches 0, 1, 2, 3, 4 and more"


def test_virtual_stages_and_overlap_are_accepted() -> None:
    verify(schedule("0F0 1F0 1B0 0B0", microbatches=1, ranks=(0, 0)))
    verify(schedule("0F0 0F1 0B0 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1"))


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(list(FAMILIES)), st.integers(1, 5), st.integers(1, 8), st.data())
def test_families_are_accepted_and_no_action_may_be_dropped_or_doubled(
    family: str, ranks: int, microbatches: int, data: st.DataObject
) -> None:
    good = make_schedule(family, ranks, microbatches)
    assert schedule_faults(good) == []
    rank = data.draw(st.integers(0, good.ranks - 1))
    order = list(good.orders[rank])
    at = data.draw(st.integers(0, len(order) - 1))
    slot = order.pop(at)
    if data.draw(st.booleans()):
        order.insert(at, slot)
        order.insert(data.draw(st.integers(0, len(order))), slot)
    orders = (*good.orders[:rank], tuple(order), *good.orders[rank + 1 :])
    assert schedule_faults(replace(good, orders=orders))
