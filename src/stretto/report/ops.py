"""A plan's ops as tables: one phase of one stage, op by op; and the costliest of the full step.

A value lives from the op that makes it to its last use by any program of the stage; views share the memory of
what they view. What is sent stays until the message has left, and gradients to the end of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from stretto.errors import PlanError, UsageError, listed
from stretto.ir.action import AFTER, BEFORE, ONCE_PHASES, Phase
from stretto.ir.flow import PHASES, is_external, results_of
from stretto.ir.plan import Plan
from stretto.ir.program import FREE
from stretto.ir.transfers import collective_time, time_of
from stretto.passes.recompute import storages
from stretto.report.detail import OpRow, once_ops, op_category, op_data, specs_of, window_ops

PROGRAMS = (BEFORE, *PHASES, AFTER)
"""All programs of a stage, in the order in which each by itself would run."""


@dataclass(frozen=True, slots=True)
class OpLine:
    """One op. shown: `op_data`. saved_for: later phases of the stage that read its result; sent: edges that
    carry it; result: what it is beyond its program (`grad w`, `loss`); freed: (value, bytes) that end with
    it; collective_us: what the communication that it starts takes on its lane, where it is known."""

    row: OpRow
    shown: dict[str, str | int]
    saved_for: tuple[Phase, ...]
    sent: tuple[str, ...]
    result: tuple[str, ...]
    freed: tuple[tuple[str, int], ...]
    collective_us: float | None = None

    def to_data(self) -> dict[str, Any]:
        """The line as JSON data; times are microseconds on the compute lane."""
        op = self.row.op
        return {
            **self.shown,
            "phase": self.row.phase.value,
            "category": op_category(op, self.row.phase),
            "dtype": op.outputs[0].dtype if op.outputs and op.outputs[0] is not None else None,
            "lane": op.lane,
            "predicted_us": self.row.us,
            "collective_us": self.collective_us,
            "saved_for": [phase.value for phase in self.saved_for],
            "sent": list(self.sent),
            "result": list(self.result),
            "freed": [{"value": value, "bytes": nbytes} for value, nbytes in self.freed],
        }


def program_lines(plan: Plan, stage: int, phase: Phase, module: str | None = None) -> list[OpLine]:
    """The ops of one phase of one stage in the order in which the plan runs them (B is I and then W, unless
    the plan's window mixes them; what runs once a step may be in several windows). module: only ops of
    modules that match this pattern (`*.attention*`), or contain it where it has no `*` or `?`.

    Raises UsageError for a stage or a program that the plan does not have, and for a pattern that nothing
    matches.
    """
    stages = len(plan.job.stages)
    if not 0 <= stage < stages:
        raise UsageError(f"--stage {stage}: the plan has stages 0 to {stages - 1}")
    if phase in ONCE_PHASES and not plan.job.stages[stage].ops.get(phase):
        there = [one.index for one in plan.job.stages if one.ops.get(phase)]
        words = f"the first stages of pipeline ranks have it: {listed(there)}" if there else "nor has another"
        raise UsageError(f"--phase {phase}: stage {stage} has no such program; {words}")
    lines = list(_lines(plan, stage, _ordered(plan, stage, phase)))
    if module is None:
        return lines
    pattern = module if any(sign in module for sign in "*?[") else f"*{module}*"
    result = [line for line in lines if fnmatchcase(line.row.op.module, pattern)]
    if not result:
        shown = listed(sorted({line.row.op.module for line in lines if line.row.op.module}))
        raise UsageError(
            f"--module {module}: no op of {stage}{phase} is of such a module; it has {shown or 'no modules'}"
        )
    return result


def totals_of(lines: list[OpLine]) -> dict[str, Any]:
    """What the lines come to: ops, flops, bytes made, saved and freed, predicted time, collectives."""
    shown = {line.row.phase for line in lines}
    saved = [line for line in lines if not shown.issuperset(line.saved_for)]
    return {
        "ops": len(lines),
        "flops": sum(line.row.op.flops for line in lines),
        "bytes": sum(line.row.op.nbytes for line in lines),
        "saved_bytes": sum(line.row.op.nbytes for line in saved),
        "freed_bytes": sum(nbytes for line in lines for _, nbytes in line.freed),
        "predicted_us": sum(line.row.us for line in lines),
        "collective_us": sum(line.collective_us or 0.0 for line in lines),
        "collectives": sum(line.row.op.collective is not None for line in lines),
    }


def _ordered(plan: Plan, stage: int, phase: Phase) -> list[OpRow]:
    """The phase's ops in the order of the first window that runs it; of the job where none does. What runs
    once a step, in the order of all windows that run some of it."""
    if phase in ONCE_PHASES:
        return list(once_ops(plan, stage, phase))
    for name, window in plan.windows.items():
        for part, (of, runs) in enumerate(window.parts):
            if of == stage and set(phase.programs) <= set(runs.programs):
                rows = window_ops(plan)[name]
                return [row for row in rows if row.part == part and row.phase in phase.programs]
    ops = plan.job.stages[stage].ops
    return [
        OpRow(op, stage, sub, 0, time_of(plan.costs, stage, op)) for sub in phase.programs for op in ops[sub]
    ]


def _lines(plan: Plan, stage: int, rows: list[OpRow]) -> Iterator[OpLine]:
    """The ops with what becomes of their memory: which values of the stage share it, and when it goes."""
    specs, stages = specs_of(plan.job), plan.job.stages
    programs = {phase: stages[stage].ops.get(phase, ()) for phase in PROGRAMS}
    root = storages([op for phase in PROGRAMS for op in programs[phase]])
    edges = [edge for edge in plan.job.edges if edge.source == stage]
    lanes = {communicator.name: communicator for communicator in plan.communicators}
    readers: dict[str, set[Phase]] = defaultdict(set)
    for phase in PROGRAMS:
        for op in programs[phase]:
            for name in op.uses:
                readers[root.get(name, name)].add(phase)
    results = {
        value: words for phase in PHASES for value, words in results_of(plan.job, stage, phase).items()
    }
    written = [op for phase in ONCE_PHASES for op in programs[phase] if op.target != FREE]
    results |= {op.name: [name.replace("/", " ", 1) for name in op.writes] for op in written if op.writes}
    # What a message, the optimizer or another rank still needs does not end with an op.
    kept = {root.get(name, name) for name in (*results, *(edge.value for edge in edges))}
    last = {root.get(name, name): at for at, row in enumerate(rows) for name in (row.op.name, *row.op.uses)}
    shown = max((PROGRAMS.index(row.phase) for row in rows), default=0)
    ending: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for name, at in last.items():
        spec = specs.get(name)
        later = any(PROGRAMS.index(phase) > shown for phase in readers[name])
        if spec is not None and not (later or is_external(name) or name in kept):
            ending[at].append((name, spec.nbytes))
    for at, row in enumerate(rows):
        op, asked = row.op, row.op.collective
        if op.target == FREE:
            ending[at] += [(name, specs[name].nbytes) for name in op.writes]
        # A view saves nothing of its own.
        later_phases = readers[op.name] if root.get(op.name, op.name) == op.name else ()
        lane = None if asked is None else lanes.get(asked.axis)
        us = None
        if asked is not None and lane is not None:
            with suppress(PlanError):  # costs without this collective
                us = collective_time(plan.costs, plan.job, lane, asked).us
        yield OpLine(
            row,
            op_data(op, specs),
            tuple(phase for phase in PROGRAMS[PROGRAMS.index(row.phase) + 1 :] if phase in later_phases),
            tuple(f"e{e.index} to stage {e.target}" for e in edges if e.value == op.name),
            tuple(results.get(op.name, ())),
            tuple(ending[at]),
            us,
        )


def notes_of(line: OpLine) -> Iterator[str]:
    """What happens to the op's memory, in words."""
    if line.saved_for:
        yield f"saved for {', '.join(line.saved_for)}"
    if line.sent:
        yield f"sent: {', '.join(line.sent)}"
    yield from line.result
    if line.freed:
        yield f"frees {', '.join(value for value, _ in line.freed)}"


@dataclass(slots=True)
class OpGroup:
    """Equal calls on equal shapes, over all stages and microbatches. source: how their times are known."""

    target: str
    reads: str
    makes: str
    phases: str = ""
    calls: int = 0
    total_us: float = 0.0
    flops: int = 0
    share: float = 0.0
    source: str = ""

    @property
    def each_us(self) -> float:
        """Of a call, in the mean."""
        return self.total_us / self.calls


def costliest_ops(plan: Plan, most: int = 12, *, by_inputs: bool = True) -> list[OpGroup]:
    """The `most` groups of ops that cost most, the costliest first; times are microseconds of the full step,
    over all stages and microbatches, `share` is of all ops' time.

    by_inputs: False takes calls together that make equal shapes, whatever they read.
    """
    specs, microbatches = specs_of(plan.job), plan.job.microbatches
    groups: dict[tuple[str, str, str], OpGroup] = {}
    # Of each group, once each, in order.
    sources: dict[tuple[str, str, str], dict[str, None]] = defaultdict(dict)
    for stage in plan.job.stages:
        for phase, ops in stage.ops.items():
            for op in ops:
                us = time_of(plan.costs, stage.index, op)
                if not us:
                    continue
                shown = op_data(op, specs)
                key = (op.target, str(shown["reads"]) if by_inputs else "", str(shown["makes"]))
                group = groups.setdefault(key, OpGroup(*key))
                sources[key][plan.costs.how(stage.index, op.name)] = None
                letters = {*group.phases, op_category(op, phase)}
                group.phases = "".join(sorted(letters, key="FIWRS".index))
                calls = 1 if phase in ONCE_PHASES else microbatches
                group.calls += calls
                group.total_us += us * calls
                group.flops += op.flops * calls
    total_us = sum(group.total_us for group in groups.values())
    for key, group in groups.items():
        group.share = group.total_us / total_us
        group.source = ", ".join(sources[key])
    return sorted(groups.values(), key=lambda one: (-one.total_us, one.target, one.reads))[:most]
