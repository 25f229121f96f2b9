"""Names and numbers in a plan that point at nothing: stages, ranks, ops, edges, windows, tied parameters.

Reading a plan file refuses them at once (with the JSON path); `stretto.verify` refuses them in plans that
were never a file. After this check, every other look-up in a plan succeeds.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable

from stretto.ir.action import ONCE_PHASES, Phase
from stretto.ir.broken import Broken, BrokenReference
from stretto.ir.broken_once import broken_once
from stretto.ir.collectives import PRICED
from stretto.ir.flow import PHASES, is_external
from stretto.ir.limits import MOST_MICROBATCHES, MOST_RANKS
from stretto.ir.plan import Instruction, InstructionKind, ItemKind, Plan, Window
from stretto.ir.program import (
    CHUNK,
    GETITEM,
    INDEX,
    SHARD,
    WAIT,
    Count,
    Edge,
    Job,
    Op,
    Ref,
)

STAGE = "there is no stage {}; the job has {}"
RANK = "there is no rank {}; the plan has {}"
EDGE = "there is no edge e{}; the job has {}"
PART = "there is no part {}; the window has {}"

BY_RANK = ("compute_us", "exposed_us", "bubble_us", "peak_bytes")
"""Lists of a prediction."""


def broken_references(plan: Plan) -> list[BrokenReference]:
    """Every reference of the plan that points at nothing, in the order of the plan file."""
    result = Broken()
    _counts(result, plan)
    _programs(result, plan.job)
    if result:
        return result  # what follows looks ops up by stage and phase
    _job(result, plan.job)
    _schedule(result, plan)
    for name, window in plan.windows.items():
        _window(result, plan, name, window)
    for rank, order in enumerate(plan.orders):
        result.rank = rank
        for at, instruction in enumerate(order):
            _instruction(result, plan, f"orders[{rank}][{at}]", instruction)
    result.rank = None
    _communicators(result, plan)
    broken_once(result, plan)
    _costs(result, plan)
    return result


def _counts(found: Broken, plan: Plan) -> None:
    """What others walk has an end."""
    most = f"at most {MOST_RANKS:,}"
    found.unless(plan.world <= MOST_RANKS, "job.axes", f"{plan.world} ranks; {most} are planned for")
    for key, count in (("job", plan.job.microbatches), ("schedule", plan.schedule.microbatches)):
        right = 1 <= count <= MOST_MICROBATCHES
        found.unless(right, f"{key}.microbatches", f"{count}; from 1 to {MOST_MICROBATCHES:,} are possible")


def _programs(found: Broken, job: Job) -> None:
    found.unless(bool(job.stages), "job.stages", "a job has at least one stage")
    for at, stage in enumerate(job.stages):
        path = f"job.stages[{at}]"
        found.unless(stage.index == at, f"{path}.index", f"stages are numbered in order; expected {at}")
        for phase in PHASES:
            found.points(f"{path}.ops", phase, stage.ops, "the program {} is missing")
        for phase in stage.ops:
            found.points(f"{path}.ops", phase, (*PHASES, *ONCE_PHASES), "there is no program {}")
        for phases in (PHASES, ONCE_PHASES):
            seen: set[str] = set()
            for phase in phases:
                for number, op in enumerate(stage.ops.get(phase, ())):
                    _op(found, f"{path}.ops.{phase}[{number}]", op, seen)


def _op(found: Broken, path: str, op: Op, seen: set[str]) -> None:
    if op.name in seen:
        found.unless(False, path, f"op {op.name!r} is there twice")
    seen.add(op.name)
    if op.kwargs and len(dict(op.kwargs)) < len(op.kwargs):
        found.unless(False, path, "a keyword argument is there twice")
    if op.target == GETITEM:
        match op.args:
            case (Ref(), int(index)) if type(index) is int and index >= 0 and not op.kwargs:
                return
        found.unless(False, path, f'a {GETITEM} takes a value and which of its parts, from 0: ["%name", 0]')


def _once(found: Broken, path: str, values: Iterable[Hashable]) -> None:
    seen: set[Hashable] = set()
    for at, value in enumerate(values):
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
        found.unless(value not in seen, f"{path}[{at}]", f"names {shown} twice")
        seen.add(value)


def _job(found: Broken, job: Job) -> None:
    for kind in ("parameters", "buffers", "constants"):
        _once(found, f"job.{kind}", (kept.name for kept in getattr(job, kind)))
    for key in ("batch", "fixed", "axes"):
        _once(found, f"job.{key}", (name for name, _ in getattr(job, key)))
    stages = range(len(job.stages))
    made = {
        (s.index, phase): {op.name for op in s.ops[phase] if any(op.outputs) and len(op.outputs) == 1}
        for s in job.stages
        for phase in PHASES
    }

    def makes(path: str, stage: int, phase: Phase, value: str) -> bool:
        what = f"stage {stage} makes no value {{!r}} in its {phase} program"
        return found.points(path, stage, stages, STAGE) and found.points(
            path, value, made.get((stage, phase), ()), what
        )

    if makes("job.loss", job.loss[0], Phase.F, job.loss[1]):
        spec = job.loss_spec
        one = spec.numel == 1 and spec.dtype.startswith(("float", "bfloat"))
        found.unless(one, "job.loss", f"a loss is one floating-point number, and {job.loss[1]!r} is {spec}")
    for at, metric in enumerate(job.metrics):
        makes(f"job.metrics[{at}]", metric.stage, Phase.F, metric.value)
    arrivals: dict[tuple[str, int], int] = {}
    for at, edge in enumerate(job.edges):
        path = f"job.edges[{at}]"
        what = f"edges are numbered in order; expected index {at}, found {edge.index}"
        found.unless(edge.index == at, path, what)
        if makes(path, edge.source, edge.phase, edge.value):
            _carries(found, job, path, edge)
        if found.points(path, edge.target, stages, STAGE):
            first = arrivals.setdefault((edge.value, edge.target), at)
            what = f"brings {edge.value!r} to stage {edge.target}, as edge {first} does"
            found.unless(first == at, path, what)
            _arrives(found, job, path, edge)
    leaves = [name for name, _ in job.batch]
    for at, leaf in enumerate(job.replicated):
        found.points(f"job.replicated[{at}]", leaf, leaves, "the batch has no leaf {!r}")
    mean = job.count is None or job.mean_over is None
    found.unless(mean, "job.mean_over", "the loss has a count, so it is a sum and no mean")
    for key, count in (("count", job.count), ("mean_over", job.mean_over)):
        if count is not None:
            _count(found, job, f"job.{key}", count)
    _reads(found, job)
    firsts = {parameter.name for parameter in job.parameters if parameter.tied_to == parameter.name}
    for at, parameter in enumerate(job.parameters):
        what = "there is no parameter {!r} that is the first of its ties"
        found.points(f"job.parameters[{at}].tied_to", parameter.tied_to, firsts, what)
    kept = [("parameters", "grads", p.stages, p.grads) for p in job.parameters]
    kept += [("buffers", "updates", b.stages, b.updates) for b in job.buffers]
    for at, (kind, key, owners, values) in enumerate(kept):
        path = f"job.{kind}[{at if kind == 'parameters' else at - len(job.parameters)}]"
        for k, stage in enumerate(owners):
            found.points(f"{path}.stages[{k}]", stage, stages, STAGE)
        _once(found, f"{path}.stages", owners)
        _once(found, f"{path}.{key}", values)
        for k, value in enumerate(values):
            if makes(f"{path}.{key}[{k}]", *value) and kind == "parameters":
                what = f"stage {value[0]} does not have the parameter"
                found.unless(value[0] in owners, f"{path}.{key}[{k}]", what)
    for at, constant in enumerate(job.constants):
        what = f"{constant.spec} has {constant.spec.numel} elements, found {len(constant.data)}"
        found.unless(len(constant.data) == constant.spec.numel, f"job.constants[{at}].data", what)


def _carries(found: Broken, job: Job, path: str, edge: Edge) -> None:
    """A receive's buffer is allocated by the edge's spec: another size would write past it or hang."""
    op = next(op for op in job.stages[edge.source].ops[edge.phase] if op.name == edge.value)
    made = ", ".join(map(str, op.outputs)) or "no tensor"
    found.unless(op.outputs == (edge.spec,), path, f"carries {edge.spec}, but {edge.value!r} is {made}")


def _arrives(found: Broken, job: Job, path: str, edge: Edge) -> None:
    what = f"leads from stage {edge.source} to itself; an edge joins two stages"
    found.unless(edge.target != edge.source, path, what)
    programs = job.stages[edge.target].ops
    reader = next((p for p in PHASES if any(edge.value in op.uses for op in programs[p])), None)
    who = f"no op of stage {edge.target} reads" if reader is None else f"{reader} is the first to read"
    what = f"user_phase is {edge.user_phase}, but {who} {edge.value!r}"
    found.unless(reader is edge.user_phase, path, what)


def _count(found: Broken, job: Job, path: str, count: Count) -> None:
    """Counts are made from the batch alone, by ops of their own."""
    made = {f"batch/{name}" for name, _ in job.batch} | {f"const/{c.name}" for c in job.constants}
    for number, op in enumerate(count.ops):
        here = f"{path}.ops[{number}]"
        plain = not op.random and op.lane == "compute" and op.target not in (WAIT, INDEX, CHUNK)
        found.unless(plain, here, "a count is made of plain ops, which neither draw nor communicate")
        for name in op.uses:
            found.points(here, name, made, "no op before it makes {!r}")
        _op(found, here, op, made)
    if not isinstance(count.value, str):
        what = "expected the name of one of `ops`, or without any a number above 0"
        found.unless(0 < count.value < math.inf and not count.ops, f"{path}.value", what)
    else:
        spec = next((op.outputs[0] for op in count.ops if op.name == count.value and op.outputs), None)
        one = spec is not None and spec.numel == 1
        found.unless(one, f"{path}.value", f"no op makes one number {count.value!r}")


def _reads(found: Broken, job: Job) -> None:
    """What ops read from outside the step is given to their stage. A view names a value of its stage, and
    following views ends at one that is none."""
    everywhere = {"tangent"} | {f"batch/{name}" for name, _ in job.batch}
    everywhere |= {f"const/{constant.name}" for constant in job.constants}
    for at, stage in enumerate(job.stages):
        given = everywhere | {f"param/{p.name}" for p in job.parameters if at in p.stages}
        given |= {f"buffer/{b.name}" for b in job.buffers if at in b.stages}
        given |= {SHARD + p.kept_as for p in job.parameters if at in p.stages and p.is_made}
        views = {op.name: op.alias for phase in PHASES for op in stage.ops[phase]}
        nothing = {o.name for phase in PHASES for o in stage.ops[phase] if not any(o.outputs)}
        several = {o.name for phase in PHASES for o in stage.ops[phase] if len(o.outputs) > 1}
        here = views.keys() | {edge.value for edge in job.edges if edge.target == at}
        for path, op in (
            (f"job.stages[{at}].ops.{phase}[{number}]", op)
            for phase in PHASES
            for number, op in enumerate(stage.ops[phase])
        ):
            for name in op.uses:
                if is_external(name) and name not in given:
                    found.unless(False, path, f"stage {at} is not given {name!r}")
                elif name in nothing or (name in several and op.target != GETITEM):
                    found.unless(False, path, f"reads {name!r}, which is no tensor")
            seen = {op.name}
            base = op.alias
            while base is not None and base in views and base not in seen:
                seen.add(base)
                base = views[base]
            if base in seen:
                found.unless(False, path, f"is a view of itself, by way of {base!r}")
            elif op.alias is not None and op.alias not in here and not is_external(op.alias):
                found.unless(False, path, f"is a view of {op.alias!r}, which stage {at} does not have")


def _schedule(found: Broken, plan: Plan) -> None:
    schedule, ranks, stages = plan.schedule, plan.ranks, len(plan.job.stages)
    what = f"orders of {schedule.ranks} ranks, but the plan has orders of {ranks} ranks"
    found.unless(schedule.ranks == ranks, "schedule.orders", what)
    for stage, rank in enumerate(schedule.stage_ranks):
        found.points(f"schedule.stage_ranks[{stage}]", rank, range(ranks), RANK)
    what = f"places {len(schedule.stage_ranks)} stages, but the job has {stages}"
    found.unless(len(schedule.stage_ranks) == stages, "schedule.stage_ranks", what)


def _window(found: Broken, plan: Plan, name: str, window: Window) -> None:
    job, parts = plan.job, range(len(window.parts))
    path = f"windows.{name}" if name.isidentifier() else f'windows["{name}"]'
    found.unless(window.name == name, path, f"the window calls itself {window.name!r}")
    found.unless(bool(parts), f"{path}.parts", "a window has at least one part")
    stages = range(len(job.stages))
    places = [found.points(f"{path}.parts[{k}]", s, stages, STAGE) for k, (s, _) in enumerate(window.parts)]
    if not all(places):
        return
    if window.shares:
        what = "names, for each part, the first part of its stage and microbatch"
        found.unless(_sound_shares(window), f"{path}.shares", what)
    made = [
        {op.name for sub in phase.programs for op in job.stages[s].ops.get(sub, ())}
        for s, phase in window.parts
    ]
    for at, item in enumerate(window.items):
        here = f"{path}.items[{at}]"
        if not found.points(here, item.part, parts, PART):
            continue
        if item.kind is not ItemKind.OP:
            found.points(here, item.ref, range(len(job.edges)), EDGE)
        elif item.ref not in made[item.part]:
            stage, phase = window.parts[item.part]
            found.unless(False, here, f"stage {stage} has no op {item.ref!r} in its {phase} program")


def _sound_shares(window: Window) -> bool:
    """Whether every part names itself, or one before it of its stage that names itself."""
    stages = [stage for stage, _ in window.parts]
    return len(window.shares) == len(stages) and all(
        0 <= first <= part and window.shares[first] == first and stages[first] == stages[part]
        for part, first in enumerate(window.shares)
    )


def _instruction(found: Broken, plan: Plan, path: str, instruction: Instruction) -> None:
    kind, ref, bound = instruction.kind, instruction.ref, len(instruction.microbatches)
    if kind is InstructionKind.RUN:
        if found.points(path, ref, plan.windows, "there is no window {!r}"):
            parts = len(plan.windows[str(ref)].parts)
            what = f"window {ref} takes {parts} microbatches, found {bound}"
            found.unless(bound == parts, path, what)
    elif found.points(path, ref, range(len(plan.job.edges)), EDGE):
        found.unless(bound == 1, path, f"{kind} takes one microbatch, found {bound}")


def _communicators(found: Broken, plan: Plan) -> None:
    sizes = dict(plan.mesh.sizes)
    for at, communicator in enumerate(plan.communicators):
        path = f"communicators[{at}]"
        known = [
            found.points(f"{path}.axes", axis, sizes, "there is no axis {}") for axis in communicator.axes
        ]
        if found.unless(bool(known), f"{path}.axes", "name an axis") and all(known):
            axis = communicator.axes[0]
            what = f"there is no rank {{}} on {axis}, which has {{}}"
            for k, rank in enumerate(communicator.ranks):
                found.points(f"{path}.ranks[{k}]", rank, range(sizes[axis]), what)


def _costs(found: Broken, plan: Plan) -> None:
    ops = {(stage, op.name) for stage, op in plan.job.all_ops}
    costs, ranks = plan.costs, range(plan.ranks)
    for key in costs.op_us:
        if key not in ops:
            found.unless(False, "costs.op_us", f"stage {key[0]} has no op {key[1]!r}")
    for key in costs.op_how:
        if key not in costs.op_us:
            found.unless(False, "costs.op_how", f"op {key[1]!r} of stage {key[0]} has no time in op_us")
    for sender, receiver in costs.links:
        what = f"there is no link from rank {sender} to rank {receiver}"
        found.unless(sender in ranks and receiver in ranks, "costs.links", what)
    axes = dict(plan.mesh.sizes)
    for name, kind in costs.collectives:
        found.points("costs.collectives", name, axes, "there is no axis {}")
        found.points("costs.collectives", kind, PRICED, "there is no collective {}")
    for axis in costs.shared:
        found.points("costs.shared", axis, axes, "there is no axis {}")
    if plan.prediction is not None:
        lists = {name: getattr(plan.prediction, name) for name in BY_RANK}
        for name in ("memory", "exposed_axis_us", "comm_axis_us"):
            for key, by_rank in getattr(plan.prediction, name).items():
                lists[f"{name}.{key}"] = by_rank
                if name != "memory":
                    found.points(f"prediction.{name}", key, axes, "there is no axis {}")
        for name, by_rank in lists.items():
            what = f"{len(by_rank)} ranks, but the plan has {plan.ranks}"
            found.unless(len(by_rank) == plan.ranks, f"prediction.{name}", what)
