"""Proves that every op of a plan can be computed on what tensor-parallel ranks hold of its operands.

Capture has proved it of the step that it traced, with the shapes of the model alone beside it. Passes and
planning have changed the programs since, and a plan file may be anybody's. So each op is placed again
(`stretto.ir.placements`) from the parameters' shards on, through all stages: an addend that is used as if it
were the sum, a sum over ranks of what is whole on each, a slice beside a whole, and gradients that are other
than their parameters say. The order of gathered rows is not followed here, and what an op without a rule
makes is taken as it is. May touch `stretto.ir`.
"""

from __future__ import annotations

from collections.abc import Iterator

from stretto.ir.axes import TENSOR
from stretto.ir.flow import PHASES
from stretto.ir.placement import LOCAL, EqualReducedError, NeedsEqualError, RefusedError, is_thin
from stretto.ir.placements import Placer, placers_of
from stretto.ir.plan import Plan
from stretto.ir.program import Job, Op, TensorSpec
from stretto.verify.fault import Fault


def placement_faults(plan: Plan) -> list[Fault]:
    """Every fault of what ranks along tp hold. The programs must have no other fault."""
    job = plan.job
    size = job.size(TENSOR)
    if size == 1:
        return []
    shards = {p.name: shard for p in job.parameters for shard in p.shards if shard.axis == TENSOR}
    placers = placers_of(TENSOR, size, shards, exact=False)
    specs = _given(job)
    found = list(_walk(plan, placers, specs))
    if not found:
        found += _gradients(plan, placers, specs)
    return found


def _given(job: Job) -> dict[str, TensorSpec]:
    """Specs of what no op makes."""
    return {
        **{f"param/{p.name}": p.spec for p in job.parameters},
        **{f"buffer/{b.name}": b.spec for b in job.buffers},
        **{f"const/{c.name}": c.spec for c in job.constants},
        **{f"batch/{name}": spec for name, spec in job.batch},
        "tangent": job.loss_spec,
    }


def _walk(plan: Plan, placers: list[Placer], specs: dict[str, TensorSpec]) -> Iterator[Fault]:
    """Place all ops of all programs, each when its operands are known: values cross stages either way."""
    programs = [
        (stage.index, phase is not PHASES[0], list(stage.ops[phase]))
        for phase in PHASES
        for stage in plan.job.stages
    ]
    known = set(specs)
    at = [0] * len(programs)
    moved = True
    while moved:
        moved = False
        for k, (stage, backward, ops) in enumerate(programs):
            while at[k] < len(ops) and all(name in known for name in ops[at[k]].uses):
                op = ops[at[k]]
                yield from _place(plan.rank_of(stage), op, placers, specs, backward)
                if len(op.outputs) == 1 and op.outputs[0] is not None:
                    specs[op.name] = op.outputs[0]
                known.add(op.name)
                at[k] += 1
                moved = True


def _place(
    rank: int, op: Op, placers: list[Placer], specs: dict[str, TensorSpec], backward: bool
) -> Iterator[Fault]:
    for placer in placers:
        try:
            placer.place(op, specs, backward=backward and not op.repeats)  # else one of the forward
            continue
        except NeedsEqualError as error:
            what = (
                f"uses {', '.join(error.names)} as a whole, of which every {TENSOR} rank has only an addend"
            )
            fix = "Sum it over the ranks first"
        except EqualReducedError as error:
            what = f"sums {error} over {TENSOR} ranks, which all hold it whole"
            fix = "Use it as it is"
        except RefusedError as error:
            what = f"has operands that {TENSOR} ranks do not hold alike: {error}"
            fix = "Gather what is spread first"
        placer.values[op.name] = LOCAL  # what comes of it is no fault of its own
        yield Fault(rank, f"{op.name} ({op.target})", what, fix)


def _gradients(plan: Plan, placers: list[Placer], specs: dict[str, TensorSpec]) -> Iterator[Fault]:
    """Gradients of spread parameters are spread with them, others are whole or addends, as they say."""
    for parameter in plan.job.parameters:
        shard = next((s for s in parameter.shards if s.axis == TENSOR), None)
        for stage, phase, value in parameter.grads:
            for placer in placers:
                own, held = placer.of(f"param/{parameter.name}"), placer.of(value)
                if (
                    held.kind == "local"
                    or held.zero
                    or (held.kind == "part" and is_thin(held, specs[value].shape))
                ):
                    continue
                fits = (
                    held.kind == "part"
                    if own.kind == "part"
                    else held.kind == ("sum" if TENSOR in parameter.partial else "equal")
                )
                if not fits:
                    yield Fault(
                        plan.rank_of(stage),
                        f"parameter {parameter.name}",
                        f"its gradient {value} ({stage}{phase}) is {held}, but the parameter is {own}"
                        + (
                            f" with addends of its gradient on {TENSOR} ranks"
                            if TENSOR in parameter.partial
                            else ""
                        ),
                        f"Give it {'the shard' if shard is None else 'no shard'} or `partial` that fits",
                    )
