"""What flows between programs, read off the names alone: inputs, saved values, messages, lifetimes."""

from __future__ import annotations

from stretto.ir.action import Phase
from stretto.ir.kept import added_spec, shard_spec
from stretto.ir.program import GRAD, PARAM, SHARD, STEP_LOSS, STEP_NORM, Job, Op, Stage, TensorSpec
from stretto.ir.updates import norm_spec

OVER_STEP = (GRAD, STEP_LOSS, STEP_NORM)
"""Prefixes of what a step makes and its programs read and write; parameters that are made are besides."""

EXTERNAL = (PARAM, SHARD, "buffer/", "batch/", "const/", *OVER_STEP)
"""Prefixes of values that no op defines."""

PHASES = (Phase.F, Phase.I, Phase.W)
"""The programs of a microbatch, in order."""


def is_external(name: str) -> bool:
    """Whether the value is given from outside the step's ops (a parameter, the batch, the tangent...)."""
    return name == "tangent" or name.startswith(EXTERNAL)


def given_specs(job: Job) -> dict[str, TensorSpec]:
    """Shape and dtype of every value that no op makes."""
    result = {PARAM + p.name: p.spec for p in job.parameters}
    result |= {SHARD + p.kept_as: shard_spec(job, p) for p in job.parameters if p.is_made}
    result |= {f"buffer/{b.name}": b.spec for b in job.buffers}
    result |= {f"const/{c.name}": c.spec for c in job.constants}
    result |= {f"batch/{name}": spec for name, spec in job.batch}
    trained = {p.tied_to for p in job.parameters if p.grads}
    result |= {GRAD + p.name: added_spec(job, p) for p in job.parameters if p.tied_to in trained}
    return result | {"tangent": job.loss_spec, STEP_LOSS: job.loss_spec, STEP_NORM: norm_spec(job)}


def made_parameters(job: Job) -> frozenset[str]:
    """`param/<name>` of those that a program makes."""
    return frozenset(PARAM + parameter.name for parameter in job.parameters if parameter.is_made)


def ops_of_stage(stage: Stage, phase: Phase) -> dict[str, tuple[Op, Phase]]:
    """All ops of a stage by name, with the phase of each, for a part of a window: a wait may be in another
    phase than what it waits for. Where phases use one name, that of `phase` counts."""
    order = sorted(stage.ops, key=lambda made: made in phase.programs)
    return {op.name: (op, made) for made in order for op in stage.ops[made]}


def results_of(job: Job, stage: int, phase: Phase) -> dict[str, list[str]]:
    """Values that outlive a program: name -> what they are (`grad <param>`, `update <buffer>`, `loss`,
    `metric <place in the job>`)."""
    uses: dict[str, list[str]] = {}
    for parameter in job.parameters:
        for at, in_phase, value in parameter.grads:
            if at == stage and in_phase is phase:
                uses.setdefault(value, []).append(f"grad {parameter.name}")
    for buffer in job.buffers:
        for at, in_phase, value in buffer.updates:
            if at == stage and in_phase is phase:
                uses.setdefault(value, []).append(f"update {buffer.name}")
    if phase is Phase.F and job.loss[0] == stage:
        uses.setdefault(job.loss[1], []).append("loss")
    if phase is Phase.F:
        for at, metric in enumerate(job.metrics):
            if metric.stage == stage:
                uses.setdefault(metric.value, []).append(f"metric {at}")
    return uses


def inputs_of(stage: Stage, phase: Phase) -> tuple[str, ...]:
    """Values that the stage's program for `phase` reads and does not define itself, in order of first use."""
    made = {op.name for op in stage.ops[phase]}
    names: dict[str, None] = {}
    for op in stage.ops[phase]:
        for name in op.uses:
            if name not in made:
                names.setdefault(name, None)
    return tuple(names)
