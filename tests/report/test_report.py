"""Runs on disk, their tables and their page; the commands `simulate` and `report`."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stretto.cli.report import report as report_command
from stretto.cli.simulate import simulate as simulate_command
from stretto.errors import UsageError
from stretto.ir.plan import Plan
from stretto.ir.serialize import save_plan
from stretto.report import load_timeline, save_json
from stretto.report.html import render
from stretto.report.rundir import load_run
from stretto.report.tables import comparison_grid, ranks_grid
from stretto.report.words import format_bytes, format_change, format_share
from stretto.simulate import predict, simulate
from tests.simulate.test_engine import ONE_F_ONE_B, RATE
from tests.synthetic import make_plan


def a_plan(**costs: float) -> Plan:
    return make_plan(ONE_F_ONE_B, **{"f_us": 90, "latency_us": 10, "bytes_per_us": RATE, **costs})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    plan = a_plan()
    save_plan(replace(plan, prediction=predict(plan)), tmp_path / "plan.json")
    save_json(simulate(plan), tmp_path / "simulated.json")
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
    for name in ("metrics.jsonl", "measured.json", "simulated.json"):
        (run_dir / name).unlink()
    run = load_run(run_dir)
    assert run.notes == [
        "metrics.jsonl is missing. Left out: the loss and speed of each step.",
        "measured.json is missing. Left out: the measured timeline.",
        "The predicted timeline was not saved; it was simulated again from plan.json.",
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
    assert rows["step"][2] == format_change(predicted, measured)
    assert rows["gap to the bound"][1] == format_share(measured / run.prediction.bound_us - 1)


def test_accounts_by_rank() -> None:
    rows = ranks_grid(simulate(a_plan(i_us=100, w_us=100))).rows
    assert rows[0][:4] == ("rank 0", "580 us (69.9%)", "60 us (7.2%)", "190 us (22.9%)")
    assert rows[1][:4] == ("rank 1", "580 us (69.9%)", "30 us (3.6%)", "220 us (26.5%)")


def test_a_broken_metrics_line_is_named(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text('{"step": 0}\nnonsense\n{"step": 2}\n')
    with pytest.raises(UsageError, match=r"metrics\.jsonl, line 2"):
        load_run(run_dir)


def test_a_metrics_file_that_is_no_text_is_named(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_bytes(b'{"step": 0}\n{"step": "\xff"}\n{"step": 2}\n')
    with pytest.raises(UsageError, match=r"metrics\.jsonl, line 2: it is not UTF-8 text; mend the line"):
        load_run(run_dir)


def test_half_a_last_line_of_a_killed_run_is_no_error(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n{"step": 1, "lo')
    assert load_run(run_dir).metrics == [{"step": 0, "loss": 1.0}]


def test_nothing_to_report_on(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such run directory or plan file"):
        load_run(tmp_path / "none")
    with pytest.raises(UsageError, match=r"holds none of settings\.json"):
        load_run(tmp_path)


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


def test_report_command_on_a_run_and_on_a_plan(run_dir: Path) -> None:
    page = run_dir / "report.html"
    result = CliRunner().invoke(report_command, [str(run_dir), "-o", str(page)])
    assert result.exit_code == 0, result.output
    assert "Measured against predicted" in result.output
    assert page.read_text().startswith("<!doctype html>")
    result = CliRunner().invoke(report_command, [str(run_dir / "plan.json")])
    assert result.exit_code == 0, result.output
    assert "The step" in result.output


def test_the_terminal_report_fits_100_columns(run_dir: Path) -> None:
    result = CliRunner(env={"COLUMNS": "180"}).invoke(report_command, [str(run_dir)])
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 100
    for words in (
        "Measured against predicted",
        "What binds the bound: rank",
        "Communication, measured",
        "Costliest ops",
        "Predicted timeline",
        "Measured timeline",
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


def test_a_suffix_that_nothing_writes_is_refused(run_dir: Path) -> None:
    result = CliRunner().invoke(report_command, [str(run_dir), "-o", "a.png"])
    assert isinstance(result.exception, UsageError)
    assert str(result.exception) == (
        "--output a.png: its suffix says the kind: give one of .html, .perfetto-trace, .svg"
    )


def test_a_directory_without_a_step_has_nothing_to_draw(run_dir: Path) -> None:
    for name in ("plan.json", "measured.json", "simulated.json"):
        (run_dir / name).unlink()
    result = CliRunner().invoke(report_command, [str(run_dir), "-o", str(run_dir / "a.svg")])
    assert isinstance(result.exception, UsageError)
    assert "there is nothing to draw" in str(result.exception)
    assert "<h2>Timelines</h2>" not in render(load_run(run_dir))


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1010 * 1024, "1010 KiB"), (3 * 2**29, "1.5 GiB"), (2**41, "2048 GiB")],
)
def test_bytes_for_people(nbytes: int, words: str) -> None:
    assert format_bytes(nbytes) == words
