"""What a model, and the code around it, keep in Python: taken down, compared, and put back.

A forward may leave anything behind: a tensor of its last call in an attribute, an item in a list, a counter.
While it is captured these are tensors without values, of a call that never was; so all is put back.

    1. From the model and its loss, all is walked that they hold: attributes, lists, dicts, sets, deques,
       small arrays of NumPy, objects of Python classes, variables of closures.
    2. Of each that can change, what it holds now is taken down (not copied: the same objects).
    3. Each that holds something else later is given back what it held.

Left alone: globals and attributes of classes; iterators, files and objects of C; what several threads use (it
holds a lock, or is of `threading`, `queue`, `logging` and their like); larger arrays of NumPy. Values of
parameters and buffers are for `torch_adapter.fake_state`. Touches no private corner of PyTorch.
"""

from __future__ import annotations

import functools
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MOST_ARRAY_BYTES = 1 << 20
"""Arrays of NumPy above this are left alone. Assumed: statistics are smaller, data sets are larger."""

SCALARS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range)

LEFT_ALONE = frozenset(
    (
        *("builtins", "functools", "itertools", "re", "torch", "stretto", "numpy"),
        *(
            "threading",
            "_thread",
            "queue",
            "logging",
            "multiprocessing",
            "concurrent",
            "asyncio",
            "contextvars",
        ),
        *("socket", "subprocess", "io", "_io", "ssl", "select", "signal", "weakref", "_weakref", "tqdm"),
    )
)
"""Rooms of whose objects only modules, containers and arrays are walked: those of several threads, of what is
outside of Python, of PyTorch, and of this package, whose own are at work while the model runs."""

HEAP_TYPE = 1 << 9
"""Flag of a class that Python code made."""

LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Thread)

Content = list[tuple[Any, Any]]
"""What an object holds, as (key or position, value)."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """How one kind of object is read and written. dot: its keys are attributes."""

    read: Callable[[Any], Content]
    write: Callable[[Any, Content], None]
    dot: bool = False


@dataclass(slots=True)
class _Held:
    """Step 2 of one object. table: it is one of parameters or of buffers."""

    path: str
    item: Any
    kind: _Kind
    kept: Content
    table: bool = False


class State:
    """What roots hold at the time when this is made. roots: (the name that paths begin with, object)."""

    def __init__(self, *roots: tuple[str, Any]) -> None:
        self._roots = roots
        self._held: list[_Held] = []
        self._tables: set[int] = set()
        self._seen: dict[int, Any] = {}  # with the objects, so that no other gets the id of one
        left: deque[tuple[str, Any]] = deque(roots)
        while left:
            path, item = left.popleft()
            if not isinstance(item, SCALARS) and id(item) not in self._seen:
                self._seen[id(item)] = item
                left.extend(self._walk(path, item))

    def _walk(self, path: str, item: Any) -> Iterator[tuple[str, Any]]:
        """Step 1 for one object, and step 2: what it holds."""
        if isinstance(item, (Tensor, type, types.ModuleType)):
            return
        if isinstance(item, nn.Module):
            self._tables.update(id(item.__dict__.get(name)) for name in ("_parameters", "_buffers"))
        if isinstance(item, (tuple, frozenset)):
            yield from ((f"{path}[{at}]", value) for at, value in enumerate(item))
        elif isinstance(item, types.MethodType):
            yield from ((path, item.__self__), (path, item.__func__))
        elif isinstance(item, functools.partial):
            yield from ((path, item.func), (path, item.args), (path, item.keywords))
        elif isinstance(item, types.FunctionType) and _room(item) not in ("stretto", "torch"):
            cells = zip(item.__code__.co_freevars, item.__closure__ or (), strict=False)
            yield from ((f"{path} {name}".strip(), cell) for name, cell in cells)
            yield from ((path, item.__dict__), (path, item.__defaults__), (path, item.__kwdefaults__))
        for holder, kind in _kinds(item):
            held = _Held(path, holder, kind, kind.read(holder), id(holder) in self._tables)
            self._held.append(held)
            yield from ((_below(held, key), v) for key, v in held.kept if not isinstance(v, SCALARS))

    def restore(self, *, running: bool = False, others: Mapping[int, Any] | None = None) -> None:
        """Step 3. running: parameters and buffers under the names that there were stay what they are, since
        the exporter puts tensors of its own there while it runs the model. others: what stands in the places
        of objects, by their ids; in tuples, too."""
        for held in self._held:
            now, kept = held.kind.read(held.item), held.kept
            if others:
                kept = [(key, _replaced(value, others)) for key, value in kept]
            if running and held.table:
                present = dict(now)
                kept = [(key, present.get(key, value)) for key, value in kept]
            if not _same(now, kept):
                held.kind.write(held.item, kept)

    def changes(self) -> list[str]:
        """The names of what holds something else now; of parameters and buffers, those under new names."""
        found: dict[str, None] = {}
        for held in self._held:
            now = held.kind.read(held.item)
            if held.table:
                gone = {key for key, _ in now} ^ {key for key, _ in held.kept}
                found.update((_below(held, key), None) for key in sorted(gone))
            elif not _same(now, held.kept):
                if held.kind.dot:
                    before, after = dict(held.kept), dict(now)
                    keys = [key for key in {**before, **after} if not _equal_at(before, after, key)]
                    found.update((_below(held, key), None) for key in keys)
                else:
                    found[held.path] = None
        return list(found)

    def again(self) -> State:
        """What the same roots hold now."""
        return State(*self._roots)

    def tensors(self) -> dict[int, Tensor]:
        """All tensors that are held beside parameters and buffers, by id."""
        own = {id(value) for held in self._held if held.table for _, value in held.kept}
        found = {id(item): item for item in self._seen.values() if isinstance(item, Tensor)}
        return {key: item for key, item in found.items() if key not in own}


def _below(held: _Held, key: Any) -> str:
    if held.path.endswith(("_modules", "_parameters", "_buffers")):
        return f"{held.path.rpartition('_')[0]}{key}"
    if held.kind.dot:
        return f"{held.path}.{key}" if held.path else str(key)
    return f"{held.path}[{key!r}]" if isinstance(key, (str, int)) else held.path


def _room(item: Any) -> str:
    return str(getattr(item, "__module__", None) or "").partition(".")[0]


def _kinds(item: Any) -> Iterator[tuple[Any, _Kind]]:
    """What of an object can change: (what holds it, how)."""
    for kind, how in _CONTAINERS.items():
        if isinstance(item, kind):
            yield item, how
            break
    if _is_array(item):
        if item.nbytes <= MOST_ARRAY_BYTES and item.flags.writeable and not item.dtype.hasobject:
            yield item, _ARRAY
    elif isinstance(item, nn.Module) or _of_the_users(item):
        if isinstance(getattr(item, "__dict__", None), dict):
            yield item.__dict__, _ATTRIBUTES
        if any(_slots(type(item))):
            yield item, _SLOTS


def _of_the_users(item: Any) -> bool:
    """An object of a class of Python's, of a room that is not left alone, which holds no lock."""
    kind = type(item)
    if not kind.__flags__ & HEAP_TYPE or _room(kind) in LEFT_ALONE:
        return False
    table = getattr(item, "__dict__", {})
    return not any(isinstance(value, LOCKS) for value in list(table.values()))


