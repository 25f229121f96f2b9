"""What is known while a model's code runs at capture, and what runs in the place of that code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_state = threading.local()


AXES = "axes"
"""The (axis, size) that the capture has."""


def value_now(kind: str) -> Any:
    """What the innermost open context of this kind was given; None without one."""
    return getattr(_state, kind, None)


@contextmanager
def now(kind: str, value: object = True) -> Iterator[None]:
    """The kind of what is called while the context lasts, in this thread."""
    before = value_now(kind)
    setattr(_state, kind, value)
    try:
        yield
    finally:
        setattr(_state, kind, before)


def put_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Give a module another forward. Returns what gives it its own back."""
    kept = {"forward": module.__dict__["forward"]} if "forward" in module.__dict__ else {}
    module.__dict__["forward"] = forward

    def put_back() -> None:
        del module.__dict__["forward"]
        module.__dict__.update(kept)

    return put_back
