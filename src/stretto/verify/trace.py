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
from stretto.ir.program import WAIT, Op

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
    sent; op: for reduce and reduced, that starts the sum."""

    kind: EventKind
    at: int
    instruction: Instruction
    message: Message = (-1, -1)
    op: Op | None = None
    item: int = 0


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
    for at, instruction in enumerate(plan.orders[rank]):
        kind = instruction.kind
        if kind is InstructionKind.RUN:
            window = plan.windows[str(instruction.ref)]
            for k, item in inside[window.name]:
                if item.kind is ItemKind.OP:
                    ops = {
                        op.name: op
                        for op in plan.job.stages[window.parts[item.part][0]].ops[Phase.REDUCE_GRAD]
                    }
                    op = ops[str(item.ref)]
                    starts = op.target != WAIT
                    op = op if starts else ops[op.uses[0]]
                    does = EventKind.REDUCE if starts else EventKind.REDUCED
                    yield Event(does, at, instruction, op=op, item=k)
                    continue
                message = (int(item.ref), instruction.microbatches[item.part])
                yield Event(EventKind(item.kind.value), at, instruction, message)
        else:
            message = (int(instruction.ref), instruction.microbatches[0])
            yield Event(EventKind(kind.value), at, instruction, message)


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
