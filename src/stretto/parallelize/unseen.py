"""What the library itself computes while a model's code runs, and what runs in the place of that code.

`stretto.parallelize.alone` compares the calls of a sharded model with those of the model alone; the library's
own (collectives, lookups in a part of a vocabulary) have no counterpart there and are not compared.

Autograd functions of a user's own get what replaces the full tensor: they ask no argument what it is, so
that the gradient of a leaf that is no plain tensor would be lost. Modules get another forward for a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn

OWN = "stretto_own"
"""Annotation of nodes whose code looks at a rank's own part on purpose."""

_state = threading.local()


HIDDEN, ALONE, AXES = "hidden", "alone", "axes"
"""What is called is the library's own; the model runs alone, and what communicates gives what it is given;
the (axis, size) that the capture has."""


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


unseen = now(HIDDEN)
"""Decorator of a function of the library's own."""


def own_code() -> AbstractContextManager[None]:
    """What is made while the context lasts looks at a rank's own part on purpose: the proof of placements
    takes it as the rank's own, until a collective makes a value of it."""
    return _annotated(OWN, True)


@contextmanager
def _annotated(key: str, value: object) -> Iterator[None]:
    before = fx_traceback.current_meta.get("custom")
    if before is None:  # nothing is traced
        yield
        return
    # A dict of its own: nodes made before share theirs.
    fx_traceback.current_meta["custom"] = {**before, key: value}
    try:
        yield
    finally:
        fx_traceback.current_meta["custom"] = before


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
