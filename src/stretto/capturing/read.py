"""Which values of Python a forward reads: attributes, variables of closures, globals, items of containers.

    1. While the forward runs, reads of attributes of modules and of the user's objects are noted.
    2. From model and loss, what was read is walked: attributes that were noted; of functions the variables of
       their closures and the globals that they name, of dicts the items whose keys their code names.
    3. Values that the forward itself has changed are left out: `carried` proves that it does not need them.

Not noted: what code of libraries reads of globals, and what is read past an object of C.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from stretto.batch.constants import MISSING, ConstantsWatch, Path, part, shown, text
from stretto.capturing.equal import LayerCall
from stretto.capturing.state import (
    LEFT_ALONE,
    MOST_OBJECTS,
    global_names,
    of_library,
    of_the_users,
    users_code,
)

PYTORCHS = {
    *(name for name, value in vars(nn.Module).items() if not callable(value)),
    *(name for name in vars(nn.Module()) if name != "training"),
}
"""Attributes of all modules, which are no part of a forward."""


@dataclass(frozen=True, slots=True)
class _ReadValue:
    """A value that was read. below: whether the path begins at the model and is valid on any like it; owner:
    the dict or namespace that it is an item of."""

    path: Path
    get: Callable[[], Any]
    text: str
    below: bool
    owner: int | None = None


class Reads:
    """What the forward of a model and its loss read."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        self._model = model
        self._loss = loss
        self._read: set[tuple[int, str]] = set()
        self._after: set[tuple[Path, str]] | None = None

    @contextmanager
    def recording(self, objects: Iterable[Any], calls: Iterable[LayerCall] = ()) -> Iterator[None]:
        """Step 1, in the first run of the forward. objects: all that model and loss refer to; calls: of equal
        layers, known when the run ends."""
        if self._after is not None:
            yield
            return
        ids: set[int] = set()
        kinds: dict[type, None] = {}
        for item in (*self._model.modules(), *objects):
            if isinstance(item, nn.Module) or (not isinstance(item, type) and of_the_users(item)):
                ids.add(id(item))
                kinds[type(item)] = None
        with ExitStack() as undo:
            for kind in kinds:
                self._note(kind, ids, undo)
            yield
        self._repeat(calls)
        self._after = {(value.path, value.text) for value in self._walk()}

    @contextmanager
    def apart(self) -> Iterator[set[tuple[int, str]]]:
        """What is read within this context: (id of the object, attribute); empty but in the first run."""
        before = {*self._read}
        self._read.clear()
        within: set[tuple[int, str]] = set()
        try:
            yield within
        finally:
            within |= self._read
            self._read |= before

    def _note(self, kind: type, ids: set[int], undo: ExitStack) -> None:
        read = self._read
        plain: Any = kind.__getattribute__

        def noting(item: Any, name: str) -> Any:
            if id(item) in ids:
                read.add((id(item), name))
            return plain(item, name)

        own = "__getattribute__" in vars(kind)
        try:
            kind.__getattribute__ = noting  # type: ignore[method-assign, assignment]
        except TypeError:
            return  # a class of C's
        undo.callback(
            *((setattr, kind, "__getattribute__", plain) if own else (delattr, kind, "__getattribute__"))
        )

    def _repeat(self, calls: Iterable[LayerCall]) -> None:
        """Equal layers that did not run read what the one did that ran in their place."""
        modules = dict(self._model.named_modules())
        ran: dict[int, str] = {}
        by_object = self._by_object()
        for call in calls:
            first = ran.setdefault(call.kind, call.layer)
            if call.template:
                continue
            for name, module in modules[first].named_modules():
                other = modules[f"{call.layer}.{name}" if name else call.layer]
                self._read |= {(id(other), key) for key in by_object.get(id(module), ())}

    def _by_object(self) -> dict[int, list[str]]:
        result: dict[int, list[str]] = {}
        for at, name in self._read:
            result.setdefault(at, []).append(name)
        return result

    def kept(self) -> tuple[tuple[tuple[Path, str], ...], ConstantsWatch]:
        """Steps 2 and 3: values below the model by their paths, and a watch of all others."""
        after = self._after or set()
        values = [value for value in self._walk() if (value.path, value.text) in after]
        below = tuple((value.path, value.text) for value in values if value.below)
        return below, ConstantsWatch((shown(v.path), v.get, v.text) for v in values if not v.below)

    def _walk(self) -> list[_ReadValue]:
        """Step 2. Objects are kept while they are walked, so that no other gets the id of one."""
        by_object = self._by_object()
        result: dict[tuple[Path, int], _ReadValue] = {}
        named: set[Any] = set()
        seen: dict[int, Any] = {}
        left: deque[tuple[Path, Any, bool]] = deque([((), self._model, True), ((), self._loss, False)])
        while left and len(seen) < MOST_OBJECTS:
            path, item, below = left.popleft()
            if id(item) in seen or isinstance(item, Tensor):
                continue
            seen[id(item)] = item
            if isinstance(item, types.FunctionType):
                named.update(_named(item.__code__))
            for step, get, same_path in _parts(item, by_object.get(id(item), ())):
                value = get()
                if value is MISSING:
                    continue
                inner = () if step is None else (*path, step) if same_path else (step,)
                stays = below and same_path and step is not None
                known = text(value)
                if known is None:
                    left.append((inner, value, stays))
                elif inner:
                    owner = id(item) if isinstance(item, (dict, types.SimpleNamespace)) else None
                    result.setdefault((inner, id(item)), _ReadValue(inner, get, known, stays, owner))
        chosen = {
            v.owner for v in result.values() if v.owner is not None and _key(v.path) in named
        }  # those of which the code names some items
        return [v for v in result.values() if v.owner not in chosen or _key(v.path) in named]


