"""The words of a command become flags with values, by the table, as Python's argparse would read them; and a
tally of the settings that are made of flags."""

from __future__ import annotations

import difflib
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tomlkit

from stretto.convert.flags import LACKING, NOT_NEEDED, REFUSED, TAKEN, Fate, Flag, Value

ROWS = (*TAKEN, *NOT_NEEDED, *LACKING, *REFUSED)
TABLE: dict[str, Flag] = {row.name: row for row in ROWS}

ALIASES = {
    "--persistent-save-interval": "--save-interval",
    "--batch-size": "--micro-batch-size",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--checkpoint-activations": "--recompute-activations",
}

NEAR = 0.75
"""Similarity of a known name that is offered, from 0 to 1. Two flags of the table often have 0.9."""


@dataclass(frozen=True, slots=True)
class Given:
    """A flag as it was given. written: as the user wrote it, with its values."""

    row: Flag
    written: str
    value: Value


def read_arguments(words: Sequence[str]) -> Tally:
    """Every word finds its place; nothing is raised. Of a flag the last counts."""
    given: dict[str, Given] = {}
    tally = Tally(given)
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not _is_flag(word):
            tally.others.append((word, "unknown", "the word belongs to no flag"))
            continue
        name, equals, value = word.partition("=")
        end = at
        while end < len(words) and not _is_flag(words[end]):
            end += 1
        behind = [value] if equals else list(words[at:end])
        row = TABLE.get(ALIASES.get(name, name))
        if row is None:
            at = at if equals else end
            near = difflib.get_close_matches(name, TABLE, n=1, cutoff=NEAR)
            what = f"the nearest known is {near[0]}" if near else "no known flag is near"
            tally.others.append((_written(name, behind, bool(equals)), "unknown", what))
            continue
        most = {"nothing": 0, "many": len(behind)}.get(str(row.takes), 1)
        taken = behind if equals else behind[:most]
        at += 0 if equals else len(taken)
        read, fault = _read(row, name, taken, bool(equals))
        if fault is not None:
            tally.refused.append(fault)
        elif read is not None:
            if row.name in given:
                again = given.pop(row.name).written
                tally.others.append((again, "not needed", "the flag is given again"))
            given[row.name] = read
    return tally


def _is_flag(word: str) -> bool:
    return (
        word.startswith("-") and len(word) > 1 and " " not in word.partition("=")[0] and _number(word) is None
    )


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _written(name: str, values: Sequence[str], equals: bool = False) -> str:
    quoted = [shlex.quote(text) for text in values]
    return f"{name}={quoted[0]}" if equals else " ".join([name, *quoted])


def append(name: str, *values: object) -> str:
    """What to append to a command, in words that a shell and `--megatron "..."` take as they are."""
    return f"append {_written(name, [str(value) for value in values])}"


def _read(row: Flag, name: str, values: list[str], equals: bool) -> tuple[Given | None, str | None]:
    written = _written(name, values, equals)
    takes = row.takes
    if takes == "nothing":
        if equals:
            return None, f"{written}: the flag takes no value; write {name}"
        return Given(row, written, True), None
    if not values and takes != "many":
        return None, f"{name}: a value must follow, {_expected(row)}"
    if takes == "many":
        return Given(row, written, values), None
    text = values[0]
    value: Value = text
    if takes == "int":
        value = int(text) if text.strip().lstrip("+-").isdecimal() else None
    elif takes == "float":
        value = _number(text)
    elif isinstance(takes, tuple) and text not in takes and row.fate == "taken":
        value = None
    if value is None:
        return None, f"{written}: expected {_expected(row)}"
    return Given(row, written, value), None


def _expected(row: Flag) -> str:
    if isinstance(row.takes, tuple):
        return " or ".join(row.takes)
    return {"int": "an integer", "float": "a number"}.get(row.takes, "a text")


@dataclass(slots=True)
class Tally:
    """values: by dotted key. made_of: the flags of each key, as written; of a key without, why it is there.
    fates: of each decided flag, and what is said of it. absent: what else
    changes the model or its memory: what Megatron does where a flag is not given, and Stretto cannot, or does
    otherwise. refused: why nothing can be written. others: what else was written, with what became of it, and
    why."""

    given: Mapping[str, Given]
    values: dict[str, Any] = field(default_factory=dict)
    made_of: dict[str, str] = field(default_factory=dict)
    fates: dict[str, tuple[Fate, str]] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    others: list[tuple[str, str, str]] = field(default_factory=list)

    def is_given(self, name: str) -> bool:
        """Whether a flag is given and does something."""
        needs = TABLE[name].needs
        return name in self.given and (not needs or self.is_given(needs))

    def get(self, name: str) -> Any:
        """A flag's value, or Megatron's default."""
        return self.given[name].value if self.is_given(name) else TABLE[name].default

    def written(self, name: str) -> str:
        """A flag as the user wrote it, or its name."""
        return self.given[name].written if name in self.given else name

    def put(self, key: str, value: Any, *names: str, why: str = "") -> None:
        """A setting, and the flags that it is made of. why: where no flag is given."""
        from_flags = [self.written(name) for name in names if self.is_given(name)]
        defaults = [name for name in names if not self.is_given(name)]
        self.values[key] = value
        self.made_of[key] = ", ".join(from_flags) or why or f"Megatron's default of {', '.join(defaults)}"
        for name in names:
            if self.is_given(name):
                said = f"{key} = {tomlkit.item(value).as_string()}"
                fate, before = self.fates.get(name, ("taken", ""))
                self.fates[name] = ("taken", f"{before}, {said}" if before and fate == "taken" else said)

    def lack(self, why: str, *names: str) -> None:
        """Flags without which the settings are written, where nothing is said of them yet."""
        for name in names:
            if self.is_given(name):
                self.fates.setdefault(name, ("lacking", why))

    def also(self, name: str, what: str) -> None:
        """A remark on a flag that is decided."""
        if name in self.fates:
            fate, said = self.fates[name]
            self.fates[name] = (fate, f"{said}; {what}")

    def refuse(self, name: str, why: str) -> None:
        """Nothing can be written with this flag."""
        self.refused.append(f"{self.written(name)}: {why}")

    def need(self, name: str) -> int:
        """The value of a flag that must be given, an integer from 1 on. A faulty one
        is refused, and 1 returned."""
        value = self.get(name)
        if value is None:
            self.refused.append(f"{name} is missing; append {name} and an integer")
        elif value < 1:
            self.refuse(name, "expected an integer from 1 on")
        return value if value is not None and value >= 1 else 1
