"""What a proof finds: a fault, with its place, its reason and its cure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One reason to refuse a schedule or a plan.

    rank: None if the fault belongs to no rank. action: the action, instruction, window or communicator.
    what: the trouble. fix: what to do about it. `str()` gives `rank 1, 0B3: <what>. <fix>`.
    """

    rank: int | None
    action: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        place = ", ".join(
            part for part in (f"rank {self.rank}" if self.rank is not None else "", self.action) if part
        )
        text = f"{place}: {self.what}" if place else self.what
        return f"{text}. {self.fix}" if self.fix else text
