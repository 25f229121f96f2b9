"""`stretto reshard`: each mode's figures, one mode's transfers, and what it refuses."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from stretto.cli.main import app
from stretto.cli.reshard import reshard
from stretto.errors import UsageError

CASE = ("--shape", "1024,1024,512", "--src", "2x4:S0RR", "--dst", "2x4:RS0R")


def run(*arguments: str) -> str:
    ran = CliRunner().invoke(reshard, list(arguments), catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return ran.output


def test_every_mode_is_a_row_with_its_makespan_and_bound() -> None:
    rows = {}
    for line in run(*CASE).splitlines():
        cells = [cell.strip() for cell in line.split("│")]
        if "naive" in cells or "balanced" in cells:
            rows[cells[1], cells[2]] = cells[3:-1]
    # tasks, transfers, bytes between hosts, makespan, units, bound, of bound
    assert rows["broadcast", "naive"][-3:] == ["0.750", "0.500", "1.50"]
    assert rows["broadcast", "balanced"] == ["4", "4", "2 GiB", "85.9 ms", "0.500", "0.500", "1.00"]
    assert rows["point to point", "balanced"][1:3] == ["16", "8 GiB"]
    assert rows["point to point", "naive"][-3:] == ["3.000", "0.500", "6.00"]
    assert len(rows) == 4


def test_json_holds_every_transfer_and_the_figures() -> None:
    document = json.loads(run(*CASE, "--json", "--rate", "8gbit", "--dtype", "bfloat16"))
    assert document["link_bytes_per_s"] == 1e9
    assert document["host_of"] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    by_name = {(plan["mode"], plan["choice"]): plan for plan in document["plans"]}
    best = by_name["broadcast", "balanced"]
    assert best["makespan_us"] == best["bound_us"] == pytest.approx(1024 * 1024 * 512 * 2 / 1e9 * 1e6 / 2)
    assert best["sent_bytes"] == {"0": 1 << 29, "1": 1 << 29}
    assert best["transfers"][0]["receivers"] == [8, 9, 10, 11]
    assert sum(one["nbytes"] for one in best["transfers"]) == best["link_bytes"] == 1 << 30


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("--shape", "1024,1024"), "--src 2x4:S0RR is of 3 dims, but --shape 1024,1024 has 2"),
        (("--shape", "1024,x"), "sizes with commas between"),
        (("--dst", "2x4:SRR"), "HOSTSxDEVICES:LETTERS"),
        (("--dtype", "float31"), "none of PyTorch's"),
        (("--rate", "unlimited"), "nothing would take time"),
    ],
)
def test_wrong_usage_is_refused(changed: tuple[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run(*CASE, *changed)


@pytest.mark.parametrize(
    "given",
    [
        ("reshard", *CASE, "--mode", "ring"),
        ("calibrate", "--device", "tpu"),
        ("show", "plan.json", "--stage", "0", "--phase", "Q"),
        ("schedule", "--format", "pdf"),
    ],
    ids=lambda given: given[0],
)
def test_words_that_an_option_does_not_have_are_refused(given: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*given])
    assert result.exit_code == 2
    assert "is not one of" in result.output
