"""Views that are none: what an op takes out of a tensor along a sharded dim is gathered, and so a copy.

In plain PyTorch a write into a view is a write into its tensor, and the other way round. PyTorch's autograd
counts the writes of a tensor and of all its views together, so that a copy can show whether it is still what
the view would be: a write into it, and a read of it after a write into its tensor, are refused on all ranks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from stretto.tensor import errors
from stretto.tensor.clip import is_absent
from stretto.tensor.dtensor_adapter import (
    given_back,
    has_rule,
    local_of,
    needs_redistribution,
    same_memory,
    shown_as,
    without_underscore,
    writes_of,
)

RENUMBERING = frozenset({"squeeze_", "unsqueeze_", "transpose_", "t_"})

_MARK = "_stretto_copied"
"""Of a tensor that is a copy: the op that took it, and the writes until then, if they are counted."""


@cache
def is_view(op: Any) -> bool:
    """Whether an op's result shows its argument's memory."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


def check(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises UsageError for an op that writes into a copy, or reads one that is no longer what it was."""
    written: set[int] | None = None
    for value in (*args, *kwargs.values()):
        for x in value if isinstance(value, (list, tuple)) else (value,):
            mark = getattr(x, _MARK, None) if isinstance(x, DTensor) else None
            if mark is None:
                continue
            if written is None:
                written = {id(value) for value in given_back(op, args, kwargs)}
            if id(x) in written:
                raise errors.copy_written(op, x, mark[0])
            if mark[1] is not None and writes_of(x) != mark[1]:
                raise errors.copy_stale(op, x, mark[0])


def remember(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Mark the results of a view's op if they are copies."""
    source = args[0]
    if not isinstance(source, DTensor):
        return
    mark = getattr(source, _MARK, None)
    if mark is None:
        mesh = source.device_mesh
        cut = any(not p.is_replicate() and mesh.size(a) > 1 for a, p in enumerate(source.placements))
        if not cut or not _copies(op, args, kwargs, result):
            return
        mark = str(op), writes_of(source)
    for x in result if isinstance(result, (list, tuple)) else (result,):
        if isinstance(x, torch.Tensor):
            setattr(x, _MARK, mark)


@cache
def renumbers(op: Any) -> bool:
    """Whether an op changes its tensor's dims in place."""
    name = str(op._schema.name).partition("::")[2]
    return name in RENUMBERING or (torch.Tag.inplace_view in op.tags and name != "detach_")


def renumbered(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """What an op gives that changes its tensor's dims in place: the tensor, as the op without the underscore
    would show it. Raises UsageError if that is a copy, or no such op is."""
    name = str(op._schema.name).partition("::")[2]
    x: DTensor = args[0]
    if name not in RENUMBERING or getattr(x, _MARK, None) is not None:
        raise errors.renumbers(op, x)
    view = without_underscore(op)(*args, **kwargs)
    if getattr(view, _MARK, None) is not None and not any(p.is_partial() for p in x.placements):
        raise errors.renumbers(op, x)
    shown_as(x, view, op, args, kwargs)
    return x


def _copies(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    """Whether the results do not show the argument's memory. The rule is asked where there is no memory to
    look at: off the mesh, and while a program is captured."""
    results = result if isinstance(result, (list, tuple)) else (result,)
    if not results:
        return False
    source, shown = local_of(args[0]), local_of(results[0])
    if type(source) is torch.Tensor and not is_absent(args[0].device_mesh):
        return not same_memory(source, shown)
    if all(p.is_replicate() for p in results[0].placements):
        return True
    return not has_rule(op, args, kwargs) or needs_redistribution(op, args, kwargs)
