"""What a model, and the code around it, keep in Python: taken down, compared, and put back.

    1. From the model and its loss, what they refer to is walked, the nearest first: attributes, containers,
       small arrays of NumPy, objects of Python classes, variables of closures; and of the user's own code the
       attributes of classes, and globals that its functions name.
    2. Of each object that can change, the content is taken down (the same objects, not copies). A `_Kind`
       reads an object as a list of (key, value), and puts such a list back into the same object.
    3. Each object with another content later gets its content back.

Left alone: globals and classes of libraries; iterators, files and objects of C; what several threads use;
larger arrays, and what is farther than `MOST_OBJECTS`.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

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
"""Packages of whose objects only modules, containers and arrays are walked: those of several threads, of what
is outside of Python, of PyTorch, and this one, whose own objects are at work while the model runs."""

LIBRARIES = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
INSTALLED = ("/site-packages/", "/dist-packages/")
"""In the paths of what is installed, into this environment or into one that it is made on."""

HEAP_TYPE = 1 << 9
"""Flag of a class that Python code made."""

LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Thread)

Content = list[tuple[Any, Any]]
"""Of an object, as (key or position, value)."""


@dataclass(frozen=True, slots=True)
class _Kind:
    read: Callable[[Any], Content]
    write: Callable[[Any, Content], None]
    dot: bool = False


@dataclass(slots=True)
class _KeptObject:
    path: str
    item: Any
    kind: _Kind
    content: Content
    table: bool = False

    def below(self, key: Any) -> str:
        """The path of what is under a key."""
        if self.path.endswith(("_modules", "_parameters", "_buffers")):
            return f"{self.path.rpartition('_')[0]}{key}"
        if self.kind.dot:
            return f"{self.path}.{key}" if self.path else str(key)
        return f"{self.path}[{key!r}]" if isinstance(key, (str, int)) and key != "" else self.path


class PythonState:
    """What roots refer to when this is made. roots: (the name that paths begin with, object)."""

    def __init__(self, *roots: tuple[str, Any]) -> None:
        self._roots = roots
        self._kept: list[_KeptObject] = []
        self._tables: set[int] = set()
        self._seen: dict[int, Any] = {}  # with the objects, so that no other gets the id of one
        self._paths: dict[int, str] = {}
        left: deque[tuple[str, Any]] = deque(roots)
        while left and len(self._seen) < MOST_OBJECTS:
            path, item = left.popleft()
            if not isinstance(item, SCALARS) and id(item) not in self._seen:
                self._seen[id(item)] = item
                if isinstance(item, Tensor):
                    self._paths[id(item)] = path
                left.extend(self._walk(path, item))

    def _walk(self, path: str, item: Any) -> Iterator[tuple[str, Any]]:
        """Step 1 for one object, and step 2."""
        if isinstance(item, (Tensor, types.ModuleType)):
            return
        if isinstance(item, nn.Module):
            self._tables.update(id(item.__dict__.get(name)) for name in ("_parameters", "_buffers"))
        if isinstance(item, nn.Module) or users_code(type(item)):
            yield type(item).__qualname__, type(item)
        if isinstance(item, (tuple, frozenset)):
            yield from ((f"{path}[{at}]", value) for at, value in enumerate(item))
        elif isinstance(item, types.MethodType):
            yield from ((path, item.__self__), (path, item.__func__))
        elif isinstance(item, functools.partial):
            yield from ((path, item.func), (path, item.args), (path, item.keywords))
        elif isinstance(item, types.FunctionType) and _package(item) not in ("stretto", "torch"):
            cells = zip(item.__code__.co_freevars, item.__closure__ or (), strict=False)
            yield from ((f"{path} {name}".strip(), cell) for name, cell in cells)
            yield from ((path, item.__dict__), (path, item.__defaults__), (path, item.__kwdefaults__))
        elif isinstance(item, type) and users_code(item):
            yield from (
                (path, value) for value in vars(item).values() if isinstance(value, types.FunctionType)
            )
            yield from ((base.__qualname__, base) for base in item.__bases__)
        for owner, kind in _kinds(item):
            if isinstance(item, types.FunctionType):
                path = item.__module__
            kept = _KeptObject(path, owner, kind, kind.read(owner), id(owner) in self._tables)
            self._kept.append(kept)
            yield from ((kept.below(key), v) for key, v in kept.content if not isinstance(v, SCALARS))

    def restore(self, *, running: bool = False, others: Mapping[int, Any] | None = None) -> None:
        """Step 3. running: parameters and buffers under the names that there were stay what they are, since
        the exporter puts tensors of its own there while it runs the model. others: what comes in the places
        of objects, by their ids; in tuples, too."""
        for kept in self._kept:
            now, content = kept.kind.read(kept.item), kept.content
            if others:
                content = [(key, _replaced(value, others)) for key, value in content]
            if running and kept.table:
                present = dict(now)
                content = [(key, present.get(key, value)) for key, value in content]
            if not _same(now, content):
                kept.kind.write(kept.item, content)

    def changes(self) -> list[str]:
        """The names of what is something else now; of parameters and buffers, those under new names."""
        names: dict[str, None] = {}
        for kept in self._kept:
            now = kept.kind.read(kept.item)
            before, after = dict(kept.content), dict(now) if kept.kind.dot or kept.table else {}
            if kept.table:
                keys = sorted(before.keys() ^ after.keys())
            elif _same(now, kept.content):
                continue
            elif kept.kind.dot:
                keys = [k for k in {**before, **after} if not _same_item(before, after, k)]
            else:
                names[kept.path] = None
                continue
            names.update((kept.below(key), None) for key in keys)
        return list(names)

    def objects(self) -> list[Any]:
        """All that roots refer to."""
        return list(self._seen.values())

    def again(self) -> PythonState:
        """What the same roots refer to now."""
        return PythonState(*self._roots)

    def tensors(self) -> dict[int, Tensor]:
        """All tensors besides parameters and buffers, by id."""
        own = {id(value) for kept in self._kept if kept.table for _, value in kept.content}
        return {key: item for key, item in self._seen.items() if isinstance(item, Tensor) and key not in own}

    def named_tensors(self) -> dict[str, Tensor]:
        """All tensors, parameters and buffers too, by the nearest path to each."""
        return {path: self._seen[key] for key, path in self._paths.items()}


def _same(now: Content, content: Content) -> bool:
    return len(now) == len(content) and all(
        _equal(a, x) and _equal(b, y) for (a, b), (x, y) in zip(now, content, strict=True)
    )


def _same_item(before: Mapping[Any, Any], after: Mapping[Any, Any], key: Any) -> bool:
    return key in before and key in after and _equal(before[key], after[key])


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, types.MethodType):
        return one.__self__ is other.__self__ and one.__func__ is other.__func__
    if type(one) is tuple:
        return len(one) == len(other) and all(map(_equal, one, other))
    return isinstance(one, SCALARS) and repr(one) == repr(other)


def _replaced(value: Any, others: Mapping[int, Any]) -> Any:
    if id(value) in others:
        return others[id(value)]
    if isinstance(value, tuple) and value:
        parts = [_replaced(item, others) for item in value]
        if any(new is not old for new, old in zip(parts, value, strict=True)):
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


# --- kinds of objects --------------------------------------------------------------------------------------


def _kinds(item: Any) -> Iterator[tuple[Any, _Kind]]:
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
            yield item.__globals__, _Kind(read, write, dot=True)
    elif any(kind.__name__ == "ndarray" and _package(kind) == "numpy" for kind in type(item).__mro__):
        if item.nbytes <= MOST_ARRAY_BYTES and item.flags.writeable and not item.dtype.hasobject:
            yield item, _ARRAY
    elif isinstance(item, nn.Module) or of_the_users(item):
        if isinstance(getattr(item, "__dict__", None), dict):
            yield item.__dict__, _ATTRIBUTES
        if any(_slots(type(item))):
            yield item, _SLOTS


def of_the_users(item: Any) -> bool:
    """Whether an object is of a Python class, of a package that is not left alone, and has no lock."""
    kind = type(item)
    if not kind.__flags__ & HEAP_TYPE or _package(kind) in LEFT_ALONE:
        return False
    table = getattr(item, "__dict__", {})
    return not any(isinstance(value, LOCKS) for value in list(table.values()))


def users_code(item: Any) -> bool:
    """Of a function or class: whether it is neither of a library nor of this package."""
    file = getattr(sys.modules.get(item.__module__), "__file__", None) or ""
    return _package(item) not in LEFT_ALONE and not of_library(file)


def of_library(file: str) -> bool:
    """Whether a file is installed, and no program of the user's."""
    return file.startswith(LIBRARIES) or any(part in file.replace(os.sep, "/") for part in INSTALLED)


