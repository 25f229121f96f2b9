"""`stretto schedule`: what it prints, where, and how it refuses."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from stretto.cli.schedule import schedule
from stretto.errors import PlanError, UsageError
from stretto.schedule.csv import read_csv, to_csv
from stretto.schedule.families import FAMILIES, make_schedule

NAMED = ["--family", "eager-1f1b", "--stages", "4", "--microbatches", "8"]
TIMES = ["--times", "F=2,I=2,W=1,message=0.5"]


def run(*arguments: str):
    return CliRunner().invoke(schedule, list(arguments))


def refusal(*arguments: str) -> str:
    result = run(*arguments)
    assert isinstance(result.exception, UsageError), result.output
    assert result.exception.exit_status == 2
    return str(result.exception)


def test_csv_is_for_pipes():
    result = run(*NAMED, "--format", "csv", *TIMES)
    assert result.exit_code == 0
    assert result.stdout == to_csv(make_schedule("eager-1f1b", 4, 8))
    assert "makespan" in result.stderr
    assert "bubble rate" in result.stderr
    assert "live microbatches, by stage  7 5 3 1" in result.stderr
    assert run(*NAMED, "--format", "csv").stderr == ""


def test_ascii_is_the_default_and_carries_the_figures():
    result = run(*NAMED, *TIMES)
    assert result.exit_code == 0
    assert result.stdout.startswith("Timeline, eager-1f1b")
    assert "\nrank 3 " in result.stdout
    assert "live microbatches, by stage  7 5 3 1" in result.stdout
    assert result.stderr == ""
    assert "makespan" not in run(*NAMED).stdout


def test_json_and_svg_go_to_files_by_their_ending(tmp_path):
    result = run(*NAMED, *TIMES, "-o", str(tmp_path / "s.json"))
    assert result.exit_code == 0
    assert "bubble rate" in result.stdout
    assert json.loads((tmp_path / "s.json").read_text())["timing"]["peak_live"] == [7, 5, 3, 1]
    assert run(*NAMED, "-o", str(tmp_path / "s.svg")).stdout == ""
    assert (tmp_path / "s.svg").read_text().startswith("<svg")
    assert "timing" not in json.loads(run(*NAMED, "--format", "json").stdout)


def test_a_file_is_read_and_drawn(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,,0B0\n1F0,1B0\n")
    assert run("--csv", str(path), "--format", "csv").stdout == to_csv(read_csv(path))
    assert re.search("····1F0-+1B0-----", run("--csv", str(path)).stdout)


def test_a_deadlock_is_refused_when_drawn_but_can_be_rewritten(tmp_path):
    path = tmp_path / "stuck.csv"
    path.write_text("0B0,0F0\n")
    result = run("--csv", str(path))
    assert isinstance(result.exception, PlanError)
    assert result.exception.exit_status == 1
    assert "rank 0: 0B0 waits for 0F0" in str(result.exception)
    assert run("--csv", str(path), "--format", "csv").stdout == "0B0,0F0\n"


def test_virtual_stages_groups_and_blocking_reach_the_family():
    ours = ("--family", "interleaved-1f1b", "--ranks", "2", "--microbatches", "5", "--format", "csv")
    made = make_schedule("interleaved-1f1b", 2, 5, virtual_stages=3, group=3)
    assert run(*ours, "--virtual-stages", "3", "--group", "3").stdout == to_csv(made)
    assert run(*ours).stdout == run(*ours[:2], "--stages", "4", *ours[4:]).stdout
    times = ["--times", "F=1,I=1,W=1,message=1", "--blocking"]
    assert (
        "makespan                     172\n"
        in run("--family", "1f1b", "--ranks", "4", "--microbatches", "32", *times).stdout
    )


def test_the_fastest_is_found_and_says_how_far_it_is_from_the_bound():
    times = ["--times", "F=10:12:12:14,I=10:12:12:15,W=8:11:11:9,message=3:2:3"]
    words = ["--ranks", "4", "--microbatches", "12"]
    text = run("--family", "auto", *words, *times).stdout
    figures = dict(line.split("  ", 1) for line in text.splitlines() if "  " in line)
    assert float(figures["cost of the longest rank"]) >= float(figures["lower bound"])
    assert figures["gap"].strip().endswith(" %")
    assert "zb-h2 " in figures["tried"]
    kept = run("--family", "auto", *words, *times, "--memory", "2").stdout
    assert max(map(int, kept.split("live microbatches, by stage")[1].splitlines()[0].split())) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no schedule named: give --family NAME --ranks N --microbatches M, or --csv FILE"),
        ([*NAMED, "--csv", "x.csv"], "--family and --csv both name a schedule"),
        (["--csv", "x.csv", "--stages", "2"], "--stages cannot change a CSV file"),
        (["--csv", "missing.csv"], "cannot read schedule missing.csv"),
        (
            ["--family", "1f1b", "--stages", "2"],
            "--family 1f1b needs --ranks N (or --stages N) and --microbatches M",
        ),
        (["--family", "no-family"], f"choose one of: {', '.join(FAMILIES)}, auto"),
        (["--family", "1f1b", "--stages", "0", "--microbatches", "1"], "--stages is 0"),
        ([*NAMED, "--max-live", "0"], "its minimum is 1"),
        ([*NAMED, "--times", "F=1"], "I, W missing"),
        ([*NAMED, "-o", "/no/such/folder/x.csv"], "the folder /no/such/folder does not exist; create it"),
        (["--family", "zb-v", "--stages", "5", "--microbatches", "2"], "is no multiple of the 2 stages"),
        (["--family", "zb-v", "--ranks", "2", "--stages", "2", "--microbatches", "2"], "give one of"),
        ([*NAMED, "--virtual-stages", "2"], "not virtual_stages = 2: give virtual_stages = 1"),
        ([*NAMED, "--group", "2"], "'eager-1f1b' has no groups of microbatches"),
        ([*NAMED, "--blocking"], "--blocking is about messages: give --times"),
        (["--list", "--stages", "2"], "--list takes no other options"),
        ([*NAMED, "--memory", "3"], "--memory is of --family auto: drop it, or use that"),
        (["--csv", "x.csv", "--weight-share", "0.5"], "--weight-share cannot change a CSV file"),
        (["--family", "auto", "--ranks", "2"], "--family auto needs --ranks N (or --stages N) and --microb"),
        (["--family", "auto", "--ranks", "2", "--microbatches", "0"], "--microbatches is 0"),
        (["--family", "auto", "--ranks", "0", "--stages", "2", "--microbatches", "2"], "--ranks is 0"),
        (
            ["--family", "auto", "--ranks", "2", "--microbatches", "2", "--virtual-stages", "0"],
            "--virtual-stages is 0",
        ),
        (
            ["--family", "auto", "--ranks", "2", "--microbatches", "2", "--weight-share", "2"],
            "--weight-share 2.0 must be from 0 to 1",
        ),
        (
            ["--family", "auto", "--ranks", "2", "--microbatches", "2", "--memory", "0.5"],
            "no schedule of 2 ranks and 1 stages each fits the memory",
        ),
    ],
)
def test_wrong_usage_is_refused(arguments, message):
    assert message in refusal(*arguments)
