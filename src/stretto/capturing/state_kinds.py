"""How each kind of Python object is read and written, for `state`: what it holds that can change.

A `Kind` reads an object as a list of (key, value) and puts such a list back into the same object. Methods
that a class of the user's overrides are passed by. Touches no private corner of PyTorch.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

MOST_ARRAY_BYTES = 1 << 20
"""Arrays of NumPy above this are left alone. Assumed: statistics are smaller, data sets are larger."""

MOST_OBJECTS = 100_000
"""So many are walked, and no larger container. Assumed: a data set is behind the rest. 0.2 s."""

SCALARS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range)

LEFT_ALONE = frozenset(
    (
        *("builtins", "functools", "itertools", "re", "torch", "stretto", "numpy"),
        *("threading", "_thread", "queue", "logging", "multiprocessing", "concurrent", "asyncio"),
        *("contextvars", "socket", "subprocess", "io", "_io", "ssl", "select", "signal", "weakref", "tqdm"),
    )
)
"""Rooms of whose objects only modules, containers and arrays are walked: those of several threads, of what is
outside of Python, of PyTorch, and of this package, whose own are at work while the model runs."""

LIBRARIES = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
"""Where code is that is not the user's."""

HEAP_TYPE = 1 << 9
"""Flag of a class that Python code made."""

LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Thread)

Content = list[tuple[Any, Any]]
"""What an object holds, as (key or position, value)."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How one kind of object is read and written. dot: its keys are attributes."""

    read: Callable[[Any], Content]
    write: Callable[[Any, Content], None]
    dot: bool = False


def room(item: Any) -> str:
    return str(getattr(item, "__module__", None) or "").partition(".")[0]


def kinds(item: Any) -> Iterator[tuple[Any, Kind]]:
    """What of an object can change: (what holds it, how)."""
    for kind, how in _CONTAINERS.items():
        if isinstance(item, kind):
            if not isinstance(item, Sized) or len(item) <= MOST_OBJECTS:
                yield item, how
            break
    if isinstance(item, type):
        if users_code(item):
            yield item, _CLASS
    elif isinstance(item, types.FunctionType):
        names = global_names(item.__code__) if users_code(item) else ()
        if names:
            read, write = functools.partial(_read_named, names), functools.partial(_write_named, names)
            yield item.__globals__, Kind(read, write, dot=True)
    elif is_array(item):
        if item.nbytes <= MOST_ARRAY_BYTES and item.flags.writeable and not item.dtype.hasobject:
            yield item, _ARRAY
    elif isinstance(item, nn.Module) or of_the_users(item):
        if isinstance(getattr(item, "__dict__", None), dict):
            yield item.__dict__, _ATTRIBUTES
        if any(_slots(type(item))):
            yield item, _SLOTS


def of_the_users(item: Any) -> bool:
    """An object of a class of Python's, of a room that is not left alone, which holds no lock."""
    kind = type(item)
    if not kind.__flags__ & HEAP_TYPE or room(kind) in LEFT_ALONE:
        return False
    table = getattr(item, "__dict__", {})
    return not any(isinstance(value, LOCKS) for value in list(table.values()))


def users_code(item: Any) -> bool:
    """Of a function or class: whether it is neither of a library nor of this package."""
    file = getattr(sys.modules.get(item.__module__), "__file__", None) or ""
    return room(item) not in LEFT_ALONE and not file.startswith(LIBRARIES)


def global_names(code: types.CodeType) -> tuple[str, ...]:
    inner = (global_names(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return tuple(dict.fromkeys((*code.co_names, *(name for names in inner for name in names))))


def _read_named(names: tuple[str, ...], table: dict[str, Any]) -> Content:
    return [(name, table[name]) for name in names if name in table]


def _write_named(names: tuple[str, ...], table: dict[str, Any], kept: Content) -> None:
    for name in names:
        table.pop(name, None)
    table.update(kept)


def _read_class(item: type) -> Content:
    """Its attributes that are no methods, properties or their like, nor Python's own."""
    return [
        (name, value)
        for name, value in vars(item).items()
        if not callable(value) and not hasattr(value, "__get__") and not name.startswith("__")
    ]


def _write_class(item: type, kept: Content) -> None:
    before = dict(kept)
    for name, _ in _read_class(item):
        if name not in before:
            delattr(item, name)
    for name, value in kept:
        if vars(item).get(name) is not value:
            setattr(item, name, value)


def is_array(item: Any) -> bool:
    return any(kind.__name__ == "ndarray" and room(kind) == "numpy" for kind in type(item).__mro__)


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        if "__slots__" in base.__dict__:  # of Python's own, whose members can be written
            members = base.__dict__.items()
            yield from (name for name, value in members if isinstance(value, types.MemberDescriptorType))


def _read_slots(item: Any) -> Content:
    found = []
    for name in _slots(type(item)):
        try:
            found.append((name, object.__getattribute__(item, name)))
        except AttributeError:  # nothing is in it
            continue
    return found


def _write_slots(item: Any, kept: Content) -> None:
    for name, _ in _read_slots(item):
        object.__delattr__(item, name)
    for name, value in kept:
        object.__setattr__(item, name, value)


def _mapping(kind: Any) -> Kind:
    def write(item: Any, kept: Content) -> None:
        kind.clear(item)
        for key, value in kept:
            kind.__setitem__(item, key, value)

    return Kind(lambda item: list(kind.items(item)), write)


def _collection(kind: Any, fill: Callable[[Any, Any], None]) -> Kind:
    def write(item: Any, kept: Content) -> None:
        kind.clear(item)
        fill(item, [value for _, value in kept])

    return Kind(lambda item: list(enumerate(kind.__iter__(item))), write)


def _read_cell(cell: types.CellType) -> Content:
    try:
        return [("", cell.cell_contents)]
    except ValueError:  # nothing is in it yet
        return []


def _write_cell(cell: types.CellType, kept: Content) -> None:
    if kept:
        cell.cell_contents = kept[0][1]
    else:
        del cell.cell_contents


def _write_array(item: Any, kept: Content) -> None:
    (base,) = (kind for kind in type(item).__mro__ if kind.__name__ == "ndarray")
    item[...] = base(item.shape, item.dtype, kept[0][1])


_ATTRIBUTES = replace(_mapping(dict), dot=True)
_CLASS = Kind(_read_class, _write_class, dot=True)
_SLOTS = Kind(_read_slots, _write_slots, dot=True)
_ARRAY = Kind(lambda array: [("", array.tobytes())], _write_array)
_CONTAINERS = {
    OrderedDict: _mapping(OrderedDict),
    dict: _mapping(dict),
    list: _collection(list, list.extend),
    set: replace(_collection(set, set.update), read=lambda item: [(None, x) for x in set.__iter__(item)]),
    deque: _collection(deque, deque.extend),
    bytearray: _collection(bytearray, bytearray.extend),
    types.CellType: Kind(_read_cell, _write_cell),
}
