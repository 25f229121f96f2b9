"""The bars of the cost model: errors against published measurements, and rates to the printed digits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.commands import bench
from benchmarks.published import (
    MULTI_NIC_GBIT,
    collectives_report,
    mean_error,
    rates,
    step_rows,
    table1_differences,
)
from typer.testing import CliRunner

from benchmarks import fit_steps


def test_curves_fitted_on_half_of_a_sweep_predict_the_other_half() -> None:
    found = collectives_report()
    assert found["sweeps"] == 21
    assert found["fitted_held_out_percent"] <= 8.0
    assert found["fitted_held_out_swapped_percent"] <= 8.0


def test_the_topology_model_is_near_the_sweeps() -> None:
    found = collectives_report()
    assert found["topology_percent"] <= 10.0
    assert found["topology_a100_percent"] <= 10.0


def test_single_node_steps_beat_the_bar() -> None:
    rows = step_rows("single")
    assert len(rows) == 693
    assert mean_error(rows[1::2]) < 0.084


def test_multi_node_steps_beat_the_bar() -> None:
    rows = step_rows("multi")
    assert len(rows) == 47
    assert mean_error(rows, MULTI_NIC_GBIT) < 0.147


def test_steps_of_another_paper_are_predicted_with_nothing_fitted() -> None:
    found = table1_differences()
    assert len(found) == 6
    assert max(map(abs, found.values())) < 10.0


def test_shipped_factors_are_where_the_fit_ends() -> None:
    train = step_rows("single")[::2]
    again = fit_steps.mean_error(train, fit_steps.fit(train[::4], fit_steps.shipped()))
    assert mean_error(train) == pytest.approx(fit_steps.mean_error(train, fit_steps.shipped()))
    assert mean_error(train) < again + 0.002


def test_a_fit_gets_better_than_where_it_began() -> None:
    train = step_rows("single")[::16]
    assert fit_steps.mean_error(train, fit_steps.fit(train)) < 0.6 * fit_steps.mean_error(
        train, fit_steps.START
    )


def test_every_printed_rate_follows_from_megatrons_count() -> None:
    found = rates()
    assert len(found) == 25
    assert [str(rate) for rate in found if not rate.agrees] == []
    (mtnlg,) = (rate for rate in found if "on 3360" in rate.what)
    assert mtnlg.printed == 113
    assert (mtnlg.low + mtnlg.high) / 2 == pytest.approx(113, abs=0.5)


def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    out = tmp_path / "published.json"
    ran = CliRunner().invoke(bench, ["published", "--json", str(out)])
    assert ran.exit_code == 0, ran.output
    full = json.loads(out.read_text())
    assert full["rates"] == {"checked": 25, "agree": 25, "disagree": []}
    assert full["steps"]["single_held_out_percent"] < 8.4
    assert f"{full['steps']['multi_percent']:.2f}" in ran.output
