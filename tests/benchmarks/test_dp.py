"""The race of data parallelism in small: every system runs, gradients agree, and the JSON is what the docs
promise."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.dp import COPIES, DDP, FSDP, FSDP_KEPT, LEVELS, DataRace, make_result, step_work
from benchmarks.labs import balanced_rate
from benchmarks.racing import Times, compare, drop_gradients, plain_step, prediction_of
from benchmarks.tables import dp_table
from benchmarks.torch_dp import TORCH

from stretto.models.gpt import next_token_loss
from stretto.planning.make_plan import make_plan
from stretto.price.cluster import described_costs
from stretto.report.rundir import load_run
from stretto.simulating import simulate
from tests.benchmarks.small_race import checked_rows, run_small
from tests.clusters import cores
from tests.runtime.launch import launch

SMALL = DataRace(hidden=32, heads=4, layers=2, vocab=67, sequence=16, microbatch=2, levels=(0,))
"""Of full copies alone; a vocabulary that no number of ranks divides."""

BASES = {"fsdp2": FSDP, "fsdp2_kept": FSDP_KEPT, "ddp": DDP}


def checked(result: Any, setup: DataRace) -> dict[str, dict[str, Any]]:
    """The rows, and what this race promises of ours."""
    rows = checked_rows(result, [*TORCH, *setup.systems], BASES)
    assert result["setup"]["bound_of"] in setup.systems
    for name in setup.systems:
        assert rows[name]["ratio_to_own_bound"] == rows[name]["step_s"] / rows[name]["own_bound_s"]
        assert 0 <= rows[name]["hidden"] <= 1
    dp_table(result).print()  # what it prints can be printed
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "microbatches"), [(2, 2), (4, 1)])
def test_small_race_runs_every_system(tmp_path: Path, dp: int, microbatches: int) -> None:
    """Two ranks of one microbatch add in the order of the plain model, and differ by nothing."""
    setup = replace(SMALL, dp=dp, microbatches=microbatches)
    result = run_small("dp", asdict(setup), dp, tmp_path / "race.json", str(tmp_path / "kept"))
    checked(result, setup)
    for name in setup.systems:
        assert load_run(tmp_path / "kept" / name.replace(" ", "-")).measured is not None


@pytest.mark.slow
def test_a_probe_finds_the_work_of_a_step(tmp_path: Path) -> None:
    (work,) = run_small("dp", asdict(SMALL), 2, tmp_path / "probe.json", "probe")
    model, _ = SMALL.build()
    assert work["wire_bytes"] == 1.5 * sum(4 * p.numel() for p in model.parameters())
    assert work["compute_us"] > 0
    assert work["collective_us"] > 0


def test_ranks_keep_all_that_is_raced_at_some_level() -> None:
    assert LEVELS == (0, 1, 3)
    assert [*replace(SMALL, levels=LEVELS).systems] == ["zero 3 blocking", "zero 3", "zero 1", "zero 0"]


def test_the_rate_is_where_two_gathers_and_a_scatter_take_as_long_as_compute() -> None:
    """As simulated. What is hidden is as the timeline says."""
    model, batch = SMALL.build()
    job = SMALL.capture(model, batch)
    costs = described_costs(job, cores(peak_tflops=0.01, op_overhead_us=0.1, latency_us=1.0, link_gbps=0.1))
    work = step_work(job, costs)
    total = sum(4 * p.numel() for p in model.parameters())
    assert work.wire_bytes == 1.5 * total
    # Links of the described cores take 100 bytes in a microsecond.
    assert work.collective_us == pytest.approx(work.wire_bytes / 100, rel=0.1)
    rate = balanced_rate([{**asdict(work), "collective_us": 0.0}])
    assert float(rate.removesuffix("mbit")) == pytest.approx(8 * work.wire_bytes / work.compute_us, rel=0.05)
    plan = make_plan(job, costs)
    timelines = [simulate(plan)]
    times = {name: Times((1.0,)) for name in TORCH}
    times[COPIES] = Times((prediction_of(plan).step_us / 1e6,))
    known = {COPIES: prediction_of(plan)}
    result = make_result(SMALL, {COPIES: plan}, times, {COPIES: timelines}, work, known)
    result["setup"]["worst_error_vs_plain"] = 1e-7
    rows = checked(result, SMALL)
    assert rows[COPIES]["hidden"] == timelines[0].hidden["dp"]
    assert rows[COPIES]["ratio_to_own_bound"] >= 1.0


def test_pytorchs_sharding_gives_the_plain_gradients() -> None:
    launch(2, "tests.benchmarks.test_dp")


def launched() -> None:
    """One rank of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for microbatches in (1, 2):
        setup = replace(SMALL, microbatches=microbatches)
        model, batch = setup.build()
        loss, plain = plain_step(model, batch, next_token_loss, microbatches * setup.dp)
        for name, make in TORCH.items():
            theirs = make(model, microbatches)
            for _ in range(2):  # it leaves nothing behind that a second step would find
                drop_gradients(theirs.parameters())
                found = float(theirs.step(batch))
            assert found == pytest.approx(loss, rel=1e-6)
            assert compare(name, dict(theirs.grads()), plain, "the plain model") < 1e-5
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    launched()
