"""Writes in place to a sequence in chunks: they are refused where the uncut model would write elsewhere too.

What is made of joined chunks may be a view of the sequence in the uncut model, such as x[:, 0], and here it
is a view of a copy. From then on neither may be written into. A tensor of the same memory counts as either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from stretto.errors import CaptureError
from stretto.tensor.dtensor_adapter import same_memory

Views = list[tuple[Tensor, ...]]

_views: ContextVar[Views | None] = ContextVar("views", default=None)
"""Memories that a write must not change: a copy of chunks of which there is a view, and the chunks. None
where no model works in chunks."""


@contextmanager
def views_noted() -> Iterator[None]:
    """While the context lasts, views are noted for `check_written`."""
    before = _views.set([])
    try:
        yield
    finally:
        _views.reset(before)


def note_views(made: Sequence[Any], full_values: Sequence[Any], given: Sequence[Any]) -> None:
    """made: what a call gave for `full_values`, which are `given` with chunks joined."""
    views = _views.get()
    if views is None:
        return
    for full, cut in zip(full_values, given, strict=True):
        if full is not cut and any(isinstance(x, Tensor) and same_memory(x, full) for x in made):
            views.append((full, *cut.parts))


def check_written(target: Any) -> None:
    """Raises CaptureError where the uncut model may write into something else by writing here."""
    views = _views.get()
    if not views or not isinstance(target, Tensor):
        return
    parts = getattr(target, "parts", (target,))
    if any(same_memory(part, kept) for memories in views for kept in memories for part in parts):
        raise CaptureError(
            "a sequence in chunks is written in place beside what was made of it full, such as x[:, 0]: "
            "write y = x + ..., or leave ampipe_degree out"
        )


def writes(function: Callable[..., Any]) -> str:
    """What a function that changes its first argument would be called if it made another tensor; "" for
    others."""
    name = str(getattr(function, "__name__", ""))
    if name in ("__setitem__", "copy_") or (name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}")):
        return name.removeprefix("__i").strip("_") if name.startswith("__i") else name
    return name[:-1] if name.endswith("_") and not name.endswith("__") else ""


def asks_in_place(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Any]] | None:
    """Of a call with `inplace=True`, as `F.relu(x, inplace=True)`: the first argument, and the others as they
    would be without it; None for other calls."""
    code = getattr(function, "__code__", None)
    names: tuple[str, ...] = () if code is None else code.co_varnames[: code.co_argcount]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if "inplace" not in names or not given.get("inplace"):
        return None
    target: Tensor = given.pop(names[0])
    return target, {**given, "inplace": False}
