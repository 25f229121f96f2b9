"""A step on one accelerator: plain PyTorch, op by op, compiled, and replayed; and what was predicted of it.

    python -m benchmarks accelerator

Prints the rows of docs/results.md. Medians of eight steps; a step has four microbatches, in bfloat16.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

import stretto
from stretto.measure.profile import profile
from stretto.models.gpt import GPT, GPTConfig, next_token_sum
from stretto.models.moe import MoEConfig, MoEGPT, moe_token_sum

MICROBATCHES, ROWS = 4, 16


def median_ms(step: Callable[[], object], count: int = 8) -> float:
    times = []
    for _ in range(count + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(1000.0 * (time.perf_counter() - start))
    return statistics.median(times[3:])


def gpt(layers: int, hidden: int, sequence: int, vocab: int = 32000) -> nn.Module:
    heads = max(4, hidden // 128)
    return GPT(
        GPTConfig(vocab_size=vocab, layers=layers, hidden=hidden, heads=heads, context=sequence), seed=3
    )


def experts(capacity: float | None) -> nn.Module:
    config = MoEConfig(
        vocab_size=32000,
        layers=2,
        hidden=2048,
        heads=16,
        context=2048,
        experts=16,
        top_k=4,
        expert_ratio=1408 / 2048,
        capacity_factor=capacity,
        shared_experts=1,
    )
    return MoEGPT(config, seed=3)


def plain(model: nn.Module, loss: Any, batch: torch.Tensor) -> None:
    model.zero_grad()
    for part in batch.chunk(MICROBATCHES):
        total, count = loss(model, part)
        (total / (count * MICROBATCHES)).backward()


def row(name: str, make: Callable[[], nn.Module], loss: Any, sequence: int, compiled: bool = False) -> None:
    with torch.device("cuda"):
        model = make()
    batch = torch.randint(0, 512, (ROWS, sequence + 1), device="cuda")
    parallel = stretto.Parallel(microbatches=MICROBATCHES)
    job = stretto.capture(model, batch, loss=loss, parallel=parallel, precision="bf16")
    plan = stretto.plan(job, "h200x1")
    ops_ms = MICROBATCHES * sum(profile(job, torch.device("cuda")).op_us.values()) / 1000
    half = copy.deepcopy(model).bfloat16()
    result = {"plain, bfloat16": median_ms(partial(plain, half, loss, batch))}
    ways: dict[str, dict[str, Any]] = {"walked": {}, "replayed": {"cuda_graph": True}}
    if compiled:
        ways["compiled"] = {"compile": "inductor"}
    for way, how in ways.items():
        runner = stretto.Runner(plan, copy.deepcopy(model), **how)
        parameters = list(runner.parameters())

        def step(runner: stretto.Runner = runner, parameters: list[nn.Parameter] = parameters) -> None:
            for parameter in parameters:
                parameter.grad = None
            runner.step(batch)

        result[way] = median_ms(step)
    result |= {"its ops, measured": ops_ms}
    if plan.prediction is not None:
        result["by the catalogue"] = plan.prediction.step_us / 1000
    print(f"{name}: " + ", ".join(f"{way} {ms:.1f} ms" for way, ms in result.items()), flush=True)


def main(arguments: Sequence[str] = ()) -> None:
    print(torch.cuda.get_device_name(), torch.__version__)
    row("8 layers of hidden 256", lambda: gpt(8, 256, 256, 512), next_token_sum, 256)
    row("4 layers of hidden 2048", lambda: gpt(4, 2048, 2048), next_token_sum, 2048)
    row("2 layers of hidden 2048", lambda: gpt(2, 2048, 2048), next_token_sum, 2048, compiled=True)
    row("16 experts, capacity 1", lambda: experts(1.0), moe_token_sum, 2048)
    row("16 experts, dropless", lambda: experts(None), moe_token_sum, 2048)
