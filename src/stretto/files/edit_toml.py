"""Changes values in the text of a TOML file and leaves all else as it was written, comments too.

A file is a row of statements: headers of tables, keys with values of one line or several, and what is
between. Only the values of keys that change are replaced. Text in, text out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stretto.errors import UsageError
from stretto.files.parse import parse_toml

_HEADER = re.compile(r"^\s*\[(?P<array>\[)?(?P<name>[^\[\]]+)\]\]?\s*(#.*)?$")
_KEY = re.compile(r"^\s*(?P<key>[A-Za-z0-9_\-\"'.\s]+?)\s*=")


def edited(text: str, changes: Mapping[str, Any], write: Callable[[Any], str]) -> str:
    """The text with other values. changes: dotted key -> value, None to take it out. write: value -> TOML.

    A key that is not there comes at the end of its table, and that at the end of the file where it is not
    there either. Raises UsageError where the text says a key in a form that cannot be changed in place, as in
    a table on one line.
    """
    lines: list[str] = []
    left = dict(changes)
    ends: dict[str, int] = {"": 0}
    table = ""
    for statement in _statements(text):
        header = _HEADER.match(statement[0])
        if header is not None:
            table = _plain(header["name"])
            lines += statement
            ends[table] = len(lines)
            continue
        key = _KEY.match(statement[0])
        if key is None:
            lines += statement
            continue
        name = _plain(key["key"])
        full = f"{table}.{name}" if table else name
        if full not in changes:
            lines += statement
        elif full in left and (value := left.pop(full)) is not None:
            indent = statement[0][: len(statement[0]) - len(statement[0].lstrip())]
            lines.append(f"{indent}{name} = {write(value)}{_comment(statement)}")
        ends[table] = len(lines)
    for full, value in left.items():
        if value is None:
            continue
        table, _, name = full.rpartition(".")
        if table not in ends:
            lines += ["", f"[{table}]"]
            ends[table] = len(lines)
        at = ends[table]
        lines.insert(at, f"{name} = {write(value)}")
        ends = {one: end + (end >= at) for one, end in ends.items()}
    made = "\n".join(lines) + "\n"
    _check(text, made, changes)
    return made


def _comment(statement: list[str]) -> str:
    """What follows the value, with the blanks before it."""
    last = statement[-1]
    for at, letter in enumerate(last):
        before = "\n".join([*statement[:-1], last[:at]])
        if letter == "#" and _reads(before):
            return last[len(last[:at].rstrip()) :]
    return ""


def _plain(key: str) -> str:
    """A dotted key without quotes and blanks."""
    return ".".join(part.strip().strip("\"'") for part in key.split("."))


def _statements(text: str) -> Iterator[list[str]]:
    """The lines of each statement. A value goes on until it can be read."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        end = at + 1
        if _KEY.match(lines[at]) and not lines[at].lstrip().startswith("#"):
            while end < len(lines) and not _reads("\n".join(lines[at:end])):
                end += 1
        yield lines[at:end]
        at = end


def _reads(text: str) -> bool:
    try:
        parse_toml(text)
    except ValueError:
        return False
    return True


def _check(before: str, after: str, changes: Mapping[str, Any]) -> None:
    """Nothing but what was asked for has changed."""
    wanted = parse_toml(before)
    for full, value in changes.items():
        *tables, leaf = full.split(".")
        below = wanted
        for part in tables:
            below = below.setdefault(part, {})
        if value is None:
            below.pop(leaf, None)
        else:
            below[leaf] = list(value) if isinstance(value, tuple) else value
    try:
        found = parse_toml(after)
    except ValueError:
        found = {}
    if _without_empty(found) != _without_empty(wanted):
        raise UsageError(
            f"{', '.join(changes)}: the file says them in a form that cannot be changed in place; write them "
            "as keys of a table with a header of its own"
        )


def _without_empty(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_empty(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if value != {}
    }
