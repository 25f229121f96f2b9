"""Actions and schedules: what each rank does, and in which order.

An action is one phase of one stage for one microbatch. Its text form is PyTorch's own schedule token
(`torch.distributed.pipelining`): `2F0` is the forward of stage 2 for microbatch 0. This room knows the
words and their text; which orders are good is for `stretto.schedule`, which are legal for
`stretto.verify`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum


class Phase(StrEnum):
    """What a program computes: forward, input gradient, weight gradient, or both gradients together, of a
    microbatch; once a step (microbatch `ONCE`; no action of a schedule) what ops read of parameters, and
    gradient reductions."""

    F = "F"
    I = "I"  # noqa: E741 - the field's own letter for the input gradient
    W = "W"
    B = "B"
    UNSHARD = "UNSHARD"
    REDUCE_GRAD = "REDUCE_GRAD"

    @property
    def meaning(self) -> str:
        """The phase in words, for legends."""
        return _MEANINGS[self]

    @property
    def programs(self) -> tuple[Phase, ...]:
        """The programs that the phase runs, in order: B is I and then W."""
        return (Phase.I, Phase.W) if self is Phase.B else (self,)


_MEANINGS = {
    Phase.F: "forward",
    Phase.I: "input gradient",
    Phase.W: "weight gradient",
    Phase.B: "backward (I and W)",
    Phase.UNSHARD: "parameters gathered",
    Phase.REDUCE_GRAD: "gradient reductions",
}

BEFORE, AFTER = Phase.UNSHARD, Phase.REDUCE_GRAD
ONCE_PHASES = (BEFORE, AFTER)
"""Programs that run once a step: by itself, the one would run before all actions, and the other after."""

ONCE = -1
"""Their microbatch."""

_TOKEN = re.compile(r"^(\d{1,18})([FIWB])(\d{1,18})$")
_OVERLAP = re.compile(r"^\(([^()]*)\)OVERLAP_F_B$")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One phase of one stage for one microbatch; `str()` gives PyTorch's token, such as `2F0`."""

    stage: int
    phase: Phase
    microbatch: int

    def __str__(self) -> str:
        once = self.phase in ONCE_PHASES
        return f"{self.stage}{self.phase.value}{'' if once else self.microbatch}"

    @property
    def actions(self) -> tuple[Action, ...]:
        """The action itself; with `Overlap.actions` this lets both be walked alike."""
        return (self,)

    @staticmethod
    def parse(token: str) -> Action:
        """Read a token such as `2F0`. Raises ValueError that quotes the token."""
        match = _TOKEN.match(token.strip())
        if match is None:
            raise ValueError(
                f"cannot read action {token!r}: expected <stage><F|I|W|B><microbatch>, for example 2F0"
            )
        return Action(int(match[1]), Phase(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class Overlap:
    """Actions of one rank whose ops are ordered together: `(2F5;5B1)OVERLAP_F_B`."""

    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return "(" + ";".join(str(a) for a in self.actions) + ")OVERLAP_F_B"


Slot = Action | Overlap
"""One place in a rank's order: an action, or several that are interleaved."""


def parse_slot(token: str) -> Slot:
    """Read an action or an overlapped pair. Raises ValueError that quotes the token."""
    token = token.strip()
    match = _OVERLAP.match(token)
    if match is None:
        return Action.parse(token)
    actions = tuple(Action.parse(part) for part in match[1].split(";"))
    if len(actions) < 2:
        raise ValueError(
            f"cannot read {token!r}: OVERLAP_F_B needs two actions, for example (2F5;5B1)OVERLAP_F_B"
        )
    return Overlap(actions)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of actions on every rank.

    `orders[rank]` is that rank's order; `stage_ranks[stage]` says which rank has the stage. A schedule
    may be wrong (a user wrote it): `stretto.verify` decides.
    """

    family: str
    stages: int
    microbatches: int
    stage_ranks: tuple[int, ...]
    orders: tuple[tuple[Slot, ...], ...] = field(repr=False)

    @property
    def ranks(self) -> int:
        return len(self.orders)

    def actions(self, rank: int) -> Iterator[Action]:
        """The rank's actions in order, overlapped ones one after the other."""
        for slot in self.orders[rank]:
            yield from slot.actions

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that the rank has, ascending."""
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)
