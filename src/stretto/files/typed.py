"""Dataclasses as JSON data, and back: what all files that programs write are made of (`files.typed_file`).

The type hint of a field says how its value is written:

    str, int, bool, None         themselves
    float                        a number; JSON has none for the texts "inf", "-inf" and "nan"
    Literal, Enum                one of its values
    X | None, str | int          whichever it is
    tuple, list                  a list
    Mapping[str, X]              an object, its keys in order
    Mapping[tuple[K, L], X]      a list of [K, L, X], in the order of the keys
    dataclass                    an object that has every field (but those of UNWRITTEN), and no other key
    Annotated[X, Fits(...)]      X, of which not all values are allowed

A `Codec` has forms of its own for further types: a text, a row. Lists of dataclasses, and whatever holds them,
have an entry a line; all else is on one line.

Reading trusts nothing: what is not of its type's form is a Misfit, which knows its place. Touches no other room.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, IntEnum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from stretto.errors import StrettoError

T = TypeVar("T")

MOST = 1e15
"""No time in microseconds (31 years) and no size in bytes of a step is longer; sums of them stay finite."""

SPECIAL_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
"""JSON has no word for these numbers; where a number stands they are texts."""

UNWRITTEN = {"unwritten": True}
"""Metadata of a field that files do not have; it has a default."""


class Misfit(Exception):
    """A value that is not of its type's form. `path` is its place, which grows as the error goes up."""

    def __init__(self, what: str, found: Any = ...) -> None:
        if found is not ...:
            try:
                shown = json.dumps(found)
            except RecursionError:
                shown = "what is nested too deeply"
            what = f"expected {what}, found {shown if len(shown) <= 60 else shown[:57] + '...'}"
        super().__init__(what)
        self.path = ""

    def within(self, key: str | int) -> Misfit:
        """The same, of what holds the value under `key`."""
        named = isinstance(key, str) and key.isidentifier()
        self.path = (f".{key}" if named else f"[{json.dumps(key)}]") + self.path
        return self


class Layout(IntEnum):
    """How much of the text a form takes. WORD: part of a line. ENTRY: in a list, a line. BLOCK: lines."""

    WORD = 0
    ENTRY = 1
    BLOCK = 2


@dataclass(frozen=True, slots=True)
class Form:
    """How values of a type are written. read: from JSON data, raises Misfit; write: to JSON data, raises
    StrettoError for what has no form."""

    read: Callable[[Any], Any]
    write: Callable[[Any], Any]
    layout: Layout = Layout.WORD


@dataclass(frozen=True, slots=True)
class Fits:
    """Which values of a type are allowed, and what that is in words, for the message."""

    test: Callable[[Any], bool]
    expected: str


Amount = Annotated[float, Fits(lambda value: 0.0 <= value <= MOST, f"a number from 0 to {MOST:.0e}")]
"""A time, a size, or a share of one."""

Share = Annotated[float, Fits(lambda value: 0.0 <= value <= 1.0, "a share from 0 to 1")]
Natural = Annotated[int, Fits(lambda value: value >= 1, "a whole number from 1")]


class Lines(list[Any]):
    """A list with an element a line."""


class Members(dict[str, Any]):
    """An object with a member a line."""


def text(parse: Callable[[str], Any], layout: Layout = Layout.WORD) -> Form:
    """The form of things that `str` writes and `parse` reads; its ValueError becomes the message."""

    def read(value: Any) -> Any:
        word = _WORDS[str].read(value)
        try:
            return parse(word)
        except ValueError as error:
            raise Misfit(f"cannot read {word!r}: {error}") from None

    def write(thing: Any) -> str:
        word = str(thing)
        try:
            if parse(word) == thing:
                return word
        except ValueError:
            pass
        raise StrettoError(f"{thing!r} has no text form that reads back; rename it without spaces and '#'")

    return Form(read, write, layout)


def each(values: Any, read: Callable[[Any], Any]) -> list[Any]:
    """A list's elements, each read."""
    if type(values) is not list:
        raise Misfit("a list", values)
    found: list[Any] = []
    try:
        for value in values:
            found.append(read(value))
    except Misfit as misfit:
        raise misfit.within(len(found)) from None
    return found


