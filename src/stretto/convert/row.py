"""A row of the table of flags: what a flag takes, and what becomes of it.

A flag is

  taken        it becomes settings: those of `keys`, or what `model` and `training` make of it
  not needed   the settings do without it, and nothing is lost
  lacking      Stretto has no such thing; the settings are written without it, `why` says what happens then
  refused      without it another model or another job would be trained, so nothing is written
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Fate = Literal["taken", "not needed", "lacking", "refused"]
Takes = Literal["nothing", "int", "float", "text", "many"] | tuple[str, ...]
"""What follows a flag: nothing, a value (a tuple: one of these words), or as many words as there are."""
Value = bool | int | float | str | list[str] | None


@dataclass(frozen=True, slots=True)
class Flag:
    """A row. default: the value without the flag. needs: it does nothing without that flag. idle: the
    value with which it does nothing."""

    name: str
    takes: Takes
    fate: Fate
    why: str = ""
    keys: tuple[str, ...] = ()
    default: Value = None
    needs: str = ""
    idle: str | None = None


def taken(name: str, takes: Takes, *keys: str, default: Value = None, needs: str = "") -> Flag:
    """A row of a flag that becomes settings."""
    return Flag(name, takes, "taken", "", keys, default, needs)


SHORT: dict[str, Takes] = {"": "nothing", "i": "int", "f": "float", "t": "text", "m": "many"}


def all_of(fate: Fate, why: str, names: str, needs: str = "") -> tuple[Flag, ...]:
    """Rows that share a reason: "overlap-grad-reduce ddp-bucket-size:i split-size:f=1", the letter being what
    a flag takes, and what follows it the value with which it does nothing."""
    rows = []
    for one in names.split():
        name, _, rest = one.partition(":")
        letter, _, idle = rest.partition("=")
        rows.append(Flag(f"--{name}", SHORT[letter], fate, why, needs=needs, idle=idle or None))
    return tuple(rows)