def _is_array(item: Any) -> bool:
    return any(kind.__name__ == "ndarray" and _room(kind) == "numpy" for kind in type(item).__mro__)


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


def _write_dict(item: dict[Any, Any], kept: Content) -> None:
    dict.clear(item)
    dict.update(item, kept)


def _write_ordered(item: OrderedDict[Any, Any], kept: Content) -> None:
    OrderedDict.clear(item)
    for key, value in kept:
        OrderedDict.__setitem__(item, key, value)


def _write_list(item: list[Any], kept: Content) -> None:
    list.__setitem__(item, slice(None), [value for _, value in kept])


def _write_set(item: set[Any], kept: Content) -> None:
    set.clear(item)
    set.update(item, [value for _, value in kept])


def _write_deque(item: deque[Any], kept: Content) -> None:
    deque.clear(item)
    deque.extend(item, [value for _, value in kept])


def _write_bytes(item: bytearray, kept: Content) -> None:
    item[:] = kept[0][1]


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


_ATTRIBUTES = _Kind(lambda table: list(table.items()), _write_dict, dot=True)
_SLOTS = _Kind(_read_slots, _write_slots, dot=True)
_ARRAY = _Kind(lambda array: [("", array.tobytes())], _write_array)
_CONTAINERS = {
    OrderedDict: _Kind(lambda item: list(OrderedDict.items(item)), _write_ordered),
    dict: _Kind(lambda item: list(dict.items(item)), _write_dict),
    list: _Kind(lambda item: list(enumerate(list.__iter__(item))), _write_list),
    set: _Kind(lambda item: [(None, value) for value in set.__iter__(item)], _write_set),
    deque: _Kind(lambda item: list(enumerate(deque.__iter__(item))), _write_deque),
    bytearray: _Kind(lambda item: [("", bytes(item))], _write_bytes),
    types.CellType: _Kind(_read_cell, _write_cell),
}


def _same(now: Content, kept: Content) -> bool:
    return len(now) == len(kept) and all(
        _equal(a, x) and _equal(b, y) for (a, b), (x, y) in zip(now, kept, strict=True)
    )


def _equal(one: Any, other: Any) -> bool:
    """The same object, or one that nothing tells from it."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, types.MethodType):
        return one.__self__ is other.__self__ and one.__func__ is other.__func__
    if type(one) is tuple:
        return len(one) == len(other) and all(map(_equal, one, other))
    return isinstance(one, SCALARS) and repr(one) == repr(other)


def _equal_at(before: Mapping[Any, Any], after: Mapping[Any, Any], key: Any) -> bool:
    return key in before and key in after and _equal(before[key], after[key])


def _replaced(value: Any, others: Mapping[int, Any]) -> Any:
    if id(value) in others:
        return others[id(value)]
    if isinstance(value, tuple) and value:
        parts = [_replaced(item, others) for item in value]
        if any(new is not old for new, old in zip(parts, value, strict=True)):
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
