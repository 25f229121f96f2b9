"""What the library itself computes while a model's code runs is not the model's: it is not compared.

`stretto.parallelize.alone` compares the calls of a sharded model with those of the model alone; what is
between (collectives, lookups in a part of a vocabulary) has no counterpart there."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import ParamSpec, TypeVar

import torch.fx.traceback as fx_traceback

P = ParamSpec("P")
R = TypeVar("R")

OWN = "stretto_own"
"""Annotation of nodes whose code looks at a rank's own part on purpose."""

CHUNK = "stretto_chunk"
"""Annotation of nodes of one chunk of a sequence: its number."""

_state = threading.local()


def is_unseen() -> bool:
    """Whether the code that runs now is the library's own."""
    return bool(getattr(_state, "depth", 0))


@contextmanager
def hidden() -> Iterator[None]:
    """What is called while the context lasts is the library's own."""
    _state.depth = getattr(_state, "depth", 0) + 1
    try:
        yield
    finally:
        _state.depth -= 1


@contextmanager
def alone() -> Iterator[None]:
    """The model runs alone while the context lasts: what communicates gives what it is given."""
    _state.alone = True
    try:
        yield
    finally:
        _state.alone = False


def is_alone() -> bool:
    return bool(getattr(_state, "alone", False))


def unseen(function: Callable[P, R]) -> Callable[P, R]:
    """A function of the library's own."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with hidden():
            return function(*args, **kwargs)

    return call


def own_code() -> AbstractContextManager[None]:
    """What is made while the context lasts looks at a rank's own part on purpose (the highest of its logits):
    the proof of placements takes it as the rank's own, until a collective makes a value of it."""
    return _annotated(OWN, True)


def of_chunk(at: int) -> AbstractContextManager[None]:
    """What is made while the context lasts is of a chunk of a sequence."""
    return _annotated(CHUNK, at)


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
