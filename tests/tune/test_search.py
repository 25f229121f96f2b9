"""The search picks what planning everything picks, ends at any time with what it has, and reports why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stretto.config import TrainSettings
from stretto.errors import UsageError
from stretto.ir.costs import Prediction
from stretto.price.cluster import Description
from stretto.tune.choices import Candidate, Choices, Dealt, LayoutChoice
from stretto.tune.search import NOT_REACHED, PLAN_TOO_LARGE, Search, finalists
from stretto.tune.work import Answer, Asked, Planned, Refused, Tuned
from tests.tune.here import Here
from tests.tune.small import CLUSTER, settings

FEW = {"schedule": "1f1b", "sequence_parallel": False, "microbatches": 2, "recompute": "none"}


FULL = 5


def tuned(
    given: TrainSettings, devices: int, found: Description, fixed: dict[str, Any], **more: Any
) -> tuple[Tuned, Here]:
    """A tuning to its end."""
    search = Search(Choices(given, devices, fixed), found, 600.0, lambda text: None)
    here = Here(given, devices, found, **more)
    search.run(here)  # type: ignore[arg-type]
    return search.result(), here


def everything(
    given: TrainSettings, devices: int, found: Description, fixed: dict[str, Any]
) -> list[Planned]:
    """All candidates that can be planned: all quickly, then the fastest `FULL` of them in full."""
    choices = Choices(given, devices, fixed)
    doing = Here(given, devices, found).work
    made = [
        doing.do(Asked(Candidate(layout, family, each, word, dealt), "list"))
        for layout in choices.layouts()
        for family, each in choices.orders(layout)
        for word in choices.again(layout)
        for kind in choices.kinds(layout)
        for dealt in kind
    ]
    quick = sorted((one for one in made if isinstance(one, Planned)), key=lambda one: one.step_us)
    full = [doing.do(Asked(one.candidate, "improve")) for one in quick[:FULL]]
    return [*(one for one in full if isinstance(one, Planned)), *quick]


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_small_choice_is_made_as_by_planning_everything(tmp_path: Path, devices: int) -> None:
    given = settings(tmp_path, layers=2)
    found, here = tuned(given, devices, CLUSTER, FEW)
    best = min(everything(given, devices, CLUSTER, FEW), key=lambda one: one.step_us)
    assert found.planned[0].step_us <= 1.01 * best.step_us
    assert found.stopped == ""
    assert found.unseen_us is None or found.unseen_us <= best.step_us
    # What was captured was allowed, and each trace once.
    priced = [asked.candidate for asked in here.done if asked.order is None]
    assert len(priced) == len({one.layout for one in priced})
    assert {one.dealt.zero for one in priced} == {0}  # kinds of zero that are not needed cost nothing
    assert sum(found.dropped.values()) > 0


@pytest.mark.slow
def test_the_winner_is_within_a_percent_of_planning_everything(tmp_path: Path) -> None:
    given = settings(tmp_path)
    for slow in (1.0, 0.05):
        cluster = CLUSTER.model_copy(update={"link_gbps": CLUSTER.link_gbps * slow})
        fixed = {"recompute": "none", "sequence_parallel": False, "microbatches": 4}
        found, here = tuned(given, 8, cluster, fixed)
        all_of_them = everything(given, 8, cluster, fixed)
        best = min(all_of_them, key=lambda one: one.step_us)
        assert found.planned[0].step_us <= 1.01 * best.step_us, (found.planned[0].candidate, best.candidate)
        assert len([asked for asked in here.done if asked.order]) < len(all_of_them)


def test_it_ends_in_the_middle_with_what_it_has(tmp_path: Path) -> None:
    given = settings(tmp_path, layers=2)
    search = Search(Choices(given, 2, FEW), CLUSTER, 600.0, lambda text: None)

    class StopError(Exception):
        pass

    def before(asked: Asked) -> None:
        # The first candidate is planned at once; the second is in progress.
        if asked.order is not None and any(one.order is not None for one in here.done):
            raise StopError

    here = Here(given, 2, CLUSTER, before)

    with pytest.raises(StopError):
        search.run(here)  # type: ignore[arg-type]
    found = search.result()
    assert len(found.planned) == 1
    assert found.dropped[NOT_REACHED] > 0
    assert found.unseen_us is not None


def test_what_cannot_be_planned_in_full_is_not_chosen(tmp_path: Path) -> None:
    """Anyone who plans or trains with what is written plans it in full."""
    given = settings(tmp_path, layers=2)
    refused: list[Candidate] = []

    class TooLarge(Here):
        def answers(self, timeout_s: float) -> list[tuple[Asked, Answer]]:
            ((asked, answer),) = super().answers(timeout_s)
            if asked.order == "improve" and not refused:
                refused.append(asked.candidate)
                answer = Refused(asked.candidate, "too large", True)
            return [(asked, answer)]

    search = Search(Choices(given, 2, FEW), CLUSTER, 600.0, lambda text: None)
    here = TooLarge(given, 2, CLUSTER)
    search.run(here)  # type: ignore[arg-type]
    found = search.result()
    (gone,) = refused
    assert gone not in [one.candidate for one in found.planned]
    assert found.planned[0].order == "improve"
    assert found.dropped[PLAN_TOO_LARGE] == 1


def test_what_fits_no_device_is_told_with_the_nearest(tmp_path: Path) -> None:
    given = settings(tmp_path, layers=2)
    found, here = tuned(given, 4, CLUSTER.model_copy(update={"memory_bytes": 10_000}), FEW)
    assert found.planned == []
    assert found.least is not None
    assert found.least[1] > 10_000
    assert all(asked.order is None for asked in here.done)  # nothing was planned in vain


def test_more_is_computed_again_where_memory_asks_for_it(tmp_path: Path) -> None:
    given = settings(tmp_path, layers=2)
    fixed = {**FEW, "pp": 2, "dp": 1, "tp": 1, "microbatches": 2}
    del fixed["recompute"]
    free, _ = tuned(given, 2, CLUSTER, fixed)
    assert free.planned[0].candidate.recompute == "none"
    least = min(
        max(one.made.peak_bytes)
        for one in everything(given, 2, CLUSTER, fixed)
        if one.candidate.recompute == "full"
    )
    assert least < max(free.planned[0].made.peak_bytes)
    tight, _ = tuned(given, 2, CLUSTER.model_copy(update={"memory_bytes": least}), fixed)
    assert tight.planned[0].candidate.recompute != "none"
    assert max(tight.planned[0].made.peak_bytes) <= least


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_copies_keep_as_much_in_parts_as_memory_asks_for(tmp_path: Path, zero: int) -> None:
    """With as much memory as each kind's step needs, what is computed again kept out: others do not fit."""
    small = settings(tmp_path, layers=2)
    given = small.model_copy(update={"model": small.model.model_copy(update={"hidden": 256})})
    fixed = {**FEW, "pp": 1, "tp": 1, "dp": 4}
    cluster = CLUSTER.model_copy(update={"link_gbps": 100.0})
    needs = {}
    for kind in (0, 1, 2, 3):
        made = Here(given, 4, cluster).work.do(
            Asked(Candidate(LayoutChoice(1, 4, 1, 1, False, 2), "1f1b", 1, dealt=Dealt(kind)), "list")
        )
        assert isinstance(made, Planned)
        needs[kind] = max(made.made.peak_bytes)
    assert needs[0] > needs[1] > needs[2] > needs[3]
    found, _ = tuned(given, 4, cluster.model_copy(update={"memory_bytes": needs[zero]}), fixed)
    best = found.planned[0]
    # One that keeps more in parts has room for what stays full.
    assert best.candidate.dealt.zero == zero or best.candidate.dealt.zero > zero > 1
    assert max(best.made.peak_bytes) <= needs[zero]
    larger = found.larger[best.candidate]
    assert {dealt.zero for dealt in larger} >= {*range(zero)}
    assert all(nbytes > needs[zero] for nbytes in larger.values())


