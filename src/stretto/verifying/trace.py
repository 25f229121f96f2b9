"""What a rank's order does with messages, and with collectives that run once a step, flattened: receives,
sends, waits, starts, in the order of the program.

The proofs of messages and of deadlock walk these traces instead of ops, so that their cost grows with the
number of messages only. References must be sound (`stretto.ir.references`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from stretto.ir.action import ONCE_PHASES
from stretto.ir.plan import Instruction, InstructionKind, ItemKind, Plan
from stretto.ir.program import WAIT, Op
from stretto.verifying.fault import Fault

Message = tuple[int, int]
"""(edge index, microbatch)."""


class EventKind(StrEnum):
    """What instructions and items do; of ops, those that start and await collectives once a step."""

    RECV = "recv"
    SEND = "send"
    WAIT = "wait"
    SENT = "sent"
    START = "start"
    FINISH = "finish"


@dataclass(frozen=True, slots=True)
class Event:
    """at: index of the instruction in the rank's order; item: in its window; message: for recv, send, wait,
    sent, with the ranks between which it goes, equal if the value stays on its rank; op: for start and
    finish, that starts the collective."""

    kind: EventKind
    rank: int
    at: int
    instruction: Instruction
    message: Message = (-1, -1)
    source: int = -1
    target: int = -1
    item: int = 0
    op: Op | None = None

    def fault(self, what: str, fix: str) -> Fault:
        """A fault of the instruction."""
        return Fault(self.rank, str(self.instruction), what, fix)


def trace_of(plan: Plan, rank: int) -> Iterator[Event]:
    """The rank's events in order."""
    once = {op.name: op for op in plan.once(rank)}
    starts = {name: op for name, op in once.items() if op.kind is not None}
    waits = {
        name: starts[op.uses[0]] for name, op in once.items() if op.target == WAIT and op.uses[0] in starts
    }
    inside = {
        name: [
            (k, i)
            for k, i in enumerate(window.items)
            if i.kind is not ItemKind.OP
            or (window.parts[i.part][1] in ONCE_PHASES and (i.ref in starts or i.ref in waits))
        ]
        for name, window in plan.windows.items()
    }
    ends = [ends_of(plan, edge.index) for edge in plan.job.edges]
    for at, instruction in enumerate(plan.orders[rank]):
        kind, ref, microbatches = instruction.kind, instruction.ref, instruction.microbatches
        if kind is InstructionKind.RUN:
            inner = [(k, i.kind.value, i.ref, i.part) for k, i in inside[str(ref)]]
        else:
            inner = [(0, kind.value, ref, 0)]
        for k, word, what, part in inner:
            if isinstance(what, int):
                message, ends_at = (what, microbatches[part]), ends[what]
                yield Event(EventKind(word), rank, at, instruction, message, *ends_at, k)
            elif what in starts:
                yield Event(EventKind.START, rank, at, instruction, item=k, op=starts[what])
            else:
                yield Event(EventKind.FINISH, rank, at, instruction, item=k, op=waits[what])


def ends_of(plan: Plan, edge: int) -> tuple[int, int]:
    """The ranks that send and receive the edge's messages; equal if the value stays on its rank."""
    result = plan.job.edges[edge]
    return plan.rank_of(result.source), plan.rank_of(result.target)


def shown(plan: Plan, message: Message) -> str:
    """`e3:2 (y0 of microbatch 2)`."""
    edge, microbatch = message
    return f"e{edge}:{microbatch} ({plan.job.edges[edge].value} of microbatch {microbatch})"
