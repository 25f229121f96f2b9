"""What a model, and the code around it, keep in Python: taken down, compared, and put back.

A forward may leave anything behind: a tensor of its last call in an attribute, an item in a list, a counter.
While it is captured these are tensors without values, of a call that never was; so all is put back.

    1. From the model and its loss, all is walked that they hold, what is nearest first: attributes, lists,
       dicts, sets, deques, small arrays of NumPy, objects of Python classes, variables of closures; and of
       the user's own code the attributes of classes, and globals that its functions name.
    2. Of each that can change, what it holds now is taken down (not copied: the same objects).
    3. Each that holds something else later is given back what it held.

Left alone: globals and classes of libraries; iterators, files and objects of C; what several threads use (it
holds a lock, or is of `threading`, `queue`, `logging` and their like); larger arrays of NumPy, and what is
farther than `MOST_OBJECTS`. Values of parameters and buffers are for `torch_adapter.fake_state`. Touches no
private corner of PyTorch.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from stretto.capturing.state_kinds import MOST_OBJECTS, SCALARS, Content, Kind, kinds, room, users_code


@dataclass(slots=True)
class _Held:
    """Step 2 of one object. table: it is one of parameters or of buffers."""

    path: str
    item: Any
    kind: Kind
    kept: Content
    table: bool = False


class State:
    """What roots hold at the time when this is made. roots: (the name that paths begin with, object)."""

    def __init__(self, *roots: tuple[str, Any]) -> None:
        self._roots = roots
        self._held: list[_Held] = []
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
        """Step 1 for one object, and step 2: what it holds."""
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
        elif isinstance(item, types.FunctionType) and room(item) not in ("stretto", "torch"):
            cells = zip(item.__code__.co_freevars, item.__closure__ or (), strict=False)
            yield from ((f"{path} {name}".strip(), cell) for name, cell in cells)
            yield from ((path, item.__dict__), (path, item.__defaults__), (path, item.__kwdefaults__))
        elif isinstance(item, type) and users_code(item):
            yield from (
                (path, value) for value in vars(item).values() if isinstance(value, types.FunctionType)
            )
            yield from ((base.__qualname__, base) for base in item.__bases__)
        for holder, kind in kinds(item):
            if isinstance(item, types.FunctionType):
                path = item.__module__
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

    def objects(self) -> list[Any]:
        """All that is held."""
        return list(self._seen.values())

    def again(self) -> State:
        """What the same roots hold now."""
        return State(*self._roots)

    def tensors(self) -> dict[int, Tensor]:
        """All tensors that are held beside parameters and buffers, by id."""
        own = {id(value) for held in self._held if held.table for _, value in held.kept}
        found = {id(item): item for item in self._seen.values() if isinstance(item, Tensor)}
        return {key: item for key, item in found.items() if key not in own}

    def named_tensors(self) -> dict[str, Tensor]:
        """All tensors that are held, parameters and buffers too, by where they are held first."""
        return {path: self._seen[key] for key, path in self._paths.items()}


def _below(held: _Held, key: Any) -> str:
    if held.path.endswith(("_modules", "_parameters", "_buffers")):
        return f"{held.path.rpartition('_')[0]}{key}"
    if held.kind.dot:
        return f"{held.path}.{key}" if held.path else str(key)
    return f"{held.path}[{key!r}]" if isinstance(key, (str, int)) and key != "" else held.path


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
