"""What `stretto.tensor` does while a program is captured, and what tracing needs of DTensor's private corners
(2.11 to 2.13). Nothing moves: who captures does what `shard`, `reshard`, `local` and `redistribute` would.

What it uses, so that the next release breaks this file alone, with a test for each:

    DeviceMesh._coordinate_on_dim                    where on a mesh this rank is
    redistribute_local_tensor, in three modules      what DTensor calls to change placements
    debug._clear_*_sharding_prop_cache               what DTensor remembers of sharding rules' answers
    _StridedShard, by its `split_factor`             the shard of a dim that is several dims in one
    _MaskPartial, by its `mask_buffer`               a sum of what each rank finds in its rows of a table
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed.tensor._api
import torch.distributed.tensor._dispatch
import torch.distributed.tensor._redistribute
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from stretto.tensor.dtensor_adapter import Spec

_captured: ContextVar[Any] = ContextVar("stretto_captured_program", default=None)


@contextmanager
def capturing(program: Any) -> Iterator[None]:
    """While the context lasts, a program is being captured: the methods of `program` replace the functions
    `shard`, `reshard`, `redistribute` and `local`."""
    token = _captured.set(program)
    try:
        yield
    finally:
        _captured.reset(token)


def captured() -> Any:
    """Who captures the program that runs; None where it just runs."""
    return _captured.get()


Redistribute = Callable[[torch.Tensor, Spec, Spec], torch.Tensor]
"""A rank's part, and what it is a part of before and after -> the part after."""


@contextmanager
def standing_first(meshes: Sequence[DeviceMesh]) -> Iterator[None]:
    """While the context lasts, this rank is at the first place of each of these meshes.

    What DTensor remembers of sharding rules depends on where a rank is: it forgets it before and after.
    """
    kept = [(mesh, mesh._coordinate_on_dim) for mesh in meshes]
    try:
        _forget()
        for mesh in meshes:
            mesh._coordinate_on_dim = (0,) * mesh.ndim
        yield
    finally:
        for mesh, coordinate in kept:
            mesh._coordinate_on_dim = coordinate
        _forget()


def _forget() -> None:
    # Loads a compiler, for which those without such meshes need not wait.
    from torch.distributed.tensor.debug import (
        _clear_fast_path_sharding_prop_cache,
        _clear_python_sharding_prop_cache,
    )

    _clear_fast_path_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _clear_python_sharding_prop_cache()  # type: ignore[no-untyped-call]


@contextmanager
def redistributing(how: Redistribute) -> Iterator[None]:
    """While the context lasts, DTensor changes placements in this way, wherever it does so."""
    inside = torch.distributed.tensor
    rooms: list[Any] = [inside._api, inside._dispatch, inside._redistribute]
    own = inside._redistribute.redistribute_local_tensor

    def redistribute(local: torch.Tensor, source: Spec, target: Spec, **_options: Any) -> torch.Tensor:
        return how(local, source, target)

    try:
        for room in rooms:
            assert room.redistribute_local_tensor is own, "PyTorch has it under one name"
            room.redistribute_local_tensor = redistribute
        yield
    finally:
        for room in rooms:
            room.redistribute_local_tensor = own


def split_factor(placement: Placement) -> int:
    """Into how many blocks DTensor's inner shard cuts its dim before each rank takes its part of each block:
    1 for a plain Shard."""
    return int(getattr(placement, "split_factor", 1))


def table_rows(placement: Placement) -> int | None:
    """Of DTensor's inner Partial of what was looked up in a table whose rows are sharded: how many rows all
    ranks have together. None for all other placements."""
    if getattr(placement, "mask_buffer", None) is None:
        return None
    shape = placement.offset_shape  # type: ignore[attr-defined]
    assert shape is not None, "DTensor knows the table where it makes one"
    return int(shape[placement.offset_dim])  # type: ignore[attr-defined]


def keep_elsewhere(placement: Placement, elsewhere: torch.Tensor) -> None:
    """Remember which of the indices are in other ranks' rows."""
    placement.mask_buffer.data = elsewhere  # type: ignore[attr-defined]
