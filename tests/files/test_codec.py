"""Typed files: every kind of type there and back, one line or several, and what is refused with its place."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import pytest

from stretto.errors import StrettoError, UsageError
from stretto.files.codec import UNWRITTEN, Amount, Codec, Form, Natural, Share, TextLayout, rounded, text
from stretto.files.typed_file import TypedFile, from_text, to_line


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: Amount = 0.0
    name: str = ""


@dataclass(frozen=True, slots=True)
class Small:
    size: Natural
    part: Share = 0.5

    def __post_init__(self) -> None:
        if self.size == 13:
            raise ValueError("thirteen is none")


@dataclass(frozen=True)
class Full:
    word: str
    flag: bool
    colour: Colour
    mode: Literal["a", "b"]
    either: str | int
    perhaps: Small | None
    pair: tuple[int, str]
    many: tuple[int, ...]
    points: list[Point]
    by_name: Mapping[str, Amount]
    by_pair: Mapping[tuple[int, str], Small]
    anything: dict[str, Any]
    path: str = field(default="", metadata=UNWRITTEN)


FULL = Full(
    *("it's", True, Colour.BLUE, "b", 3, Small(2), (1, "x"), (1, 2), [Point(math.inf), Point(1.5, 2.0, "p")]),
    *({"b": 1.0, "a": 2.0}, {(2, "a"): Small(1), (1, "z"): Small(3, 1.0)}, {"deep": [1, None]}),
)
FILE = TypedFile(Full, "whole", 3, "whole thing", "Make one")
TEXT = FILE.to_text(FULL)


def test_there_and_back_with_an_entry_a_line() -> None:
    assert FILE.from_text(TEXT, "w.json") == FULL
    assert to_line(Point(1.0)) == '{"x": 1.0, "y": 0.0, "name": ""}'
    assert TEXT == (
        '{\n  "format": "whole",\n  "version": 3,\n  "word": "it\'s",\n  "flag": true,\n  "colour": "blue",\n'
        '  "mode": "b",\n  "either": 3,\n  "perhaps": {"size": 2, "part": 0.5},\n  "pair": [1, "x"],\n'
        '  "many": [1, 2],\n  "points": [\n    {"x": "inf", "y": 0.0, "name": ""},\n'
        '    {"x": 1.5, "y": 2.0, "name": "p"}\n  ],\n  "by_name": {\n'
        '    "a": 2.0,\n    "b": 1.0\n  },\n  "by_pair": [\n'
        '    [1, "z", {"size": 3, "part": 1.0}],\n    [2, "a", {"size": 1, "part": 0.5}]\n  ],'
        '\n  "anything": {\n    "deep": [1, null]\n  }\n}\n'
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("word", 3, "word: expected text, found 3"),
        ("flag", 1, "flag: expected true or false"),
        ("colour", "green", "colour: expected red or blue"),
        ("colour", [], "colour: expected red or blue"),
        ("mode", "c", "mode: expected a or b"),
        ("either", True, "either: expected str or int"),
        ("perhaps", 3, "perhaps: expected an object"),
        ("perhaps", {"size": 0, "part": 1}, "perhaps.size: expected an integer from 1"),
        ("perhaps", {"size": 13, "part": 1}, "perhaps: thirteen is none"),
        ("perhaps", {"size": 1, "part": "nan"}, "perhaps.part: expected a share"),
        ("perhaps", {"size": 1}, "perhaps: the key 'part' is missing"),
        ("pair", [1], "pair: expected a list of 2"),
        ("pair", [1, 2], r"pair\[1\]: expected text"),
        ("many", [1, 2.0], r"many\[1\]: expected an integer"),
        ("many", {}, "many: expected a list"),
        ("points", [{"x": 1, "y": -1, "name": ""}], r"points\[0\]\.y: expected a number from 0"),
        ("points", [{"x": 1, "z": 1}], r"points\[0\]: unknown key 'z'; known are: x, y, name"),
        ("by_name", {"a b": "x"}, r'by_name\["a b"\]: expected a number'),
        ("by_name", [], "by_name: expected an object"),
        ("by_pair", [[1, "z", {"size": 1, "part": 1}]] * 2, r"by_pair\[1\]: 1, z is there twice; keep one"),
        ("path", "", "w.json: unknown key 'path'"),
        ("version", 2, "version 2 cannot be read: this Stretto reads version 3. Make one"),
        ("version", 3.0, "version 3.0 cannot be read"),
        ("format", None, "not a whole thing file"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(key: str, value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        FILE.from_text(json.dumps({**json.loads(TEXT), key: value}), "w.json")
    assert str(caught.value).startswith("w.json: ")


def parse(word: str) -> complex:
    if word == "(1+2j)":
        return 1 + 2j
    raise ValueError("no such number")


CODEC = Codec({complex: text(parse), float: rounded(1), Any: Form(int, str)})
CODEC.row(Point, 1, TextLayout.ENTRY)


def test_forms_of_their_own() -> None:
    for kind, value, data in (
        (complex, 1 + 2j, "(1+2j)"),
        (float, 0.26, 0.3),
        (Any, 7, "7"),
        (Point, Point(1.0), [1.0]),
        (Point, Point(1.0, name="p"), [1.0, {"name": "p"}]),
    ):
        assert CODEC.form(kind).write(value) == data
        assert kind is float or CODEC.form(kind).read(data) == value
    with pytest.raises(StrettoError, match="2j has no text form that reads back"):
        CODEC.form(complex).write(2j)
    with pytest.raises(TypeError, match="no form is known for"):
        CODEC.form(set[int])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("[]", r"a row: expected \[x\] and perhaps an object, found \[\]"),
        ('["a"]', r"a row: \[0\]: expected a number"),
        ("[1, {}, 2]", r"a row: expected \[x\]"),
        ('[1, {"y": -1}]', r"a row: \[1\]\.y: expected a number from 0"),
        ('[1, {"x": 1}]', r"a row: \[1\]: unknown key 'x'"),
        ('[1, {"y": 1, "y": 1}]', "a row: not readable as JSON .*the key 'y' twice"),
    ],
)
def test_rows_are_refused_with_their_place(data: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_text(Point, data, "a row", CODEC)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    FILE.save(FULL, tmp_path / "w.json")
    assert FILE.load(tmp_path / "w.json") == FULL
    with pytest.raises(UsageError, match="none does not exist"):
        FILE.save(FULL, tmp_path / "none" / "w.json")
    with pytest.raises(UsageError, match="No such file"):
        FILE.load(tmp_path / "other.json")
