"""Timelines as files: JSON there and back, Perfetto parsed again, SVG as XML with what must be seen."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

import stretto.report as report
from stretto.errors import UsageError
from stretto.ir.timeline import SpanKind, Timeline
from stretto.report.curve import draw_loss
from stretto.schedule.families import make_schedule
from stretto.simulating import simulate
from tests.simulating.test_engine import NBYTES, ONE_F_ONE_B, RATE
from tests.synthetic import make_plan
from tests.synthetic_comm import make_comm_plan

SVG = "{http://www.w3.org/2000/svg}"
MESSAGE = SpanKind.MESSAGE


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return simulate(make_plan(ONE_F_ONE_B, f_us=90, latency_us=10, bytes_per_us=RATE))


def test_json_there_and_back(timeline: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    timeline.save(path)
    assert report.load_timeline(path) == timeline


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1, column 2: not JSON"),
        ("[]", r"expected an object, found \[\]"),
        ("{}", 'not a timeline file: expected "format": "stretto timeline"'),
        (
            '{"format": "stretto timeline", "version": 9}',
            "version 9 cannot be read: this Stretto reads version 3",
        ),
        ('{"format": "stretto timeline", "version": 3}', "the key 'source' is missing"),
    ],
)
def test_a_wrong_timeline_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as refused:
        report.load_timeline(path)
    assert str(path) in str(refused.value)


def test_an_unknown_suffix_is_refused(timeline: Timeline, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"known suffixes are \.json, \.perfetto-trace, \.svg"):
        timeline.save(tmp_path / "t.png")


def test_perfetto_parsed_again(timeline: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "t.perfetto-trace"
    timeline.save(path)
    trace = Trace()
    trace.ParseFromString(path.read_bytes())
    tracks = {
        p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")
    }
    processes = [t.process.process_name for t in tracks.values() if t.HasField("process")]
    assert processes == ["rank 0 (simulated)", "rank 1 (simulated)"]

    slices: dict[str, list[tuple[str, str, int, int]]] = defaultdict(list)
    flows: dict[int, list[tuple[int, str]]] = defaultdict(list)
    counters: dict[int, list[tuple[int, int]]] = defaultdict(list)
    open_: dict[int, list[tuple[str, str, int]]] = defaultdict(list)
    for packet in trace.packet:
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        track = tracks[event.track_uuid]
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            # One slice at a time on a track, or the viewer would nest them.
            assert not open_[event.track_uuid]
            open_[event.track_uuid].append((event.name, event.categories[0], packet.timestamp))
            for flow in event.flow_ids:
                flows[flow].append((packet.timestamp, event.name))
        elif event.type == TrackEvent.TYPE_SLICE_END:
            name, category, start = open_[event.track_uuid].pop()
            rank = tracks[track.parent_uuid].process.pid - 1
            slices[f"{rank} {track.name}"].append((name, category, start, packet.timestamp))
        else:
            rank = tracks[track.parent_uuid].process.pid - 1
            counters[rank].append((packet.timestamp, event.counter_value))
    assert not any(open_.values())

    assert slices["0 compute"][:2] == [("0F0", "F", 0, 90_000), ("0F1", "F", 90_000, 180_000)]
    assert ("pp 0>1 e0:0", "message", 90_000, 120_000) in slices["1 pp 0>1"]
    assert {category for rows in slices.values() for _, category, _, _ in rows} == {
        "F",
        "B",
        "exposed",
        "bubble",
        "message",
    }
    # Sender's slice, message, receiver's slice.
    chains = [[name for _, name in sorted(chain)] for chain in flows.values()]
    assert ["0F0", "pp 0>1 e0:0", "1F0"] in chains
    assert ["1B0", "pp 1>0 e1:0", "0B0"] in chains
    assert [held for _, held in counters[0]] == [held for _, held in timeline.memory[0]]


def test_perfetto_puts_pipelined_messages_on_tracks_of_their_own() -> None:
    timeline = simulate(make_plan(ONE_F_ONE_B, f_us=90, latency_us=500, bytes_per_us=NBYTES / 20))
    trace = Trace()
    trace.ParseFromString(report.perfetto.to_perfetto(timeline))
    names = [p.track_descriptor.name for p in trace.packet if p.HasField("track_descriptor")]
    assert names.count("pp 0>1") == 2


def texts(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    return ["".join(node.itertext()) for node in root.iter(f"{SVG}text")]


def test_svg_shows_two_timelines_on_one_scale(timeline: Timeline) -> None:
    slow = simulate(make_plan(ONE_F_ONE_B, f_us=180, latency_us=10, bytes_per_us=RATE))
    svg = report.draw([slow, timeline], ["Without <overlap>", "With overlap"])
    words = texts(svg)
    for label in ("Without <overlap>", "With overlap", "0F0", "1B1", "rank 0", "rank 1", "pp 0>1", "pp 1>0"):
        assert label in words
    assert any("exposed communication" in w and "%" in w for w in words)
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
    svg = report.draw([replace(timeline, step_us=10_000.0, spans=(*timeline.spans, long))])
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
    words = texts(report.draw([timeline]))
    wanted = {"sums" if lane == "loss" or lane.startswith("tied") else lane for lane in lanes_of(timeline)}
    assert wanted >= {"pp 0>1", "pp 1>0", "tp", "dp", "sums"}
    assert wanted <= set(words)
    told = " ".join(title for title, _ in boxes_of(report.draw([timeline])))
    assert all(span.name in told for span in timeline.spans if span.kind is MESSAGE)


def lanes_of(timeline: Timeline) -> set[str]:
    return {span.lane for span in timeline.spans if span.kind is MESSAGE}


def test_svg_boxes_stay_inside(timeline: Timeline) -> None:
    root = ElementTree.fromstring(report.draw([timeline]))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for box in root.iter(f"{SVG}rect"):
        if "x" in box.attrib:
            assert 0 <= float(box.attrib["x"]) <= width - float(box.attrib["width"]) + 0.01
            assert 0 <= float(box.attrib["y"]) <= height - float(box.attrib["height"]) + 0.01


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


def test_json_is_one_span_a_line(timeline: Timeline) -> None:
    text = report.jsonfile.to_json(timeline)
    assert len(json.loads(text)["spans"]) == len(timeline.spans)
    spans = text[text.index('"spans"') : text.index('"peak_bytes"')]
    assert sum(line.startswith("    [") for line in spans.splitlines()) == len(timeline.spans)
