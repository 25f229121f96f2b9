"""Settings as the text of a TOML file, each with a comment."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any


def toml_value(value: Any) -> str:
    """A value as TOML writes it; numbers and texts are read back the same."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # TOML's basic strings have JSON's escapes, and forbid one character more.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    raise TypeError(f"{value!r} is no value of a setting")


def toml_text(values: Mapping[str, Any], comments: Mapping[str, str], head: Iterable[str]) -> str:
    """The file. values: by dotted key, in the order of its table. comments: by key. head: comment lines."""
    tables: dict[str, list[str]] = {}
    for key, value in values.items():
        table, _, leaf = key.rpartition(".")
        tables.setdefault(table, []).append(f"{leaf} = {toml_value(value)}{_comment(comments.get(key, ''))}")
    parts = [[f"#{_one_line(line)}".rstrip() for line in head]]
    for table in sorted(tables, key=lambda name: name != ""):
        parts.append([f"[{table}]", *tables[table]] if table else tables[table])
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of dotted keys."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *tables, leaf = key.split(".")
        below = tree
        for table in tables:
            below = below.setdefault(table, {})
        below[leaf] = value
    return tree


def _comment(text: str) -> str:
    return f"  #{_one_line(text)}" if text else ""


def _one_line(text: str) -> str:
    """TOML's comments forbid control characters."""
    return f" {''.join(c if c.isprintable() else ' ' for c in text)}" if text else ""
