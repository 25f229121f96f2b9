"""Traces decoded again: slices, counters and flows; with a plan, ops inside actions and their shapes."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from stretto.ir.plan import Plan
from stretto.ir.timeline import SpanKind, Timeline
from stretto.report import perfetto
from stretto.report.perfetto import count_ops, ops_left_out, to_perfetto
from stretto.schedule.families import make_schedule
from stretto.simulating import simulate
from tests.simulating.test_engine import ONE_F_ONE_B, RATE
from tests.synthetic import make_plan
from tests.synthetic_comm import make_comm_plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_comm_plan(
        make_schedule("1f1b", 2, 3), blocks=2, latency_us=10, bytes_per_us=5000, collective_us=70.0
    )


@pytest.fixture(scope="module")
def timeline(plan: Plan) -> Timeline:
    return simulate(plan)


class Decoded:
    """Slices of a trace as they nest, by process and track; flows as the slices that carry them."""

    def __init__(self, data: bytes) -> None:
        trace = Trace()
        trace.ParseFromString(data)
        tracks: dict[int, Any] = {}
        self.slices: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self.counters: dict[str, list[int]] = defaultdict(list)
        open_: dict[int, list[dict[str, Any]]] = defaultdict(list)
        last: dict[int, int] = {}
        for packet in trace.packet:
            if packet.HasField("track_descriptor"):
                tracks[packet.track_descriptor.uuid] = packet.track_descriptor
                continue
            event = packet.track_event
            # On a track time never goes back, or slices would nest wrongly.
            assert packet.timestamp >= last.get(event.track_uuid, 0)
            last[event.track_uuid] = packet.timestamp
            if event.type == TrackEvent.TYPE_SLICE_BEGIN:
                track = tracks[event.track_uuid]
                found = {
                    "process": tracks[track.parent_uuid].process.process_name,
                    "track": track.name,
                    "name": event.name,
                    "category": event.categories[0],
                    "start": packet.timestamp,
                    "in": open_[event.track_uuid][-1]["name"] if open_[event.track_uuid] else None,
                    "details": {a.name: _value(a) for a in event.debug_annotations},
                }
                open_[event.track_uuid].append(found)
                self.slices[f"{found['process']} {track.name}"].append(found)
                for flow in event.flow_ids:
                    self.flows[flow].append(found)
            elif event.type == TrackEvent.TYPE_SLICE_END:
                open_[event.track_uuid].pop()["end"] = packet.timestamp
            else:
                process = tracks[tracks[event.track_uuid].parent_uuid].process.process_name
                self.counters[process].append(event.counter_value)
        assert not any(open_.values())
        self.tracks = [track.name for track in tracks.values()]
        self.processes = [t.process.process_name for t in tracks.values() if t.HasField("process")]


def _value(annotation: Any) -> int | float | str:
    found: int | float | str = getattr(annotation, annotation.WhichOneof("value"))
    return found


def test_slices_counters_and_flows_of_a_file(tmp_path: Path) -> None:
    timeline = simulate(make_plan(ONE_F_ONE_B, f_us=90, latency_us=10, bytes_per_us=RATE))
    timeline.save(tmp_path / "t.perfetto-trace")
    decoded = Decoded((tmp_path / "t.perfetto-trace").read_bytes())
    assert decoded.processes == ["rank 0 (simulated)", "rank 1 (simulated)"]
    shown = {
        lane: [(s["name"], s["category"], s["start"], s["end"]) for s in slices]
        for lane, slices in decoded.slices.items()
    }
    compute = shown["rank 0 (simulated) compute"]
    assert compute[:2] == [("0F0", "F", 0, 90_000), ("0F1", "F", 90_000, 180_000)]
    assert ("pp 0>1 e0:0", "message", 90_000, 120_000) in shown["rank 1 (simulated) pp 0>1"]
    categories = {category for slices in shown.values() for _, category, _, _ in slices}
    assert categories == {"F", "B", "exposed", "bubble", "message"}
    # Sender's slice, message, receiver's slice.
    chains = [[s["name"] for s in sorted(c, key=lambda s: s["start"])] for c in decoded.flows.values()]
    assert ["0F0", "pp 0>1 e0:0", "1F0"] in chains
    assert ["1B0", "pp 1>0 e1:0", "0B0"] in chains
    assert decoded.counters["rank 0 (simulated)"] == [nbytes for _, nbytes in timeline.memory[0]]


def test_perfetto_is_imported_where_a_trace_is_written() -> None:
    code = "import sys, stretto; stretto.simulate; assert 'stretto.report' in sys.modules; "
    code += "assert not any(name.startswith('perfetto') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ops_lie_inside_their_actions(plan: Plan, timeline: Timeline) -> None:
    decoded = Decoded(to_perfetto(timeline, plan))
    compute = decoded.slices["ranks 0-1 (simulated) compute"]
    ops = [s for s in compute if s["category"] == "op"]
    # F of two blocks: two products, two additions, y; B has the same backward and three weight gradients.
    assert [s["name"] for s in ops if s["in"] == "0F0"] == ["fm0.0", "fy0.0", "fm0.1", "fy0.1", "y0"]
    assert {s["in"] for s in ops} == {f"0{phase}{mb}" for phase in "FB" for mb in range(3)}
    every = [s for slices in decoded.slices.values() for s in slices if s["category"] == "op"]
    assert len(every) == count_ops(plan, [timeline])
    product = next(s for s in ops if s["name"] == "fm0.0")
    assert product["details"] == {
        "op": "made_up.work.default",
        "category": "F",
        "reads": "float32[256,512] float32[512,256]",
        "makes": "float32[256,512]",
        "bytes": 256 * 512 * 4,
        "flops": 1000,
        "predicted_us": 100.0,
    }
    for slice_ in ops:
        assert slice_["end"] - slice_["start"] == pytest.approx(100_000, abs=2)


def test_too_many_ops_are_left_out_and_told(
    plan: Plan, timeline: Timeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = count_ops(plan, [timeline])
    monkeypatch.setattr(perfetto, "MOST_OPS", count)
    assert ops_left_out(timeline, plan) == ""
    monkeypatch.setattr(perfetto, "MOST_OPS", count - 1)
    assert f"without its {count} ops" in ops_left_out(timeline, plan)
    assert ops_left_out(timeline, None) == ""
    compute = Decoded(to_perfetto(timeline, plan)).slices["ranks 0-1 (simulated) compute"]
    assert {s["category"] for s in compute} <= {"F", "B", "bubble", "exposed"}


def test_a_collective_flows_from_its_start_to_what_runs_after_its_wait(
    plan: Plan, timeline: Timeline
) -> None:
    decoded = Decoded(to_perfetto(timeline, plan))
    chains = [[s["name"] for s in sorted(c, key=lambda s: s["start"])] for c in decoded.flows.values()]
    assert ["fm0.0", "tp all_reduce fr0.0", "fy0.0"] in chains
    assert ["bm1.1", "tp all_reduce br1.1", "by1.1"] in chains
    assert ["0F0", "pp 0>1 e0:0", "1F0"] in chains
    messages = [s for s in timeline.spans if s.kind is SpanKind.MESSAGE]
    through = [c for c in decoded.flows.values() if any(s["category"] == "message" for s in c)]
    assert len(through) == len(messages)
    for chain in decoded.flows.values():
        starts = [s["start"] for s in sorted(chain, key=lambda s: s["start"])]
        assert starts == sorted(set(starts)) or len(chain) < 3


def test_measured_and_predicted_share_a_trace(plan: Plan, timeline: Timeline) -> None:
    decoded = Decoded(to_perfetto([timeline, replace(timeline, source="measured")], plan))
    assert decoded.processes == [
        f"ranks {r} ({s})" for s in ("simulated", "measured") for r in ("0-1", "2-3")
    ]
    # Flows never lead from one timeline into the other.
    for chain in decoded.flows.values():
        assert len({s["process"].split("(")[1] for s in chain}) == 1