def _members(value: Any, forms: Mapping[str, Form], optional: bool = False) -> dict[str, Any]:
    if type(value) is not dict:
        raise Misfit("an object", value)
    if value.keys() != forms.keys():
        for key in value:
            if key not in forms:
                raise Misfit(f"unknown key {key!r}; known are: {', '.join(forms)}")
        for key in () if optional else forms:
            if key not in value:
                raise Misfit(f"the key {key!r} is missing")
    found: dict[str, Any] = {}
    key = ""
    try:
        for key in value:
            found[key] = forms[key].read(value[key])
    except Misfit as misfit:
        raise misfit.within(key) from None
    return found


def _made(kind: Callable[..., T], /, *args: Any, **members: Any) -> T:
    """What a dataclass itself refuses is a misfit too."""
    try:
        return kind(*args, **members)
    except ValueError as error:
        raise Misfit(str(error)) from None


def _scalar(kind: type, expected: str) -> Form:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise Misfit(expected, value)
        return value

    return Form(read, lambda value: value)


def _read_float(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value)
    if type(value) is str and value in SPECIAL_FLOATS:
        return SPECIAL_FLOATS[value]
    raise Misfit('a number, or "inf", "-inf" or "nan"', value)


def write_float(value: float) -> float | str:
    """A float as JSON has it."""
    return float(value) if math.isfinite(value) else str(float(value))


def rounded(digits: int) -> Form:
    """Floats with so many digits behind the point."""
    return Form(_read_float, lambda value: write_float(round(value, digits)))


_WORDS: Mapping[Any, Form] = {
    str: _scalar(str, "text"),
    int: _scalar(int, "a whole number"),
    bool: _scalar(bool, "true or false"),
    NoneType: _scalar(NoneType, "null"),
    float: Form(_read_float, write_float),
    Any: Form(lambda value: value, lambda value: value),
}


