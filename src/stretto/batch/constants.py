"""Constants of a batch as text: equal texts mean equal values, to the last bit.

What a batch holds beside tensors is a constant of the captured step, and each later batch must have the same.
A repr would not do: NumPy shortens long arrays, objects show their address, or less than they hold.

    numbers, text, bytes, None, types of PyTorch and NumPy, dates, paths   as Python writes them
    arrays of NumPy                                                       dtype, shape and a hash of the bytes
    enums, data classes, other objects of Python classes                  their class and what they hold
    anything else                                                         refused
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import types
from collections.abc import Mapping
from typing import Any

import torch

from stretto.errors import UsageError

PLAIN = (bool, float, complex, str, bytes, type(None), type(...), range)
TORCH = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
VALUE_ROOMS = ("datetime", "pathlib", "decimal", "fractions", "uuid", "ipaddress", "zoneinfo")
"""Modules of Python whose objects are values, and are written whole by repr."""

LONG = 1 << 64
"""Whole numbers from here on are written in hexadecimal, which Python does at any length."""


def text_of(value: Any, path: str) -> str:
    """The text of a batch's leaf that is no tensor. path: where it stands.

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
        raise _unknown(value, path, "holds itself")
    within = (*within, id(value))

    def inner(item: Any) -> str:
        return _text(item, path, within)

    if isinstance(value, torch.Tensor):
        raise _unknown(within, path, "holds a tensor, which only dicts, lists and tuples of the batch may do")
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
    """An object of a Python class, by its class and what it holds."""
    kind = type(value)
    held: dict[str, Any] = dict(getattr(value, "__dict__", {}))
    if isinstance(value, types.SimpleNamespace):
        return f"{_name(kind)}({', '.join(f'{name}={inner(item)}' for name, item in sorted(held.items()))})"
    if dataclasses.is_dataclass(value):
        held |= {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    slots = any("__slots__" in base.__dict__ and base.__dict__["__slots__"] for base in kind.__mro__)
    python = kind.__flags__ & (1 << 9) and getattr(kind, "__new__", None) is object.__new__
    if not python or (slots and not dataclasses.is_dataclass(value)):
        base = next((b for b in (int, float, complex, str, bytes) if isinstance(value, b)), None)
        if base is None or slots:
            raise _unknown(value, path, "cannot be compared with that of another batch")
        held["the value"] = base(value)
    return f"{_name(kind)}({', '.join(f'{name}={inner(item)}' for name, item in sorted(held.items()))})"


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
