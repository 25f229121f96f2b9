"""How values are written as JSON data and read back: words, numbers, texts, lists, and which are allowed.

Reading trusts nothing: what is not of its form is a `Misfit`, which knows its place. `files.codec` finds the
forms of dataclasses. Touches no other room.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from keyword import iskeyword
from types import NoneType
from typing import Annotated, Any

from stretto.errors import StrettoError, meant

MOST = 1e15
"""No time in microseconds (31 years) and no size in bytes of a step is longer; sums of them stay finite."""

SPECIAL_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
"""JSON has no word for these numbers; where a number stands they are texts."""


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
    """In the annotation of a type: which of its values are allowed, and what that is in words."""

    test: Callable[[Any], bool]
    expected: str


Amount = Annotated[float, Fits(lambda value: 0.0 <= value <= MOST, f"a number from 0 to {MOST:.0e}")]
"""A time, a size, or a share of one."""

Finite = Annotated[float, Fits(lambda value: -MOST <= value <= MOST, f"a number up to {MOST:.0e}")]
"""A time that may lie before another, or what is computed of times."""

Share = Annotated[float, Fits(lambda value: 0.0 <= value <= 1.0, "a share from 0 to 1")]
Natural = Annotated[int, Fits(lambda value: value >= 1, "a whole number from 1")]

Keyword = Annotated[
    str, Fits(lambda name: name.isidentifier() and not iskeyword(name), "a keyword argument's name")
]
"""What stands in the source of a function that is made of a file: nothing but a name may be one."""


def checked(form: Form, fits: Fits) -> Form:
    """The form, of values that fit."""

    def read(value: Any) -> Any:
        found = form.read(value)
        if not fits.test(found):
            raise Misfit(fits.expected, value)
        return found

    return Form(read, form.write, form.layout)


def one_of(values: Mapping[Any, Any]) -> Form:
    """What is written as one of these texts."""
    expected = " or ".join(map(str, values))

    def read(value: Any) -> Any:
        if type(value) is not str or value not in values:
            raise Misfit(expected, value)
        return values[value]

    return Form(read, lambda value: getattr(value, "value", value))


def text(parse: Callable[[str], Any], layout: Layout = Layout.WORD) -> Form:
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
    found: list[Any] = []
    try:
        for read, value in zip(readers, values, strict=False):
            found.append(read(value))
    except Misfit as misfit:
        raise misfit.within(len(found)) from None
    return found


def read_members(value: Any, forms: Mapping[str, Form], optional: bool = False) -> dict[str, Any]:
    """An object's members, each by its form. Refuses other keys, and demands all unless they are optional."""
    if type(value) is not dict:
        raise Misfit("an object", value)
    if value.keys() != forms.keys():
        for key in value:
            if key not in forms:
                raise Misfit(f"unknown key {key!r}; {meant(key, forms)}known are: {', '.join(forms)}")
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
    int: _itself(int, "a whole number"),
    bool: _itself(bool, "true or false"),
    NoneType: _itself(NoneType, "null"),
    float: Form(_read_float, write_float),
    Any: Form(lambda value: value, lambda value: value),
}
