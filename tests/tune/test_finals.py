"""What is planned in full: the best first, and "auto" with stages to choose from."""

from __future__ import annotations

from pathlib import Path

from stretto.tune.choices import Candidate, Choices, Layout
from stretto.tune.finals import finalists, with_any_schedule
from stretto.tune.outcome import Briefed, Planned
from stretto.tune.standing import Standing
from tests.tune.small import settings

TWO = Candidate(Layout(2, 1, 1, 1, False, 4), "1f1b", 1)
FOUR = Candidate(Layout(4, 1, 1, 1, False, 4), "1f1b", 1)
COPIES = Candidate(Layout(1, 2, 1, 1, False, 4), "1f1b", 1)


def planned(candidate: Candidate, order: str, step_us: float) -> Planned:
    return Planned(candidate, order, step_us, 0.0, "", {}, 0.0, 0)


def test_auto_has_several_stages_a_rank_to_choose_from(tmp_path: Path) -> None:
    choices = Choices(settings(tmp_path), 2)
    (found,) = with_any_schedule(TWO, choices)
    assert (found.schedule, found.virtual_stages) == ("auto", 2)
    more = Candidate(TWO.layout, "interleaved-1f1b", 4)
    (found,) = with_any_schedule(more, Choices(settings(tmp_path, layers=8), 2))
    assert found.virtual_stages == 4


def test_auto_is_not_where_it_may_not_be_or_has_nothing_to_choose(tmp_path: Path) -> None:
    given = settings(tmp_path)
    assert with_any_schedule(COPIES, Choices(given, 2)) == []
    assert with_any_schedule(TWO, Choices(given, 2, {"schedule": "1f1b"})) == []
    (found,) = with_any_schedule(TWO, Choices(given, 2, {"virtual_stages": 1}))
    assert found.virtual_stages == 1
    # Of four layers on four ranks each has one stage.
    (found,) = with_any_schedule(FOUR, Choices(given, 4))
    assert found.virtual_stages == 1


def test_the_best_and_auto_come_first_and_the_settings_own_last(tmp_path: Path) -> None:
    choices = Choices(settings(tmp_path), 2)
    own = choices.own()
    assert own is not None
    standing = Standing()
    standing.plan(planned(own, "list", 9.0))
    others = [Candidate(TWO.layout, family, 1) for family in ("gpipe", "zb-h1", "zb-h2", "eager-1f1b")]
    for step_us, one in enumerate(others, 1):
        standing.brief(Briefed(one, float(step_us), 0))
    auto = with_any_schedule(others[0], choices)
    assert finalists(standing, choices) == [others[0], *auto, *others[1:3], own]


def test_a_plan_counts_more_than_a_short_step_and_a_full_one_more_than_a_quick_one() -> None:
    standing = Standing()
    standing.brief(Briefed(TWO, 1.0, 0))
    standing.brief(Briefed(COPIES, 2.0, 0))
    assert standing.promising() == TWO
    standing.plan(planned(TWO, "list", 3.0))
    assert standing.ranked() == [COPIES, TWO]
    assert standing.promising() == COPIES
    assert standing.likely_us == 2.0
    standing.plan(planned(TWO, "improve", 4.0))  # what is written is planned in full
    assert standing.best_us == 4.0
    assert standing.in_full() == {TWO}
    assert standing.forget(COPIES)
    assert not standing.forget(COPIES)
