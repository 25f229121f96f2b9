"""What was gathered in the forward, gathered again for the backward: time of a collective for memory.

Sequence parallelism gathers the slices of a sequence before a colwise matrix, whose gradient needs what was
gathered. Kept, it is as large as if nothing were spread over the sequence. Gathered again, only a rank's
slice is kept (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2); the second collective is one more
that an order of ops can hide, under the products of the backward.

    1. Start from the all-gathers of the forward and their waits.
    2. With them goes what only moves the result: views, and copies into another order.

`stretto.passes.recompute` repeats them. Touches `stretto.ir` only.
"""

from __future__ import annotations

from stretto.ir.action import Phase
from stretto.ir.collectives import ALL_GATHER
from stretto.ir.program import Stage

MOVES = ("aten.clone.default",)
"""Copies, which allocate but compute nothing."""


def gathers(stage: Stage) -> list[str]:
    """The ops of a stage's forward that gather, and that move what is gathered."""
    found: dict[str, None] = {}
    for op in stage.ops[Phase.F]:
        gathered = op.target == ALL_GATHER.target  # step 1
        # Step 2. A wait is a view of its start.
        moves = len(op.uses) == 1 and op.uses[0] in found and (op.alias is not None or op.target in MOVES)
        if gathered or moves:
            found[op.name] = None
    return list(found)
