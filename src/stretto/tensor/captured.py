"""What `shard`, `reshard` and `local` do while a program is captured: nothing moves.

Who captures the program is told where it goes on, and every tensor stays the plain one that is traced.
Touches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch.distributed.device_mesh import DeviceMesh

Tell = Callable[[DeviceMesh], None]
"""Is given the mesh to which a tensor is resharded."""

_teller: ContextVar[Tell | None] = ContextVar("stretto_captured_borders", default=None)


@contextmanager
def capturing(tell: Tell) -> Iterator[None]:
    """While the context lasts, the program is being captured."""
    token = _teller.set(tell)
    try:
        yield
    finally:
        _teller.reset(token)


def teller() -> Tell | None:
    """Whom to tell, where a program is being captured; else None."""
    return _teller.get()
