"""Dense blocks in chunks on 8 H100, predicted from the catalogue: what hides tensor-parallel communication.

    python -m benchmarks chunks-described

A GPT of 4 layers (hidden 4096, 32 heads, vocabulary 32768) over tp = 8, with one microbatch of 2 sequences
of 4096 tokens, captured on the meta device and planned with described costs. Prints the table of
docs/experts.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import stretto
from stretto.models.gpt import GPT, GPTConfig, next_token_sum

RANKS, SEQUENCE, ROWS = 8, 4096, 2

LAYOUTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("serial", {"overlap": "off"}),
    ("within each action", {}),
    ("2 chunks", {"ampipe_degree": 2}),
)


def model() -> GPT:
    with torch.device("meta"):
        return GPT(GPTConfig(vocab_size=32768, layers=4, hidden=4096, heads=32, context=SEQUENCE))


def main(arguments: Sequence[str] = ()) -> None:
    print("| | step ms | exposed ms | hidden |\n| --- | --- | --- | --- |")
    batch = torch.empty(ROWS, SEQUENCE + 1, dtype=torch.int64, device="meta")
    for sequence in (False, True):
        for name, how in LAYOUTS:
            settings = {"overlap": "local", "sequence_parallel": sequence, **how}
            parallel = stretto.Parallel(tp=RANKS, **settings)
            job = stretto.capture(
                model(), batch, loss=next_token_sum, parallel=parallel, precision="bf16", device="cuda"
            )
            result = stretto.plan(job, f"h100x{RANKS}").prediction
            assert result is not None
            exposed = max(result.exposed_axis_us.get("tp", (0.0,))) / 1000
            hidden = 100 * (result.hidden("tp") or 0)
            kind = "sequence-parallel, " if sequence else ""
            print(
                f"| {kind}{name} | {result.step_us / 1000:.1f} | {exposed:.2f} | {hidden:.0f} % |", flush=True
            )