def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The names that a function and the functions in it use, globals among them."""
    inner = (global_names(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return tuple(dict.fromkeys((*code.co_names, *(name for names in inner for name in names))))


def _package(item: Any) -> str:
    return str(getattr(item, "__module__", None) or "").partition(".")[0]


def _read_named(names: tuple[str, ...], table: dict[str, Any]) -> Content:
    return [(name, table[name]) for name in names if name in table]


def _write_named(names: tuple[str, ...], table: dict[str, Any], content: Content) -> None:
    for name in names:
        table.pop(name, None)
    table.update(content)


def _read_class(item: type) -> Content:
    """Its attributes that are no methods, properties or their like, nor Python's own."""
    return [
        (name, value)
        for name, value in vars(item).items()
        if not callable(value) and not hasattr(value, "__get__") and not name.startswith("__")
    ]


def _write_class(item: type, content: Content) -> None:
    before = dict(content)
    for name, _ in _read_class(item):
        if name not in before:
            delattr(item, name)
    for name, value in content:
        if vars(item).get(name) is not value:
            setattr(item, name, value)


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        if "__slots__" in base.__dict__:  # of Python's own, whose members can be written
            members = base.__dict__.items()
            yield from (name for name, value in members if isinstance(value, types.MemberDescriptorType))


