"""The settings so far, and what has become of each flag."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tomlkit

from stretto.convert.arguments import TABLE, Given
from stretto.convert.flags import Fate


@dataclass(slots=True)
class Tally:
    """values: by dotted key. culprits: the flags of each key, as written. made_of: the same as a text; of a
    key that no flag made, why it is there. fates: of each flag that was decided, and what is said of it.
    absent: what Megatron does where a flag is not given, and Stretto cannot. refused: why nothing can be
    written."""

    given: Mapping[str, Given]
    values: dict[str, Any] = field(default_factory=dict)
    made_of: dict[str, str] = field(default_factory=dict)
    culprits: dict[str, tuple[str, ...]] = field(default_factory=dict)
    fates: dict[str, tuple[Fate, str]] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

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
        from_flags = tuple(self.written(name) for name in names if self.is_given(name))
        defaults = [name for name in names if not self.is_given(name)]
        self.values[key] = value
        self.culprits[key] = from_flags
        self.made_of[key] = ", ".join(from_flags) or why or f"Megatron's default of {', '.join(defaults)}"
        for name in names:
            if self.is_given(name):
                said = f"{key} = {toml_value(value)}"
                fate, before = self.fates.get(name, ("taken", ""))
                self.fates[name] = ("taken", f"{before}, {said}" if before and fate == "taken" else said)

    def skip(self, why: str, *names: str) -> None:
        """Flags that are not needed, where nothing is said of them yet."""
        self._decide("not needed", why, names)

    def lack(self, why: str, *names: str) -> None:
        """Flags without which the settings are written, where nothing is said of them yet."""
        self._decide("lacking", why, names)

    def also(self, name: str, what: str) -> None:
        """A remark on a flag that is decided."""
        if name in self.fates:
            fate, said = self.fates[name]
            self.fates[name] = (fate, f"{said}; {what}")

    def _decide(self, fate: Fate, why: str, names: tuple[str, ...]) -> None:
        for name in names:
            if self.is_given(name):
                self.fates.setdefault(name, (fate, why))

    def need(self, name: str) -> int:
        """The value of a flag that must be given, a whole number from 1 on. A faulty one
        is refused, and 1 returned."""
        value = self.get(name)
        if value is None:
            self.refused.append(f"{name} is missing; append {name} and a whole number")
        elif value < 1:
            self.refused.append(f"{self.written(name)}: expected a whole number from 1 on")
        return value if value is not None and value >= 1 else 1


def toml_value(value: Any) -> str:
    """A value as TOML writes it."""
    text: str = tomlkit.item(value).as_string()
    return text
