"""Collectives on `torch.distributed` as plans use them: the runtime starts them, the cost model times them.

Every function starts and returns a work whose `wait()` completes it. Touches `torch.distributed` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# PyTorch 2.13 calls these by new names, and warns of the old ones.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_reduce(value: torch.Tensor, group: dist.ProcessGroup, op: str = "sum") -> Any:
    """In place. op: "sum" or "max"."""
    how = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
    return dist.all_reduce(value, how, group=group, async_op=True)


def all_gather(result: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """All members' values along dim 0 of `result`, in the order of the group."""
    return _all_gather(result, value, group=group, async_op=True)


def reduce_scatter(result: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """This member's rows (dim 0) of the sum of all members' values.

    On processors, Gloo has it as an all-reduce of which most is thrown away, twice the bytes (measured on two
    hosts: 84 ms a megabyte at 100 Mbit/s). There members exchange rows instead, and each adds up its own when
    it waits: 42 ms.
    """
    if value.device.type != "cpu":
        return _reduce_scatter(result, value, group=group, async_op=True)
    members = dist.get_world_size(group)
    if members == 1:
        result.copy_(value)
        return _Done()
    parts = torch.empty_like(value)
    work = dist.all_to_all_single(parts, value, group=group, async_op=True)

    def add_up() -> None:
        first, *others = parts.chunk(members)  # in the order of the group, so that sums are the same bits
        result.copy_(first)
        for other in others:
            result.add_(other)

    return _AddedUp(work, add_up)


class _Done:
    def wait(self) -> None:
        return None


class _AddedUp:
    """A work that has something left to do on the processor that waits for it."""

    def __init__(self, work: Any, finish: Callable[[], object]) -> None:
        self._work, self._finish = work, finish

    def wait(self) -> None:
        self._work.wait()
        self._finish()
