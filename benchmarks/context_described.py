"""Long sequences that H100s share, predicted from the catalogue: what of a ring's messages is hidden.

    python -m benchmarks context-described [LAYERS [CP...]]

Layers of an 8B Llama (hidden 4096, 32 heads, 8 of keys, vocabulary 128256) over cp and tp = 8, with sequence
parallelism, of one sample of 16,384 tokens for each rank of cp, captured on the meta device and planned with
described costs. Prints the table of docs/context-parallel.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import stretto
from stretto.ir.timeline import SpanKind, Timeline
from stretto.models.build import huggingface_sum
from stretto.simulating import simulate

TP, TOKENS = 8, 16_384
SIZES = (8, 64)
LAYERS = 4


def model(layers: int, length: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
        max_position_embeddings=length,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def ring_us(timeline: Timeline, kind: SpanKind) -> float:
    """Time of the ring's messages, or of what waits for them."""
    found = (span for span in timeline.spans if span.kind is kind and "permute" in span.name)
    return sum(span.duration_us for span in found)


def main(arguments: Sequence[str] = ()) -> None:
    layers, *sizes = map(int, arguments) if arguments else (LAYERS,)
    print("| layers | tokens | cp | step ms | messages ms | exposed ms | hidden | GB a rank |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for cp in sizes or SIZES:
        length = TOKENS * cp
        ids = torch.empty(1, length, dtype=torch.int64, device="meta")
        batch = {"input_ids": ids, "labels": ids}
        parallel = stretto.Parallel(cp=cp, cp_kind="ring", tp=TP, sequence_parallel=True)
        job = stretto.capture(
            model(layers, length), batch, huggingface_sum, parallel, precision="bf16", device="cuda"
        )
        plan = stretto.plan(job, f"h100x{cp * TP}")
        assert plan.prediction is not None
        timeline = simulate(plan)
        sent, exposed = (ring_us(timeline, kind) for kind in (SpanKind.MESSAGE, SpanKind.EXPOSED))
        step, peak = plan.prediction.step_us / 1e3, max(plan.prediction.peak_bytes) / 1e9
        cells = f"{layers} | {length:,} | {cp} | {step:.1f} | {sent / 1e3:.1f} | {exposed / 1e3:.1f}"
        print(f"| {cells} | {100 * (1 - exposed / sent):.1f} % | {peak:.1f} |", flush=True)
