"""Llama 3 of 405 billion parameters on 16,384 H100, predicted from the catalogue, beside what Meta measured.

    python -m benchmarks llama-described [CHUNKS...]

The layout of table 4 of arXiv 2407.21783: tp = 8 with sequence parallelism, pp = 16, dp = 128, 16 sequences
of 8192 tokens for each replica. 126 layers are 128 stages, 8 a rank: the first has the embedding alone, the
last the head. What the backward computes again is what a device's memory asks for. Each block is one piece,
or CHUNKS of the sequence. Captured on the meta device, planned with described costs; prints the table of
docs/results.md.

The optimizer's state (AdamW, and the masters in float32) is sharded over dp: `zero = 1`. The update itself is
not counted.

MFU is by 6 operations a parameter and token, without the embedding, and by the causal half of attention.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import LlamaForCausalLM

import stretto
from benchmarks.zero_described import llama
from stretto.models.build import huggingface_sum
from stretto.price.devices import device

DEVICE, TP, PP, DP, STAGES_A_RANK, MICROBATCHES, TOKENS = "h100", 8, 16, 128, 8, 16, 8192
LAYERS, HIDDEN, VOCABULARY = 126, 16384, 128256
CHUNKS = (2,)
PUBLISHED_TFLOPS, PUBLISHED_MFU = 400.0, 0.41


def model() -> LlamaForCausalLM:
    with torch.device("meta"):
        return llama(LAYERS, HIDDEN, 128, 53248)


def captured(chunks: int) -> stretto.Job:
    parallel = stretto.Parallel(
        pp=PP,
        tp=TP,
        dp=DP,
        zero=1,
        sequence_parallel=True,
        microbatches=MICROBATCHES,
        schedule="interleaved-1f1b",
        split=[*(f"model.layers.{layer}" for layer in range(LAYERS)), "model.norm"],
        ampipe_degree=chunks,
    )
    ids = torch.empty(MICROBATCHES * DP, TOKENS, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    return stretto.capture(model(), batch, huggingface_sum, parallel, precision="bf16", device="cuda")


def flops() -> float:
    """Of a step, on each device."""
    parameters = sum(p.numel() for p in model().parameters()) - VOCABULARY * HIDDEN
    attention = LAYERS * HIDDEN * TOKENS
    tokens = MICROBATCHES * TOKENS
    return 6.0 * (parameters + attention) * tokens / (TP * PP)


def planned(job: stretto.Job) -> stretto.Plan:
    job = replace(job, recompute=int(device(DEVICE).memory_bytes))
    return stretto.plan(job, f"{DEVICE}x{TP * PP * DP}")


def main(arguments: Sequence[str] = ()) -> None:
    names = (
        "chunks, step s, of the bound, TFLOP/s, MFU, bubble, computed again, tp hidden, dp hidden, pp hidden"
    )
    names += ", GB a rank, captured s, planned s, planner's GB"
    print(f"| {names.replace(', ', ' | ')} |\n{'| --- ' * 14}|")
    for chunks in map(int, arguments) if arguments else CHUNKS:
        begun_s = time.process_time()
        job = captured(chunks)
        captured_s = time.process_time() - begun_s
        plan = planned(job)
        planned_s = time.process_time() - begun_s - captured_s
        result = plan.prediction
        assert result is not None
        rate = flops() / result.step_us / 1e6
        bubble = sum(result.bubble_us) / PP / result.step_us
        again = sum(plan.again_us) / PP / result.step_us
        peak = max(result.peak_bytes)
        hidden = " | ".join(f"{100 * (result.hidden(axis) or 0):.1f} %" for axis in ("tp", "dp", "pp"))
        most_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        peak_tflops = device(DEVICE).number("peak_tflops")
        cells = f"{chunks} | {result.step_us / 1e6:.3f} | {result.step_us / result.bound_us:.3f} | {rate:.0f}"
        cells += (
            f" | {100 * rate / peak_tflops:.1f} % | {100 * bubble:.1f} % | {100 * again:.1f} % | {hidden}"
        )
        cells += f" | {peak / 1e9:.1f} | {captured_s:.0f} | {planned_s:.0f} | {most_gb:.1f}"
        print(f"| {cells} |", flush=True)
    print(f"\nMeta: {PUBLISHED_TFLOPS:.0f} TFLOP/s, MFU {100 * PUBLISHED_MFU:.0f} %.")
