"""Dataclasses as JSON data, and back, by the types of their fields: what typed files are made of.

    str, int, bool, None         themselves
    float                        a number, or one of the texts "inf", "-inf" and "nan"
    Literal, Enum                one of its values
    X | None, str | int          whichever it is
    tuple, list                  a list
    Mapping[str, X]              an object, its keys in order
    Mapping[tuple[K, L], X]      a list of [K, L, X], in the order of the keys
    dataclass                    an object that has every field (but those of UNWRITTEN, and those of
                                 WHERE_SET at their defaults), and no other key
    Annotated[X, Fits(...)]      X, of which not all values are allowed

A codec may have other forms for some types: a text, a row. Lists of dataclasses, and whatever contains them,
have an entry a line; all else is on one line. Reading trusts nothing: what is not of its form is a `Misfit`,
which knows its place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, IntEnum
from itertools import repeat
from keyword import iskeyword
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from stretto.errors import StrettoError, meant

T = TypeVar("T")

UNWRITTEN = {"unwritten": True}
"""Metadata of a field that files do not have; it has a default."""

WHERE_SET = {"unwritten": "default"}
"""Metadata of a field that files have where it is not at its default."""

MOST = 1e15
"""No time in microseconds (31 years) and no size in bytes of a step is longer; sums of them stay finite."""

SPECIAL_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
"""JSON has no word for these numbers; in the place of a number they are texts."""


class Misfit(Exception):  # noqa: N818 - it is a finding; users get an error that names the file
    """A value that is not of its form. `path` is its place, which grows as the error goes up."""

    def __init__(self, what: str, found: Any = ...) -> None:
        """With `found`, `what` is what was expected instead."""
        if found is not ...:
            try:
                shown = json.dumps(found)
            except RecursionError:
                shown = "what is nested too deeply"
            what = f"expected {what}, found {shown if len(shown) <= 60 else shown[:57] + '...'}"
        super().__init__(what)
        self.path = ""

    def within(self, key: str | int) -> Misfit:
        """The same, for what has the value under `key`."""
        named = isinstance(key, str) and key.isidentifier()
        self.path = (f".{key}" if named else f"[{json.dumps(key)}]") + self.path
        return self


class TextLayout(IntEnum):
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
    layout: TextLayout = TextLayout.WORD


@dataclass(frozen=True, slots=True)
class Fits:
    """In the annotation of a type: which of its values are allowed, and what that is in words."""

    test: Callable[[Any], bool]
    expected: str


Amount = Annotated[float, Fits(lambda value: 0.0 <= value <= MOST, f"a number from 0 to {MOST:.0e}")]
"""A time, a size, or a share of one."""

Finite = Annotated[float, Fits(lambda value: -MOST <= value <= MOST, f"a number up to {MOST:.0e}")]
"""A time that may be before another, or what is computed of times."""

Share = Annotated[float, Fits(lambda value: 0.0 <= value <= 1.0, "a share from 0 to 1")]
Natural = Annotated[int, Fits(lambda value: value >= 1, "an integer from 1")]

Keyword = Annotated[
    str, Fits(lambda name: name.isidentifier() and not iskeyword(name), "a keyword argument's name")
]
"""A word that becomes part of a generated function's source: nothing but a name is allowed."""


def checked(form: Form, fits: Fits) -> Form:
    """The form, of values that fit."""

    def read(value: Any) -> Any:
        result = form.read(value)
        if not fits.test(result):
            raise Misfit(fits.expected, value)
        return result

    return Form(read, form.write, form.layout)


def one_of(values: Mapping[Any, Any]) -> Form:
    """What is written as one of these texts, or numbers."""
    expected, kinds = " or ".join(map(str, values)), set(map(type, values))

    def read(value: Any) -> Any:
        if type(value) not in kinds or value not in values:
            raise Misfit(expected, value)
        return values[value]

    return Form(read, lambda value: getattr(value, "value", value))


def text(parse: Callable[[str], Any], layout: TextLayout = TextLayout.WORD) -> Form:
    """The form of things that `str` writes and `parse` reads; its ValueError becomes the message."""

    def read(value: Any) -> Any:
        word = WORDS[str].read(value)
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


