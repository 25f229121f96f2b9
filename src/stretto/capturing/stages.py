"""Cut a traced step into stages with F, I and W programs, and find what crosses between them.

1. Every op goes to its stages (`stretto.capturing.split`).
2. In a stage, forward ops are F. Of the backward ops, those from which a gradient that leaves the
   stage can be reached are I, the rest are W. A stage that nothing leaves (the first) has no such
   gradient: there I are the ops from which gradients of two or more parameters can be reached, which
   is the chain through its layers.
3. A gradient that sums parts of several stages is kept as parts: each stage adds its own to its own
   copy, and the copies are summed once a step instead of once a microbatch.
4. A value used in a stage that does not make it becomes an edge.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from stretto.capturing.graph import GRAD, LOSS, SEEN, UPDATE, Traced
from stretto.capturing.split import Placement
from stretto.errors import CaptureError
from stretto.ir.action import Phase
from stretto.ir.flow import is_external
from stretto.ir.program import Edge, Job, Op, Ref, Stage
from stretto.passes.rewrite import live, stage_of


def cut(traced: Traced, placement: Placement, stages: int, microbatches: int) -> Job:
    """The job of `stages` stages and `microbatches` microbatches.

    Raises CaptureError where a buffer is written in one stage and read in another.
    """
    forward: list[list[Op]] = [[] for _ in range(stages)]
    backward: list[list[Op]] = [[] for _ in range(stages)]
    homes: dict[str, tuple[int, ...]] = dict(placement)
    roots = traced.program.roots
    grads, gone, sums = _gradient_parts(traced, homes)
    for op, origin in traced.program.ops:
        if op.name not in gone:
            for stage in homes[op.name]:
                (backward if origin.backward else forward)[stage].append(op)
    for stage, op in sums:
        homes[op.name] = (stage,)
        backward[stage].append(op)

    leaving = _leaving(forward, backward, homes)
    made: list[Stage] = []
    for stage in range(stages):
        into, weight = _split_backward(backward[stage], leaving[stage], grads)
        made.append(stage_of(stage, {Phase.F: forward[stage], Phase.I: into, Phase.W: weight}))

    phase_of: dict[tuple[int, str], Phase] = {
        (stage.index, op.name): phase for stage in made for phase, ops in stage.ops.items() for op in ops
    }
    edges = _edges(made, homes, phase_of)
    users: dict[str, set[int]] = defaultdict(set)
    for stage_ops in made:
        for ops in stage_ops.ops.values():
            for op in ops:
                for name in op.uses:
                    if is_external(name):
                        users[name].add(stage_ops.index)
    parameters = tuple(
        replace(
            one,
            stages=tuple(sorted(users[f"param/{one.name}"])),
            grads=tuple((stage, phase_of[stage, value], value) for stage, value in grads.get(one.name, ())),
        )
        for one in traced.job.parameters
    )
    buffers = []
    for buffer in traced.job.buffers:
        at = tuple(sorted(users[f"buffer/{buffer.name}"]))
        update = roots.get(f"{UPDATE}{buffer.name}")
        updates = () if update is None else tuple((s, phase_of[s, update], update) for s in homes[update])
        if updates and set(at) - {stage for stage, _, _ in updates}:
            raise CaptureError(
                f"buffer {buffer.name!r} is written in stage {updates[0][0]} and read in stages {at}: one "
                "would read a stale copy; choose split so that what writes it and all that read it are "
                "together"
            )
        buffers.append(replace(buffer, stages=at, updates=updates))
    seen = ((one, roots[f"{SEEN}{k}"]) for k, one in enumerate(traced.job.metrics))
    return replace(
        traced.job,
        microbatches=microbatches,
        stages=tuple(made),
        edges=edges,
        parameters=parameters,
        buffers=tuple(buffers),
        loss=(homes[roots[LOSS]][0], roots[LOSS]),
        metrics=tuple(replace(one, stage=homes[value][0], value=value) for one, value in seen),
    )


def _gradient_parts(
    traced: Traced, homes: dict[str, tuple[int, ...]]
) -> tuple[dict[str, tuple[tuple[int, str], ...]], set[str], list[tuple[int, Op]]]:
    """Step 3: for each parameter its gradient's parts (stage, value); the sums over stages that are in this
    way gone; and sums within a stage that take their place, with their stage."""
    ops = {op.name: op for op, _ in traced.program.ops}
    uses: dict[str, int] = defaultdict(int)
    for op in ops.values():
        for name in op.uses:
            uses[name] += 1
    gone: set[str] = set()
    sums: list[tuple[int, Op]] = []
    grads: dict[str, tuple[tuple[int, str], ...]] = {}

    def terms(value: str, root: bool) -> list[str]:
        """The terms of a tree of plain sums that nothing else reads."""
        op = ops[value]
        names = [a.name for a in op.args if isinstance(a, Ref)]
        if op.target != "aten.add.Tensor" or op.kwargs or len(names) != 2 or uses[value] > (0 if root else 1):
            return [value]
        if any(name not in ops for name in names):
            return [value]
        return [term for name in names for term in terms(name, False)]

    def tree(value: str, leaves: set[str]) -> set[str]:
        if value in leaves:
            return set()
        return {value}.union(*(tree(name, leaves) for name in ops[value].uses))

    owners: dict[str, set[int]] = defaultdict(set)
    for op in ops.values():
        for name in op.uses:
            if name.startswith("param/"):
                owners[name.removeprefix("param/")].update(homes[op.name])

    for root, value in traced.program.roots.items():
        if not root.startswith(GRAD):
            continue
        name = root.removeprefix(GRAD)
        leaves = terms(value, True)
        if {homes[leaf][0] for leaf in leaves} <= owners[name] and len({homes[x][0] for x in leaves}) == 1:
            grads[name] = ((homes[value][0], value),)
            continue
        gone |= tree(value, set(leaves))
        by_stage: dict[int, str] = {}
        for leaf in leaves:
            stage = homes[leaf][0]
            if stage not in owners[name]:
                # The gradient of a term at the end of a stage is the message itself: it goes where the
                # parameter is, and becomes its gradient there.
                stage = max((s for s in owners[name] if s < stage), default=min(owners[name]))
                here = f"{value}_part{len(sums)}"
                sums.append(
                    (stage, Op(here, "aten.alias.default", (Ref(leaf),), (), ops[leaf].outputs, leaf))
                )
                leaf = here
            if stage not in by_stage:
                by_stage[stage] = leaf
                continue
            both = f"{value}_part{len(sums)}"
            spec = ops[value].outputs
            sums.append((stage, Op(both, "aten.add.Tensor", (Ref(by_stage[stage]), Ref(leaf)), (), spec)))
            by_stage[stage] = both
        grads[name] = tuple(sorted(by_stage.items()))
    return grads, gone, sums


def _leaving(
    forward: Sequence[Sequence[Op]], backward: Sequence[Sequence[Op]], homes: dict[str, tuple[int, ...]]
) -> list[set[str]]:
    leaving: list[set[str]] = [set() for _ in backward]
    made = [{op.name for op in ops} for ops in backward]
    for stage, ops in enumerate(zip(forward, backward, strict=True)):
        for op in (*ops[0], *ops[1]):
            for name in op.uses:
                if name in homes and stage not in homes[name] and name in made[homes[name][0]]:
                    leaving[homes[name][0]].add(name)
    return leaving


def _split_backward(
    ops: Sequence[Op], leaving: set[str], grads: dict[str, tuple[tuple[int, str], ...]]
) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    if leaving:
        into = {op.name for op in live(ops, leaving)}
    else:
        parameters = [value for parts in grads.values() for _, value in parts]
        reach: dict[str, int] = defaultdict(int)
        for bit, value in enumerate(parameters):
            reach[value] |= 1 << bit
        for op in reversed(ops):
            for name in op.uses:
                reach[name] |= reach[op.name]
        into = {op.name for op in ops if reach[op.name].bit_count() >= 2}
    return tuple(op for op in ops if op.name in into), tuple(op for op in ops if op.name not in into)


def _edges(
    stages: Sequence[Stage], homes: dict[str, tuple[int, ...]], phase_of: dict[tuple[int, str], Phase]
) -> tuple[Edge, ...]:
    """Step 4, in the order in which the values are made; forward edges first."""
    order = [Phase.F, Phase.I, Phase.W]
    first_use: dict[tuple[str, int], Phase] = {}
    for stage in stages:
        for phase in order:
            for op in stage.ops[phase]:
                for name in op.uses:
                    if name in homes and stage.index not in homes[name]:
                        first_use.setdefault((name, stage.index), phase)
    specs = {op.name: op.outputs for stage in stages for ops in stage.ops.values() for op in ops}
    position = {name: at for at, name in enumerate(specs)}
    result = sorted(
        first_use.items(),
        key=lambda item: (
            order.index(phase_of[homes[item[0][0]][0], item[0][0]]),
            homes[item[0][0]][0],
            position[item[0][0]],
            item[0][1],
        ),
    )
    edges: list[Edge] = []
    for (name, target), phase in result:
        source = homes[name][0]
        spec = specs[name][0]
        if spec is None or len(specs[name]) != 1:
            raise CaptureError(
                f"{name} crosses from stage {source} to {target} but is not one tensor; split elsewhere"
            )
        edges.append(Edge(len(edges), name, source, phase_of[source, name], target, phase, spec))
    return tuple(edges)
