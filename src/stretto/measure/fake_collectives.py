"""What communication ops do on one device when they are timed: buffers and views, no communication.

The start of a collective makes the buffer of its result (an all-reduce sums in place, so it copies); what
the call into the transport takes beside that is measured between ranks (`cost.measure_collectives`). A wait
gives its buffer on. `axis.*` ops give the values of the rank at coordinate 0. Touches no process group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stretto.backend.dispatch import resolve
from stretto.ir.program import CHUNK, GETITEM, INDEX, STARTS, WAIT


def function_of(target: str, device: torch.device) -> Callable[..., Any]:
    """The function that stands for an op: the dispatcher's own, or one of these."""
    found: dict[str, Callable[..., Any]] = {
        GETITEM: lambda parts, index: parts[index],
        "comm.all_reduce": lambda x, op, axis, size: x.clone(memory_format=torch.contiguous_format),
        "comm.all_gather": lambda x, axis, size: x.new_empty((x.shape[0] * size, *x.shape[1:])),
        "comm.reduce_scatter": lambda x, op, axis, size: x.new_empty((x.shape[0] // size, *x.shape[1:])),
        WAIT: lambda started: started,
        INDEX: lambda axis, size: torch.zeros((), dtype=torch.int64, device=device),
        CHUNK: lambda x, dim, axis, size: x.narrow(dim, 0, x.shape[dim] // size),
    }
    assert {*STARTS} <= found.keys()
    return found[target] if target in found else resolve(target)
