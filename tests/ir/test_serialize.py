"""The plan file: equal plans give equal bytes, what is written is read back."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path

import pytest

from stretto.errors import StrettoError, UsageError
from stretto.files.codec import UNWRITTEN
from stretto.ir.action import Phase
from stretto.ir.plan import Plan
from stretto.ir.program import Job, Stage
from stretto.ir.references import broken_references
from stretto.ir.serialize import load_plan, plan_from_text, plan_to_text, save_plan
from stretto.schedule.families import make_schedule
from tests.ir.odd import DOCUMENT, ODD_OP, TEXT, odd_plan
from tests.synthetic import make_plan


def test_round_trip_keeps_everything() -> None:
    plan = odd_plan()
    back = plan_from_text(TEXT)
    assert back == plan
    assert plan_to_text(back) == TEXT
    odd = back.job.stages[0].ops[Phase.F][-1]
    assert repr(odd.args) == repr(ODD_OP.args)  # 1, 1.0 and True are equal, but not the same argument


@pytest.mark.parametrize("family", ["gpipe", "1f1b", "zb-h2"])
def test_round_trip_of_families(family: str) -> None:
    plan = make_plan(make_schedule(family, 3, 4))
    assert plan_from_text(plan_to_text(plan)) == plan


def test_equal_plans_give_equal_bytes_whatever_their_insertion_order() -> None:
    plan = odd_plan()
    turned = replace(
        plan,
        windows=dict(reversed(plan.windows.items())),
        costs=replace(
            plan.costs,
            op_us=dict(reversed(plan.costs.op_us.items())),
            links=dict(reversed(plan.costs.links.items())),
            collectives=dict(reversed(plan.costs.collectives.items())),
        ),
    )
    assert turned == plan
    assert plan_to_text(turned) == TEXT


def test_one_op_a_line() -> None:
    assert (
        '            ["y0", "made_up.work.default", ["%h0"], [], ["float32[256,512]"], {"flops": 1000}],\n'
        in TEXT
    )
    assert '      "run 0F:0",\n' in TEXT


def test_no_field_of_a_plan_or_job_is_forgotten() -> None:
    written = {f.name for f in fields(Plan) if f.metadata != UNWRITTEN}
    assert written == DOCUMENT.keys() - {"format", "version", "digests"}
    assert {f.name for f in fields(Job) if f.metadata != UNWRITTEN} == DOCUMENT["job"].keys()


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(odd_plan(), path)
    assert path.read_text() == TEXT
    assert load_plan(path) == odd_plan()
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_device_that_is_full() -> None:
    with pytest.raises(StrettoError, match=r"cannot write plan .* No space left"):
        save_plan(odd_plan(), "/dev/full")
    assert not Path("/dev/full").is_file()


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the folder .*nowhere does not exist; create it"):
        save_plan(odd_plan(), tmp_path / "nowhere" / "plan.json")


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read plan .*none\.json: No such file"):
        load_plan(tmp_path / "none.json")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not a text file"):
        load_plan(tmp_path / "bytes")


def test_an_argument_without_a_text_form_is_refused() -> None:
    plan = odd_plan()
    op = replace(ODD_OP, args=(3 + 4j,))
    stage = Stage(0, {**plan.job.stages[0].ops, Phase.F: (op,)})
    with pytest.raises(StrettoError, match=r"op odd: an argument of type complex has no place"):
        plan_to_text(replace(plan, job=replace(plan.job, stages=(stage, *plan.job.stages[1:]))))


def test_a_name_without_a_text_form_is_refused() -> None:
    plan = odd_plan()
    window = plan.windows["0F"]
    bad = replace(window, items=(replace(window.items[0], ref="two words"),))
    with pytest.raises(StrettoError, match="no text form that reads back"):
        plan_to_text(replace(plan, windows={**plan.windows, "0F": bad}))


def test_a_window_under_another_name() -> None:
    plan = odd_plan()
    renamed = {"1F": replace(plan.windows["1F"], name="other")}
    found = broken_references(replace(plan, windows={**plan.windows, **renamed}))
    assert [str(broken) for broken in found] == ["windows[\"1F\"]: the window calls itself 'other'"]
