"""A value that several stages read is sent once to each rank, and may be handed on by a stage that has it.

As captured, the stage that makes a value sends it to every stage that reads it: an encoder's output that all
decoder stages read leaves one rank as often as there are such stages, and twice for one rank where that has
two of them. A stage that has received it can give it to the next.

    sent_once   1. Of the stages of one rank that read a value, those behind the first take it from that one:
                   there is no message.
    handed_on   2. Every stage takes it from the nearest stage that has it by then: that from which a message
                   takes least, and of equal ones the one that got it last, so that each rank sends it once.
                   Planning tries a step with and without: it relieves the card of the rank that makes the
                   value, and it is later where a stage that hands it on is late itself.

A stage has a value by then if it reads it in the phase in which it was made, and comes before in that phase:
forward in the order of the stages, backward in the other. No number changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from stretto.ir.action import Phase
from stretto.ir.program import Edge, Job, Op, Ref
from stretto.ir.transfers import message_us
from stretto.passes.rewrite import read_as, stage_of
from stretto.passes.step import Context, Step

SAME = "aten.alias.default"


def sent_once(step: Step, context: Context) -> Step:
    """The step in which no rank is sent a value twice; the step itself where none is."""
    ranks = step.schedule.stage_ranks
    result: dict[int, Edge] = {}
    for edge, holders in _later_readers(step.job):
        here = [holder for holder in holders if ranks[holder.target] == ranks[edge.target]]
        if here and ranks[edge.source] != ranks[edge.target]:
            result[edge.index] = here[0]
    return replace(step, job=_through(step.job, result)) if result else step


def handed_on(step: Step, context: Context) -> Step:
    """The step in which values are handed on by the nearest; the step itself where none can be."""
    ranks = step.schedule.stage_ranks
    costs = context.costs_of(step.job)

    def us(sender: int, edge: Edge) -> float:
        return message_us(costs.link(ranks[sender], ranks[edge.target]), edge.spec.nbytes)

    result: dict[int, Edge] = {}
    for edge, holders in _later_readers(step.job):
        others = [holder for holder in holders if ranks[holder.target] != ranks[edge.target]]
        if ranks[edge.source] == ranks[edge.target] or len(others) < len(holders) or not others:
            continue
        nearest = min(reversed(others), key=lambda holder: us(holder.target, edge))
        if us(nearest.target, edge) <= us(edge.source, edge):
            result[edge.index] = nearest
    return replace(step, job=_through(step.job, result)) if result else step


def _later_readers(job: Job) -> Iterator[tuple[Edge, list[Edge]]]:
    """Edges of values that stages before their target have by then, with the edges of these, in order."""
    of_value: dict[tuple[str, int], list[Edge]] = defaultdict(list)
    for edge in job.edges:
        of_value[edge.value, edge.source].append(edge)
    for edges in of_value.values():
        backward = edges[0].phase is not Phase.F
        edges.sort(key=lambda edge: -edge.target if backward else edge.target)
        for at, edge in enumerate(edges):
            holders = [one for one in edges[:at] if one.user_phase is edge.phase]
            if holders:
                yield edge, holders


def _through(job: Job, holders: dict[int, Edge]) -> Job:
    """The job in which the edges of these indexes come from the stage that each one's holder leads to. There
    the value gets a name of its own, as one that the stage makes."""
    programs = {stage.index: dict(stage.ops) for stage in job.stages}
    carried = list(job.edges)
    named: set[str] = set()
    for index, holder in holders.items():
        edge, stage = job.edges[index], holder.target
        name = f"{edge.value}_from_{stage}"
        if name not in named:
            named.add(name)
            ops = programs[stage][edge.phase]
            # The value may have another name here by now: its own holder's.
            value = carried[holder.index].value
            first = next(at for at, op in enumerate(ops) if value in op.uses)
            same = Op(name, SAME, (Ref(value),), (), (edge.spec,), value, module=ops[first].module)
            programs[stage][edge.phase] = (*ops[:first], same, *ops[first:])
        read_as(programs[edge.target], edge, name, lambda module: ())
        carried[index] = replace(edge, value=name, source=stage)
    stages = tuple(stage_of(stage.index, programs[stage.index]) for stage in job.stages)
    return replace(job, stages=stages, edges=tuple(carried))
