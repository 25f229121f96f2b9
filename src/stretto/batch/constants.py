"""Constants of a captured step: values of Python in the batch, and those that model and loss read.

`text_of` writes a value as text, equal for equal values alone, to the last bit: numbers, text, types and
dates as Python writes them; arrays by dtype, shape and a hash of the bytes; enums, data classes and other
objects of Python classes by class and content. Anything else is refused.

A `ConstantsWatch` looks before every step at what model and loss have read:

    values below the model    known by their paths, which a plan file has: a Runner looks at its own model
    all others                (variables of the loss's closure, globals, objects of the loss) known in the
                              process that has captured, which has the objects

A path is read without running code of the user's: no property is called.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import hashlib
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from stretto.errors import UsageError

PLAIN = (bool, float, complex, str, bytes, type(None), type(...), range)
TORCH = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
VALUE_ROOMS = ("datetime", "pathlib", "decimal", "fractions", "uuid", "ipaddress", "zoneinfo")
"""Modules of Python whose objects are values, and are written in full by repr."""

LONG = 1 << 64
"""Integers from here on are written in hexadecimal, which Python does at any length."""

Path = tuple[str, ...]
"""Steps from an object to a value: ".name" of an attribute, "[key" of an item, as Python writes the key."""

SCALARS = (*PLAIN, int, slice, enum.Enum, torch.dtype, torch.Size)

MOST_ELEMENTS = 1000
"""Of a container or an array that is compared in every step. Assumed: longer ones are data."""

MISSING = object()


def text_of(value: Any, path: str) -> str:
    """The text of a batch's leaf that is no tensor. path: of the leaf.

    Raises UsageError for what cannot be compared with another batch's.
    """
    return _text(value, path, ())


def _text(value: Any, path: str, within: tuple[int, ...]) -> str:
    kind = type(value)
    if isinstance(value, enum.Enum):
        return f"{_name(kind)}.{value.name}({_text(value.value, path, within)})"
    if kind is int:
        return repr(value) if abs(value) < LONG else hex(value)
    if kind in PLAIN or isinstance(value, TORCH) or _room(kind) in VALUE_ROOMS:
        return repr(value)
    if _of_numpy(kind, "generic") and not value.dtype.hasobject:
        return (
            f"numpy {value.dtype.str}({value!r})" if value.dtype.kind != "V" else _array(value, path, within)
        )
    if _of_numpy(kind, "ndarray"):
        return _array(value, path, within)
    if id(value) in within:
        raise _unknown(value, path, "contains itself")
    within = (*within, id(value))

    def inner(item: Any) -> str:
        return _text(item, path, within)

    if isinstance(value, torch.Tensor):
        raise _unknown(
            within, path, "contains a tensor, which only dicts, lists and tuples of the batch may do"
        )
    if isinstance(value, Mapping):
        return f"{_name(kind)}{{{', '.join(f'{inner(k)}: {inner(v)}' for k, v in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"{_name(kind)}[{', '.join(map(inner, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"{_name(kind)}{{{', '.join(sorted(map(inner, value)))}}}"
    if isinstance(value, slice):
        return f"slice({inner(value.start)}, {inner(value.stop)}, {inner(value.step)})"
    if isinstance(value, (type, types.BuiltinFunctionType)) or (
        isinstance(value, types.FunctionType) and not value.__closure__
    ):
        return f"{value.__module__}.{value.__qualname__}"
    return _object(value, path, inner)


def _object(value: Any, path: str, inner: Any) -> str:
    kind = type(value)
    content: dict[str, Any] = dict(getattr(value, "__dict__", {}))
    if dataclasses.is_dataclass(value):
        content |= {
            f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)
        }
    slots = any("__slots__" in base.__dict__ and base.__dict__["__slots__"] for base in kind.__mro__)
    python = kind.__flags__ & (1 << 9) and getattr(kind, "__new__", None) is object.__new__
    python = python or isinstance(value, types.SimpleNamespace)
    if not python or (slots and not dataclasses.is_dataclass(value)):
        base = next((b for b in (int, float, complex, str, bytes) if isinstance(value, b)), None)
        if base is None or slots:
            raise _unknown(value, path, "cannot be compared with that of another batch")
        content["the value"] = base(value)
    return f"{_name(kind)}({', '.join(f'{name}={inner(item)}' for name, item in sorted(content.items()))})"


def _array(value: Any, path: str, within: tuple[int, ...]) -> str:
    about = f"numpy {value.dtype.descr if value.dtype.names else value.dtype.str}{list(value.shape)}"
    if value.dtype.hasobject:
        return f"{about} {_text(value.tolist(), path, (*within, id(value)))}"
    return f"{about} sha256 {hashlib.sha256(value.tobytes()).hexdigest()}"


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _room(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _of_numpy(kind: type, name: str) -> bool:
    return any(base.__name__ == name and _room(base) == "numpy" for base in kind.__mro__)


def _unknown(value: Any, path: str, why: str) -> UsageError:
    what = (
        "" if isinstance(value, tuple) else f" is a {type(value).__module__}.{type(value).__qualname__} and"
    )
    return UsageError(
        f"batch leaf {path!r}{what} {why}: leaves that are no tensors are constants of the plan. Make it a "
        "tensor, numbers or text, or leave it out of the batch"
    )


# --- watched values ----------------------------------------------------------------------------------------


def text(value: Any) -> str | None:
    """The text of a plain value; None for all others: objects, functions, tensors."""
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


class ConstantsWatch:
    """Values and what they were. A copy, in another process or not, watches nothing."""

    def __init__(self, values: Iterable[tuple[str, Callable[[], Any], str]] = ()) -> None:
        """values: (name, what reads it now, its text when the step was captured)."""
        self._values = list(values)
        self._last: list[Any] = [MISSING] * len(self._values)

    def __reduce__(self) -> tuple[type[ConstantsWatch], tuple[()]]:
        return ConstantsWatch, ()

    def check(self) -> None:
        """Raises UsageError for a value that is another now."""
        for at, (name, get, known) in enumerate(self._values):
            now = get()
            if now is self._last[at] or now is MISSING:
                continue
            result = text(now)
            if result == known:
                if isinstance(now, SCALARS):
                    self._last[at] = now  # what cannot change in place need not be written again
                continue
            raise UsageError(
                f"{name} is {result or type(now).__name__} now, and was {known} when the step was captured: "
                "Python's values that model and loss read are constants of a plan. Make it a leaf of the "
                "batch, marked stretto.replicated(x), or a buffer of the model, both of which may change "
                "in every "
                "step; or put it back; or capture the step again, plan it and make a new Runner"
            )


def watch_model(model: nn.Module, read: Iterable[tuple[Path, str]], trains: bool) -> ConstantsWatch:
    """The values that a step has read below a model. trains: False for a step of evaluation, which any mode
    of the model may have. The model may be dropped."""
    modules: Mapping[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    values = []
    for path, known in read:
        if path[-1] == ".training" and not trains:
            continue
        cut = next((n for n in range(len(path) - 1, -1, -1) if _module_name(path[:n]) in modules), 0)
        owner = weakref.ref(modules[_module_name(path[:cut])])
        values.append((shown(path), _below(owner, path[cut:]), known))
    return ConstantsWatch(values)


def _module_name(path: Path) -> str:
    return ".".join(step[1:] for step in path)


def _below(owner: weakref.ref[nn.Module], path: Path) -> Callable[[], Any]:
    def get() -> Any:
        item: Any = owner()
        for step in path:
            if item is None or item is MISSING:
                return MISSING
            item = part(item, step)
        return item

    return get
