"""What a rank's order does with messages and sums, flattened: receives, sends, waits, starts, in the order of
the program.

The proofs of messages and of deadlock walk these traces instead of ops, so that their cost grows with the
number of messages only. References must be sound (`stretto.ir.references`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from stretto.ir.action import Phase
from stretto.ir.plan import Instruction, InstructionKind, ItemKind, Plan
from stretto.ir.program import WAIT, Op
from stretto.verifying.fault import Fault

Message = tuple[int, int]
"""(edge index, microbatch)."""


class EventKind(StrEnum):
    """What instructions and items do; of ops, the starts of sums and the waits for them."""

    RECV = "recv"
    SEND = "send"
    WAIT = "wait"
    SENT = "sent"
    REDUCE = "reduce"
    REDUCED = "reduced"


@dataclass(frozen=True, slots=True)
class Event:
    """at: index of the instruction in the rank's order; item: in its window; message: for recv, send, wait,
    sent, with the ranks between which it goes, equal if the value stays on its rank; op: for reduce and
    reduced, that starts the sum."""

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
    inside = {
        name: [
            (k, i)
            for k, i in enumerate(window.items)
            if i.kind is not ItemKind.OP or window.parts[i.part][1] is Phase.REDUCE_GRAD
        ]
        for name, window in plan.windows.items()
    }
    sums = {(s.index, op.name): op for s in plan.job.stages for op in s.ops.get(Phase.REDUCE_GRAD, ())}
    ends = [ends_of(plan, edge.index) for edge in plan.job.edges]
    for at, instruction in enumerate(plan.orders[rank]):
        kind, ref, microbatches = instruction.kind, instruction.ref, instruction.microbatches
        if kind is InstructionKind.RUN:
            parts = plan.windows[str(ref)].parts
            inner = [(k, i.kind.value, i.ref, i.part) for k, i in inside[str(ref)]]
        else:
            inner = [(0, kind.value, ref, 0)]
        for k, word, what, part in inner:
            if isinstance(what, int):
                message, ends_at = (what, microbatches[part]), ends[what]
                yield Event(EventKind(word), rank, at, instruction, message, *ends_at, k)
            else:
                does, op = EventKind.REDUCE, sums[parts[part][0], what]
                if op.target == WAIT:
                    does, op = EventKind.REDUCED, sums[parts[part][0], op.uses[0]]
                yield Event(does, rank, at, instruction, item=k, op=op)


def ends_of(plan: Plan, edge: int) -> tuple[int, int]:
    """The ranks that send and receive the edge's messages; equal if the value stays on its rank."""
    result = plan.job.edges[edge]
    return plan.rank_of(result.source), plan.rank_of(result.target)


def shown(plan: Plan, message: Message) -> str:
    """`e3:2 (y0 of microbatch 2)`."""
    edge, microbatch = message
    return f"e{edge}:{microbatch} ({plan.job.edges[edge].value} of microbatch {microbatch})"
