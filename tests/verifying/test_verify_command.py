"""`stretto verify`: one line and status 0, every fault and status 1, an unreadable file and status 2."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stretto.cli import main as entry
from stretto.ir.serialize import save_plan
from stretto.schedule.csv import write_csv
from stretto.schedule.families import make_schedule
from tests.synthetic import make_plan
from tests.verifying.comm_plans import one_of_each


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["stretto", "verify", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        entry.main()
    return int(stop.value.code or 0)


def test_a_good_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_plan(make_plan(make_schedule("1f1b", 2, 8)), tmp_path / "plan")  # told by content, not by name
    assert run(monkeypatch, tmp_path / "plan") == 0
    assert (
        capsys.readouterr().out == "ok: 2 ranks, 8 microbatches, 32 actions, 16 messages on 2 communicators\n"
    )


def test_a_good_plan_with_axes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_plan(one_of_each(), tmp_path / "plan.json")
    assert run(monkeypatch, tmp_path / "plan.json") == 0
    # Eight collectives for each of three microbatches on each place, and the loss's on the last.
    assert capsys.readouterr().out == (
        "ok: 12 ranks (pp 2 x dp 3 x tp 2), 3 microbatches, 18 actions, 6 messages on 2 communicators, "
        "51 collectives, 10 sums of gradients\n"
    )


def test_a_plan_for_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_plan(make_plan(make_schedule("1f1b", 1, 1)), tmp_path / "plan.json")
    assert run(monkeypatch, tmp_path / "plan.json") == 0
    assert capsys.readouterr().out == "ok: 1 rank, 1 microbatch, 2 actions, 0 messages on 0 communicators\n"


def test_a_good_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_csv(make_schedule("zb-h1", 3, 4), tmp_path / "orders.csv")
    assert run(monkeypatch, tmp_path / "orders.csv") == 0
    assert capsys.readouterr().out == "ok: 3 ranks, 4 microbatches, 36 actions\n"


def test_faults_of_a_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.csv").write_text("0F0,0B0\n1B0,1F0\n")
    assert run(monkeypatch, tmp_path / "bad.csv") == 1
    assert capsys.readouterr().err == (
        "stretto: the schedule cannot run: 1 fault\n"
        "  rank 1, 1B0: backward before forward of microbatch 0 (1F0 comes later at position 1). "
        "Put 1F0 before it\n"
    )


def test_faults_of_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(make_schedule("1f1b", 2, 2))
    save_plan(replace(plan, communicators=plan.communicators[1:]), tmp_path / "plan.json")
    assert run(monkeypatch, tmp_path / "plan.json") == 1
    assert "communicator pp 0>1: missing, and ranks [0, 1] need it" in capsys.readouterr().err


def test_a_limit_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_plan(make_plan(make_schedule("1f1b", 2, 2)), tmp_path / "plan.json")
    write_csv(make_schedule("1f1b", 2, 2), tmp_path / "orders.csv")
    assert run(monkeypatch, tmp_path / "plan.json", "--max-bytes", "1000") == 1
    assert "more than the limit of 1,000" in capsys.readouterr().err
    assert run(monkeypatch, tmp_path / "orders.csv", "--max-bytes", "1000") == 2
    assert "is a schedule, which knows no tensors" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "file, line 1, column 2: not JSON"),
        (b"{}", "file: not a plan file"),
        (b"0F0,0X0\n", "file, line 1, column 2: cannot read action '0X0'"),
        (b"", "file: holds no action"),
        (b"\xff\x00\xfe", "file: neither a plan (JSON) nor a schedule (CSV)"),
    ],
)
def test_unreadable_files(
    content: bytes,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_bytes(content)
    assert run(monkeypatch, tmp_path / "file") == 2
    assert message in capsys.readouterr().err


def test_a_missing_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "/nowhere/plan.json") == 2
    assert "cannot read /nowhere/plan.json: No such file" in capsys.readouterr().err
