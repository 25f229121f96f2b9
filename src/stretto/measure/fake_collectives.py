"""What communication ops do on one device when they are timed: buffers and views, no communication.

The start of a collective makes the buffer of its result (an all-reduce sums in place, so it copies); what
the call into the transport takes beside that is measured between ranks (`cost.measure_collectives`). A wait
gives its buffer on. `axis.*` ops give the values of the rank at coordinate 0. Integers say how much there is
to do (how many rows an expert gets), so of those the others are taken to send what this rank does. Touches no
process group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from stretto.backend.dispatch_adapter import resolve
from stretto.ir.collectives import BY_TARGET, How, Kind
from stretto.ir.program import CHUNK, GETITEM, INDEX, WAIT


def function_of(target: str, device: torch.device) -> Callable[..., Any]:
    """The function that stands for an op: the dispatcher's own, or one of these."""
    if target in BY_TARGET:
        return partial(_started, BY_TARGET[target])
    result: dict[str, Callable[..., Any]] = {
        GETITEM: lambda parts, index: parts[index],
        WAIT: lambda started: started,
        INDEX: lambda axis, size: torch.zeros((), dtype=torch.int64, device=device),
        CHUNK: lambda x, dim, axis, size: x.narrow(dim, 0, x.shape[dim] // size),
    }
    return result[target] if target in result else resolve(target)


def _started(kind: Kind, x: torch.Tensor, *how_axis_size: Any) -> torch.Tensor:
    """The buffer of a collective's result."""
    if kind.in_place:
        return x.clone(memory_format=torch.contiguous_format)
    how: How = how_axis_size[0] if kind.says_how else ""
    shape = kind.shape(x.shape, how_axis_size[-1], how)
    assert shape is not None, f"{kind.name} of a tensor of shape {list(x.shape)}"
    made = x.new_empty(shape)
    if not x.is_floating_point() and x.numel():
        flat = x.flatten()
        made.view(-1).copy_(flat.repeat(math.ceil(made.numel() / x.numel()))[: made.numel()])
    return made
