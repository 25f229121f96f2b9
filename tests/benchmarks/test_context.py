"""The race of long sequences in small: every system runs, gradients agree, and the JSON is what the docs
promise."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.context import BLOCKING, RING, SYSTEMS, TORCH_RING, ContextRace, make_result
from benchmarks.racing import Times, compare, drop_gradients, plain_step, prediction_of
from benchmarks.tables import context_table
from benchmarks.torch_context import ROTATIONS, TorchContext
from benchmarks.work import work_of

from stretto.models.gpt import next_token_loss
from stretto.planning.make_plan import make_plan
from stretto.price.cluster import described_costs
from stretto.report.rundir import load_run
from stretto.simulating import simulate
from tests.benchmarks.small_race import checked_rows, run_small
from tests.clusters import cores
from tests.runtime.launch import launch

SMALL = ContextRace(hidden=32, heads=4, layers=1, vocab=64, sequence=64)
PAIR_BYTES = 2 * 32 * 32 * 4
"""Keys and values of a rank's tokens."""


def checked_hidden(rows: dict[str, dict[str, Any]]) -> None:
    """A ring's share is of the messages that the one which waits at once exposes."""
    waited_s = rows[BLOCKING]["exposed_messages_s"]
    assert 0 < waited_s <= rows[BLOCKING]["exposed_s"]
    assert rows[BLOCKING]["hidden"] == 0
    assert rows[RING]["hidden"] == pytest.approx(1 - rows[RING]["exposed_messages_s"] / waited_s)


@pytest.mark.slow
@pytest.mark.parametrize("cp", [2, 4])
def test_small_race_runs_every_system(tmp_path: Path, cp: int) -> None:
    setup = {**asdict(SMALL), "cp": cp}
    result = run_small("context", setup, cp, tmp_path / "race.json", str(tmp_path / "kept"))
    rows = checked_rows(result, [*ROTATIONS, *SYSTEMS], {"blocking": BLOCKING, "torch_ring": TORCH_RING})
    checked_hidden(rows)
    for name, system in SYSTEMS.items():
        assert rows[name]["overlap"] == system.overlap or rows[name]["overlap_why"]
        assert ("hidden" in rows[name]) == (system.kind == RING)
        assert load_run(tmp_path / "kept" / name).measured is not None
    context_table(result).print()  # what it prints can be printed


@pytest.mark.slow
def test_a_probe_finds_the_work_of_a_microbatch(tmp_path: Path) -> None:
    (work,) = run_small("context", asdict(SMALL), 2, tmp_path / "probe.json", "probe")
    assert work["wire_bytes"] >= 3 * PAIR_BYTES
    assert work["compute_us"] > 0
    assert work["collective_us"] > 0


def test_what_is_hidden_is_of_the_ring_alone() -> None:
    """As simulated, where a message takes about as long as attention."""
    model, batch = SMALL.build()
    job = SMALL.capture(model, batch)
    costs = described_costs(job, cores(peak_tflops=0.01, op_overhead_us=0.1, latency_us=1.0, link_gbps=0.1))
    work = work_of(job, costs, [0], "cp")
    # Keys and values go to the next rank, and again in the backward; gradients go home. Beside them travel
    # a few numbers of the loss.
    assert 3 * PAIR_BYTES <= work.wire_bytes < 3 * PAIR_BYTES + 100
    plans = {name: make_plan(job, costs, overlap=SYSTEMS[name].overlap) for name in (BLOCKING, RING)}
    timelines = {name: [simulate(plan)] for name, plan in plans.items()}
    times = {TORCH_RING: Times((1.0,))}
    times |= {name: Times((prediction_of(plan).step_us / 1e6,)) for name, plan in plans.items()}
    result = make_result(SMALL, plans, times, timelines, work, prediction_of(plans[RING]))
    rows = {row["system"]: row for row in result["rows"]}
    checked_hidden(rows)
    assert rows[RING]["hidden"] > 0.5
    assert rows[RING]["speedup_vs_blocking"] > 1.1
    assert "hidden" not in rows[TORCH_RING]
    context_table(result).print()


def test_pytorchs_ring_around_the_kernel_of_processors_gives_the_plain_gradients() -> None:
    launch(2, "tests.benchmarks.test_context")


def launched() -> None:
    """One rank of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, batch = SMALL.build()
    loss, plain = plain_step(model, batch, next_token_loss, SMALL.microbatches)
    for name, rotation in ROTATIONS.items():
        theirs = TorchContext(model, SMALL.microbatches, rotation)
        for _ in range(2):  # it leaves nothing behind that a second step would find
            drop_gradients(theirs.parameters())
            found = float(theirs.step(batch))
        assert found == pytest.approx(loss, rel=1e-6)
        assert compare(name, dict(theirs.grads()), plain, "the plain model") < 1e-5
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    launched()
