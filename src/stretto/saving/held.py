"""What a rank holds of a Runner's model and optimizer, and what of it this rank writes, by name.

    model.<name>                a parameter, under the first name of its tie
    buffer.<name>               a buffer that the computation reads or writes
    optimizer.<name>.<part>     a tensor of the optimizer's state (`stretto.saving.optimizer`)

Tensors are whole under their names; a rank holds boxes of them (`stretto.saving.parts`). Reads, and changes
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from stretto.errors import UsageError
from stretto.ir.program import Parameter
from stretto.runtime import Runner
from stretto.runtime.shards import pieces_of, whole_spec
from stretto.saving.parts import Part


def held_model(runner: Runner) -> dict[str, Part]:
    """Parameters and buffers, as views of the runner's own tensors. Raises UsageError for a model on meshes,
    whose parts have no place in a whole that a Runner knows."""
    if runner.held.on_mesh:
        raise UsageError(
            "the Runner's model lies on meshes (stretto.shard); save and load its parameters with "
            "torch.distributed.checkpoint, which knows DTensors"
        )
    known = {p.name: p for p in runner.plan.job.parameters}
    found = {
        f"model.{known[name].tied_to}": spread_part(runner, known[name], parameter.detach())
        for name, parameter in runner.named_parameters()
    }
    for name, buffer in runner.named_buffers():
        found[f"buffer.{name}"] = Part.all_of(buffer)
    return found


def known_names(runner: Runner) -> set[str]:
    """The names of all parameters of the model, whoever holds them."""
    return {f"model.{parameter.tied_to}" for parameter in runner.plan.job.parameters}


def spread_part(runner: Runner, parameter: Parameter, held: torch.Tensor) -> Part:
    """Where what has the shape of this rank's part of the parameter lies in the whole."""
    job = runner.plan.job
    boxes = pieces_of(held, parameter, job, runner.coordinates)
    return Part(whole_spec(job, parameter).shape, tuple(boxes))


def owned_names(runner: Runner) -> set[str]:
    """The first names of ties of which this rank is the one to write what it holds."""
    tied_to = {p.name: p.tied_to for p in runner.plan.job.parameters}
    return {tied_to[name] for name, _ in runner.named_parameters() if runner.owns(name)}


def owned_model(runner: Runner, held: Mapping[str, Part]) -> dict[str, Part]:
    """Of `held_model`, what this rank writes: it is the one to, or one of those that hold the same."""
    kept = {f"model.{name}" for name in owned_names(runner)}
    kept |= {f"buffer.{name}" for name in runner.held.owned_buffers()}
    return {key: part for key, part in held.items() if key in kept}
