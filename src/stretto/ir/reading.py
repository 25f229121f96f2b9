"""Reading JSON that people may have edited: every trouble is one message with the file and the JSON path.

A `Cursor` is a place in the document. It hands out typed values and other cursors, and raises UsageError
such as `plan.json: orders[1][17]: expected text, found 3`. Knows nothing of plans; touches no other room.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from stretto.errors import UsageError
from stretto.files.parse import parse_json

T = TypeVar("T")

MOST = 1e15
"""No time in microseconds (31 years) and no size in bytes of a step is longer; sums of them stay finite."""

SPECIAL_FLOATS = ("inf", "-inf", "nan")
"""JSON has no word for these numbers; where a number stands they are written as text."""


def read_json(text: str, where: str) -> Cursor:
    """The document's root. Raises UsageError with line and column if the text is not JSON, and for an
    object that has a key twice (JSON readers would drop one in silence)."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise UsageError(f"{where}: an object has the key {twice!r} twice; keep one of them")
        return found

    def constant(word: str) -> NoReturn:
        raise UsageError(f'{where}: {word} is not JSON; write infinite numbers as text, for example "inf"')

    try:
        value = parse_json(text, object_pairs_hook=unique, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{where}, line {error.lineno}, column {error.colno}: not JSON ({error.msg}). "
            "Write the file again, or mend that place"
        ) from None
    except ValueError as error:
        raise UsageError(f"{where}: not readable as JSON ({error})") from None
    return Cursor(value, "", where)


@dataclass(frozen=True, slots=True)
class Cursor:
    """A value of the document, and where it stands: `path` such as `orders[1][17]` in the file `where`."""

    value: Any
    path: str
    where: str

    def error(self, what: str) -> UsageError:
        """The error that names the file and the path; for the caller to raise."""
        place = f"{self.where}: {self.path}" if self.path else self.where
        return UsageError(f"{place}: {what}")

    def _wrong(self, expected: str) -> UsageError:
        try:
            shown = json.dumps(self.value)
        except RecursionError:
            shown = "what is nested too deeply"
        return self.error(f"expected {expected}, found {shown if len(shown) <= 60 else shown[:57] + '...'}")

    def text(self) -> str:
        if isinstance(self.value, str):
            return self.value
        raise self._wrong("text")

    def integer(self) -> int:
        if isinstance(self.value, int) and not isinstance(self.value, bool):
            return self.value
        raise self._wrong("a whole number")

    def flag(self) -> bool:
        if isinstance(self.value, bool):
            return self.value
        raise self._wrong("true or false")

    def number(self) -> float:
        """A float; infinities and not-a-number stand as text."""
        if isinstance(self.value, str) and self.value in SPECIAL_FLOATS:
            return float(self.value)
        if isinstance(self.value, (int, float)) and not isinstance(self.value, bool):
            try:
                return float(self.value)
            except OverflowError:
                raise self._wrong("a number within the range of a float") from None
        raise self._wrong('a number, or "inf", "-inf" or "nan"')

    def amount(self) -> float:
        """A time, a size or a share: from 0 to `MOST`."""
        value = self.number()
        if not 0.0 <= value <= MOST:
            raise self.error(f"expected a number from 0 to {MOST:.0e}, found {value}")
        return value

    def parsed(self, parse: Callable[[str], T]) -> T:
        """Text read by `parse`, whose ValueError becomes the message."""
        text = self.text()
        try:
            return parse(text)
        except ValueError as error:
            raise self.error(f"cannot read {text!r}: {error}") from None

    def elements(self) -> list[Cursor]:
        if not isinstance(self.value, list):
            raise self._wrong("a list")
        return [Cursor(value, f"{self.path}[{i}]", self.where) for i, value in enumerate(self.value)]

    def sequence(self, read: Callable[[Cursor], T]) -> tuple[T, ...]:
        """A list's elements, each read by `read`."""
        return tuple(read(element) for element in self.elements())

    def members(self) -> dict[str, Cursor]:
        """An object's members, whatever their keys."""
        if not isinstance(self.value, dict):
            raise self._wrong("an object")
        return {key: Cursor(v, self._below(key), self.where) for key, v in self.value.items()}

    def fields(self, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> Mapping[str, Cursor]:
        """An object's members; refuses unknown keys and demands the required ones."""
        found = self.members()
        for key in found:
            if key not in required and key not in optional:
                raise self.error(f"unknown key {key!r}; known are: {', '.join((*required, *optional))}")
        for key in required:
            if key not in found:
                raise self.error(f"the key {key!r} is missing")
        return found

    def _below(self, key: str) -> str:
        if not key.isidentifier():
            return f"{self.path}[{json.dumps(key)}]"
        return f"{self.path}.{key}" if self.path else key
