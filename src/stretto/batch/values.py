"""Python values that model and loss read while a step was captured. They are constants of its plan, as those
of the batch are, and are looked at before every step.

    values below the model    known by their paths, which a plan file holds: a Runner looks at its own model
    all others                (variables of the loss's closure, globals, what the loss holds) known in the
                              process that has captured, which has the objects

A path is read without running code of the user's: no property is called.
"""

from __future__ import annotations

import ast
import enum
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from stretto.batch.constants import text_of
from stretto.errors import UsageError

Path = tuple[str, ...]
"""Steps from an object to a value: ".name" of an attribute, "[key" of an item, as Python writes the key."""

SCALARS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    range,
    slice,
    enum.Enum,
    torch.dtype,
    torch.Size,
)

MOST_ELEMENTS = 1000
"""Of a container or an array that is compared in every step. Assumed: longer ones are data."""

MISSING = object()


def text(value: Any) -> str | None:
    """What tells a value from others; None for what is no plain value: objects, functions, tensors."""
    if isinstance(value, SCALARS) or _plain(value):
        try:
            return text_of(value, "")
        except UsageError:
            return None
    return None


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return len(value) <= MOST_ELEMENTS and all(isinstance(x, SCALARS) or _plain(x) for x in value)
    kind = type(value)
    return kind.__module__ == "numpy" and hasattr(value, "dtype") and value.size <= MOST_ELEMENTS


def shown(path: Path) -> str:
    """A path as Python writes it."""
    return "".join(step if step[0] == "." else f"{step}]" for step in path).removeprefix(".")


def part(item: Any, step: str) -> Any:
    """What is one step from an object, or MISSING."""
    key = step[1:]
    if step[0] == "[":
        try:
            return item[ast.literal_eval(key)] if type(item) in (dict, list, tuple) else MISSING
        except (LookupError, TypeError, ValueError, SyntaxError):
            return MISSING
    if isinstance(item, nn.Module) and key in item._modules:
        return item._modules[key]
    own = getattr(item, "__dict__", {})
    if key in own:
        return own[key]
    for kind in type(item).__mro__:
        if key in vars(kind):
            value = vars(kind)[key]
            if isinstance(value, types.MemberDescriptorType):
                try:
                    return value.__get__(item)
                except AttributeError:  # nothing is in it
                    return MISSING
            return MISSING if hasattr(value, "__get__") else value
    return MISSING


class Watch:
    """Values and what they were. A copy, in another process or not, watches nothing."""

    def __init__(self, values: Iterable[tuple[str, Callable[[], Any], str]] = ()) -> None:
        """values: (name, what reads it now, its text when the step was captured)."""
        self._values = list(values)
        self._last: list[Any] = [MISSING] * len(self._values)

    def __reduce__(self) -> tuple[type[Watch], tuple[()]]:
        return Watch, ()

    def check(self) -> None:
        """Raises UsageError for a value that is another now."""
        for at, (name, get, known) in enumerate(self._values):
            now = get()
            if now is self._last[at] or now is MISSING:
                continue
            found = text(now)
            if found == known:
                if isinstance(now, SCALARS):
                    self._last[at] = now  # what cannot change in place need not be written again
                continue
            raise UsageError(
                f"{name} is {found or type(now).__name__} now, and was {known} when the step was captured: "
                "Python's values that model and loss read are constants of a plan. Make it a leaf of the "
                "batch, marked stretto.whole(x), or a buffer of the model, both of which may change in every "
                "step; or put it back; or capture the step again, plan it and make a new Runner"
            )


def watch_model(model: nn.Module, read: Iterable[tuple[Path, str]], trains: bool) -> Watch:
    """The values that a step has read below a model. trains: False for a step of evaluation, which any mode
    of the model may have. The model may be dropped."""
    modules: Mapping[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    values = []
    for path, known in read:
        if path[-1] == ".training" and not trains:
            continue
        cut = next((n for n in range(len(path) - 1, -1, -1) if _module_name(path[:n]) in modules), 0)
        holder = weakref.ref(modules[_module_name(path[:cut])])
        values.append((shown(path), _below(holder, path[cut:]), known))
    return Watch(values)


def _module_name(path: Path) -> str:
    return ".".join(step[1:] for step in path)


def _below(holder: weakref.ref[nn.Module], path: Path) -> Callable[[], Any]:
    first, rest = path[0], path[1:]

    def own() -> Any:
        module = holder()
        if module is not None and (held := module.__dict__.get(first[1:], MISSING)) is not MISSING:
            return held
        return get()

    def get() -> Any:
        item: Any = holder()
        for step in path:
            if item is None or item is MISSING:
                return MISSING
            item = part(item, step)
        return item

    return get if rest else own
