"""Proves on the orders that what a run reads is there: left by an earlier phase, and not freed since.

A value that a stage keeps is freed after the run of the last phase that reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from stretto.ir.action import Phase
from stretto.ir.flow import PHASES, inputs_of, is_external
from stretto.ir.plan import Instruction, InstructionKind, Plan, Window
from stretto.verifying.fault import Fault
from stretto.verifying.windows import earlier_values


def lifetime_faults(plan: Plan) -> list[Fault]:
    """Reads of values that are not there yet or no longer. References must be sound."""
    reads = {(s.index, phase): _kept_reads(plan, s.index, phase) for s in plan.job.stages for phase in PHASES}
    result: list[Fault] = []
    for rank in range(plan.ranks):
        result += _kept(plan, rank, reads)
    return result


def _kept_reads(plan: Plan, stage: int, phase: Phase) -> list[tuple[str, Phase, Phase]]:
    """(value, phase that brings it, phase after which it is freed) for what the program reads of earlier
    phases; one value for each pair of phases, which is enough to prove or refuse a run."""
    result: dict[tuple[Phase, Phase], str] = {}
    program = plan.job.stages[stage]
    origin = earlier_values(plan.job, stage, phase)
    readers = {sub: {name for op in program.ops[sub] for name in op.uses} for sub in PHASES}
    for name in inputs_of(program, phase):
        if not is_external(name) and name in origin:
            last = max((sub for sub in PHASES if name in readers[sub]), key=PHASES.index)
            result.setdefault((origin[name], last), name)
    return [(name, made, last) for (made, last), name in result.items()]


def _kept(
    plan: Plan, rank: int, reads: dict[tuple[int, Phase], list[tuple[str, Phase, Phase]]]
) -> Iterator[Fault]:
    done: dict[tuple[int, int], set[Phase]] = defaultdict(set)
    for instruction in plan.orders[rank]:
        if instruction.kind is not InstructionKind.RUN:
            continue
        window = plan.windows[str(instruction.ref)]
        if window.bound(instruction.microbatches) != window.shares:
            yield Fault(rank, str(instruction), *_bound_otherwise(instruction, window))
            return
        for (stage, phase), m in zip(window.parts, instruction.microbatches, strict=True):
            before = done[stage, m]
            for sub in phase.parts:
                for value, made, last in reads.get((stage, sub), ()):
                    if made not in before:
                        first = f"{stage}{made}{m}"
                        what = f"reads {value} of microbatch {m}, which {first} has not made yet"
                        yield Fault(rank, str(instruction), what, f"Run {first} before it")
                    elif last in before:
                        end = f"{stage}{last}{m}"
                        what = f"reads {value} of microbatch {m}, which is freed: {end}, its last reader, has"
                        yield Fault(
                            rank, str(instruction), f"{what} run", f"Run it once, and before {end} ends"
                        )
                before.add(sub)


def _bound_otherwise(instruction: Instruction, window: Window) -> tuple[str, str]:
    """Of a run whose parts share microbatches in another way than the window's order is made for."""
    given = window.bound(instruction.microbatches)
    at = next((part for part, first in enumerate(given) if first != part), None)
    if at is None or window.shares:
        return (
            f"binds parts to microbatches as {list(given) or 'all apart'}, but the window's order is for "
            f"{list(window.shares) or 'all apart'}",
            "Order a window for these microbatches",
        )
    return (
        f"overlaps two phases of stage {window.parts[at][0]} for one microbatch, "
        f"{instruction.microbatches[at]}, of which one needs the other",
        "Overlap different microbatches, or order a window for it; I and W together are B",
    )
