"""The race of experts in small: every system runs, gradients agree, and the JSON is what the docs promise."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.moe import AUTO, SERIAL, SYSTEMS, MoeRace
from benchmarks.moe_model import EvenRouter, under_experts
from benchmarks.tables import moe_table

from stretto.ir.collectives import ALL_TO_ALL
from stretto.ir.plan import ItemKind, Plan
from stretto.ir.program import WAIT, Op
from stretto.models.moe import MoEConfig
from stretto.order.policies import register
from stretto.parallelize.experts import experts_in
from stretto.planning.make_plan import make_plan
from stretto.price.cluster import described_costs
from stretto.report.rundir import load_run
from tests.benchmarks.small_race import checked_rows, run_small
from tests.clusters import cores

SMALL: dict[str, Any] = {
    "hidden": 32,
    "heads": 2,
    "layers": 1,
    "sequence": 64,
    "microbatches": 2,
    "ep_buffer": 2.0,
}


def check(result: Any) -> None:
    steps_s = {row["system"]: row["step_s"] for row in result["rows"]}
    mlp_only = min((name for name in steps_s if name.startswith("MLP-only")), key=lambda name: steps_s[name])
    rows = checked_rows(result, [*SYSTEMS, AUTO], {"serial": SERIAL, "mlp_only": mlp_only})
    for name, row in rows.items():
        assert row["hidden"] == pytest.approx(1 - row["exposed_s"] / rows[SERIAL]["exposed_s"])
        if name in SYSTEMS:
            assert row["overlap"] == SYSTEMS[name].overlap or row["overlap_why"]
            assert row["chunks"] == SYSTEMS[name].cuts.chunks
    assert rows[AUTO]["chunks"] in (1, 2, 4)
    assert rows[SERIAL]["exposed_s"] > 0
    moe_table(result).print()  # what it prints can be printed


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["balanced", "router"])
def test_small_race_runs_every_system(tmp_path: Path, routing: str) -> None:
    setup = {**SMALL, "routing": routing}
    result = run_small("moe", setup, 2, tmp_path / "race.json", str(tmp_path / "kept"))
    check(result)
    for name in ("serial", "MLP-only-2", "AMPipe-2-pipe-experts-2", "auto"):
        assert load_run(tmp_path / "kept" / name).measured is not None


@pytest.mark.slow
def test_a_probe_finds_the_work_of_a_microbatch(tmp_path: Path) -> None:
    (work,) = run_small("moe", SMALL, 2, tmp_path / "probe.json", "probe")
    rows = 2 * 64  # two experts for each token
    assert work["wire_bytes"] == 4 * rows * 32 * 4 / 2, "there and back, twice; half stays"
    assert work["compute_us"] > 0
    assert work["collective_us"] > 0


def test_the_even_router_gives_each_expert_of_every_chunk_the_same() -> None:
    router = EvenRouter(MoEConfig(vocab_size=1, layers=1, hidden=8, heads=2, context=64, experts=8, top_k=2))
    torch.nn.init.normal_(router.weight)
    routed = router(torch.randn(64, 8))
    assert torch.allclose(routed.weights.sum(dim=-1), torch.ones(64))
    for chunk in routed.chosen.chunk(4):
        assert set(Counter(chunk.flatten().tolist()).items()) == {(expert, 4) for expert in range(8)}


# --- the MLP-only pipeline ----------------------------------------------------------------------------


@functools.cache
def mlp_only(slices: int, routing: str = "balanced") -> tuple[Plan, dict[str, Op], tuple[str, ...]]:
    """A plan of two blocks, its ops by name, and the modules with experts."""
    setup = MoeRace(**{**SMALL, "layers": 2, "routing": routing})
    model, batch = setup.build()
    job = setup.capture(model, batch, pipe_experts_multi_data=slices)
    modules = experts_in(model)
    register("of the test", under_experts(job, modules))
    costs = described_costs(job, cores(peak_tflops=0.005, op_overhead_us=0.1, latency_us=1.0, link_gbps=0.05))
    plan = make_plan(job, costs, overlap="local", order="of the test")
    return plan, {op.name: op for ops in job.stages[0].ops.values() for op in ops}, modules


@pytest.mark.parametrize(
    ("slices", "routing"),
    [
        (2, "balanced"),
        pytest.param(4, "balanced", marks=pytest.mark.slow),
        pytest.param(2, "router", marks=pytest.mark.slow),
    ],
)
def test_only_experts_run_under_their_all_to_alls(slices: int, routing: str) -> None:
    plan, ops, modules = mlp_only(slices, routing)
    overlapped = 0
    for window in plan.windows.values():
        under_way: dict[str, str] = {}
        for item in window.items:
            op = ops.get(str(item.ref)) if item.kind is ItemKind.OP else None
            if op is None:  # a sum of gradients
                continue
            if op.kind is ALL_TO_ALL:
                under_way[op.name] = op.module
                overlapped += len(under_way) > 1
            elif op.target == WAIT:
                under_way.pop(op.uses[0], None)
            elif under_way and op.flops:
                assert op.module in modules, f"{op.name} of {op.module} in {window.name}"
                assert {*under_way.values()} == {op.module}, op.name
                overlapped += 1
        assert not under_way, window.name
    assert overlapped > 0, "slices run under each other"
