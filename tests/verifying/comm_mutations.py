"""Ways to break the collectives of a plan's programs.

Each takes a plan and a source of chance, and gives a plan that must be refused, or None if the plan has no
place for it (no collective, for example).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from stretto.ir.action import Phase
from stretto.ir.flow import PHASES
from stretto.ir.plan import Item, ItemKind, Plan
from stretto.ir.program import STARTS, WAIT, Arg, Op, Parameter, Ref, Stage, TensorSpec
from stretto.planning.lower import lower
from tests.verifying.order_mutations import Mutation

Found = tuple[int, Phase, Op]
"""An op with its stage and phase."""


def _ops(plan: Plan, *targets: str) -> list[Found]:
    return [
        (stage.index, phase, op)
        for stage in plan.job.stages
        for phase in PHASES
        for op in stage.ops[phase]
        if op.target in targets
    ]


def _with_programs(plan: Plan, change: Callable[[int, Phase, Op], Op]) -> Plan:
    stages = tuple(
        Stage(s.index, {phase: tuple(change(s.index, phase, op) for op in s.ops[phase]) for phase in s.ops})
        for s in plan.job.stages
    )
    return replace(plan, job=replace(plan.job, stages=stages))


def _with_op(plan: Plan, found: Found, new: Op) -> Plan:
    at = (found[0], found[1], found[2].name)
    return _with_programs(plan, lambda s, phase, op: new if (s, phase, op.name) == at else op)


def _pick(chance: Random, plan: Plan, *targets: str) -> Found | None:
    found = _ops(plan, *targets)
    return chance.choice(found) if found else None


def with_parameter(plan: Plan, at: int, new: Parameter) -> Plan:
    parameters = list(plan.job.parameters)
    parameters[at] = new
    return replace(plan, job=replace(plan.job, parameters=tuple(parameters)))


def lowered_again(plan: Plan) -> Plan:
    return lower(plan.job, plan.schedule, plan.costs)


def wait_becomes_another_op(plan: Plan, chance: Random) -> Plan | None:
    """Nothing waits any more, and the op reads what is being filled."""
    found = _pick(chance, plan, WAIT)
    return found and _with_op(plan, found, replace(found[2], target="aten.alias.default"))


def read_before_wait(plan: Plan, chance: Random) -> Plan | None:
    """Every reader of a wait reads the start instead; the windows stand as they are."""
    found = _pick(chance, plan, WAIT)
    if found is None:
        return None
    stage, _, wait = found

    def start(arg: Arg) -> Arg:
        return wait.args[0] if isinstance(arg, Ref) and arg.name == wait.name else arg

    changed = _with_programs(
        plan, lambda s, _, op: replace(op, args=tuple(map(start, op.args))) if s == stage else op
    )
    return changed if changed != plan else None


def wait_before_its_start(plan: Plan, chance: Random) -> Plan | None:
    found = _pick(chance, plan, WAIT)
    if found is None:
        return None
    stage, phase, wait = found
    for window in plan.windows.values():
        for part, (of, parts) in enumerate(window.parts):
            if of == stage and phase in parts.parts:
                items = list(window.items)
                items.remove(Item(ItemKind.OP, part, wait.name))
                items.insert(
                    items.index(Item(ItemKind.OP, part, wait.args[0].name)),
                    Item(ItemKind.OP, part, wait.name),
                )
                return replace(
                    plan, windows={**plan.windows, window.name: replace(window, items=tuple(items))}
                )
    return None


def start_twice(plan: Plan, chance: Random) -> Plan | None:
    names = {op.name for _, _, op in _ops(plan, *STARTS)}
    places = [
        (window, at)
        for window in plan.windows.values()
        for at, i in enumerate(window.items)
        if i.ref in names
    ]
    if not places:
        return None
    window, at = chance.choice(places)
    items = (*window.items[:at], window.items[at], *window.items[at:])
    return replace(plan, windows={**plan.windows, window.name: replace(window, items=items)})


def second_wait(plan: Plan, chance: Random) -> Plan | None:
    found = _pick(chance, plan, WAIT)
    if found is None:
        return None
    stage, phase, wait = found
    again = replace(wait, name=f"{wait.name}_again")
    programs = {**plan.job.stages[stage].ops}
    programs[phase] = (*programs[phase], again)
    stages = [Stage(stage, programs) if s.index == stage else s for s in plan.job.stages]
    return lowered_again(replace(plan, job=replace(plan.job, stages=tuple(stages))))


def wait_for_something_else(plan: Plan, chance: Random) -> Plan | None:
    found = _pick(chance, plan, WAIT)
    if found is None:
        return None
    others = [op.args[0] for _, _, op in _ops(plan, *STARTS) if op.name == found[2].args[0].name]
    return _with_op(plan, found, replace(found[2], args=(others[0],), alias=None))


def another_axis(plan: Plan, chance: Random) -> Plan | None:
    found = _pick(chance, plan, *STARTS)
    if found is None:
        return None
    *args, axis, size = found[2].args
    other = chance.choice([a for a in ("pp", "ep", "", 0) if a != axis])
    return _with_op(plan, found, replace(found[2], args=(*args, other, size)))


def another_size(plan: Plan, chance: Random) -> Plan | None:
    found = _pick(chance, plan, *STARTS)
    if found is None:
        return None
    *args, size = found[2].args
    return _with_op(
        plan, found, replace(found[2], args=(*args, chance.choice([0, 1, size + 1, size * 2, -1])))
    )


def another_reduction(plan: Plan, chance: Random) -> Plan | None:
    found = _pick(chance, plan, "comm.all_reduce", "comm.reduce_scatter")
    if found is None:
        return None
    value, _, *group = found[2].args
    return _with_op(plan, found, replace(found[2], args=(value, chance.choice(["mean", "", 1]), *group)))


def another_kind(plan: Plan, chance: Random) -> Plan | None:
    found = _pick(chance, plan, *STARTS)
    if found is None:
        return None
    kinds = [kind for kind in (*STARTS, "comm.broadcast") if kind != found[2].target]
    return _with_op(plan, found, replace(found[2], target=chance.choice(kinds)))


def another_shape(plan: Plan, chance: Random) -> Plan | None:
    """Of the start and of its wait alike, so that they agree."""
    found = _pick(chance, plan, *STARTS)
    if found is None:
        return None
    stage, _, start = found
    spec = start.outputs[0]
    assert spec is not None
    other = chance.choice(
        [
            TensorSpec((*spec.shape, 2), spec.dtype),
            TensorSpec(spec.shape, "int8"),
            TensorSpec((7,), spec.dtype),
        ]
    )

    def changed(s: int, _: Phase, op: Op) -> Op:
        is_it = s == stage and start.name in (op.name, op.alias)
        return replace(op, outputs=(other,)) if is_it else op

    return _with_programs(plan, changed)


def axis_of_another_size(plan: Plan, chance: Random) -> Plan | None:
    """The mesh grows; programs and communicators stay as they were."""
    axes = [(axis, size * 2 if axis == "tp" else size) for axis, size in plan.job.axes]
    changed = replace(plan, job=replace(plan.job, axes=tuple(axes)))
    return changed if changed != plan else None


def gradient_of_a_start(plan: Plan, chance: Random) -> Plan | None:
    found = _pick(chance, plan, *STARTS)
    if found is None:
        return None
    stage, phase, start = found
    here = [at for at, p in enumerate(plan.job.parameters) if any(s == stage for s, *_ in p.grads)]
    at = chance.choice(here)
    grads = ((stage, phase, start.name),)
    return with_parameter(plan, at, replace(plan.job.parameters[at], grads=grads))


COMM_MUTATIONS: tuple[Mutation, ...] = (
    wait_becomes_another_op,
    read_before_wait,
    wait_before_its_start,
    start_twice,
    second_wait,
    wait_for_something_else,
    another_axis,
    another_size,
    another_reduction,
    another_kind,
    another_shape,
    axis_of_another_size,
    gradient_of_a_start,
)
"""Every way to break collectives; the test runs each on many plans."""
