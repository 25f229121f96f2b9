"""Runs on disk, their tables and their page; the commands `simulate` and `report`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stretto.cli.report import report as report_command
from stretto.cli.walks import simulate as simulate_command
from stretto.errors import UsageError
from stretto.ir.compared import against, beside_bound, signed
from stretto.ir.plan import VERSION, Plan
from stretto.ir.serialize import save_plan
from stretto.report.files import load_timeline, save_json
from stretto.report.html import render
from stretto.report.rundir import load_run
from stretto.report.tables import comparison_grid, ranks_grid
from stretto.simulating import predict, simulate
from tests.simulating.test_engine import ONE_F_ONE_B, RATE
from tests.synthetic import make_plan


def a_plan(**costs: float) -> Plan:
    return make_plan(ONE_F_ONE_B, **{"f_us": 90, "latency_us": 10, "bytes_per_us": RATE, **costs})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    plan = a_plan()
    save_plan(replace(plan, prediction=predict(plan)), tmp_path / "plan.json")
    save_json(replace(simulate(a_plan(f_us=180)), source="measured"), tmp_path / "measured.json")
    lines = [{"step": k, "loss": 4.0 - k, "tokens_per_s": 1000.0} for k in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "settings.json").write_text('{"model": {"hidden": 512, "name": "<b>"}}')
    (tmp_path / "summary.json").write_text('{"steps": 3}')
    return tmp_path


class Balanced(HTMLParser):
    """Counts tags, and keeps what would load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [f"{tag} {key}" for key, _ in attrs if key in ("src", "href")]
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_holds_everything_and_loads_nothing(run_dir: Path) -> None:
    page = render(load_run(run_dir))
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert parser.loads == []
    for words in ("Measured against predicted", "Timelines", "Loss", "Summary", "Settings", "model.hidden"):
        assert words in page
    assert "&lt;b&gt;" in page
    assert "Left out" not in page


def test_what_is_missing_is_left_out_and_said(run_dir: Path) -> None:
    for name in ("metrics.jsonl", "measured.json"):
        (run_dir / name).unlink()
    run = load_run(run_dir)
    assert run.notes == [
        "metrics.jsonl is missing. Left out: the loss and speed of each step.",
        "measured.json is missing. Left out: the measured timeline.",
    ]
    page = render(run)
    assert "Left out" in page
    assert "measured.json is missing" in page
    assert "<h2>Loss</h2>" not in page


def test_predicted_against_measured(run_dir: Path) -> None:
    run = load_run(run_dir)
    assert run.prediction is not None
    assert run.measured is not None
    rows = {row[0]: row[1:] for row in comparison_grid(run.prediction, run.measured).rows}
    # 2 x 90 and 2 x 200 us on both ranks; measured 2 x 180 for F.
    assert rows["compute (mean of the ranks)"] == ("580 us", "760 us", "+31.0%")
    predicted, measured = run.prediction.step_us, run.measured.step_us
    assert rows["step"][2] == signed(against(measured, predicted))
    assert rows["step"][2].startswith("+")  # it was slower than predicted
    assert rows["gap to the bound"][1] == beside_bound(measured, run.prediction.bound_us)


def test_accounts_by_rank() -> None:
    rows = ranks_grid(simulate(a_plan(i_us=100, w_us=100))).rows
    assert rows[0][:4] == ("rank 0", "580 us (69.9%)", "60 us (7.2%)", "190 us (22.9%)")
    assert rows[1][:4] == ("rank 1", "580 us (69.9%)", "30 us (3.6%)", "220 us (26.5%)")


def test_a_plan_of_another_version_is_refused_and_without_it_the_rest_is_reported(run_dir: Path) -> None:
    path = run_dir / "plan.json"
    path.write_text(path.read_text().replace(f'"version": {VERSION}', '"version": 3', 1))
    with pytest.raises(UsageError, match=r"plan\.json.*version 3.*reads version"):
        load_run(run_dir)
    path.unlink()
    page = render(load_run(run_dir))
    assert "plan.json is missing" in page
    assert "By rank, measured" in page
    assert "faster than 0" not in page


def test_a_plan_whose_programs_were_edited_is_said(run_dir: Path) -> None:
    path = run_dir / "plan.json"
    path.write_text(path.read_text().replace('"flops": 1000', '"flops": 1001', 1))
    assert "programs were edited after planning" in " ".join(load_run(run_dir).notes)


def test_simulate_command(run_dir: Path) -> None:
    files = [run_dir / name for name in ("t.perfetto-trace", "t.svg", "t.json")]
    options = [
        word for pair in zip(("--trace", "--svg", "--json"), map(str, files), strict=True) for word in pair
    ]
    result = CliRunner().invoke(simulate_command, [str(run_dir / "plan.json"), *options])
    assert result.exit_code == 0, result.output
    for words in ("exposed, pp", "bubble", "lower bound", "gap to the bound", "What binds the bound: rank"):
        assert words in result.output
    assert all(path.stat().st_size > 0 for path in files)
    assert load_timeline(files[2]) == simulate(a_plan())


def test_the_terminal_report_fits_100_columns(run_dir: Path) -> None:
    result = CliRunner(env={"COLUMNS": "180"}).invoke(report_command, [str(run_dir)])
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 100
    for words in (
        "Measured against predicted",
        "What binds the bound: rank",
        "Communication, measured",
        "Costliest ops",
        "Timeline, predicted",
        "Timeline, measured",
        "// exposed",
    ):
        assert words in result.output


@pytest.mark.parametrize(
    ("name", "begins"), [("a.perfetto-trace", b"\n"), ("a.svg", b"<svg"), ("a.html", b"<!doctype html>")]
)
def test_the_suffix_says_what_is_written(run_dir: Path, name: str, begins: bytes) -> None:
    path = run_dir / name
    result = CliRunner().invoke(report_command, [str(run_dir), "-o", str(path)])
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(begins)


@pytest.mark.parametrize(
    ("removed", "written", "output", "message"),
    [
        ((), {"plan.json": b'{"format": "stretto plan"'}, "", r"plan\.json"),
        ((), {"metrics.jsonl": b'{"step": 0}\nnonsense\n{"step": 2}\n'}, "", r"metrics\.jsonl, line 2"),
        ((), {"metrics.jsonl": b'{"step": "\xff"}\n{}\n'}, "", r"metrics\.jsonl: not a text file"),
        (("plan.json", "measured.json"), {}, "a.svg", "nothing to draw"),
        (("*",), {}, "", r"has none of settings\.json"),
        ((), {}, "a.png", "give one of .html, .perfetto-trace, .svg"),
    ],
)
def test_refusals(
    run_dir: Path, removed: tuple[str, ...], written: dict[str, bytes], output: str, message: str
) -> None:
    for pattern in removed:
        for path in list(run_dir.glob(pattern)):
            path.unlink()
    for name, content in written.items():
        (run_dir / name).write_bytes(content)
    options = ["-o", str(run_dir / output)] if output else []
    result = CliRunner().invoke(report_command, [str(run_dir), *options])
    assert isinstance(result.exception, UsageError)
    assert re.search(message, str(result.exception))


def test_half_a_last_line_of_a_killed_run_is_no_error(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n{"step": 1, "lo')
    assert load_run(run_dir).metrics == [{"step": 0, "loss": 1.0}]
