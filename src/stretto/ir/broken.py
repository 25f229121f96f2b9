"""What a plan names and does not have, as it is found."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BrokenReference:
    """A reference that points at nothing. path: its place in the plan file; rank: if it is in an order."""

    path: str
    what: str
    rank: int | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


class Broken(list[BrokenReference]):
    """What is broken. rank: whose order is looked at."""

    rank: int | None = None

    def unless(self, right: bool, path: str, what: str) -> bool:
        if not right:
            self.append(BrokenReference(path, what, self.rank))
        return right

    def points(self, path: str, value: Any, known: Collection[Any], what: str) -> bool:
        """what: words for a value that is not among those known, and for how many there are."""
        return value in known or self.unless(False, path, what.format(value, len(known)))
