"""No hang: few microbatches on two to eight stages, of which some have nothing, over the narrowest channels.

Every family is proved for one communicator a pair and direction, messages in the order of their sends, and
sends that end with their receives; then it runs over just these (`tests.runtime.strict`), and loss and
gradients are the plain model's. What a family cannot do is refused, and what the message names works.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
import torch

from stretto.capturing.graph import Traced
from stretto.capturing.trace import trace
from stretto.errors import UsageError
from stretto.ir.action import Phase, Schedule
from stretto.ir.program import Job
from stretto.ir.stage_maps import loop, stage_map_of, v
from stretto.models.gpt import next_token_loss
from stretto.planning.lower import lower
from stretto.planning.make_plan import make_plan
from stretto.planning.schedules import choose_schedule
from stretto.schedule.families import FAMILIES
from stretto.schedule.list_schedule import ActionWalk
from stretto.verifying import verify
from tests.runtime.equality import Result, assert_equal, gpt, job_of, made_up_costs, plain, tokens
from tests.runtime.strict import run_strictly
from tests.synthetic import make_job

LAYERS, COLUMNS = 7, 4
STAGES, MICROBATCHES = range(2, 9), (1, 2, 3)


@cache
def model() -> torch.nn.Module:
    """Embedding and head are one parameter, whose gradient the ranks that have it sum."""
    return gpt(True, layers=LAYERS, hidden=8).double()


@cache
def traced() -> Traced:
    return trace(model(), tokens(1, columns=COLUMNS), next_token_loss, microbatches=1)


@cache
def expected(microbatches: int) -> Result:
    return plain(model(), tokens(microbatches, columns=COLUMNS), next_token_loss)


def ways(family: str, stages: int) -> list[int]:
    """Numbers of ranks on which the family can have so many stages."""
    places = stage_map_of(family)
    return [n for n in range(1, stages + 1) if stages % n == 0 and places.allow(stages // n)]


def drawn(draw: Random, stages: int, empty: bool) -> str:
    """A text of uneven stages; with `empty`, some have nothing."""
    kept = sorted(draw.sample(range(stages), draw.randint(1, stages - 1))) if empty else list(range(stages))
    layers = [0] * stages
    for at in kept[1:-1]:  # the first has the embedding, and the last the loss
        layers[at] = 1
    for _ in range(LAYERS - sum(layers)):
        layers[draw.choice(kept)] += 1
    words = [["layer"] * count for count in layers]
    words[kept[0]].insert(0, "embedding")
    words[kept[-1]].append("loss")
    return "|".join(map(",".join, words))


def cases(family: str) -> Iterator[tuple[int, int, bool, int, str]]:
    """(stages, ranks, whether some have nothing, microbatches, the text)."""
    draw = Random(family)
    for stages in STAGES:
        for ranks in ways(family, stages):
            for empty in (False, True):
                for microbatches in MICROBATCHES:
                    yield stages, ranks, empty, microbatches, drawn(draw, stages, empty)


def job_for(family: str, ranks: int, microbatches: int, text: str) -> Job:
    job = job_of(traced(), text.count("|") + 1, microbatches, text)
    assert [not any(stage.ops.values()) for stage in job.stages] == [not one for one in text.split("|")]
    return replace(job, pp=ranks, schedule=family)


def check(family: str, ranks: int, microbatches: int, text: str, overlap: Any) -> None:
    job = job_for(family, ranks, microbatches, text)
    plan = lower(job, choose_schedule(job), made_up_costs(job), overlap=overlap)
    verify(plan)
    found = run_strictly(plan, model(), tokens(microbatches, columns=COLUMNS))
    assert_equal(found, expected(microbatches), 1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_few(family: str) -> None:
    """Of all cases one with stages that have nothing; every other family waits for each message at once."""
    found = [case for case in cases(family) if case[2] and 1 < case[1] < 5]
    _, ranks, _, microbatches, text = Random(family).choice(found)
    check(family, ranks, microbatches, text, ("off", "local")[list(FAMILIES).index(family) % 2])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_all(family: str) -> None:
    for _, ranks, _, microbatches, text in cases(family):
        for overlap in ("off", "local"):
            check(family, ranks, microbatches, text, overlap)


@pytest.mark.parametrize(
    ("ranks", "each", "stage_map"),
    [
        (2, 3, v),
        pytest.param(2, 3, loop, marks=pytest.mark.slow),
        *(
            pytest.param(*size, stage_map, marks=pytest.mark.slow)
            for size in ((1, 3), (2, 4), (3, 2), (4, 2))
            for stage_map in (loop, v)
        ),
    ],
)
def test_maps_with_any_number_of_stages_a_rank(stage_map: Any, ranks: int, each: int) -> None:
    """An order for any map: the walk in time, with the microbatch that is furthest behind first."""
    places, draw = stage_map(ranks, each), Random(f"{ranks} {each}")
    for microbatches, empty in ((1, True), (3, False)):
        text = drawn(draw, ranks * each, empty)
        orders = ActionWalk(places, microbatches, lambda a: (a.microbatch, a.phase != "F", a.stage)).orders()
        schedule = Schedule("by hand", ranks * each, microbatches, places, orders)
        job = job_for("1f1b", ranks, microbatches, text)
        for overlap in ("off", "local"):
            plan = lower(job, schedule, made_up_costs(job), overlap=overlap)  # type: ignore[arg-type]
            verify(plan)
            found = run_strictly(plan, model(), tokens(microbatches, columns=COLUMNS))
            assert_equal(found, expected(microbatches), 1e-10)


def test_stages_that_hold_nothing_have_no_messages() -> None:
    job = job_for("1f1b", 5, 2, "embedding,layer*3||layer*2|layer*2|loss")
    plan = make_plan(job, made_up_costs(job))
    assert all(1 not in (edge.source, edge.target) for edge in plan.job.edges)
    assert not any("1" in found.name for found in plan.communicators if found.name.startswith("pp "))
    empty = [window for window in plan.windows.values() if all(stage == 1 for stage, _ in window.parts)]
    assert empty
    assert all(not window.items for window in empty if (1, Phase.REDUCE_GRAD) not in window.parts)


# --- refusals: the nearest setting that the message names works --------------------------------------


def named(error: pytest.ExceptionInfo[UsageError], pattern: str) -> list[int]:
    found = re.search(pattern, str(error.value))
    assert found is not None, str(error.value)
    return [int(number) for number in found.groups()]


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_that_a_family_cannot_share_out(family: str) -> None:
    """On every number of ranks, and where the user names none."""
    refused = 0
    for stages in range(1, 9):
        for ranks in (*range(1, 9), None):
            job = replace(make_job(stages, 2), pp=ranks, schedule=family)
            if ranks is not None and ranks in ways(family, stages):
                verify(choose_schedule(job))
                continue
            try:
                verify(choose_schedule(job))
            except UsageError:
                pass
            else:
                assert ranks is None
                continue
            with pytest.raises(UsageError) as error:
                choose_schedule(job)
            count, each = named(
                error, r"capture with (\d+) stages \(virtual_stages = (\d+), or as many in split\)"
            )
            other = replace(make_job(count, 2), pp=count // each, schedule=family)
            assert ranks in (None, count // each)
            verify(choose_schedule(other))
            nearer = [n for n in STAGES if abs(n - stages) < abs(count - stages)]
            assert not [n for n in nearer if ranks is not None and ranks in ways(family, n)]
            refused += 1
    assert refused
