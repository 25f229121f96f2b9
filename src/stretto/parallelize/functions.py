"""Autograd functions of a user's own while a model is spread: they get what stands for the whole.

They ask no argument what it is, so that the gradient of one that is no plain tensor would be lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

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
