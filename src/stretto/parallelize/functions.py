"""What runs in the place of a user's code while a model is sharded.

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
    kept = module.__dict__.get("forward")
    module.__dict__["forward"] = forward

    def put_back() -> None:
        module.__dict__.pop("forward")
        if kept is not None:
            module.__dict__["forward"] = kept

    return put_back
