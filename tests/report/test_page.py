"""The report's page in a real browser: what is on it, and that zoom, hover, drag and keys work."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from stretto.ir.plan import Plan
from stretto.ir.timeline import Timeline
from stretto.report.html import render
from stretto.report.pack import drawing_data
from stretto.report.rundir import Run
from stretto.schedule.families import make_schedule
from stretto.simulating import predict, simulate
from tests.report.chromium import open_page
from tests.synthetic_comm import make_comm_plan

DRIVER = Path(__file__).with_name("driver.js")
MOST_BYTES = 5_000_000


def comm_plan(
    stages: int = 4, microbatches: int = 8, *, collective_us: float = 70.0, blocks: int = 4
) -> Plan:
    order = make_schedule("1f1b", stages, microbatches)
    return make_comm_plan(order, blocks=blocks, latency_us=30, bytes_per_us=1700, collective_us=collective_us)


def run_of(plan: Plan, measured: Timeline | None = None) -> Run:
    timeline = simulate(plan)
    return Run(
        Path("a run"), plan=plan, simulated=timeline, measured=measured, prediction=predict(plan, timeline)
    )


@pytest.fixture(scope="module")
def run() -> Run:
    plan = comm_plan()
    slow = replace(simulate(comm_plan(collective_us=90.0)), source="measured")
    return run_of(plan, slow)


@pytest.fixture(scope="module")
def page(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(run), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def outcome(page: Path) -> dict[str, Any]:
    """What came of working the page as a reader would (`driver.js`)."""
    driven = page.with_name("driven.html")
    script = f"<script>{DRIVER.read_text(encoding='utf-8')}</script>"
    driven.write_text(
        page.read_text(encoding="utf-8").replace("</body>", f"{script}</body>"), encoding="utf-8"
    )
    document = open_page(driven, "--window-size=1280,900", "--dump-dom")
    found = re.search(r'<pre id="outcome">(.*?)</pre>', document, re.DOTALL)
    assert found is not None, document[-2000:]
    result: dict[str, Any] = json.loads(unescape(found[1]))
    assert "error" not in result
    return result


def times(words: str) -> tuple[float, float]:
    """`6.4 ms to 28 ms.` in microseconds."""
    units = {"us": 1.0, "ms": 1e3, "s": 1e6}
    numbers = re.findall(r"([\d.]+) (us|ms|s)\b", words)
    (first, a), (last, b) = numbers
    return float(first) * units[a], float(last) * units[b]


def length(words: str) -> float:
    first, last = times(words)
    return last - first


def test_everything_is_on_the_page(run: Run, outcome: dict[str, Any]) -> None:
    assert outcome["ready"] == "yes"
    assert run.simulated is not None
    assert run.measured is not None
    spans = [len(run.simulated.spans), len(run.measured.spans)]
    lanes = sum(len(row["lanes"]) for row in drawing_data([run.simulated], [""], run.plan)["timelines"])
    assert f"Predicted: 4 pipeline ranks, {lanes} lanes, {spans[0]} spans." in outcome["status"]
    assert f"Measured: 4 pipeline ranks, {lanes} lanes, {spans[1]} spans." in outcome["status"]
    assert outcome["panels"] == 2
    # Aligned: both have one width and one view.
    assert outcome["widths"][0] == outcome["widths"][1]
    assert outcome["drawn"][0] == [spans[0], 0]
    assert outcome["legend"] == ["F", "I", "W", "B", "exposed", "bubble", "message", "collective", "memory"]
    assert outcome["overflow"] <= 0


def test_pointing_at_a_span_tells_of_it(outcome: dict[str, Any]) -> None:
    assert outcome["hovered"].startswith("exposed: waits for tp all_reduce fr0.0\npredicted\n70 us")
    assert outcome["hoveredLabel"] == ""
    for words in ("0F0 on ranks 0-1", "F forward", "predicted\n900 us", "measured\n900 us", "ops\n17"):
        assert words in outcome["chosen"]
    for words in ("made_up.work.default", "float32[256,512]", "512 KiB", "1000 FLOP", "100 us (made up)"):
        assert words in outcome["op"]
    assert outcome["action"].startswith("0F0 on ranks 0-1")
    # A communication is reported as it was predicted and as it was measured, wherever the pointer is.
    assert outcome["travelled"].startswith("pp 1>0 e3:0\npredicted\n338.4 us\nmeasured\n338.4 us\n")


def test_zoom_by_button_wheel_key_and_drag(outcome: dict[str, Any]) -> None:
    full = length(outcome["whole"])
    assert length(outcome["button"]) == pytest.approx(full / 1.6, rel=0.01)
    assert outcome["fitted"] == outcome["whole"]
    # The wheel belongs to the page until the reader has taken the timeline, or has Ctrl.
    assert outcome["scrollsPage"] is True
    assert outcome["wheelAlone"] == outcome["whole"]
    assert length(outcome["wheel"]) < full / 2
    assert times(outcome["wheel"])[0] == 0
    assert length(outcome["wheelFocused"]) < full / 2
    assert length(outcome["keyIn"]) == pytest.approx(full / 1.5, rel=0.01)
    assert times(outcome["keyRight"])[0] > times(outcome["keyIn"])[0]
    assert 0 < length(outcome["dragged"]) < full / 2
    assert length(outcome["moved"]) == pytest.approx(length(outcome["dragged"]), rel=0.01)
    assert times(outcome["moved"])[0] > times(outcome["dragged"])[0]


def test_ops_appear_when_zoomed_in(outcome: dict[str, Any]) -> None:
    # Four blocks of a product and an addition, the stage's result.
    assert length(outcome["framed"]) < 2000
    assert outcome["ops"] >= 9


def test_the_address_keeps_the_view(outcome: dict[str, Any]) -> None:
    first, last = times(outcome["moved"])
    kept = [float(us) for us in outcome["hash"].removeprefix("#view=").split(",")]
    assert kept == [pytest.approx(first, rel=1e-3), pytest.approx(last, rel=1e-3)]


def test_a_link_into_the_page_shows_its_stretch(page: Path) -> None:
    document = open_page(page, "--window-size=1280,900", "--dump-dom", fragment="#view=10000,13500")
    assert "Shown: 10 ms to 13.5 ms." in document


@pytest.mark.parametrize(
    "flags", [(), pytest.param(("--force-dark-mode",), marks=pytest.mark.slow)], ids=["light", "dark"]
)
def test_a_screenshot_shows_phases_and_exposed_communication(
    page: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    picture = tmp_path / "page.png"
    open_page(page, "--window-size=1400,1000", f"--screenshot={picture}", *flags)
    image = (
        pytest.importorskip("PIL.Image", reason="pillow reads the screenshot").open(picture).convert("RGB")
    )
    assert image.size == (1400, 1000)
    counts = {colour: count for count, colour in image.getcolors(maxcolors=1 << 24)}
    forward = (0x2B, 0x8C, 0xC4) if flags else (0x00, 0x72, 0xB2)
    assert counts.get(forward, 0) > 300
    assert counts.get((0xA8, 0x45, 0x7A), 0) > 300
    # Hatching is drawn with soft edges; near its colour is enough.
    near = sum(n for (r, g, b), n in counts.items() if r > 190 and 60 < g < 160 and b < 90)
    assert near > 300


@pytest.mark.slow
def test_a_page_of_16_pipeline_ranks_and_64_microbatches_stays_small() -> None:
    """24 collectives a forward and as many backward; no browser is needed to weigh it."""
    plan = comm_plan(16, 64, blocks=24)
    run = Run(Path("large"), plan=plan, simulated=simulate(plan))
    assert len(run.simulated.spans if run.simulated else ()) > 140_000
    assert len(render(run).encode()) < MOST_BYTES
