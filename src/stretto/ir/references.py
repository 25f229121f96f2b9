"""Names and numbers in a plan that point at nothing: stages, ranks, ops, edges, windows, tied parameters.

Reading a plan file refuses them at once (with the JSON path); `stretto.verify` refuses them in plans that
were never a file. After this check, every other look-up in a plan succeeds. Touches `stretto.ir` only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stretto.ir.action import Phase
from stretto.ir.collectives import ALL_REDUCE
from stretto.ir.flow import PHASES, defined, is_external
from stretto.ir.plan import Instruction, InstructionKind, ItemKind, Plan, Window
from stretto.ir.program import CHUNK, INDEX, STEP_LOSS, WAIT, Edge, Job, Op, Ref


@dataclass(frozen=True, slots=True)
class BrokenReference:
    """A reference that points at nothing. path: its place in the plan file; rank: if it is in an order."""

    path: str
    what: str
    rank: int | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


def broken_references(plan: Plan) -> list[BrokenReference]:
    """Every reference of the plan that points at nothing, in the order of the plan file."""
    found = list(_in_stages(plan.job))
    if found:
        return found  # what follows looks ops up by stage and phase
    found += _in_job(plan.job)
    found += _in_schedule(plan)
    for name, window in plan.windows.items():
        found += _in_window(plan.job, name, window)
    found += _in_sums(plan)
    for rank, order in enumerate(plan.orders):
        for at, instruction in enumerate(order):
            what = _in_instruction(plan, instruction)
            if what:
                found.append(BrokenReference(f"orders[{rank}][{at}]", what, rank))
    found += _in_communicators_and_costs(plan)
    return found


def _in_stages(job: Job) -> Iterator[BrokenReference]:
    if not job.stages:
        yield BrokenReference("job.stages", "a job has at least one stage")
    for at, stage in enumerate(job.stages):
        path = f"job.stages[{at}]"
        if stage.index != at:
            yield BrokenReference(f"{path}.index", f"stages are numbered in order; expected {at}")
        for phase in PHASES:
            if phase not in stage.ops:
                yield BrokenReference(f"{path}.ops", f"the program {phase} is missing")
        # I and W may run as one action, so their ops share one name space.
        for phases in ((Phase.F,), (Phase.I, Phase.W), (Phase.REDUCE_GRAD,)):
            seen: set[str] = set()
            for phase in phases:
                for number, op in enumerate(stage.ops.get(phase, ())):
                    if op.name in seen:
                        yield BrokenReference(
                            f"{path}.ops.{phase}[{number}]", f"op {op.name!r} is there twice"
                        )
                    seen.add(op.name)


def _in_job(job: Job) -> Iterator[BrokenReference]:
    stages = len(job.stages)
    made = {(s.index, phase): defined(s.ops[phase]) for s in job.stages for phase in PHASES}

    def missing(stage: int, phase: Phase, value: str) -> str | None:
        if not 0 <= stage < stages:
            return f"there is no stage {stage}; the job has {stages}"
        if value not in made.get((stage, phase), ()):
            return f"stage {stage} makes no value {value!r} in its {phase} program"
        return None

    what = missing(job.loss[0], Phase.F, job.loss[1])
    if what:
        yield BrokenReference("job.loss", what)
    arrivals: dict[tuple[str, int], int] = {}
    for at, edge in enumerate(job.edges):
        for what in _in_edge(job, at, edge, missing(edge.source, edge.phase, edge.value), arrivals):
            yield BrokenReference(f"job.edges[{at}]", what)
    yield from _counts(job)
    yield from _given(job)
    yield from _aliases(job)
    names = {parameter.name for parameter in job.parameters}
    for at, parameter in enumerate(job.parameters):
        path = f"job.parameters[{at}]"
        if parameter.tied_to not in names:
            yield BrokenReference(f"{path}.tied_to", f"there is no parameter {parameter.tied_to!r}")
        yield from _stages_exist(f"{path}.stages", parameter.stages, stages)
        for k, (stage, phase, value) in enumerate(parameter.grads):
            what = missing(stage, phase, value)
            if what:
                yield BrokenReference(f"{path}.grads[{k}]", what)
    for at, buffer in enumerate(job.buffers):
        path = f"job.buffers[{at}]"
        yield from _stages_exist(f"{path}.stages", buffer.stages, stages)
        for k, (stage, phase, value) in enumerate(buffer.updates):
            what = missing(stage, phase, value)
            if what:
                yield BrokenReference(f"{path}.updates[{k}]", what)


def _counts(job: Job) -> Iterator[BrokenReference]:
    """Counts are made from the batch alone, by ops of their own."""
    leaves = [name for name, _ in job.batch]
    for at, name in enumerate(job.whole):
        if name not in leaves:
            yield BrokenReference(f"job.whole[{at}]", f"the batch has no leaf {name!r}")
    for key, count in (("count", job.count), ("mean_over", job.mean_over)):
        if count is None:
            continue
        made = {f"batch/{name}" for name in leaves} | {f"const/{c.name}" for c in job.constants}
        for number, op in enumerate(count.ops):
            path = f"job.{key}.ops[{number}]"
            if op.random or op.lane != "compute" or op.target in (WAIT, INDEX, CHUNK):
                yield BrokenReference(
                    path, "a count is made of plain ops, which neither draw nor communicate"
                )
            if op.name in made:
                yield BrokenReference(path, f"op {op.name!r} is there twice")
            for name in op.uses:
                if name not in made:
                    yield BrokenReference(path, f"no op before it makes {name!r}")
            made.add(op.name)
        if isinstance(count.value, str):
            spec = next((op.outputs[0] for op in count.ops if op.name == count.value and op.outputs), None)
            if spec is None or spec.numel != 1:
                yield BrokenReference(f"job.{key}.value", f"no op makes one number {count.value!r}")


def _given(job: Job) -> Iterator[BrokenReference]:
    """Values from outside the step that ops read: parameters, buffers, leaves of the batch, constants."""
    everywhere = {"tangent"} | {f"batch/{name}" for name, _ in job.batch}
    everywhere |= {f"const/{constant.name}" for constant in job.constants}
    for at, stage in enumerate(job.stages):
        here = everywhere | {f"param/{p.name}" for p in job.parameters if at in p.stages}
        here |= {f"buffer/{b.name}" for b in job.buffers if at in b.stages}
        for phase in PHASES:
            for number, op in enumerate(stage.ops[phase]):
                for name in op.uses:
                    if is_external(name) and name not in here:
                        yield BrokenReference(
                            f"job.stages[{at}].ops.{phase}[{number}]", f"stage {at} is not given {name!r}"
                        )


def _aliases(job: Job) -> Iterator[BrokenReference]:
    """A view names a value of its stage, and following views ends at one that is none."""
    for at, stage in enumerate(job.stages):
        views = {op.name: op.alias for phase in PHASES for op in stage.ops[phase]}
        here = views.keys() | {edge.value for edge in job.edges if edge.target == at}
        for phase in PHASES:
            for number, op in enumerate(stage.ops[phase]):
                path = f"job.stages[{at}].ops.{phase}[{number}]"
                seen = {op.name}
                name = op.alias
                while name is not None and name in views and name not in seen:
                    seen.add(name)
                    name = views[name]
                if name in seen:
                    yield BrokenReference(path, f"is a view of itself, by way of {name!r}")
                elif op.alias is not None and op.alias not in here and not is_external(op.alias):
                    yield BrokenReference(path, f"is a view of {op.alias!r}, which stage {at} does not have")


def _in_edge(
    job: Job, at: int, edge: Edge, source: str | None, arrivals: dict[tuple[str, int], int]
) -> Iterator[str]:
    if edge.index != at:
        yield f"edges are numbered in order; expected index {at}, found {edge.index}"
    if source:
        yield source
    else:
        op = next(op for op in job.stages[edge.source].ops[edge.phase] if op.name == edge.value)
        # A receive's buffer is allocated by the edge's spec: another size would write past it or hang.
        if [(s.shape, s.dtype) for s in op.outputs if s is not None] != [(edge.spec.shape, edge.spec.dtype)]:
            made = ", ".join(map(str, op.outputs))
            yield f"carries {edge.spec}, but {edge.value!r} is {made or 'no tensor'}"
    if not 0 <= edge.target < len(job.stages):
        yield f"there is no stage {edge.target}; the job has {len(job.stages)}"
        return
    if edge.target == edge.source:
        yield f"leads from stage {edge.source} to itself; an edge joins two stages"
    first = arrivals.setdefault((edge.value, edge.target), at)
    if first != at:
        yield f"brings {edge.value!r} to stage {edge.target}, as edge {first} does"
    programs = job.stages[edge.target].ops
    reader = next((p for p in PHASES if any(edge.value in op.uses for op in programs[p])), None)
    if reader is not edge.user_phase:
        yield (
            f"user_phase is {edge.user_phase}, but "
            + (f"no op of stage {edge.target} reads" if reader is None else f"{reader} is the first to read")
            + f" {edge.value!r}"
        )


def _stages_exist(path: str, stages: tuple[int, ...], count: int) -> Iterator[BrokenReference]:
    for k, stage in enumerate(stages):
        if not 0 <= stage < count:
            yield BrokenReference(f"{path}[{k}]", f"there is no stage {stage}; the job has {count}")


def _in_schedule(plan: Plan) -> Iterator[BrokenReference]:
    ranks = len(plan.orders)
    if plan.schedule.ranks != ranks:
        yield BrokenReference(
            "schedule.orders",
            f"orders of {plan.schedule.ranks} ranks, but the plan has orders of {ranks} ranks",
        )
    for stage, rank in enumerate(plan.schedule.stage_ranks):
        if not 0 <= rank < ranks:
            yield BrokenReference(
                f"schedule.stage_ranks[{stage}]", f"there is no rank {rank}; the plan has {ranks}"
            )
    if len(plan.schedule.stage_ranks) != len(plan.job.stages):
        yield BrokenReference(
            "schedule.stage_ranks",
            f"places {len(plan.schedule.stage_ranks)} stages, but the job has {len(plan.job.stages)}",
        )


def _in_window(job: Job, name: str, window: Window) -> Iterator[BrokenReference]:
    path = f"windows.{name}" if name.isidentifier() else f'windows["{name}"]'
    if window.name != name:
        yield BrokenReference(path, f"the window calls itself {window.name!r}")
    if not window.parts:
        yield BrokenReference(f"{path}.parts", "a window has at least one part")
    for k, (stage, _) in enumerate(window.parts):
        if not 0 <= stage < len(job.stages):
            yield BrokenReference(
                f"{path}.parts[{k}]", f"there is no stage {stage}; the job has {len(job.stages)}"
            )
            return
    if window.shares and not _sound_shares(window):
        yield BrokenReference(
            f"{path}.shares", "names, for each part, the first part of its stage and microbatch"
        )
    made = [
        {op.name for sub in phase.parts for op in job.stages[s].ops.get(sub, ())} for s, phase in window.parts
    ]
    for at, item in enumerate(window.items):
        what = None
        if not 0 <= item.part < len(window.parts):
            what = f"there is no part {item.part}; the window has {len(window.parts)}"
        elif item.kind is ItemKind.OP:
            if item.ref not in made[item.part]:
                stage, phase = window.parts[item.part]
                what = f"stage {stage} has no op {item.ref!r} in its {phase} program"
        elif not isinstance(item.ref, int) or not 0 <= item.ref < len(job.edges):
            what = f"there is no edge e{item.ref}; the job has {len(job.edges)}"
        if what:
            yield BrokenReference(f"{path}.items[{at}]", what)


def _sound_shares(window: Window) -> bool:
    """Whether every part names itself, or one before it of its stage that names itself."""
    stages = [stage for stage, _ in window.parts]
    return len(window.shares) == len(stages) and all(
        0 <= first <= part and window.shares[first] == first and stages[first] == stages[part]
        for part, first in enumerate(window.shares)
    )


def _in_instruction(plan: Plan, instruction: Instruction) -> str | None:
    kind, ref = instruction.kind, instruction.ref
    if kind is InstructionKind.RUN:
        window = plan.windows.get(str(ref))
        if window is None:
            return f"there is no window {ref!r}"
        if len(instruction.microbatches) != len(window.parts):
            return (
                f"window {ref} takes {len(window.parts)} microbatches, found {len(instruction.microbatches)}"
            )
    elif kind in (InstructionKind.RECV, InstructionKind.SENT):
        if not isinstance(ref, int) or not 0 <= ref < len(plan.job.edges):
            return f"there is no edge e{ref}; the job has {len(plan.job.edges)}"
        if len(instruction.microbatches) != 1:
            return f"{kind} takes one microbatch, found {len(instruction.microbatches)}"
    return None


def _in_sums(plan: Plan) -> Iterator[BrokenReference]:
    """Programs of sums: starts over a communicator of the plan, and waits for them."""
    known = {parameter.tied_to for parameter in plan.job.parameters} | {STEP_LOSS}
    lanes = {communicator.name for communicator in plan.communicators}
    for at, stage in enumerate(plan.job.stages):
        started: set[str] = set()
        for k, op in enumerate(stage.ops.get(Phase.REDUCE_GRAD, ())):
            what = ""
            if op.target == WAIT:
                if op.args not in [(Ref(name),) for name in started]:
                    what = "waits for no sum that starts before it"
            elif not _is_sum(op):
                what = f"is no sum of gradients or of the loss, and no wait for one: {op.target}"
            elif op.lane not in lanes:
                what = f"there is no communicator {op.lane!r}"
            else:
                what = "".join(f"there is no tied group {name!r}" for name in op.sums if name not in known)
                started.add(op.name)
            if what:
                path = f"job.stages[{at}].ops.{Phase.REDUCE_GRAD}[{k}]"
                yield BrokenReference(path, f"{op.name}: {what}")


def _is_sum(op: Op) -> bool:
    if op.target != ALL_REDUCE.target or len(op.args) != 4 or op.kwargs or None in (op.outputs or (None,)):
        return False
    read, how, lane, size = op.args
    return (
        (type(read), how, type(lane), type(size), len(op.outputs)) == (tuple, "sum", str, int, 1)
        and bool(op.sums)
        and len(op.sums) == len(op.uses)
        and all(isinstance(one, Ref) for one in read)
    )


def _in_communicators_and_costs(plan: Plan) -> Iterator[BrokenReference]:
    ranks = len(plan.orders)
    for at, communicator in enumerate(plan.communicators):
        path = f"communicators[{at}]"
        unknown = [axis for axis in communicator.axes if axis not in dict(plan.mesh.sizes)]
        if unknown or not communicator.axes:
            yield BrokenReference(
                f"{path}.axes", f"there is no axis {', '.join(unknown)}" if unknown else "name an axis"
            )
            continue
        size = plan.mesh.size(communicator.axes[0])
        for k, rank in enumerate(communicator.ranks):
            if not 0 <= rank < size:
                yield BrokenReference(
                    f"{path}.ranks[{k}]",
                    f"there is no rank {rank} on {communicator.axes[0]}, which has {size}",
                )
    names = [{op.name for phase in PHASES for op in stage.ops[phase]} for stage in plan.job.stages]
    for stage, name in plan.costs.op_us:
        if not 0 <= stage < len(names) or name not in names[stage]:
            yield BrokenReference("costs.op_us", f"stage {stage} has no op {name!r}")
    for stage, name in plan.costs.op_how:
        if (stage, name) not in plan.costs.op_us:
            yield BrokenReference("costs.op_how", f"op {name!r} of stage {stage} has no time in op_us")
    for sender, receiver in plan.costs.links:
        if not (0 <= sender < ranks and 0 <= receiver < ranks):
            yield BrokenReference("costs.links", f"there is no link from rank {sender} to rank {receiver}")
    if plan.prediction is not None:
        for key in ("compute_us", "exposed_us", "bubble_us", "peak_bytes"):
            count = len(getattr(plan.prediction, key))
            if count != ranks:
                yield BrokenReference(f"prediction.{key}", f"{count} ranks, but the plan has {ranks}")
