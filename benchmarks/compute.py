"""The compute alone: our window functions against eager PyTorch, on one rank with no communication.

    1. A cell is a model and a number of threads; each has a process of its own, which runs `run_worker`.
    2. All systems compute the same step, gradient accumulation over microbatches, on the same parameters:
       eager PyTorch, our windows op by op, `torch.compile` of the model with its loss, our windows compiled.
       Losses and gradients are compared first, or the cell is void.
    3. They take turns, the order rotating. A system's ratio is the median over rounds of its time over
       eager's in the same round, so that what slows a full round counts for nothing.

Touches `transformers` for the models that come from there.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import stretto
from benchmarks.labs import worker_command
from benchmarks.racing import compare, fresh, race, timed
from stretto.config import GPTSettings, HuggingFaceSettings
from stretto.errors import RunError, UsageError, meant
from stretto.models.build import build_model, counted_loss_function

EAGER, OURS = "torch eager", "stretto"
COMPILED, OURS_COMPILED = "torch.compile", "stretto inductor"

WARM_UPS = 4
"""Turns that do not count. Measured: the C library's allocator goes on returning memory, and the system on
giving it again, for three steps; later steps fault no pages."""

ROWS, SEQUENCE, VOCABULARY = 1, 256, 4096
"""Of a microbatch, unless it is asked for longer ones, and of all models."""

CONTEXTS = ("max_position_embeddings", "n_positions")
"""What models of `transformers` call the longest sequence."""


@dataclass(frozen=True, slots=True)
class ComputeCell:
    """One place of the grid. model: a name of `MODELS`."""

    model: str
    threads: int
    microbatches: int = 4
    rounds: int = 9
    compile: bool = True
    sequence: int = SEQUENCE
    world: int = 1

    @property
    def threads_per_rank(self) -> int:
        return self.threads

    @property
    def settings(self) -> GPTSettings | HuggingFaceSettings:
        """The model's, with room for the sequence."""
        result = MODELS[self.model]
        if isinstance(result, GPTSettings):
            return result.model_copy(update={"context": self.sequence})
        sizes = {key: self.sequence if key in CONTEXTS else size for key, size in result.config.items()}
        return result.model_copy(update={"config": sizes})


def _gpt(hidden: int, layers: int) -> GPTSettings:
    return GPTSettings(layers=layers, hidden=hidden, heads=hidden // 64, context=SEQUENCE)


MODELS: Mapping[str, GPTSettings | HuggingFaceSettings] = {
    "gpt 512": _gpt(512, 4),
    "gpt 768": _gpt(768, 3),
    "gpt 1024": _gpt(1024, 2),
    "llama 512": HuggingFaceSettings(
        kind="huggingface",
        architecture="LlamaForCausalLM",
        config={
            "hidden_size": 512,
            "intermediate_size": 1376,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": SEQUENCE,
        },
    ),
    "gpt2 512": HuggingFaceSettings(
        kind="huggingface",
        architecture="GPT2LMHeadModel",
        config={
            "n_embd": 512,
            "n_layer": 4,
            "n_head": 8,
            "n_positions": SEQUENCE,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
}
"""Hidden sizes at which a step takes about a second on one core."""


def run_worker(cell: ComputeCell) -> dict[str, Any]:
    """Steps 2 and 3 in this process: {"cell": ..., "rows": [...]}. Raises RunError when systems disagree."""
    torch.manual_seed(0)
    model = build_model(cell.settings, VOCABULARY, seed=0)
    counted = counted_loss_function(cell.settings)

    def loss(module: nn.Module, tokens: Tensor) -> Tensor:
        total, count = counted(module, tokens)
        return total / count

    batch = torch.randint(0, VOCABULARY, (ROWS * cell.microbatches, cell.sequence + 1))
    job = stretto.capture(model, batch, loss=loss, parallel=stretto.Parallel(microbatches=cell.microbatches))
    plan = stretto.plan(job, "local")
    torch.set_num_threads(cell.threads)  # measuring has threads of its own
    parts = batch.chunk(cell.microbatches)

    def theirs(forward: Callable[[Tensor], Tensor]) -> Tensor:
        total = torch.zeros(())
        for part in parts:
            value = forward(part) / cell.microbatches
            value.backward()  # type: ignore[no-untyped-call]
            total += value.detach()
        return total

    plain = partial(loss, model)
    steps: dict[str, Callable[[], Tensor]] = {
        EAGER: partial(theirs, plain),
        OURS: partial(stretto.Runner(plan, model).step, batch),
    }
    compile_s: dict[str, float] = {}
    if cell.compile:
        steps[COMPILED] = partial(theirs, torch.compile(plain, dynamic=False))
        compile_s[COMPILED] = timed(fresh(model.parameters(), steps[COMPILED]))
        start = time.perf_counter()
        runner = stretto.Runner(plan, model, compile="inductor")
        compile_s[OURS_COMPILED] = time.perf_counter() - start
        steps[OURS_COMPILED] = partial(runner.step, batch)
    systems = {name: fresh(model.parameters(), step) for name, step in steps.items()}
    errors = _compare(model, systems)
    times = race(systems, cell.rounds, warm_ups=0)
    rows = [
        {
            "system": name,
            "step_s": result.median_s,
            "ratio_to_eager": statistics.median(
                mine / eager for mine, eager in zip(result.rounds, times[EAGER].rounds, strict=True)
            ),
            "error": errors[name],
            "compile_s": compile_s.get(name),
            "rounds_s": list(result.rounds),
        }
        for name, result in times.items()
    ]
    return {"cell": asdict(cell), "rows": rows}


def _compare(model: nn.Module, systems: Mapping[str, Callable[[], Tensor | None]]) -> dict[str, float]:
    """The largest relative error of each system's loss and gradients against eager's; and warms up."""
    errors: dict[str, float] = {}
    want: dict[str, Tensor] = {}
    for name, step in systems.items():
        for _ in range(WARM_UPS):
            loss = step()
        assert loss is not None
        result = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        result["loss"] = loss.detach().clone()
        want = want or result
        errors[name] = compare(name, result, want, EAGER)
    return errors


def compute(
    models: Sequence[str],
    threads: Sequence[int],
    rounds: int,
    folder: Path,
    *,
    compile: bool = True,
    sequence: int = SEQUENCE,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Step 1: all cells, one process after the other: {"setup": ..., "cells": [...]}.

    folder: for the processes' files; sequence: tokens of a microbatch. Raises UsageError for an unknown
    model, RunError when a cell failed.
    """
    for model in models:
        if model not in MODELS:
            raise UsageError(f"unknown model {model!r}; {meant(model, MODELS)}known are {', '.join(MODELS)}")
    result: list[dict[str, Any]] = []
    for count in threads:
        for model in models:
            cell = ComputeCell(model, count, rounds=rounds, compile=compile, sequence=sequence)
            say(f"{model}, {count} {'thread' if count == 1 else 'threads'}")
            out = folder / f"{len(result)}.json"
            command = worker_command("compute", asdict(cell), out)
            environment = {**os.environ, "OMP_NUM_THREADS": str(count)}
            status = subprocess.run(command, env=environment, check=False).returncode
            if status:
                raise RunError(f"{model} with {count} threads failed (status {status}); its output is above")
            result.append(json.loads(out.read_text()))
    setup = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": ROWS,
        "sequence": sequence,
        "vocabulary": VOCABULARY,
        "dtype": "float32",
        "rounds": rounds,
    }
    return {"setup": setup, "cells": result}


SETUP = ComputeCell
"""What a worker of this module takes."""
