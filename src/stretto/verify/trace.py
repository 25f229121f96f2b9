"""What a rank's order does with messages and sums, flattened: receives, sends, waits, starts, in the order of
the program.

The proofs of messages and of deadlock walk these traces instead of ops, so that their cost grows with the
number of messages only. May touch `stretto.ir`. References must be sound (`stretto.ir.references`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from stretto.ir.action import Phase
from stretto.ir.plan import Instruction, InstructionKind, ItemKind, Plan
from stretto.verify.fault import Fault

Message = tuple[int, int]
"""(edge index, microbatch)."""


class EventKind(StrEnum):
    """An instruction's kinds, and those that stand inside a window only."""

    RECV = "recv"
    SEND = "send"
    WAIT = "wait"
    SENT = "sent"
    LOSS = "loss"
    HEARD = "heard"
    REDUCE = "reduce"
    REDUCED = "reduced"


@dataclass(frozen=True, slots=True)
class Event:
    """at: index of the instruction in the rank's order; message: for recv, send, wait, sent, with the ranks
    between which it goes, equal if the value stays on its rank; bucket: for reduce and reduced."""

    kind: EventKind
    rank: int
    at: int
    instruction: Instruction
    message: Message = (-1, -1)
    source: int = -1
    target: int = -1
    bucket: str = ""

    def fault(self, what: str, fix: str) -> Fault:
        """A fault of the instruction."""
        return Fault(self.rank, str(self.instruction), what, fix)


def trace_of(plan: Plan, rank: int) -> Iterator[Event]:
    """The rank's events in order."""
    inside = {
        name: [i for i in window.items if i.kind is not ItemKind.OP] for name, window in plan.windows.items()
    }
    ends = [ends_of(plan, edge.index) for edge in plan.job.edges]
    for at, instruction in enumerate(plan.orders[rank]):
        kind, ref, microbatches = instruction.kind, instruction.ref, instruction.microbatches
        if kind is InstructionKind.RUN:
            inner = [(i.kind.value, i.ref, microbatches[i.part]) for i in inside[str(ref)]]
        else:
            inner = [(kind.value, ref, microbatches[0] if microbatches else -1)]
        for word, what, microbatch in inner:
            if isinstance(what, int):
                message, ends_at = (what, microbatch), ends[what]
                yield Event(EventKind(word), rank, at, instruction, message, *ends_at)
            else:
                yield Event(EventKind(word), rank, at, instruction, bucket=what)


def last_runs(plan: Plan, rank: int) -> dict[tuple[int, Phase], int]:
    """(stage, F | I | W) -> the index of the rank's last instruction that runs that program."""
    found: dict[tuple[int, Phase], int] = {}
    programs = {
        name: [(stage, sub) for stage, phase in window.parts for sub in phase.parts]
        for name, window in plan.windows.items()
    }
    for at, instruction in enumerate(plan.orders[rank]):
        if instruction.kind is InstructionKind.RUN:
            found.update(dict.fromkeys(programs[str(instruction.ref)], at))
    return found


def ends_of(plan: Plan, edge: int) -> tuple[int, int]:
    """The ranks that send and receive the edge's messages; equal if the value stays on its rank."""
    found = plan.job.edges[edge]
    return plan.rank_of(found.source), plan.rank_of(found.target)


def shown(plan: Plan, message: Message) -> str:
    """`e3:2 (y0 of microbatch 2)`."""
    edge, microbatch = message
    return f"e{edge}:{microbatch} ({plan.job.edges[edge].value} of microbatch {microbatch})"
