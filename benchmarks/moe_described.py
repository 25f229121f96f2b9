"""Experts on 16 H100, predicted from the catalogue: what hides their all-to-all.

    python benchmarks/moe_described.py

A mixture of experts with DeepSeek-V2-Lite's shapes (arXiv 2405.04434, table of the Lite model: hidden 2048,
64 routed experts of width 1408, 6 of them for each token, 2 shared), two layers and the head, captured on the
meta device and planned with described costs. Prints the table of docs/experts.md.
"""

from __future__ import annotations

from typing import Any

import torch

import stretto
from stretto.models.moe import MoEConfig, MoEGPT, moe_token_sum

EP, SEQUENCE, LAYERS = 16, 4096, 2

ROWS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("serial", "off", {}),
    ("within each action", "local", {}),
    ("pipe-experts, 2 slices", "local", {"pipe_experts_multi_data": 2}),
    ("AMPipe 2", "local", {"ampipe_degree": 2}),
    ("AMPipe 4", "local", {"ampipe_degree": 4}),
    ("AMPipe 2, pipe-experts", "local", {"ampipe_degree": 2, "pipe_experts_multi_data": 2}),
    ("windows", "window", {}),
    ("windows, AMPipe 2", "window", {"ampipe_degree": 2}),
)


def model() -> MoEGPT:
    with torch.device("meta"):
        return MoEGPT(
            MoEConfig(
                vocab_size=102400,
                layers=LAYERS,
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


def main(microbatches: int = 4) -> None:
    print("| | step ms | exposed ms | hidden |\n| --- | --- | --- | --- |")
    batch = torch.empty(microbatches * EP, SEQUENCE + 1, dtype=torch.int64, device="meta")
    for name, overlap, how in ROWS:
        parallel = stretto.Parallel(ep=EP, dp=EP, microbatches=microbatches, overlap=overlap, **how)
        job = stretto.capture(
            model(), batch, loss=moe_token_sum, parallel=parallel, precision="bf16", device="cuda"
        )
        found = stretto.plan(job, f"h100x{EP}").prediction
        assert found is not None
        hidden = found.hidden("ep")
        exposed = max(found.exposed_axis_us["ep"]) / 1000
        print(
            f"| {name} | {found.step_us / 1000:.1f} | {exposed:.1f} | {100 * (hidden or 0):.0f} % |",
            flush=True,
        )


if __name__ == "__main__":
    main()
