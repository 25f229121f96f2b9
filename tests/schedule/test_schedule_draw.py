"""Drawings: every action is there, where and as long as its time says; texts and pictures are well formed."""

from __future__ import annotations

import json
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stretto.report.svg import MAX_WIDTH_PX, draw_schedule
from stretto.schedule.csv import read_csv
from stretto.schedule.draw import describe_timing, tick_times, to_ascii, to_json
from stretto.schedule.families import make_schedule
from stretto.schedule.one_stage import ONE_STAGE
from stretto.schedule.timing import PhaseTimes, time_schedule

FAMILIES = [family.name for family in ONE_STAGE]
SVG = "{http://www.w3.org/2000/svg}"
V_SHAPE = "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n"


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


def test_a_unit_drawing_is_the_familiar_picture():
    schedule = make_schedule("1f1b", 2, 3)
    assert to_ascii(schedule, time_schedule(schedule)) == (
        "time    0              5              10\n"
        "rank 0  F0 F1 ......B0--- F2 B1--- ...B2---\n"
        "rank 1  ...F0 B0--- F1 B1--- F2 B2--- ......\n"
    )


def test_ranks_with_several_stages_say_which():
    schedule = read_csv(V_SHAPE)
    drawn = to_ascii(schedule, time_schedule(schedule))
    assert drawn == (
        "time                0                   5                   10\n"
        "rank 0 (stage 0,3)  0F0 ........3F0 3B0---- ................0B0----\n"
        "rank 1 (stage 1,2)  ....1F0 2F0 ............2B0---- 1B0---- ........\n"
    )


@given(st.sampled_from(FAMILIES), st.integers(1, 4), st.integers(1, 12), st.floats(0.3, 3))
@example("eager-1f1b", 2, 5, 1.0)  # boxes that begin and end on half columns
@settings(max_examples=40, deadline=None)
def test_text_shows_every_action_in_its_columns(family, stages, microbatches, f):
    schedule = make_schedule(family, stages, microbatches)
    timing = time_schedule(schedule, PhaseTimes(f, 1.0, 0.7, 0.2))
    rows = to_ascii(schedule, timing).splitlines()[1:]
    columns_per_unit = (max(map(len, rows)) - len("rank 0  ")) / timing.makespan
    for rank, row in enumerate(rows):
        chart = row[len("rank 0  ") :]
        words = chart.replace(".", " ").replace("-", " ").split()
        assert words == [str(action)[1:] for action in schedule.actions(rank)]
        at = 0
        for action in schedule.actions(rank):
            at = chart.index(str(action)[1:], at)
            assert at == pytest.approx(timing.start[action] * columns_per_unit, abs=2)


def test_wide_drawings_are_cut_into_bands():
    schedule = make_schedule("1f1b", 3, 20)
    timing = time_schedule(schedule)
    whole = to_ascii(schedule, timing).splitlines()
    bands = to_ascii(schedule, timing, width=60).split("\n\n")
    assert len(bands) > 2
    for index, row in enumerate(whole[1:], start=1):
        pieces = [band.splitlines()[index] for band in bands]
        assert all(len(piece) <= 60 for piece in pieces)
        assert "".join(piece[8:].ljust(52) for piece in pieces).rstrip() == row[8:]


def test_phases_without_duration_are_left_out_of_the_text():
    schedule = make_schedule("zb-h1", 1, 2)
    assert to_ascii(schedule, time_schedule(schedule, PhaseTimes(1.0, 1.0, 0.0))).splitlines()[1] == (
        "rank 0  F0 I0 F1 I1"
    )
    nothing = to_ascii(schedule, time_schedule(schedule, PhaseTimes(0.0, 0.0, 0.0)))
    assert nothing == "time    0\nrank 0\n"


def test_a_very_short_phase_does_not_blow_up_the_text():
    schedule = make_schedule("zb-h1", 2, 4)
    rows = to_ascii(schedule, time_schedule(schedule, PhaseTimes(10.0, 10.0, 0.001))).splitlines()
    assert max(map(len, rows)) < 24 * 3 * 8
    assert "F3-" in rows[1]


@pytest.mark.parametrize("family", FAMILIES)
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
    schedule = read_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    found = boxes(draw_schedule(schedule, time_schedule(schedule)))
    assert found["0F1"][1:3] == found["0B0"][1:3]
    assert found["0F1"][3] < found["0F0"][3] / 2 + 1


def test_names_are_escaped_and_widths_bounded():
    schedule = make_schedule("zb-h2", 2, 400)
    timing = time_schedule(schedule, PhaseTimes(1.0, 1.0, 0.0001))
    root = ElementTree.fromstring(draw_schedule(schedule, timing))
    assert float(root.get("width")) <= MAX_WIDTH_PX
    named = type(schedule)("<a&b>", 1, 1, (0,), make_schedule("1f1b", 1, 1).orders)
    assert ElementTree.fromstring(draw_schedule(named, time_schedule(named)))[0].text.startswith(
        "<a&b>: 1 stage, 1 micro"
    )
    empty_time = make_schedule("1f1b", 2, 2)
    ElementTree.fromstring(draw_schedule(empty_time, time_schedule(empty_time, PhaseTimes(0.0, 0.0, 0.0))))


@given(st.floats(1e-9, 1e9), st.floats(0.1, 100))
@settings(deadline=None)
def test_ticks_are_round_and_apart(apart, ratio):
    until = apart * ratio
    ticks = tick_times(until, apart)
    assert ticks[0] == 0
    assert ticks[-1] <= until * (1 + 1e-6)
    gaps = [right - left for left, right in pairwise(ticks)]
    assert all(gap >= apart * (1 - 1e-6) for gap in gaps)
    if gaps:
        assert f"{gaps[0]:.0e}"[0] in "125"


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


def test_figures_are_described():
    schedule = make_schedule("gpipe", 2, 2)
    assert describe_timing(time_schedule(schedule)) == (
        "makespan                     9\n"
        "cost of the longest rank     9\n"
        "bubble rate                  0.3333\n"
        "live microbatches, by stage  2 2\n"
    )
