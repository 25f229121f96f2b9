"""Proves that the step's loss is told and heard: once on every rank, after its last part exists. May touch
`stretto.ir`.
"""

from __future__ import annotations

from collections.abc import Iterator

from stretto.ir.action import Phase
from stretto.ir.plan import InstructionKind, Plan
from stretto.verify.communicators import tells_loss
from stretto.verify.fault import Fault
from stretto.verify.trace import last_runs


def loss_faults(plan: Plan) -> list[Fault]:
    """Every fault of `loss` and `heard`. References must be sound."""
    return [fault for rank in range(plan.ranks) for fault in _on_rank(plan, rank, tells_loss(plan))]


def _on_rank(plan: Plan, rank: int, told: bool) -> Iterator[Fault]:
    order = plan.orders[rank]
    places: dict[InstructionKind, int] = {}
    for kind in (InstructionKind.LOSS, InstructionKind.HEARD):
        at = [i for i, instruction in enumerate(order) if instruction.kind is kind]
        if told and not at:
            yield Fault(rank, kind.value, "missing; the other ranks would wait for this one", "Add it")
        elif not told and at:
            yield Fault(
                rank, kind.value, "this rank has the whole loss, and no other to tell it", "Remove it"
            )
        elif len(at) > 1:
            yield Fault(rank, kind.value, f"stands {len(at)} times in the order", "Keep one")
        if at:
            places[kind] = at[0]
    start, finish = places.get(InstructionKind.LOSS), places.get(InstructionKind.HEARD)
    if start is not None and finish is not None and finish < start:
        yield Fault(rank, "heard", "waits for `loss`, which comes later", "Swap them")
    last = last_runs(plan, rank).get((plan.job.loss[0], Phase.F))
    if start is not None and last is not None and start < last:
        yield Fault(
            rank,
            "loss",
            f"told before `{order[last]}` has added its microbatch's loss",
            f"Move it after instruction {last}",
        )
