"""What is known while a model's code runs at capture, and what runs in the place of that code.

Autograd functions of a user's own get what replaces the full tensor: they ask no argument what it is, so
that the gradient of a leaf that is no plain tensor would be lost. Modules get another forward for a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_state = threading.local()


ON_CUDA, AXES = "on_cuda", "axes"
"""What is called will run on CUDA, wherever its tensors are; the (axis, size) that the capture has."""


def is_now(kind: str) -> bool:
    """Whether a context of this kind is open in this thread."""
    return bool(getattr(_state, kind, False))


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


_lock = threading.Lock()
_own: list[Any] = []
"""`Function.apply` as it was, once for each context that is open: threads may have one each."""


@contextmanager
def functions_given(change: Callable[[Any], Any]) -> Iterator[None]:
    """While the context lasts, `change` is done to the arguments of all autograd functions."""
    functions: Any = torch.autograd.Function
    with _lock:
        own = _own[0] if _own else functions.__dict__["apply"]
        _own.append(own)

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return own.__func__(cls, *change(args), **change(kwargs))

        functions.apply = classmethod(apply)
    try:
        yield
    finally:
        with _lock:
            _own.pop()
            if not _own:
                functions.apply = own


def put_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Give a module another forward. Returns what gives it its own back."""
    kept = {"forward": module.__dict__["forward"]} if "forward" in module.__dict__ else {}
    module.__dict__["forward"] = forward

    def put_back() -> None:
        del module.__dict__["forward"]
        module.__dict__.update(kept)

    return put_back
