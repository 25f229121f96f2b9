"""Whatever a file says, if it can be read it can be proved or refused: no proof ever fails on it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import UsageError
from stretto.ir.plan import Plan
from stretto.ir.serialize import plan_from_text, plan_to_text
from stretto.verifying import plan_faults, schedule_faults
from stretto.verifying.memory import memory_faults
from tests.ir.odd import DOCUMENT
from tests.verifying.comm_plans import comm_job, comm_plan
from tests.verifying.plans import BY_HAND, plan_of, rich_plan

COMM_JOBS = [
    comm_job(2, 2, (("tp", 2),)),
    comm_job(2, 2, (("dp", 2), ("tp", 2)), sequence=True, tied=True),
]
DOCUMENTS = [DOCUMENT, json.loads(plan_to_text(rich_plan("zb-h1", 3, 2)))]
DOCUMENTS += [json.loads(plan_to_text(plan_of(name, 0, 0))) for name in BY_HAND]
DOCUMENTS += [json.loads(plan_to_text(comm_plan("1f1b", job))) for job in COMM_JOBS]
PARTS = ("job", "schedule", "windows", "orders", "communicators", "costs")
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "%", "@", "'", "#", "0F0", "recv e0:", "run :0", "e1", "inf", "#9 h0", "wait e"]),
    st.text(max_size=5),
    st.sampled_from([[], {}, [[]]]),
)


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    found = [path] if path else []
    members = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, part in members:
        found += places(part, (*path, key))
    return found


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A plan file in which up to three values have been exchanged with others of their kind, or removed."""
    document = copy.deepcopy(draw(st.sampled_from(DOCUMENTS)))
    for _ in range(draw(st.integers(1, 3))):
        inside = document[draw(st.sampled_from(PARTS))]
        owners = [p for p in places(inside) if isinstance(at(inside, p), (dict, list)) and at(inside, p)]
        owner = at(inside, draw(st.sampled_from(owners)) if owners else ())
        if not owner:
            continue
        keys = list(owner) if isinstance(owner, dict) else list(range(len(owner)))
        key, other = draw(st.sampled_from(keys)), draw(st.sampled_from(keys))
        how = draw(st.sampled_from(["swap", "copy", "remove", "number", "double", "junk"]))
        if how == "swap":
            owner[key], owner[other] = owner[other], owner[key]
        elif how == "copy":
            owner[key] = copy.deepcopy(owner[other])
        elif how == "double" and isinstance(owner, list):
            owner.insert(int(other), copy.deepcopy(owner[key]))
        elif how == "number" and isinstance(owner[key], int):
            owner[key] = draw(st.integers(-1, 4))
        elif how == "junk":
            owner[key] = draw(JUNK)
        elif how == "remove":
            del owner[key]
    return json.dumps(document)


def at(value: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def read(text: str) -> Plan | None:
    refusal = ""
    try:
        return plan_from_text(text, "p.json", edited=True)
    except UsageError as error:
        refusal = str(error)
    assert refusal.startswith("p.json")
    return None


@settings(max_examples=120, deadline=None)
@given(damaged())
def test_damaged_plans_are_proved_or_refused(text: str) -> None:
    check(text)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(damaged())
def test_many_damaged_plans_are_proved_or_refused(text: str) -> None:
    check(text)


def check(text: str) -> None:
    plan = read(text)
    if plan is not None:
        assert plan_from_text(plan_to_text(plan), edited=True) == plan
        faults = plan_faults(plan)
        assert all(str(fault) for fault in faults)
        assert all(str(fault) for fault in schedule_faults(plan.schedule))
        if not faults:
            assert len(memory_faults(plan, 0)) == plan.ranks
