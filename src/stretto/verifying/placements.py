"""Proves that every op of a plan can be computed on what tensor-parallel ranks hold of its operands.

Capture has proved it of the step that it traced, with the shapes of the model alone beside it. Passes and
planning have changed the programs since, and a plan file may be anybody's. So each op is placed again
(`stretto.ir.placements`) from the parameters' shards on, through all stages: an addend that is used as if it
were the sum, a sum over ranks of what is whole on each, a slice beside a whole, and gradients that are other
than their parameters say. The order of gathered rows is not followed here, and what an op without a rule
makes is taken as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stretto.ir.axes import TENSOR
from stretto.ir.flow import PHASES, given_specs
from stretto.ir.op_names import COPIES, names
from stretto.ir.placed_programs import Trouble, place_all, placers_of, programs_of, shards_of
from stretto.ir.placement import UNKNOWN, EqualReducedError, NeedsEqualError, Placement, is_thin
from stretto.ir.placements import Placer
from stretto.ir.plan import Plan
from stretto.ir.program import GETITEM, VIEWS, Op, TensorSpec
from stretto.verifying.fault import Fault

HIGHEST = names("amax amin max min max.dim min.dim")
NORMS = names("linalg_vector_norm norm.ScalarOpt_dim norm.Scalar")
"""Of which that of order infinity is a highest element."""


def placement_faults(plan: Plan) -> list[Fault]:
    """Every fault of what ranks along tp hold. The programs must have no other fault."""
    job = plan.job
    size = job.size(TENSOR)
    if size == 1:
        return []
    placers = placers_of(TENSOR, size, shards_of(job, TENSOR), exact=False)
    specs = given_specs(job)
    stages, programs = zip(*programs_of(job), strict=True)
    troubles = place_all(programs, placers, specs)
    result = [_fault(plan.rank_of(stages[at]), op, trouble) for at, op, trouble in troubles]
    result += _reductions(plan)
    return result or [*_kept(plan, placers), *_gradients(plan, placers, specs)]


def _reductions(plan: Plan) -> Iterator[Fault]:
    """Addends are summed, and of ranks' highest elements the highest is taken."""
    made = {op.name: op for stage in plan.job.stages for ops in stage.ops.values() for op in ops}
    for stage, op in ((s, op) for s in plan.job.stages for phase in PHASES for op in s.ops[phase]):
        if op.kind is None or not op.kind.reductions or op.lane != TENSOR:
            continue
        source = op.args[0].name
        maker = _maker(made, source)
        if op.how == "max" and maker not in (*HIGHEST, *NORMS):
            what = f"takes the maximum of {source} over {TENSOR} ranks, which is no highest element"
            yield Fault(plan.rank_of(stage.index), f"{op.name} ({op.target})", what, "Reduce it by sum")
        elif op.how != "max" and maker in HIGHEST:
            what = f"adds up {source} over {TENSOR} ranks, which is each rank's highest element"
            yield Fault(plan.rank_of(stage.index), f"{op.name} ({op.target})", what, "Reduce it by max")


def _maker(made: Mapping[str, Op], name: str) -> str:
    """The function that makes a value, behind views, copies and changes of sign; "" if no op does."""
    op = made.get(name)
    while op is not None and (op.target in COPIES or op.target in VIEWS or op.target == GETITEM):
        op = made.get(op.uses[0]) if op.uses else None
    return "" if op is None else op.target


def _fault(rank: int, op: Op, trouble: Trouble) -> Fault:
    if isinstance(trouble, NeedsEqualError):
        names = ", ".join(trouble.names)
        what = f"uses {names} as a whole, of which every {TENSOR} rank has only an addend"
        fix = "Sum it over the ranks first"
    elif isinstance(trouble, EqualReducedError):
        what = f"sums {trouble} over {TENSOR} ranks, which all hold it whole"
        fix = "Use it as it is"
    else:
        what = f"has operands that {TENSOR} ranks do not hold alike: {trouble}"
        fix = "Gather what is spread first"
    return Fault(rank, f"{op.name} ({op.target})", what, fix)


def _gradients(plan: Plan, placers: list[Placer], specs: dict[str, TensorSpec]) -> Iterator[Fault]:
    """Gradients of spread parameters are spread with them, others are whole or addends, as they say."""
    for parameter in plan.job.parameters:
        where, partial = f"parameter {parameter.name}", TENSOR in parameter.partial
        for stage, phase, value in parameter.grads:
            rank, its = plan.rank_of(stage), f"its gradient {value} ({stage}{phase})"
            if value not in specs:
                what = f"{its} needs what a later program makes of it"
                yield Fault(rank, where, what, "Put each op behind what it reads, I before W")
                continue
            for placer in placers:
                own, held = placer.of(f"param/{parameter.name}"), placer.of(value)
                thin = is_thin(held, specs[value].shape)  # one element may be an addend as well
                if held.zero:
                    continue
                whole = _is_whole(held)
                if own.kind == "part" and held.kind not in ("part", "local"):
                    what = f"{its} is {held}, but the parameter is {own}"
                    yield Fault(rank, where, what, "Give it the shard or `partial` that fits")
                elif own.kind != "part" and not partial and not whole and not thin:
                    what = f"{its} differs between {TENSOR} ranks, which all hold it whole, and is not summed"
                    yield Fault(rank, where, what, f"Name {TENSOR} in `partial`")
                elif own.kind != "part" and partial and whole:
                    size = plan.job.size(TENSOR)
                    what = f"{its} is the whole on every {TENSOR} rank, and would be counted {size} times"
                    yield Fault(rank, where, what, f"Take {TENSOR} out of `partial`")
                elif own.kind != "part" and partial and held.kind == "part" and not thin:
                    what = f"{its} is {held}, but the parameter is {own} with addends of its gradient"
                    yield Fault(rank, where, f"{what} on {TENSOR} ranks", "Give it no shard that fits")


def _kept(plan: Plan, placers: list[Placer]) -> Iterator[Fault]:
    """The loss, and what buffers become, are whole on every rank."""
    for placer in placers:
        stage, loss = plan.job.loss
        if not _is_whole(placer.of(loss)):
            what = f"{loss} differs between {TENSOR} ranks"
            yield Fault(plan.rank_of(stage), "loss", what, "Gather or sum what it is made of first")
        for buffer in plan.job.buffers:
            for stage, phase, value in buffer.updates:
                if not _is_whole(placer.of(value)):
                    what = f"its update {value} ({stage}{phase}) differs between {TENSOR} ranks, which all "
                    fix = "Sum or gather what it is made of first"
                    yield Fault(plan.rank_of(stage), f"buffer {buffer.name}", f"{what}hold it whole", fix)


def _is_whole(held: Placement) -> bool:
    return held.kind == "equal" or held == UNKNOWN