def test_the_settings_own_is_planned_first_and_compared(tmp_path: Path) -> None:
    given = settings(tmp_path, layers=2)  # for two devices
    found, here = tuned(given, 2, CLUSTER, {"schedule": "1f1b", "recompute": "none", "microbatches": 4})
    first = next(asked for asked in here.done if asked.order is not None)
    assert first.candidate == Choices(given, 2).own()
    assert isinstance(found.own, Planned)
    assert found.planned[0].step_us <= found.own.step_us
    assert found.own.order == "improve"  # as the first is


def test_nothing_is_captured_that_the_settings_refuse(tmp_path: Path) -> None:
    given = settings(tmp_path)
    with pytest.raises(UsageError, match=r"no layout of 7 devices fits these settings: .*multiple of"):
        tuned(given, 7, CLUSTER, {})


TWO = Candidate(LayoutChoice(2, 1, 1, 1, False, 4), "1f1b", 1)


def planned(candidate: Candidate, order: str, step_us: float) -> Planned:
    return Planned(candidate, order, Prediction(step_us, (), (), (), (), 0.0, ""))


def test_the_best_and_auto_come_first_and_the_settings_own_last(tmp_path: Path) -> None:
    choices = Choices(settings(tmp_path), 2)
    own = choices.own()
    assert own is not None
    others = [Candidate(TWO.layout, family, 1) for family in ("gpipe", "zb-h1", "zb-h2", "eager-1f1b")]
    auto = choices.with_auto(others[0])
    plans = {own: planned(own, "list", 9.0)}
    assert finalists([*others, own], plans, choices) == [others[0], *auto, *others[1:3], own]
