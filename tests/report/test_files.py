"""Timelines as files: JSON there and back, and refused; SVG as XML with what must be seen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from stretto.errors import UsageError
from stretto.ir.timeline import SpanKind, Timeline
from stretto.report.files import load_timeline, to_json
from stretto.report.load import draw_loss
from stretto.report.svg import draw
from stretto.schedule.families import make_schedule
from stretto.simulating import simulate
from tests.simulating.test_engine import ONE_F_ONE_B, RATE
from tests.synthetic import make_plan
from tests.synthetic_comm import make_comm_plan

SVG = "{http://www.w3.org/2000/svg}"
MESSAGE = SpanKind.MESSAGE


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return simulate(make_plan(ONE_F_ONE_B, f_us=90, latency_us=10, bytes_per_us=RATE))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 10**9}, "of as many ranks as"),
        ({"ranks": 0}, "of as many ranks as"),
        ({"members": 10**9}, "of as many ranks as"),
        ({"memory": [[]]}, "of as many ranks as"),
        ({"step_us": "inf"}, "step_us: expected a number"),
        ({"busy_us": ["nan"]}, r"busy_us\[0\]: expected a number"),
    ],
    ids=str,
)
def test_a_timeline_of_other_ranks_or_times(
    timeline: Timeline, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({**json.loads(to_json(timeline)), **change}))
    with pytest.raises(UsageError, match=message):
        load_timeline(path)


def test_an_unknown_suffix_is_refused(timeline: Timeline, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"known suffixes are \.json, \.perfetto-trace, \.svg"):
        timeline.save(tmp_path / "t.png")


def texts(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    return ["".join(node.itertext()) for node in root.iter(f"{SVG}text")]


def test_svg_shows_two_timelines_on_one_scale(timeline: Timeline) -> None:
    slow = simulate(make_plan(ONE_F_ONE_B, f_us=180, latency_us=10, bytes_per_us=RATE))
    svg = draw([replace(slow, source="without <overlap>"), timeline])
    words = texts(svg)
    for label in ("without <overlap>", "predicted", "0F0", "1B1", "rank 0", "rank 1", "pp 0>1", "pp 1>0"):
        assert label in words
    assert any(w.startswith("step ") and "exposed pp" in w for w in words)
    boxes = [(r.findtext(f"{SVG}title") or "", r) for r in ElementTree.fromstring(svg).iter(f"{SVG}rect")]
    first = [float(r.attrib["width"]) for title, r in boxes if title.startswith("0F0,")]
    # Twice the time is twice the width: the scale is common.
    assert first[0] == pytest.approx(2 * first[1], rel=1e-3)
    hatched = [title for title, r in boxes if "exposed" in r.attrib.get("class", "").split() and title]
    expected = sum(s.kind is SpanKind.EXPOSED for t in (slow, timeline) for s in t.spans)
    assert len(hatched) == expected
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")


def boxes_of(svg: str) -> list[tuple[str, dict[str, str]]]:
    """(what is told of it, attributes) of every box of a span."""
    boxes = ElementTree.fromstring(svg).iter(f"{SVG}rect")
    return [(title, box.attrib) for box in boxes if (title := box.findtext(f"{SVG}title"))]


def test_svg_boxes_are_as_wide_as_their_times(timeline: Timeline) -> None:
    """A step of 10,000 us on 1,092 px, so that the rest is far below a pixel each."""
    long = replace(timeline.spans[0], start_us=timeline.step_us, end_us=10_000.0)
    svg = draw([replace(timeline, step_us=10_000.0, spans=(*timeline.spans, long))])
    scale = (1200 - 84 - 24) / 10_000
    shown = sorted(span.duration_us * scale for span in (*timeline.spans, long) if span.kind is not MESSAGE)
    boxes = [box for title, box in boxes_of(svg) if not title.startswith("message")]
    assert sorted(float(box["width"]) for box in boxes) == pytest.approx(shown, rel=1e-4)
    assert min(shown) < 4
    # An edge would be wider than the box.
    assert all("edged" not in box["class"] for box in boxes if float(box["width"]) < 4)


def test_svg_has_every_lane_that_carries_something() -> None:
    plan = make_comm_plan(
        make_schedule("1f1b", 2, 4), axes=(("dp", 2), ("tp", 2)), tied=True, collective_us=0.001
    )
    timeline = simulate(plan)
    words = texts(draw([timeline]))
    wanted = {
        "reductions" if lane == "loss" or lane.startswith("tied") else lane for lane in lanes_of(timeline)
    }
    assert wanted >= {"pp 0>1", "pp 1>0", "tp", "dp", "reductions"}
    assert wanted <= set(words)
    told = " ".join(title for title, _ in boxes_of(draw([timeline])))
    assert all(span.name in told for span in timeline.spans if span.kind is MESSAGE)


def lanes_of(timeline: Timeline) -> set[str]:
    return {span.lane for span in timeline.spans if span.kind is MESSAGE}


def test_loss_curve() -> None:
    metrics = [{"step": k, "loss": 5.0 / (k + 1)} for k in range(10)]
    svg = draw_loss([*metrics, {"step": 9, "held_out_loss": 0.7}])
    assert svg is not None
    assert "held-out loss" in texts(svg)
    line = ElementTree.fromstring(svg).find(f"{SVG}polyline")
    assert line is not None
    assert len(line.attrib["points"].split()) == 10
    assert draw_loss(metrics[:1]) is None
    assert draw_loss([{"step": 0, "loss": float("nan")}, {"step": 1, "loss": 1.0}]) is None
