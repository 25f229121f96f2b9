"""A job without its backward: what it takes to evaluate a model with the stages that train it.

The result is a job like any other, so the same planner, proofs, simulation and runtime serve it.
"""

from __future__ import annotations

from dataclasses import replace

from stretto.ir.action import Phase
from stretto.ir.flow import is_external
from stretto.ir.program import Edge, Job, Op, Stage


def forward_only(job: Job) -> Job:
    """The job's forward up to its loss and metrics; what only its backward needs is left out.

    Evaluating does not change a model: updates of buffers are left out too.
    """
    needed = {job.loss, *((metric.stage, metric.value) for metric in job.metrics)}
    kept: list[tuple[Op, ...]] = [()] * len(job.stages)
    homes = {(edge.value, edge.target): edge.source for edge in job.edges if edge.phase is Phase.F}
    # A value comes from its own stage or over an edge, from a stage that may be before or after it.
    sources = list(needed)
    ops = {(stage.index, op.name): op for stage in job.stages for op in stage.ops[Phase.F]}
    while sources:
        stage, name = sources.pop()
        for used in ops[stage, name].uses:
            if is_external(used):
                continue
            source = (stage if (stage, used) in ops else homes[used, stage], used)
            if source not in needed:
                needed.add(source)
                sources.append(source)
    for at, stage_ in enumerate(job.stages):
        kept[at] = tuple(op for op in stage_.ops[Phase.F] if (at, op.name) in needed)
    read = [{name for op in stage_ops for name in op.uses} for stage_ops in kept]
    edges: list[Edge] = []
    for edge in job.edges:
        if edge.phase is Phase.F and edge.value in read[edge.target]:
            edges.append(replace(edge, index=len(edges), user_phase=Phase.F))

    def holders(external: str) -> tuple[int, ...]:
        return tuple(stage for stage, names in enumerate(read) if external in names)

    counting = {name for op in (() if job.count is None else job.count.ops) for name in op.uses}
    used_constants = {name for names in (*read, counting) for name in names if name.startswith("const/")}
    return replace(
        job,
        stages=tuple(
            Stage(stage, {Phase.F: stage_ops, Phase.I: (), Phase.W: ()})
            for stage, stage_ops in enumerate(kept)
        ),
        edges=tuple(edges),
        parameters=tuple(replace(p, stages=holders(f"param/{p.name}"), grads=()) for p in job.parameters),
        buffers=tuple(replace(b, stages=holders(f"buffer/{b.name}"), updates=()) for b in job.buffers),
        constants=tuple(c for c in job.constants if f"const/{c.name}" in used_constants),
    )