Part = tuple[str | None, Callable[[], Any], bool]
"""Of an object: the step to it (None: a part of the same name), what reads it, and whether the object's path
goes on in it."""


def _parts(item: Any, read: Iterable[str]) -> Iterator[Part]:
    if isinstance(item, types.MethodType):
        yield from ((None, lambda: item.__self__, False), (None, lambda: item.__func__, False))
    elif isinstance(item, functools.partial):
        yield from (
            (None, functools.partial(getattr, item, name), False) for name in ("func", "args", "keywords")
        )
    elif isinstance(item, types.FunctionType):
        yield from _of_function(item)
    elif isinstance(item, dict):
        for key in list(item)[:MOST_OBJECTS]:
            if isinstance(key, (str, int)):
                yield f"[{key!r}", functools.partial(dict.get, item, key, MISSING), True
    elif isinstance(item, types.SimpleNamespace):
        yield from ((f".{name}", functools.partial(part, item, f".{name}"), True) for name in vars(item))
    elif isinstance(item, (list, tuple)):
        for at in range(min(len(item), MOST_OBJECTS)):
            yield f"[{at}", functools.partial(part, item, f"[{at}"), True
    else:
        if isinstance(item, nn.Module):
            yield from (
                (f".{name}", functools.partial(part, item, f".{name}"), True) for name in item._modules
            )
        for name in sorted({*read, "__call__"} - PYTORCHS):
            yield f".{name}", functools.partial(part, item, f".{name}"), True
            for kind in type(item).__mro__:
                method = vars(kind).get(name)
                if isinstance(method, types.FunctionType) and users_code(method):
                    yield None, functools.partial(getattr, kind, name), False


def _of_function(item: types.FunctionType) -> Iterator[Part]:
    if not users_code(item):
        return
    for name, cell in zip(item.__code__.co_freevars, item.__closure__ or (), strict=False):
        yield f".{name}", functools.partial(_of_cell, cell), False
    yield None, lambda: item.__defaults__ or (), False
    yield None, lambda: item.__kwdefaults__ or {}, False
    table, names = item.__globals__, global_names(item.__code__)
    for name in names:
        value = table.get(name, MISSING)
        if isinstance(value, types.ModuleType):
            file = getattr(value, "__file__", None) or ""
            if value.__name__.partition(".")[0] not in LEFT_ALONE and not of_library(file):
                for key in names:
                    yield f".{name}.{key}", functools.partial(vars(value).get, key, MISSING), False
        elif isinstance(value, type) and users_code(value):
            for key in names:
                if not hasattr(vars(value).get(key), "__get__"):
                    yield f".{name}.{key}", functools.partial(vars(value).get, key, MISSING), False
        elif value is not MISSING and not isinstance(value, type):
            yield f".{name}", functools.partial(table.get, name, MISSING), False


def _of_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it
        return MISSING


def _named(code: types.CodeType) -> Iterator[Any]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _named(constant)
        elif isinstance(constant, (str, int)):
            yield repr(constant)


def _key(path: Path) -> str:
    return path[-1][1:]
