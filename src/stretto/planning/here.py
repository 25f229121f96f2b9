"""A plan for the ranks that run: one of them plans, and sends its plan to the others.

    1. Ranks compare what they are to plan: jobs, schedule, wishes and costs. Where one has others than rank
       0, all refuse.
    2. Rank 0 looks for such a plan among what its host has kept, or plans, and keeps it. Its plan is
       everybody's, whatever other hosts have kept.
    3. All read the plan's text.

A single process does the same by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from stretto.errors import UsageError
from stretto.files.kept import Kept, code_digest, key_of
from stretto.ir.plan import Plan
from stretto.ir.serialize import plan_from_text, plan_to_text
from stretto.measure.running import Running
from stretto.passes.step import Watch
from stretto.runtime.all_or_none import together

PLAN = "plan"


def agree_on(ranks: Running, wishes: Mapping[str, str]) -> None:
    """Step 1; every rank must call it. wishes: in a word each, as texts.

    Raises the same UsageError on all ranks, which names the first wish in which one differs from rank 0.
    """
    first, *others = ranks.all_gather({name: key_of(text) for name, text in wishes.items()})
    for rank, other in enumerate(others, start=1):
        for name in (*first, *other):
            if first.get(name) != other.get(name):
                raise UsageError(
                    f"the {name} to plan on rank {rank} is another than on rank 0: start all ranks with the "
                    "same model, settings, code and release of PyTorch"
                )


def plan_on_first(
    ranks: Running,
    wishes: Mapping[str, str],
    make: Callable[[], Plan],
    kept: Kept | None = None,
    watch: Watch | None = None,
) -> Plan:
    """Steps 1 to 3; every rank must call it. wishes: all that the plan depends on, as texts. make: plans,
    without a message to other ranks; called on rank 0 alone. watch: of that plan; the best so far of a search
    that was interrupted is not kept, and an interrupt while a plan is being kept does not lose it.

    Raises what `make` raises, on all ranks.
    """
    agree_on(ranks, wishes)
    waits = watch or Watch()
    key = key_of(
        PLAN, code_digest(), torch.__version__, *(text for one in sorted(wishes.items()) for text in one)
    )

    def kept_or_made() -> Plan:
        said = "made here {ago} for this job and these costs, kept in {folder}"
        text = None if kept is None else kept.find(PLAN, key, said)
        if text is not None:
            return plan_from_text(text, PLAN)
        made = make()
        if kept is not None and not waits.stopped:
            try:
                kept.keep(PLAN, key, plan_to_text(made))
            except KeyboardInterrupt as error:
                waits.stop(error)
        return made

    mine = kept_or_made if ranks.rank == 0 else lambda: None
    plan = together(ranks, mine, "plans for all ranks")
    if ranks.size == 1:
        assert plan is not None
        return plan
    text: str = ranks.broadcast(None if plan is None else plan_to_text(plan))
    return plan or plan_from_text(text, "rank 0's plan")
