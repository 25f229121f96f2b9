"""What a job computes, with no plan: the yardstick for what a plan computes (`tests.verifying.reference`).

Values are numbers of a finite field, drawn from what an op is and reads, so that a wrong input, a wrong
microbatch or a missing part of a sum changes the result; sums do not depend on their order. Ops are worked
out for all ranks of one place at once, program by program.
"""

from __future__ import annotations

from itertools import product

from stretto.ir.action import Phase
from stretto.ir.flow import is_external
from stretto.ir.mesh import Mesh
from stretto.ir.program import CHUNK, INDEX, STARTS, WAIT, Arg, Job, Op, Ref

PRIME = 2**61 - 1
Results = dict[tuple[str, int, str], int]
"""("loss" | "grad", rank of the run, name) -> value."""


_ROWS: dict[int, tuple[int, int, int]] = {}
"""A rank's rows of a value -> the value, which of its equal parts they are, and of how many: all parts of one
value, gathered in order, are that value again."""


DATA = ("dp", "ep")
"""Axes whose ranks have other data, so that all gradients and the loss are summed over them."""


def mixed(*parts: object) -> int:
    """A number for these parts."""
    return hash(parts) % PRIME


def external(job: Job, name: str, at: dict[str, int], microbatch: int) -> int:
    """A value from outside the step, on the rank with these coordinates."""
    kind, _, own = name.partition("/")
    if kind == "param":
        parameter = next(p for p in job.parameters if p.name == own)
        return mixed("param", parameter.tied_to, *(at[shard.axis] for shard in parameter.shards))
    if kind == "batch":
        return mixed(name, microbatch, *(at.get(axis, 0) for axis in DATA))
    return mixed(name)


def computed(op: Op, read: list[int], at: dict[str, int], microbatch: int) -> int:
    """The result of an op that is no communication."""
    if op.target == INDEX:
        return mixed(INDEX, at[op.args[0]])
    if op.target == CHUNK:
        value = mixed(CHUNK, read[0], op.args[1], at[op.args[2]])
        if op.args[1] == 0:
            _ROWS[value] = read[0], at[op.args[2]], op.args[3]
        return value
    if op.target == "aten.alias.default":
        return read[0]  # what a stage hands on
    drawn = (op.repeats or op.name, microbatch) if op.random else ()
    return mixed(op.target, _form(op.args), tuple(read), drawn)


def _form(arg: Arg) -> object:
    """An argument without the names of what it reads."""
    if isinstance(arg, tuple):
        return tuple(map(_form, arg))
    return "value" if isinstance(arg, Ref) else arg


def combined(kind: str, parts: list[int], place: int) -> int:
    """A collective's result at a place in its group."""
    if kind == "all_gather":
        full_values = {_ROWS[part][0] for part in parts if part in _ROWS}
        if len(full_values) == 1:
            full = full_values.pop()
            if [_ROWS.get(part) for part in parts] == [(full, k, len(parts)) for k in range(len(parts))]:
                return full
        return mixed(kind, *parts)
    total = sum(parts) % PRIME
    return total if kind == "all_reduce" else mixed(kind, total, place)


def meaning(job: Job, stage_ranks: tuple[int, ...]) -> Results:
    """Loss and gradients of every rank of a step."""
    mesh = Mesh(job.axes)
    ats = [mesh.coordinates(c) for c in range(mesh.world)]
    losses = [0] * mesh.world
    grads: dict[str, list[int]] = {p.tied_to: [0] * mesh.world for p in job.parameters if p.grads}
    order = [(Phase.F, stage) for stage in job.stages]
    order += [(phase, stage) for phase in (Phase.I, Phase.W) for stage in reversed(job.stages)]
    for microbatch in range(job.microbatches):
        made: dict[str, list[int]] = {}

        def value(name: str, c: int, made: dict[str, list[int]] = made, microbatch: int = microbatch) -> int:
            return external(job, name, ats[c], microbatch) if is_external(name) else made[name][c]

        for phase, stage in order:
            for op in stage.ops[phase]:
                if op.target in STARTS:
                    kind, axis = op.target.removeprefix("comm."), op.args[-2]
                    groups = [_along(mesh, c, (axis,)) for c in range(mesh.world)]
                    made[op.name] = [
                        combined(kind, [value(op.args[0].name, m) for m in group], group.index(c))
                        for c, group in enumerate(groups)
                    ]
                elif op.target == WAIT:
                    made[op.name] = made[op.args[0].name]
                else:
                    made[op.name] = [
                        computed(op, [value(name, c) for name in op.uses], ats[c], microbatch)
                        for c in range(mesh.world)
                    ]
        for c in range(mesh.world):
            losses[c] += made[job.loss[1]][c]
            for parameter in job.parameters:
                for *_, name in parameter.grads:
                    grads[parameter.tied_to][c] += made[name][c]
    places = max(stage_ranks) + 1
    found: Results = {}
    for place, c in product(range(places), range(mesh.world)):
        rank = place * mesh.world + c
        found["loss", rank, ""] = sum(losses[m] for m in _along(mesh, c, DATA)) % PRIME
        for parameter in job.parameters:
            if parameter.tied_to in grads and any(stage_ranks[s] == place for s in parameter.stages):
                partial = {a for p in job.parameters if p.tied_to == parameter.tied_to for a in p.partial}
                sharded = {shard.axis for shard in parameter.shards}
                group = _along(mesh, c, (*(axis for axis in DATA if axis not in sharded), *partial))
                total = sum(grads[parameter.tied_to][m] for m in group)
                found["grad", rank, parameter.tied_to] = total % PRIME
    return found


def _along(mesh: Mesh, c: int, axes: tuple[str, ...]) -> list[int]:
    """The ranks that differ from one in these axes alone, ascending."""
    here = mesh.coordinates(c)
    return [
        other
        for other in range(mesh.world)
        if all(axis in axes or at == here[axis] for axis, at in mesh.coordinates(other).items())
    ]
