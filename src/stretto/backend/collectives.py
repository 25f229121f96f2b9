"""Collectives on `torch.distributed` as plans use them: the runtime starts them, the cost model times them.

`start` returns a work whose `wait()` completes it. What a kind does is its row of `stretto.ir.collectives`.
Touches `torch.distributed` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from stretto.ir.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, KINDS, REDUCE_SCATTER, Kind

# PyTorch 2.13 calls these by new names, and warns of the old ones.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Call = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup, str], Any]
"""(result, value, group, how) -> the work, already under way."""


def _all_reduce(result: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup, how: str) -> Any:
    reduction = dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM
    return dist.all_reduce(result, reduction, group=group, async_op=True)


CALLS: dict[str, Call] = {
    ALL_REDUCE.name: _all_reduce,
    ALL_GATHER.name: lambda result, value, group, _: _all_gather(result, value, group=group, async_op=True),
    REDUCE_SCATTER.name: lambda result, value, group, _: _reduce_scatter(
        result, value, group=group, async_op=True
    ),
}
"""The library's own call, on accelerators, of each kind that gathers or sums. Others are `_by_all_to_all`."""


def _by_all_to_all(kind: Kind, result: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup) -> Any:
    received = sent = None
    if kind is not ALL_TO_ALL:  # whose parts are equal
        at = (value.shape[0], dist.get_rank(group), dist.get_world_size(group))
        received, sent = ([b - a for a, b in rows] for rows in (kind.gets(*at), kind.gives(*at)))
    return dist.all_to_all_single(result, value, received, sent, group=group, async_op=True)


def start(
    kind: str, result: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup, how: str = ""
) -> Any:
    """Start a collective of a kind; all members of the group call it. Where it works in place, value is the
    result. On processors kinds that do not work in place are made of messages (`_exchange`)."""
    row = KINDS[kind]
    if kind in CALLS and (row.in_place or value.device.type != "cpu"):
        return CALLS[kind](result, value, group, how)
    return (_exchanged if value.device.type == "cpu" else _by_all_to_all)(row, result, value, group)


def arrived(kind: Kind, values: Sequence[torch.Tensor], me: int) -> list[torch.Tensor]:
    """What member `me` gets from each, views. values: what members give, in the order of the group."""
    if kind.in_place:
        return list(values)
    size, rows = len(values), values[0].shape[0]
    return [value[slice(*kind.sent(rows, m, me, size))] for m, value in enumerate(values)]


def put_together(kind: Kind, result: torch.Tensor, parts: Sequence[torch.Tensor], how: str = "") -> None:
    """Write what came from each member into the result, where it is to lie or added up. Sums are taken in the
    order of the group, so that all layouts of a run give the same bits."""
    if not kind.sums:
        torch.cat(list(parts), out=result)
        return
    result.copy_(parts[0])
    for part in parts[1:]:
        if how == "max":
            torch.maximum(result, part, out=result)
        else:
            result.add_(part)


def _exchanged(kind: Kind, result: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup) -> Any:
    size, me = dist.get_world_size(group), dist.get_rank(group)
    gives = [value[a:b] for a, b in kind.gives(value.shape[0], me, size)]
    if not kind.sums:
        slices = [result[a:b] for a, b in kind.gets(value.shape[0], me, size)]
        slices[me].copy_(gives[me])
        return Exchange(_exchange(slices, gives, group))
    others = list(torch.empty((size, *result.shape), dtype=value.dtype))

    def add_up() -> None:
        others[me] = gives[me]
        put_together(kind, result, others)

    return Exchange(_exchange(others, gives, group), add_up)


def _exchange(
    into: Sequence[torch.Tensor], out: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> list[Any]:
    """Start to send `out[m]` to each other member m and to receive `into[m]` from it, where not empty.

    All receives are posted first: Gloo announces a receive to the sender before data may leave, and behind a
    send the announcement waits for that send's data, as in Gloo's own collectives. 131 kB each way at
    100 Mbit/s take 10.6 ms so; Gloo's all-gather takes 13.8 ms, its all-to-all 18.6 (PyTorch 2.13).
    """
    ranks, me = dist.get_process_group_ranks(group), dist.get_rank(group)
    # Each member begins with its neighbour, so that no member is sent to by all at once.
    order = [(me + step) % len(ranks) for step in range(1, len(ranks))]
    receives = [m for m in reversed(order) if into[m].numel()]
    works: list[Any] = [dist.irecv(into[m], ranks[m], group=group) for m in receives]
    return works + [dist.isend(out[m], ranks[m], group=group) for m in order if out[m].numel()]


class Exchange:
    """Works that end together, with something left to do on the processor that waits."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], object] | None = None) -> None:
        self._works, self._finish = works, finish

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._finish()


Said = TypeVar("Said")


def gather_all(value: Said) -> list[Said]:
    """What every running rank says, by rank; of a process alone, what it says itself."""
    gathered = [value]
    if dist.is_initialized():
        gathered *= dist.get_world_size()
        dist.all_gather_object(gathered, value)
    return gathered
