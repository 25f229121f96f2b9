"""Long sequences that H100s share, predicted from the catalogue: what of a ring's messages is hidden.

    python -m benchmarks context-described [LAYERS [CP...]]

An 8B Llama (32 layers, hidden 4096, 32 heads, 8 of keys, vocabulary 128256), or some of its layers, over cp
and tp = 8, with sequence parallelism, of one sample of 16,384 tokens for each rank of cp, captured on the
meta device and planned with described costs. Each layer is a stage of the same ranks, so that equal ones are
ordered once. Prints the table of docs/context-parallel.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import stretto
from stretto.ir.timeline import SpanKind, Timeline
from stretto.models.build import huggingface_sum
from stretto.simulating import simulate

TP, TOKENS = 8, 16_384
SIZES = (8, 64)
LAYERS = 32


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


def planned(layers: int, cp: int) -> stretto.Plan:
    """Over cp and tp."""
    length = TOKENS * cp
    ids = torch.empty(1, length, dtype=torch.int64, device="meta")
    parallel = stretto.Parallel(
        cp=cp,
        cp_kind="ring",
        tp=TP,
        sequence_parallel=True,
        schedule="interleaved-1f1b" if layers > 1 else "1f1b",
        split=[f"model.layers.{k}" for k in range(1, layers)] or "auto",
    )
    batch = {"input_ids": ids, "labels": ids}
    job = stretto.capture(
        model(layers, length), batch, huggingface_sum, parallel, precision="bf16", device="cuda"
    )
    return stretto.plan(job, f"h100x{cp * TP}")


def main(arguments: Sequence[str] = ()) -> None:
    layers, *sizes = map(int, arguments) if arguments else (LAYERS,)
    names = "layers, tokens, cp, step s, of the bound, messages s, exposed ms, hidden, GB a rank, planned s"
    print(f"| {names.replace(', ', ' | ')} |\n{'| --- ' * 10}|")
    for cp in sizes or SIZES:
        begun_s = time.process_time()
        plan = planned(layers, cp)
        planned_s = time.process_time() - begun_s
        prediction = plan.prediction
        assert prediction is not None
        timeline = simulate(plan)
        sent, exposed = (ring_us(timeline, kind) for kind in (SpanKind.MESSAGE, SpanKind.EXPOSED))
        step, peak = prediction.step_us, max(prediction.peak_bytes) / 1e9
        cells = f"{layers} | {TOKENS * cp:,} | {cp} | {step / 1e6:.3f} | {step / prediction.bound_us:.3f}"
        cells += f" | {sent / 1e6:.3f} | {exposed / 1e3:.1f} | {100 * (1 - exposed / sent):.1f} %"
        print(f"| {cells} | {peak:.1f} | {planned_s:.0f} |", flush=True)
