"""`stretto verify`: one line and status 0, every fault and status 1, an unreadable file and status 2."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stretto.cli import main as entry
from stretto.ir.serialize import plan_to_text
from stretto.schedule.csv import to_csv
from stretto.schedule.families import make_schedule
from tests.synthetic import make_plan
from tests.verifying.comm_plans import one_of_each

SMALL = make_plan(make_schedule("1f1b", 2, 2))
CASES: dict[str, tuple[str | bytes, tuple[str, ...], int, tuple[str, ...]]] = {
    # (the file, options, status, key words of what is printed)
    "a plan": (
        plan_to_text(make_plan(make_schedule("1f1b", 2, 8))),
        (),
        0,
        ("ok: 2 ranks, 8 microbatches, 32 actions, 16 messages on 2 communicators\n",),
    ),
    # Eight collectives for each of three microbatches on each pipeline rank, and the loss's on the last.
    "axes": (
        plan_to_text(one_of_each()),
        (),
        0,
        ("ok: 12 ranks (pp 2 x dp 3 x tp 2)", " 6 messages", " 51 collectives", " 10 gradient reductions\n"),
    ),
    "one rank": (plan_to_text(make_plan(make_schedule("1f1b", 1, 1))), (), 0, ("1 rank, 1 microbatch,",)),
    "faults of a schedule": ("0F0,0B0\n1B0,1F0\n", (), 1, ("1 fault\n  rank 1, 1B0: ",)),
    "faults of a plan": (
        plan_to_text(replace(SMALL, communicators=SMALL.communicators[1:])),
        (),
        1,
        ("communicator pp 0>1: missing",),
    ),
    "too much memory": (plan_to_text(SMALL), ("--max-bytes", "1000"), 1, ("the limit of 1,000",)),
    "memory of a schedule": ("0F0,0B0\n", ("--max-bytes", "1000"), 2, ("knows no tensors",)),
    "not JSON": ("{", (), 2, ("file, line 1, column 2: not JSON",)),
    "no plan": ("{}", (), 2, ("file: not a plan file",)),
    "no action": ("0F0,0X0\n", (), 2, ("file, line 1, column 2: cannot read action '0X0'",)),
    "nothing": ("", (), 2, ("file: has no action",)),
    "neither": (b"\xff\x00\xfe", (), 2, ("not a text file",)),
}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["stretto", "verify", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        entry.main()
    return int(stop.value.code or 0)


@pytest.mark.parametrize("case", CASES)
def test_status_and_words(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content, options, status, words = CASES[case]
    path = tmp_path / "file"  # what it is shows in the content, not in the name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert run(monkeypatch, path, *options) == status
    out, err = capsys.readouterr()
    assert not (err if status == 0 else out)
    assert all(word in out + err for word in words)


def test_a_good_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "orders.csv").write_text(to_csv(make_schedule("zb-h1", 3, 4)))
    assert run(monkeypatch, tmp_path / "orders.csv") == 0
    assert capsys.readouterr().out == "ok: 3 ranks, 4 microbatches, 36 actions\n"
    assert run(monkeypatch, tmp_path / "none.csv") == 2
    assert "No such file" in capsys.readouterr().err