class Codec:
    """Reads and writes values by their type hints. forms: of types that have another form than theirs."""

    def __init__(self, forms: Mapping[Any, Form] | None = None) -> None:
        self._forms: dict[Any, Form] = {**_WORDS, **(forms or {})}

    def form(self, hint: Any) -> Form:
        """How values of that type are written. Raises TypeError where nothing says it."""
        if hint not in self._forms:
            self._forms[hint] = self._make(hint)
        return self._forms[hint]

    def row(self, kind: type, count: int, layout: Layout) -> None:
        """Write a dataclass as a list of its first `count` fields, and of an object of the others that are
        not at their defaults, if any."""
        forms = self._fields(kind)
        names, places, rest = tuple(forms), tuple(forms.values())[:count], dict(list(forms.items())[count:])
        defaults = {f.name: f.default for f in fields(kind)}
        shown = f"[{', '.join(names[:count])}] and perhaps an object of {', '.join(rest)}"

        def read(value: Any) -> Any:
            if type(value) is not list or len(value) not in (count, count + 1):
                raise Misfit(shown, value)
            form = iter(places)
            found = each(value[:count], lambda part: next(form).read(part))
            try:
                others = _members(value[count], rest, optional=True) if len(value) > count else {}
            except Misfit as misfit:
                raise misfit.within(count) from None
            return _made(kind, *found, **others)

        def write(thing: Any) -> list[Any]:
            try:
                found = [form.write(getattr(thing, name)) for name, form in zip(names, places, strict=False)]
            except StrettoError as error:
                raise StrettoError(f"{kind.__name__.lower()} {getattr(thing, names[0])}: {error}") from None
            others = {name: (getattr(thing, name), form) for name, form in rest.items()}
            extra = {
                name: form.write(value) for name, (value, form) in others.items() if value != defaults[name]
            }
            return [*found, extra] if extra else found

        self._forms[kind] = Form(read, write, layout)

    def _make(self, hint: Any) -> Form:
        origin, args = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return self._checked(self.form(args[0]), args[1])
        if origin in (Union, UnionType):
            return self._either(args)
        if origin is tuple and args[1:] != (...,):
            return self._tuple(args)
        if origin in (tuple, list):
            return self._sequence(origin, self.form(args[0]))
        if origin in (dict, Mapping) and get_origin(args[0]) is tuple:
            return self._table(get_args(args[0]), args[1])
        if origin in (dict, Mapping):
            return self._mapping(self.form(args[0]), self.form(args[1]))
        if origin is Literal:
            return _one_of({value: value for value in args})
        if is_dataclass(hint):
            return self._object(hint)
        if isinstance(hint, type) and issubclass(hint, Enum):
            return _one_of({one.value: one for one in hint})
        raise TypeError(f"no form is known for {hint}")

    def _fields(self, kind: Any) -> dict[str, Form]:
        hints = get_type_hints(kind, include_extras=True)
        written = (f.name for f in fields(kind) if f.init and f.metadata != UNWRITTEN)
        return {name: self.form(hints[name]) for name in written}

    def _object(self, kind: Any) -> Form:
        forms = self._fields(kind)
        block = any(form.layout is Layout.BLOCK for form in forms.values())
        holder = Members if block else dict

        def write(thing: Any) -> dict[str, Any]:
            return holder({name: form.write(getattr(thing, name)) for name, form in forms.items()})

        layout = Layout.BLOCK if block else Layout.ENTRY
        return Form(lambda value: _made(kind, **_members(value, forms)), write, layout)

    def _checked(self, form: Form, fits: Fits) -> Form:
        def read(value: Any) -> Any:
            found = form.read(value)
            if not fits.test(found):
                raise Misfit(fits.expected, value)
            return found

        return Form(read, form.write, form.layout)

    def _either(self, kinds: Iterable[Any]) -> Form:
        """By the type of the JSON value, of which each member has its own; but a float's may be others."""
        forms = {kind: self.form(kind) for kind in kinds}
        other = next((form for kind, form in forms.items() if kind not in _WORDS), forms.get(float))

        def read(value: Any) -> Any:
            form = forms.get(type(value), other)
            if form is None:
                raise Misfit(" or ".join(kind.__name__ for kind in forms), value)
            return form.read(value)

        def write(value: Any) -> Any:
            form = forms.get(type(value), other)
            assert form is not None
            return form.write(value)

        return Form(read, write, max(form.layout for form in forms.values()))

    def _tuple(self, kinds: tuple[Any, ...]) -> Form:
        forms = [self.form(kind) for kind in kinds]
        shown = f"a list of {len(forms)}"

        def read(value: Any) -> Any:
            if type(value) is not list or len(value) != len(forms):
                raise Misfit(shown, value)
            form = iter(forms)
            return tuple(each(value, lambda part: next(form).read(part)))

        return Form(read, lambda parts: [form.write(part) for form, part in zip(forms, parts, strict=True)])

    def _sequence(self, kind: Callable[[list[Any]], Any], element: Form) -> Form:
        holder = Lines if element.layout else list
        return Form(
            lambda value: kind(each(value, element.read)),
            lambda parts: holder([element.write(part) for part in parts]),
            Layout.BLOCK if element.layout else Layout.ENTRY,
        )

    def _mapping(self, keys: Form, values: Form) -> Form:
        def read(value: Any) -> Any:
            found = _members(value, dict.fromkeys(value, values) if type(value) is dict else {})
            return {keys.read(key): part for key, part in found.items()}

        return Form(
            read,
            lambda found: Members({keys.write(key): values.write(found[key]) for key in sorted(found)}),
            Layout.BLOCK,
        )

    def _table(self, keys: tuple[Any, ...], value: Any) -> Form:
        row = self._tuple((*keys, value))

        def read(rows: Any) -> Any:
            found: dict[Any, Any] = {}
            for at, (*key, part) in enumerate(each(rows, row.read)):
                if tuple(key) in found:
                    raise Misfit(f"{', '.join(map(str, key))} is there twice; keep one of them").within(at)
                found[tuple(key)] = part
            return found

        return Form(
            read, lambda found: Lines([row.write((*key, found[key])) for key in sorted(found)]), Layout.BLOCK
        )


def _one_of(values: Mapping[Any, Any]) -> Form:
    words = [str(value) for value in values]
    expected = " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)

    def read(value: Any) -> Any:
        if type(value) is not str or value not in values:
            raise Misfit(expected, value)
        return values[value]

    return Form(read, lambda value: getattr(value, "value", value))
