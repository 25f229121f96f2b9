"""Capture: a model with its loss becomes a job, its training step cut into stages of F, I and W ops."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from stretto.batch.dims import with_dims
from stretto.batch.loss import Loss
from stretto.capturing.again import captured_again
from stretto.capturing.captures import Captures
from stretto.config import ParallelSettings
from stretto.errors import CaptureError, UsageError
from stretto.ir.program import Job

DEVICES = ("cpu", "cuda")

DEGREES = (2, 4)
"""Numbers of chunks that `ampipe_degree = "auto"` captures besides 1. MindSpeed's are 2 to 4; more make
products that are too small."""

DTYPES = {"float32": None, "bf16": torch.bfloat16}
"""Precision setting -> dtype of the parameters in the computation; None keeps their own. float16 is not
offered: it needs loss scaling, which nothing here does."""


def capture(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    parallel: ParallelSettings,
    *,
    precision: str = "float32",
    device: torch.device | str | None = None,
    stages: int | None = None,
    tp_plan: Mapping[str, Any] | None = None,
    batch_dims: Any = 0,
    equal_layers: bool = True,
) -> Job:
    """Capture one training step of `model` without running it, and cut it into pipeline stages.

    model: any `nn.Module`, on any device ("meta" too; nothing is allocated). It is not changed. One whose
        parameters are on several meshes is cut where it reshards to the next (`stretto.capturing.meshes`).
    batch: a tensor or a tree of tensors (mappings, lists, tuples, dataclasses) whose first dim is the batch;
        only shapes and dtypes are read. What every microbatch takes in full is marked with
        `stretto.replicated`, or None in `batch_dims`.
    batch_dims: where the batch's dim is another than the first: a tree prefix of the batch, as `in_dims` of
        `torch.func.vmap`, by name where the batch has names (`stretto.batch.dims`):
        `{"positions": 1, "mask": None}`. Every step's batch is read by it.
    loss: `loss(model, microbatch)` returns the mean loss of a microbatch, a scalar; or (sum, count): the sum
        of its losses, and how many they are (a tensor made from the microbatch alone, or a number).
    parallel: pipeline ranks, microbatches, schedule, and where to cut (`split`).
    precision: "float32" computes with the parameters as they are; "bf16" with bfloat16 copies of them.
    device: where the step will run; the model's own device by default, "cpu" for a model on "meta". For
        "cuda" the machine that captures needs none (`stretto.capturing.substitutes`).
    tp_plan: which modules are sharded over tensor-parallel ranks, pattern of module names -> style (a word,
        or PyTorch's `ColwiseParallel()` and its like; `stretto.parallelize.styles`); `parallel.tp_plan`, or
        the model's own, by default.
    equal_layers: False traces every layer, where equal ones are else traced twice and repeated. The job is
        the same; logging of `stretto.capturing.trace` (DEBUG) reports why layers are not repeated.
    stages: number of stages; those of `parallel.split`, or `parallel.pp` times `parallel.virtual_stages`.

    Returns a Job of plain data. The step's loss is the mean of the microbatches' losses; for (sum, count) the
    sum of all sums over the sum of all counts, of all data-parallel copies too.

    Raises CaptureError that names the source line for a model that cannot be captured, UsageError for a
    batch, a split or settings that do not fit.

    Method: joint export of forward and backward by PyTorch's AOTAutograd; programs as in Zero Bubble
    Pipeline Parallelism (arXiv 2401.10241), by reachability in the graph.
    """
    if precision not in DTYPES:
        raise UsageError(f"unknown precision {precision!r}: give {' or '.join(map(repr, DTYPES))}")
    _check_arguments(model, loss, parallel, device, stages)
    batch = with_dims(batch, batch_dims)
    captures = Captures(model, batch, loss, DTYPES[precision], device, tp_plan, equal_layers)
    job, *others = _forms(captures, parallel, stages)
    untraced = replace(captures)  # a job keeps no traces
    return replace(job, forms=tuple(others), recipe=partial(captured_again, untraced, parallel))


def _forms(captures: Captures, parallel: ParallelSettings, stages: int | None) -> Iterator[Job]:
    counts = (stages,) if stages is not None else captures.stages(parallel)
    for count in counts:
        yield captures.job(parallel, count)
    if parallel.ampipe_degree == "auto":
        for job in _in_chunks(partial(captures.job, parallel, counts[0])):
            yield job
            yield from (captures.job(parallel, count, job.chunks) for count in counts[1:])


def _in_chunks(made: Callable[[int], Job]) -> Iterator[Job]:
    """The step in each number of chunks in which it can be cut; the user is warned where it can in none."""
    for degree in DEGREES:
        try:
            yield made(degree)
        except (CaptureError, UsageError) as error:
            if degree == DEGREES[0]:
                warnings.warn(f"ampipe_degree = 'auto' cuts nothing: {error}", stacklevel=3)
            return


def _check_arguments(model: object, loss: object, parallel: object, device: object, stages: object) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"capture takes a model, a torch.nn.Module, not {type(model).__name__}")
    if not callable(loss):
        raise UsageError(f"loss is a function loss(model, microbatch), not {type(loss).__name__}")
    if not isinstance(parallel, ParallelSettings):
        raise UsageError(
            f"parallel is a {type(parallel).__name__}: give stretto.Parallel(...), as stretto.Parallel(pp=2)"
        )
    if device is not None:
        kind = device.type if isinstance(device, torch.device) else str(device).partition(":")[0]
        if kind not in DEVICES:
            raise UsageError(f"unknown device {device!r}: give {' or '.join(map(repr, DEVICES))}")
    if stages is not None and (not isinstance(stages, int) or stages < 1):
        raise UsageError(f"stages = {stages!r}: give an integer from 1 on, or leave it out for one a rank")
