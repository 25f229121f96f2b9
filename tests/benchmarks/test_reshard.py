"""The reshard race in small: cases and what is predicted of them, values that are checked, and refusals."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from benchmarks.reshard import COLUMNS, HOSTS, ITEMSIZE_BYTES, RANKS_PER_HOST, ReshardRace, cases, planned

from tests.benchmarks.small_race import run_small

ROWS = 4096
BYTES_PER_S = 25e6
UNIT_S = ROWS * COLUMNS * ITEMSIZE_BYTES / BYTES_PER_S


def predicted_units() -> dict[str, float]:
    return {
        case.name: sum(one.plan.makespan_us for one in planned(case, ROWS, BYTES_PER_S)) / 1e6 / UNIT_S
        for case in cases()
    }


def test_what_is_predicted_of_each_case() -> None:
    """A chain takes a piece of 1 MiB, a 64th of the tensor, longer for each host; a copy to each rank takes a
    unit, be it on a host of its own or not."""
    piece = 1 / 64
    assert predicted_units() == pytest.approx(
        {
            "one host to 1, broadcast, balanced": 1.0,
            "one host to 2, broadcast, balanced": 1.0 + piece,
            "one host to 2, point_to_point, balanced": 2.0,
            "one host to 3, broadcast, balanced": 1.0 + 2 * piece,
            "one host to 3, point_to_point, balanced": 3.0,
            "one rank to 1 x 2, broadcast, balanced": 1.0,
            "one rank to 1 x 2, point_to_point, balanced": 2.0,
            "one rank to 2 x 2, broadcast, balanced": 1.0 + piece,
            "one rank to 2 x 2, point_to_point, balanced": 4.0,
            "one rank to 3 x 2, broadcast, balanced": 1.0 + 2 * piece,
            "one rank to 3 x 2, point_to_point, balanced": 6.0,
            "two replicas to rows, broadcast, naive": 1.0,
            "two replicas to rows, broadcast, balanced": 0.5,
            "columns to rows, broadcast, naive": 0.75,
            "columns to rows, broadcast, balanced": 0.5,
            "whole to 2 meshes in turn, broadcast, balanced": 2.0,
            "whole to 2 meshes together, broadcast, balanced": 1.0 + piece,
            "rows to 2 meshes in turn, broadcast, balanced": 2.0,
            "rows to 2 meshes together, broadcast, balanced": 1.0,
        }
    )


@pytest.mark.slow
def test_a_small_race_checks_values_and_says_what_the_page_says(tmp_path: Path) -> None:
    setup = asdict(ReshardRace(mib=1, rounds=3))
    result = run_small("reshard", setup, HOSTS * RANKS_PER_HOST, tmp_path / "race.json")
    assert [f"{row['case']}, {row['mode']}, {row['choice']}" for row in result["rows"]] == list(
        predicted_units()
    )
    for row in result["rows"]:
        assert len(row["rounds_s"]) == 3
        assert row["measured_s"] == sorted(row["rounds_s"])[1]
        assert row["measured_over_predicted"] == pytest.approx(row["measured_s"] / row["predicted_s"])
        assert row["predicted_s"] >= row["bound_s"] * (1 - 1e-9)
