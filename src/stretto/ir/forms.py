"""Jobs made of a job: the forms of a step (`Job.forms`) and the words in which they differ, and the forward
alone, which evaluates a model with the stages that train it.

The results are jobs like any other, so the same planner, proofs, simulation and runtime serve them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.ir.action import Phase
from stretto.ir.flow import is_external
from stretto.ir.program import Edge, Job, Op, Stage

_ONE_AND_MORE = {
    "stages": ("stage", "stages"),
    "chunks": ("chunk of the sequence", "chunks of the sequence"),
}


def forms_of(job: Job) -> tuple[Job, ...]:
    """The step in each form, as it is itself first."""
    return (replace(job, forms=()), *job.forms)


def differing(jobs: Sequence[Job]) -> tuple[str, ...]:
    """What there are different numbers of: "stages", "chunks"."""
    return tuple(what for what in _ONE_AND_MORE if len({_count(job, what) for job in jobs}) > 1)


def number(job: Job, differ: Sequence[str]) -> str:
    """A form among others, as "4" or "4 and 1"."""
    return " and ".join(str(_count(job, what)) for what in differ)


def form(job: Job, differ: Sequence[str]) -> str:
    """A form in words, as "4 stages and 1 chunk of the sequence"."""
    counts = [(_count(job, what), _ONE_AND_MORE[what]) for what in differ]
    return " and ".join(f"{count} {one if count == 1 else more}" for count, (one, more) in counts)


def nouns(differ: Sequence[str]) -> str:
    """What the numbers are of, as "stages and chunks of the sequence"."""
    return " and ".join(_ONE_AND_MORE[what][1] for what in differ)


def _count(job: Job, what: str) -> int:
    return len(job.stages) if what == "stages" else job.chunks


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

    def owners(external: str) -> tuple[int, ...]:
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
        parameters=tuple(replace(p, stages=owners(f"param/{p.name}"), grads=()) for p in job.parameters),
        buffers=tuple(replace(b, stages=owners(f"buffer/{b.name}"), updates=()) for b in job.buffers),
        constants=tuple(c for c in job.constants if f"const/{c.name}" in used_constants),
    )
