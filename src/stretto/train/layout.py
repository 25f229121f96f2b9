"""How a run's model is spread over ranks, and what the user is told of it.

Reads the model's modules; moves them to the rank's device.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn

from stretto.config import DecoderSettings, TrainSettings
from stretto.ir.plan import Plan
from stretto.parallelize.layout import Layout, layout_of
from stretto.train.text import Say


def spread(model: nn.Module, settings: TrainSettings, say: Say) -> Layout:
    """How it is laid out. `say` takes what is left whole.

    Raises UsageError for a model, a plan or sizes that do not fit.
    """
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", UserWarning)
        layout = layout_of(model, settings.parallel)
    for told in dict.fromkeys(str(warning.message) for warning in found):
        say(f"note: {told}{_padding(model, settings)}")
    return layout


def move(model: nn.Module, plan: Plan, rank: int, device: torch.device) -> None:
    """Move what this rank's stages use of the model to `device`, and nothing else: it may be too large."""
    if device.type == "cpu":
        return
    stages = set(plan.schedule.stages_of(plan.mesh.place(rank)))
    parameters = {p.name for p in plan.job.parameters if stages & set(p.stages)}
    buffers = {b.name for b in plan.job.buffers if stages & {*b.stages, *(s for s, _, _ in b.updates)}}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in parameters:
            parameter.data = parameter.data.to(device)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if f"{prefix}.{name}".lstrip(".") in buffers:
                setattr(module, name, buffer.to(device))


def _padding(model: nn.Module, settings: TrainSettings) -> str:
    """The setting that pads the vocabulary."""
    rows = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(rows, int):
        return ""
    size = settings.parallel.tp
    key = "model.vocab_size" if isinstance(settings.model, DecoderSettings) else "model.config.vocab_size"
    return f" ({key} = {-(-rows // size) * size})"
