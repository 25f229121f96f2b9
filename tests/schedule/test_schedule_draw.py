"""Drawings: every action is there, where and as long as its time says; texts and pictures are well formed."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.families import ONE_STAGE

from stretto.report.svg import draw_schedule
from stretto.report.text import LABEL_CELLS, schedule_text
from stretto.schedule.csv import from_csv
from stretto.schedule.draw import to_json
from stretto.schedule.families import make_schedule
from stretto.schedule.timing import PhaseTimes, time_schedule

SVG = "{http://www.w3.org/2000/svg}"


def boxes(svg: str) -> dict[str, tuple[str, float, float, float]]:
    """Token -> phase, left edge, width and height of its box."""
    found = {}
    for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        tooltip = rect.find(f"{SVG}title")
        if tooltip is not None:
            token = tooltip.text.split(",")[0]
            assert token not in found or token == "bubble"
            found[token] = (rect.get("class"), *(float(rect.get(key)) for key in ("x", "width", "height")))
    return found


def test_overlapped_actions_are_one_box():
    schedule = from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    _, row, *_ = schedule_text(schedule, time_schedule(schedule)).plain.splitlines()
    assert re.fullmatch(r"rank 0 +0F0-+0F1\+0B0-+0B1-+", row)


@given(st.sampled_from(ONE_STAGE), st.integers(1, 4), st.integers(1, 12), st.floats(0.3, 3))
@example("eager-1f1b", 2, 5, 1.0)  # boxes that begin and end on half columns
@settings(max_examples=40, deadline=None)
def test_text_shows_every_action_in_its_columns(family, stages, microbatches, f):
    schedule = make_schedule(family, stages, microbatches)
    timing = time_schedule(schedule, PhaseTimes(f, 1.0, 0.7, 0.2))
    rows = [row for row in schedule_text(schedule, timing).plain.splitlines() if row.startswith("rank")]
    for rank, row in enumerate(rows):
        chart = row[LABEL_CELLS:]
        found = [(word[0], word.start()) for word in re.finditer(r"\d+[FIWB]\d+", chart)]
        assert [word for word, _ in found] == [str(action) for action in schedule.actions(rank)]
        for action, (_, at) in zip(schedule.actions(rank), found, strict=True):
            assert at == pytest.approx(timing.start[action] * len(chart) / timing.makespan, abs=2)


@pytest.mark.parametrize("family", ONE_STAGE)
def test_the_picture_has_one_box_for_each_action_at_its_time(family):
    schedule = make_schedule(family, 3, 5)
    timing = time_schedule(schedule, PhaseTimes(3.0, 2.0, 1.0, 0.5))
    svg = draw_schedule(schedule, timing)
    found = boxes(svg)
    assert found.keys() - {"bubble"} == {str(action) for action in timing.start}
    first = found["0F0"][1]
    scale = (found["0F1"][1] - first) / 3
    for action, start in timing.start.items():
        phase, left, width, _ = found[str(action)]
        assert phase[0] == action.phase.value
        assert left == pytest.approx(first + start * scale, abs=0.1)
        assert width == pytest.approx((timing.end[action] - start) * scale, abs=0.1)
    labels = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    for action in timing.start:
        assert str(action)[1:] in labels
    assert f"{family}: 3 stages, 5 microbatches" in labels
    assert {"rank 0", "rank 1", "rank 2", "F  forward", "bubble: nothing to do"} <= set(labels)
    assert ("I  input gradient" in labels) == (family.startswith("zb") or family.endswith("split"))
    assert "http" not in svg.replace('xmlns="http://www.w3.org/2000/svg"', "")


def test_overlapped_actions_share_the_height():
    schedule = from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    found = boxes(draw_schedule(schedule, time_schedule(schedule)))
    assert found["0F1"][1:3] == found["0B0"][1:3]
    assert found["0F1"][3] < found["0F0"][3] / 2 + 1


def test_json_says_everything():
    schedule = make_schedule("zb-h1", 2, 2)
    timing = time_schedule(schedule, PhaseTimes(2.0, 1.0, (1.0, 3.0), 0.5))
    read = json.loads(to_json(schedule, timing))
    assert read["format"] == "stretto-schedule"
    assert (read["family"], read["stages"], read["microbatches"]) == ("zb-h1", 2, 2)
    assert read["orders"][0] == ["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"]
    assert read["stage_ranks"] == [0, 1]
    assert read["timing"]["times"] == {"F": 2, "I": 1, "W": [1, 3], "message": 0.5}
    assert read["timing"]["makespan"] == timing.makespan
    assert read["timing"]["peak_live"] == [2, 2]
    assert [0, "0F1", 2, 4] in read["timing"]["actions"]
    assert len(read["timing"]["actions"]) == 12
    assert "timing" not in json.loads(to_json(schedule))
    assert to_json(schedule, timing) == to_json(schedule, timing)