def read_list(values: Any, readers: Iterable[Callable[[Any], Any]]) -> list[Any]:
    """A list's elements, each by its reader."""
    if type(values) is not list:
        raise Misfit("a list", values)
    results: list[Any] = []
    try:
        for read, value in zip(readers, values, strict=False):
            results.append(read(value))
    except Misfit as misfit:
        raise misfit.within(len(results)) from None
    return results


def read_members(value: Any, forms: Mapping[str, Form], optional: Collection[str] = ()) -> dict[str, Any]:
    """An object's members, each by its form. Refuses other keys, and demands those that are not optional."""
    if type(value) is not dict:
        raise Misfit("an object", value)
    if value.keys() != forms.keys():
        for key in value:
            if key not in forms:
                raise Misfit(f"unknown key {key!r}; {meant(key, forms)}known are: {', '.join(forms)}")
        for key in forms:
            if key not in value and key not in optional:
                raise Misfit(f"the key {key!r} is missing")
    results: dict[str, Any] = {}
    key = ""
    try:
        for key in value:
            results[key] = forms[key].read(value[key])
    except Misfit as misfit:
        raise misfit.within(key) from None
    return results


def rounded(digits: int) -> Form:
    """Floats with so many digits behind the point."""
    return Form(_read_float, lambda value: write_float(round(value, digits)))


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


def _itself(kind: type, expected: str) -> Form:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise Misfit(expected, value)
        return value

    return Form(read, lambda value: value)


WORDS: Mapping[Any, Form] = {
    str: _itself(str, "text"),
    int: _itself(int, "an integer"),
    bool: _itself(bool, "true or false"),
    NoneType: _itself(NoneType, "null"),
    float: Form(_read_float, write_float),
    Any: Form(lambda value: value, lambda value: value),
}


class LineList(list[Any]):
    """A list with an element a line."""


class LineObject(dict[str, Any]):
    """An object with a member a line."""


class Codec:
    """The forms of types. forms: of those that are not written as this module says."""

    def __init__(self, forms: Mapping[Any, Form] | None = None) -> None:
        self._forms: dict[Any, Form] = {**WORDS, **(forms or {})}

    def form(self, hint: Any) -> Form:
        """How values of that type are written. Raises TypeError where nothing says it."""
        if hint not in self._forms:
            self._forms[hint] = self._make(hint)
        return self._forms[hint]

    def row(self, kind: type, count: int, layout: TextLayout) -> None:
        """Write a dataclass as a list of its first `count` fields, and of an object of the others that are
        not at their defaults, if any."""
        forms = self._fields(kind)
        names, rest = list(forms)[:count], dict(list(forms.items())[count:])
        first = _fixed([forms[name] for name in names], f"[{', '.join(names)}] and perhaps an object")
        defaults = {f.name: f.default for f in fields(kind)}

        def read(value: Any) -> Any:
            extended = type(value) is list and len(value) == count + 1
            row = first.read(value[:count] if extended else value)
            try:
                others = read_members(value[count], rest, optional=rest) if extended else {}
            except Misfit as misfit:
                raise misfit.within(count) from None
            return _made(kind, *row, **others)

        def write(thing: Any) -> list[Any]:
            try:
                row: list[Any] = first.write([getattr(thing, name) for name in names])
            except StrettoError as error:
                raise StrettoError(f"{kind.__name__.lower()} {getattr(thing, names[0])}: {error}") from None
            others = {}
            for name, form in rest.items():
                value = getattr(thing, name)
                if value != defaults[name]:
                    others[name] = form.write(value)
            return [*row, others] if others else row

        self._forms[kind] = Form(read, write, layout)

    def _make(self, hint: Any) -> Form:
        origin, args = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return checked(self.form(args[0]), args[1])
        if origin in (Union, UnionType):
            return _either({kind: self.form(kind) for kind in args})
        if origin is tuple and args[1:] != (...,):
            return self._fixed(args)
        if origin in (tuple, list):
            return _sequence(origin, self.form(args[0]))
        if origin in (dict, Mapping) and get_origin(args[0]) is tuple:
            return _table(self._fixed((*get_args(args[0]), args[1])))
        if origin in (dict, Mapping):
            return _mapping(self.form(args[0]), self.form(args[1]))
        if origin is Literal:
            return one_of({value: value for value in args})
        if is_dataclass(hint):
            return self._object(hint)
        if isinstance(hint, type) and issubclass(hint, Enum):
            return one_of({one.value: one for one in hint})
        raise TypeError(f"no form is known for {hint}")

    def _fields(self, kind: Any) -> dict[str, Form]:
        hints = get_type_hints(kind, include_extras=True)
        return {f.name: self.form(hints[f.name]) for f in fields(kind) if f.init and f.metadata != UNWRITTEN}

    def _fixed(self, kinds: tuple[Any, ...]) -> Form:
        return _fixed([self.form(kind) for kind in kinds], f"a list of {len(kinds)}")

    def _object(self, kind: Any) -> Form:
        forms = self._fields(kind)
        sparse = {f.name: f.default for f in fields(kind) if f.metadata == WHERE_SET}
        block = any(form.layout is TextLayout.BLOCK for form in forms.values())
        owner = LineObject if block else dict

        def write(thing: Any) -> dict[str, Any]:
            values = ((name, form, getattr(thing, name)) for name, form in forms.items())
            return owner({n: form.write(v) for n, form, v in values if n not in sparse or v != sparse[n]})

        layout = TextLayout.BLOCK if block else TextLayout.ENTRY
        return Form(lambda value: _made(kind, **read_members(value, forms, sparse)), write, layout)


