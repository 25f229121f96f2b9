"""What tensor-parallel ranks compute in full, because no rule says how to compute it on their slices.

That is slow, and right: a warning says where it is, and a step is refused where that leaves nothing to gain.
What the plan replicates is meant so. An evaluation is laid out as its training, which has warned.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

from stretto.capturing.graph import GRAD, Traced
from stretto.errors import CaptureError, listed
from stretto.ir.axes import TENSOR
from stretto.passes.layout.emit import GATHER, REDUCE, SCATTER
from stretto.passes.layout.shard import Gathered, ShardedProgram

MOST = 0.5
"""Share of a step's flops, or of its parameters, that may be computed, or gathered, in full for want of a
rule. By Amdahl's law (AFIPS 1967) no number of ranks makes the step twice as fast where it is more."""

LEAST = 0.01
"""Share of the bytes that a rank's collectives make, below which nothing is said of what is gathered so: as
little of the time of sending is lost."""

WAY_OUT = (
    "compute it by other ops, or along a dim that the plan does not shard; or leave the modules that make "
    "what it reads out of tp_plan"
)


def check_in_full(traced: Traced, made: ShardedProgram, gathering: tuple[str, ...] = ()) -> None:
    """See the module. gathering: how names begin in modules that are to gather activations. Raises
    CaptureError."""
    unruled = [
        one for one in made.gathered if one.of_parameters or not f"{one.op.module}.".startswith(gathering)
    ]
    is_training = any(root.startswith(GRAD) for root in traced.program.roots)
    if not unruled or not is_training:
        return
    sent = sum(
        op.outputs[0].nbytes
        for op, _ in made.program.ops
        if op.target in (GATHER, REDUCE, SCATTER) and op.outputs[0]
    )
    if sum(one.nbytes for one in unruled) < LEAST * sent:
        return
    flops = made.flops_in_full / max(sum(op.flops for op, _ in traced.program.ops), 1)
    parameters = sum(one.spec.nbytes for one in traced.job.parameters)
    gathered = sum(one.of_parameters for one in unruled) / max(parameters, 1)
    text = (
        f"ranks of {TENSOR} gather their slices for what no rule computes on slices, and each computes it in "
        f"full: {_places(unruled)}"
    )
    for share, what in ((flops, "flops are computed"), (gathered, "parameters are gathered")):
        if share > MOST:
            raise CaptureError(
                f"{TENSOR} has little to gain in {traced.job.name}: {100 * min(share, 1):.0f} % of its "
                f"{what} in full on every rank.\n  {text}.\n  {WAY_OUT[0].upper()}{WAY_OUT[1:]}"
            )
    warnings.warn(f"{text}. That is right, and slow: {WAY_OUT}", stacklevel=2)


def _places(gathered: Sequence[Gathered]) -> str:
    """By module and op, where layers that differ by a number are one; most bytes first."""
    nbytes: dict[tuple[str, str], int] = {}
    for one in gathered:
        module = re.sub(r"(?<![^.])\d+(?![^.])", "*", one.op.module) or "the model or its loss"
        place = module, one.op.target.split(".")[-2] if "." in one.op.target else one.op.target
        nbytes[place] = nbytes.get(place, 0) + one.nbytes
    largest = sorted(nbytes, key=lambda place: -nbytes[place])
    return listed(f"{op} in {module} ({nbytes[module, op]:,} bytes a microbatch)" for module, op in largest)
