"""Experts on 16 H100, predicted from the catalogue: what hides their all-to-all.

    python -m benchmarks moe-described [MICROBATCHES]

A mixture of experts with DeepSeek-V2-Lite's shapes (arXiv 2405.04434, table of the Lite model: hidden 2048,
64 routed experts of width 1408, 6 of them for each token, 2 shared), two layers and the head, captured on the
meta device and planned with described costs (400 Gbit/s a device between nodes). Prints the table of
docs/experts.md. Orders by hand are simulated with the same ops at the same prices (`hand_orders`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import stretto
from benchmarks.hand_orders import Orderer, ampipe, hidden, megatron, planned
from stretto.ir.plan import Plan
from stretto.ir.program import Job, OverlapMode
from stretto.models.moe import MoEConfig, MoEGPT, moe_token_sum
from stretto.planning.make_plan import prices_of
from stretto.planning.schedules import choose_schedule
from stretto.price.cluster_file import find_cluster
from stretto.schedule.once import without_once

EP, SEQUENCE, LAYERS = 16, 4096, 2
CLUSTER = f"h100x{EP}"


def model(layers: int = LAYERS) -> MoEGPT:
    with torch.device("meta"):
        return MoEGPT(
            MoEConfig(
                vocab_size=102400,
                layers=layers,
                hidden=2048,
                heads=16,
                context=SEQUENCE,
                experts=64,
                top_k=6,
                expert_ratio=1408 / 2048,
                capacity_factor=1.0,
                shared_experts=2,
            )
        )


def captured(microbatches: int, layers: int = LAYERS, **how: Any) -> Job:
    batch = torch.empty(microbatches * EP, SEQUENCE + 1, dtype=torch.int64, device="meta")
    parallel = stretto.Parallel(ep=EP, dp=EP, microbatches=microbatches, **how)
    job = stretto.capture(
        model(layers), batch, loss=moe_token_sum, parallel=parallel, precision="bf16", device="cuda"
    )
    return without_once(job)


def by_hand(job: Job, order: Orderer) -> Plan:
    """The step in an order that others wrote."""
    return planned(job, prices_of(job, choose_schedule(job), find_cluster(CLUSTER)), order)


def main(arguments: Sequence[str]) -> None:
    microbatches = int(arguments[0]) if arguments else 4
    print(
        "| | step ms | exposed ms | hidden | in the steady state |\n| --- | --- | --- | --- | --- |",
        flush=True,
    )

    def row(name: str, plan: Plan) -> Plan:
        timeline = stretto.simulate(plan)
        full, steady = (f"{100 * share:.0f} %" for share in hidden(plan, "ep"))
        exposed_ms = max(timeline.exposed_axis_us()["ep"]) / 1000
        print(
            f"| {name} | {timeline.step_us / 1000:.1f} | {exposed_ms:.1f} | {full} | {steady} |", flush=True
        )
        return plan

    def ours(name: str, job: Job, overlap: OverlapMode) -> Plan:
        return row(name, stretto.plan(job, CLUSTER, overlap=overlap))

    every = captured(microbatches, ampipe_degree="auto")
    one, (two, four) = replace(every, forms=()), every.forms
    sliced = partial(captured, microbatches, pipe_experts_multi_data=2)
    ours("serial", one, "off")
    ours("within each action", one, "local")
    ours("pipe-experts, 2 slices", sliced(), "local")
    ours("AMPipe 2", two, "local")
    ours("AMPipe 4", four, "local")
    ours("AMPipe 2, pipe-experts", sliced(ampipe_degree=2), "local")
    row("AMPipe 2 in MindSpeed's order", by_hand(without_once(two), ampipe))
    row("AMPipe 4 in MindSpeed's order", by_hand(without_once(four), ampipe))
    row("windows in Megatron's order", by_hand(one, megatron))
    ours("windows", one, "window")
    ours("windows, AMPipe 2", two, "window")
    print(ours('windows, `"auto"`', every, "window").overlap_why)