def _made(kind: Callable[..., T], /, *args: Any, **members: Any) -> T:
    """What a dataclass itself refuses is a misfit too."""
    try:
        return kind(*args, **members)
    except ValueError as error:
        raise Misfit(str(error)) from None


def _either(forms: Mapping[Any, Form]) -> Form:
    """By the type of the JSON value; what is of none is left to a type that is no word, or to a float."""
    other = next((form for kind, form in forms.items() if kind not in WORDS), forms.get(float))

    def form_of(value: Any) -> Form:
        form = forms.get(type(value), other)
        if form is None:
            raise Misfit(" or ".join(kind.__name__ for kind in forms), value)
        return form

    return Form(
        lambda value: form_of(value).read(value),
        lambda value: form_of(value).write(value),
        max(form.layout for form in forms.values()),
    )


def _fixed(forms: list[Form], expected: str) -> Form:
    readers = [form.read for form in forms]
    writers = [form.write for form in forms]

    def read(value: Any) -> tuple[Any, ...]:
        if type(value) is not list or len(value) != len(readers):
            raise Misfit(expected, value)
        return tuple(read_list(value, readers))

    return Form(read, lambda parts: [write(part) for write, part in zip(writers, parts, strict=True)])


def _sequence(kind: Callable[[Iterable[Any]], Any], element: Form) -> Form:
    read, write, several = element.read, element.write, element.layout is not TextLayout.WORD
    owner = LineList if several else list
    return Form(
        lambda value: kind(read_list(value, repeat(read))),
        lambda parts: owner([write(part) for part in parts]),
        TextLayout.BLOCK if several else TextLayout.ENTRY,
    )


def _mapping(keys: Form, values: Form) -> Form:
    def read(value: Any) -> Any:
        members = read_members(value, dict.fromkeys(value, values) if type(value) is dict else {})
        return {keys.read(key): part for key, part in members.items()}

    def write(mapping: Any) -> Any:
        return LineObject({keys.write(key): values.write(mapping[key]) for key in sorted(mapping)})

    return Form(read, write, TextLayout.BLOCK)


def _table(row: Form) -> Form:
    def read(rows: Any) -> Any:
        table: dict[Any, Any] = {}
        for at, (*key, part) in enumerate(read_list(rows, repeat(row.read))):
            if tuple(key) in table:
                raise Misfit(f"{', '.join(map(str, key))} is there twice; keep one of them").within(at)
            table[tuple(key)] = part
        return table

    def write(mapping: Any) -> Any:
        return LineList([row.write((*key, mapping[key])) for key in sorted(mapping)])

    return Form(read, write, TextLayout.BLOCK)
