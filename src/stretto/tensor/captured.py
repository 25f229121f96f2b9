"""What `shard`, `reshard`, `local` and `redistribute` do while a program is captured: nothing moves.

Who captures the program does it for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement


class Capturing(Protocol):
    """Who captures a program on meshes; its methods replace the functions of these names."""

    def shard(
        self, tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement] | None
    ) -> Any: ...

    def reshard(self, x: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Any: ...

    def redistribute(self, x: Any, placements: Sequence[Placement]) -> Any: ...

    def local(self, x: torch.Tensor) -> torch.Tensor: ...


_captured: ContextVar[Capturing | None] = ContextVar("stretto_captured_program", default=None)


@contextmanager
def capturing(program: Capturing) -> Iterator[None]:
    """While the context lasts, a program is being captured."""
    token = _captured.set(program)
    try:
        yield
    finally:
        _captured.reset(token)


def captured() -> Capturing | None:
    """Who captures the program that runs; None where it just runs."""
    return _captured.get()
