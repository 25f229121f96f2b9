"""`stretto plan` with tensor, sequence and data parallelism, for a cluster by name; what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import stretto
from stretto.cli.main import app
from stretto.errors import UsageError
from stretto.verifying.summary import plan_summary
from tests.train.tiny import write_settings

AXES = ("parallel.pp=2", "parallel.dp=2", "parallel.tp=2", "parallel.sequence_parallel=true")


def invoke(tmp_path: Path, *changes: str, cluster: str = "h100x8") -> Result:
    command = ["plan", str(write_settings(tmp_path)), "-o", str(tmp_path / "plan.json"), "--cluster", cluster]
    for change in changes:
        command += ["--set", change]
    return CliRunner().invoke(app, command)


def test_all_axes_on_a_cluster_by_name(tmp_path: Path) -> None:
    result = invoke(tmp_path, *AXES)
    assert result.exit_code == 0, result.output
    # What is hidden of each axis is said; exposed ones are named where any of it is exposed.
    assert re.search(r"hidden .*% of pp, .*% of dp, .*% of tp", result.output), result.output
    plan = stretto.load_plan(tmp_path / "plan.json")
    stretto.verify(plan)
    assert plan.job.axes == (("dp", 2), ("tp", 2))
    assert plan_summary(plan).startswith("8 ranks (pp 2 x dp 2 x tp 2), ")
    # Sequence parallelism: norms see slices, so their gradients are summed over tp, and then over dp.
    kinds = {op.target for stage in plan.job.stages for ops in stage.ops.values() for op in ops}
    assert {"comm.all_gather", "comm.reduce_scatter"} <= kinds
    assert {op.lane for op in plan.once(0) if op.kind} == {"loss", "tp", "dp"}
    assert {("tp", "all_gather"), ("dp", "all_reduce")} <= plan.costs.collectives.keys()


@pytest.mark.parametrize(
    ("changes", "cluster", "message"),
    [
        (AXES, "h100x4", "pp = 2, dp = 2, tp = 2 needs 8 devices, but h100x4 has 4"),
        (AXES, "q100x8", "--cluster q100x8: unknown cluster 'q100x8': no device is called 'q100'"),
        (("parallel.tp=3",), "h100x8", "must be a multiple of parallel.tp = 3"),
        (("parallel.cp=3",), "h100x8", "must be a multiple of twice parallel.cp = 3: each rank has two"),
    ],
)
def test_what_does_not_fit(tmp_path: Path, changes: tuple[str, ...], cluster: str, message: str) -> None:
    error = invoke(tmp_path, *changes, cluster=cluster).exception
    assert isinstance(error, UsageError)
    assert message in str(error)
    assert not (tmp_path / "plan.json").exists()
