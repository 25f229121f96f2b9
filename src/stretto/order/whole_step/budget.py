"""How many steps may still be walked for one plan. Walks are counted, not timed, so that equal jobs get equal
plans on every machine."""

from __future__ import annotations


class Budget:
    """left: walks that may be made; spent: those that were."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.spent = 0

    def spend(self, walks: int = 1) -> None:
        """So many walks are made."""
        self.spent += walks
        self.left = max(0, self.left - walks)

    def keep(self, part: float) -> int:
        """Take a part away, for later; how much it is."""
        kept = int(part * self.left)
        self.left -= kept
        return kept