def _read_slots(item: Any) -> Content:
    content = []
    for name in _slots(type(item)):
        try:
            content.append((name, object.__getattribute__(item, name)))
        except AttributeError:  # nothing is in it
            continue
    return content


def _write_slots(item: Any, content: Content) -> None:
    for name, _ in _read_slots(item):
        object.__delattr__(item, name)
    for name, value in content:
        object.__setattr__(item, name, value)


def _mapping(kind: Any) -> _Kind:
    def write(item: Any, content: Content) -> None:
        kind.clear(item)
        for key, value in content:
            kind.__setitem__(item, key, value)

    return _Kind(lambda item: list(kind.items(item)), write)


def _collection(kind: Any, fill: Callable[[Any, Any], None]) -> _Kind:
    def write(item: Any, content: Content) -> None:
        kind.clear(item)
        fill(item, [value for _, value in content])

    return _Kind(lambda item: list(enumerate(kind.__iter__(item))), write)


def _read_cell(cell: types.CellType) -> Content:
    try:
        return [("", cell.cell_contents)]
    except ValueError:  # nothing is in it yet
        return []


def _write_cell(cell: types.CellType, content: Content) -> None:
    if content:
        cell.cell_contents = content[0][1]
    else:
        del cell.cell_contents


def _write_array(item: Any, content: Content) -> None:
    (base,) = (kind for kind in type(item).__mro__ if kind.__name__ == "ndarray")
    item[...] = base(item.shape, item.dtype, content[0][1])


_ATTRIBUTES = replace(_mapping(dict), dot=True)
_CLASS = _Kind(_read_class, _write_class, dot=True)
_SLOTS = _Kind(_read_slots, _write_slots, dot=True)
_ARRAY = _Kind(lambda array: [("", array.tobytes())], _write_array)
_CONTAINERS = {
    OrderedDict: _mapping(OrderedDict),
    dict: _mapping(dict),
    list: _collection(list, list.extend),
    set: replace(_collection(set, set.update), read=lambda item: [(None, x) for x in set.__iter__(item)]),
    deque: _collection(deque, deque.extend),
    bytearray: _collection(bytearray, bytearray.extend),
    types.CellType: _Kind(_read_cell, _write_cell),
}
