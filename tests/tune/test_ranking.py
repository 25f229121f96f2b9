"""Estimates and short steps put candidates in the order of their plans, or nearly."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import correlation

import pytest

from stretto.config import TrainSettings
from stretto.planning.brief import Brief
from stretto.price.cluster import Description
from stretto.tune.block import TuneBlock
from stretto.tune.choices import VIRTUAL, Candidate, Choices, LayoutChoice
from stretto.tune.estimate import estimate
from stretto.tune.work import Asked, Planned, TuneWork
from tests.tune.small import CLUSTER, settings

SLOW = CLUSTER.model_copy(update={"link_gbps": 0.1})
"""Links on which tensor parallelism exposes as much as compute takes."""

MOE = {"kind": "moe", "experts": 4, "top_k": 2}


def candidates(choices: Choices, seed: int) -> Iterable[Candidate]:
    """Random ones, without end."""
    draw = random.Random(seed)
    layouts = list(choices.layouts())
    while True:
        layout = draw.choice(layouts)
        family, each = draw.choice(list(choices.orders(layout)))
        yield Candidate(layout, family, each)


def figures(
    given: TrainSettings, devices: int, found: Description, some: Iterable[Candidate], count: int
) -> list[tuple[float, float, float]]:
    """(plan, short step, estimate) of as many as can be planned."""
    choices, work = Choices(given, devices), TuneWork(given, devices, found, {})
    stages = tuple(sorted({layout.pp * each for layout in choices.layouts() for each in (1, *VIRTUAL)}))
    made: list[tuple[float, float, float]] = []
    for candidate in some:
        block = work.do(Asked(choices.plain(candidate.layout), None, ("none",), stages))
        assert isinstance(block, TuneBlock), block
        guessed = estimate(candidate, block, block.again["none"], found)
        short = work.do(Asked(candidate, "list", short=True, ahead=guessed.ahead))
        plan = work.do(Asked(candidate, "list"))
        assert isinstance(short, Brief) == isinstance(plan, Planned), (short, plan)
        if isinstance(plan, Planned) and isinstance(short, Brief):
            made.append((plan.step_us, short.step_us, guessed.step_us))
        if len(made) == count:
            break
    return made


def ranks(values: Sequence[float]) -> list[int]:
    return [sorted(values).index(one) for one in values]


def check(made: list[tuple[float, float, float]], estimates: float, first: float = 1.1) -> None:
    """estimates: how well they must correlate with plans. first: times the fastest plan, that of the least
    estimate at most."""
    plans, shorts, guesses = zip(*made, strict=True)
    assert correlation(ranks(plans), ranks(shorts)) >= 0.95, made
    assert correlation(ranks(plans), ranks(guesses)) >= estimates, made
    assert plans[shorts.index(min(shorts))] <= 1.02 * min(plans), made
    assert plans[guesses.index(min(guesses))] <= first * min(plans), made


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "first"), [("gpt", 1.1), ("moe", 1.15)])  # of the mixture it is 1.13
def test_random_candidates_are_ranked_as_their_plans_are(tmp_path: Path, kind: str, first: float) -> None:
    given = settings(tmp_path, layers=4, batch=16, overlap="window")
    if kind == "moe":
        values = given.model_dump(exclude_unset=True)
        given = TrainSettings.model_validate({**values, "model": {**values["model"], **MOE}})
    check(figures(given, 8, SLOW, candidates(Choices(given, 8), 0), 10), 0.8, first)


@pytest.mark.parametrize(
    "family",
    ["1f1b", "zb-v", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gpipe", "interleaved-1f1b"))],
)
def test_a_short_step_tells_what_many_microbatches_take(tmp_path: Path, family: str) -> None:
    """Of 64 microbatches on two ranks eight are simulated."""
    given = settings(tmp_path, layers=4, batch=64, overlap="window")
    work = TuneWork(given, 2, SLOW, {})
    each = 1 if family in ("1f1b", "gpipe") else 2
    candidate = Candidate(LayoutChoice(2, 1, 1, 1, False, 64), family, each)
    short, plan = (work.do(Asked(candidate, "list", short=short)) for short in (True, False))
    assert isinstance(short, Brief)
    assert isinstance(plan, Planned)
    assert short.step_us == pytest.approx(plan.step_us, rel=0.03)
