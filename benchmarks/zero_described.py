"""Sharded state on H100, predicted from the catalogue: what of its communication is hidden.

    python -m benchmarks zero-described [NAME...]

Steps of 8192 tokens a microbatch (the GPT: 8192 in four sequences), bf16, AdamW's state unless said, captured
on the meta device and planned with described costs. Memory is the fullest rank's, with the optimizer's state.
All by default, which takes about an hour of a core; prints the table of docs/results.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import stretto
from stretto.errors import UsageError
from stretto.ir.parameters import OptimizerKind
from stretto.models.build import huggingface_sum
from stretto.models.gpt import GPT, GPTConfig, next_token_sum

TOKENS = 8192
LIMIT_BYTES = 80 * 10**9
"""Of an H100; what is computed again is what it asks for."""


def llama(layers: int, hidden: int, heads: int, inner: int) -> LlamaForCausalLM:
    """Of Llama 3's vocabulary and key heads."""
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        intermediate_size=inner,
        vocab_size=128256,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def llama_8b() -> nn.Module:
    return llama(32, 4096, 32, 14336)


def llama_70b() -> nn.Module:
    return llama(80, 8192, 64, 28672)


def mixtral_8x7b() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(max_position_embeddings=TOKENS, output_router_logits=False))


def gpt() -> nn.Module:
    return GPT(GPTConfig(vocab_size=32768, layers=8, hidden=2048, heads=16, context=2048))


@dataclass(frozen=True, slots=True)
class Described:
    """One step. rows: sequences of a microbatch; ranks: devices; bf16_weights: whether the model's own
    parameters are in bf16, else copies are."""

    model: Callable[[], nn.Module]
    parallel: stretto.Parallel
    ranks: int
    rows: int = 1
    bf16_weights: bool = False
    optimizer: OptimizerKind | None = None


DESCRIBED: Mapping[str, Described] = {
    # With AdamW's state zero = 0 needs more than the device has.
    "llama-8b-zero-0": Described(
        llama_8b, stretto.Parallel(dp=8, recompute="full"), 8, bf16_weights=True, optimizer="sgd"
    ),
    "llama-8b-zero-3": Described(llama_8b, stretto.Parallel(dp=8, zero=3, recompute=LIMIT_BYTES), 8),
    "gpt-zero-0": Described(gpt, stretto.Parallel(pp=2, dp=2, microbatches=8, schedule="1f1b"), 4, rows=4),
    "mixtral-8x7b-zero-1": Described(
        mixtral_8x7b,
        stretto.Parallel(dp=16, ep=8, zero=1, ampipe_degree="auto", ep_buffer=1.25, recompute=LIMIT_BYTES),
        16,
        bf16_weights=True,
    ),
    "llama-70b-zero-1": Described(
        llama_70b,
        stretto.Parallel(
            pp=4,
            tp=8,
            dp=16,
            zero=1,
            sequence_parallel=True,
            microbatches=16,
            schedule="interleaved-1f1b",
            split="auto",
            recompute=LIMIT_BYTES,
        ),
        512,
    ),
}


def planned(name: str) -> stretto.Plan:
    one = DESCRIBED[name]
    with torch.device("meta"):
        model = one.model()
    model = model.bfloat16() if one.bf16_weights else model
    rows = one.rows * one.parallel.microbatches * one.parallel.dp
    if isinstance(model, GPT):
        loss, batch = next_token_sum, torch.empty(rows, 2049, dtype=torch.int64, device="meta")
    else:
        ids = torch.empty(rows, TOKENS, dtype=torch.int64, device="meta")
        loss, batch = huggingface_sum, {"input_ids": ids, "labels": ids}
    precision = "float32" if one.bf16_weights else "bf16"
    job = stretto.capture(model, batch, loss, one.parallel, precision=precision, device="cuda")
    return stretto.plan(job, f"h100x{one.ranks}", optimizer=one.optimizer)


def main(arguments: Sequence[str] = ()) -> None:
    names = list(arguments) or list(DESCRIBED)
    if unknown := [name for name in names if name not in DESCRIBED]:
        raise UsageError(f"there is no {unknown[0]!r}; choose of: {', '.join(DESCRIBED)}")
    print(f"| | step ms | of the bound | hidden | GB a rank | planned s |\n{'| --- ' * 6}|")
    for name in names:
        begun_s = time.process_time()
        plan = planned(name)
        took_s = time.process_time() - begun_s
        result = plan.prediction
        assert result is not None
        hidden = ", ".join(
            f"{axis} {100 * (result.hidden(axis) or 0):.1f} %"
            for axis, busy in result.comm_axis_us.items()
            if any(busy)
        )
        exposed, busy = (sum(map(sum, of.values())) for of in (result.exposed_axis_us, result.comm_axis_us))
        hidden += f"; all {100 * (1 - exposed / busy):.1f} %"
        cells = f"{name} | {result.step_us / 1000:.1f} | {result.step_us / result.bound_us:.3f} | {hidden}"
        print(f"| {cells} | {max(result.peak_bytes) / 1e9:.1f} | {took_s:.0f} |", flush=True)
