"""Proves on the orders that what a run reads is there: left by an earlier phase, and not freed since.

A value that a stage keeps is freed after the run of the last phase that reads it. Values between two stages
of one rank travel without a message; for those the send must stand before the wait. May touch `stretto.ir`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from stretto.ir.action import Phase
from stretto.ir.flow import PHASES, inputs_of, is_external
from stretto.ir.plan import Instruction, InstructionKind, Plan, Window
from stretto.verify.fault import Fault
from stretto.verify.trace import EventKind, Message, ends_of, shown, trace_of
from stretto.verify.windows import earlier_values


def lifetime_faults(plan: Plan) -> list[Fault]:
    """Reads of values that are not there yet or no longer. References must be sound."""
    reads = {(s.index, phase): _kept_reads(plan, s.index, phase) for s in plan.job.stages for phase in PHASES}
    found: list[Fault] = []
    for rank in range(plan.ranks):
        found += _kept(plan, rank, reads)
        found += _on_one_rank(plan, rank)
    return found


def _kept_reads(plan: Plan, stage: int, phase: Phase) -> list[tuple[str, Phase, Phase]]:
    """(value, phase that brings it, phase after which it is freed) for what the program reads of earlier
    phases; one value for each pair of phases, which is enough to prove or refuse a run."""
    found: dict[tuple[Phase, Phase], str] = {}
    program = plan.job.stages[stage]
    origin = earlier_values(plan.job, stage, phase)
    readers = {sub: {name for op in program.ops[sub] for name in op.uses} for sub in PHASES}
    for name in inputs_of(program, phase):
        if not is_external(name) and name in origin:
            last = max((sub for sub in PHASES if name in readers[sub]), key=PHASES.index)
            found.setdefault((origin[name], last), name)
    return [(name, made, last) for (made, last), name in found.items()]


def _kept(
    plan: Plan, rank: int, reads: dict[tuple[int, Phase], list[tuple[str, Phase, Phase]]]
) -> Iterator[Fault]:
    done: dict[tuple[int, int], set[Phase]] = defaultdict(set)
    for instruction in plan.orders[rank]:
        if instruction.kind is not InstructionKind.RUN:
            continue
        window = plan.windows[str(instruction.ref)]
        parts = window.parts
        if window.bound(instruction.microbatches) != window.shares:
            yield _bound_otherwise(rank, instruction, window)
            return
        bound = [(stage, m) for (stage, _), m in zip(parts, instruction.microbatches, strict=True)]
        for (stage, phase), key in zip(parts, bound, strict=True):
            for sub in phase.parts:
                for value, made, last in reads.get((stage, sub), ()):
                    if made not in done[key]:
                        yield Fault(
                            rank,
                            str(instruction),
                            f"reads {value} of microbatch {key[1]}, "
                            f"which {stage}{made}{key[1]} has not made yet",
                            f"Run {stage}{made}{key[1]} before it",
                        )
                    elif last in done[key]:
                        yield Fault(
                            rank,
                            str(instruction),
                            f"reads {value} of microbatch {key[1]}, which is freed: "
                            f"{stage}{last}{key[1]}, its last reader, has run",
                            f"Run it once, and before {stage}{last}{key[1]} ends",
                        )
                done[key].add(sub)


def _bound_otherwise(rank: int, instruction: Instruction, window: Window) -> Fault:
    """A run whose parts share microbatches in another way than the window's order is made for."""
    given = window.bound(instruction.microbatches)
    at = next((part for part, first in enumerate(given) if first != part), None)
    if at is None or window.shares:
        return Fault(
            rank,
            str(instruction),
            f"binds parts to microbatches as {list(given) or 'all apart'}, but the window's order is for "
            f"{list(window.shares) or 'all apart'}",
            "Order a window for these microbatches",
        )
    return Fault(
        rank,
        str(instruction),
        f"overlaps two phases of stage {window.parts[at][0]} for one microbatch, "
        f"{instruction.microbatches[at]}, of which one needs the other",
        "Overlap different microbatches, or order a window for it; I and W together are B",
    )


def _on_one_rank(plan: Plan, rank: int) -> Iterator[Fault]:
    sent: set[Message] = set()
    for event in trace_of(plan, rank):
        if (
            event.kind not in (EventKind.SEND, EventKind.WAIT)
            or len(set(ends_of(plan, event.message[0]))) > 1
        ):
            continue
        if event.kind is EventKind.SEND:
            sent.add(event.message)
        elif event.message not in sent:
            source = plan.job.edges[event.message[0]].source
            yield Fault(
                rank,
                str(event.instruction),
                f"waits for {shown(plan, event.message)}, "
                f"which stage {source} of the same rank has not made yet",
                f"Run stage {source} for that microbatch before it",
            )
