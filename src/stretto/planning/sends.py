"""The pass that says when sends are waited for, so that buffers do not pile up and no wait is in the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stretto.ir.action import Action
from stretto.ir.plan import InstructionKind, Plan
from stretto.ir.timeline import SpanKind, Timeline
from stretto.passes.step import Context, Step
from stretto.planning.windows import lowered
from stretto.schedule.posting import Message
from stretto.simulating import simulate

SENT_MARGIN = 2.0
"""A send is waited for once this many times its predicted duration has gone by since its start. Assumed:
a message that is twice as slow as predicted still does not hold up its sender."""


def sends_waited(step: Step, context: Context) -> Step:
    """The step with the run before which each send is waited for, by a simulation without. Raises PlanError
    for one whose ranks wait for each other for ever."""
    draft = lowered(step, context)
    sends = any(i.kind is InstructionKind.SENT for order in draft.orders for i in order)
    if not sends or step.overlap == "off":
        return step
    return replace(step, sent_before=_sent_before(draft, simulate(draft)))


def _sent_before(plan: Plan, timeline: Timeline) -> Mapping[Message, int]:
    """Message -> the sender's run before which its send is waited for."""
    # A run is one or more spans: it may wait inside, and its parts have actions of their own.
    runs = {
        action: at
        for order in plan.schedule.orders
        for at, slot in enumerate(order)
        for action in slot.actions
    }
    starts = [[float("inf")] * len(order) for order in plan.schedule.orders]
    for span in timeline.spans:
        if span.kind is SpanKind.COMPUTE and span.phase is not None:
            assert span.stage is not None
            assert span.microbatch is not None
            at = runs[Action(span.stage, span.phase, span.microbatch)]
            starts[span.rank][at] = min(starts[span.rank][at], span.start_us)
    for times in starts:
        # A run without ops takes no time and has no span: it begins when the one after it does.
        for at in reversed(range(len(times) - 1)):
            times[at] = min(times[at], times[at + 1])
    makes = {
        (action.stage, phase, action.microbatch): at
        for order in plan.schedule.orders
        for at, slot in enumerate(order)
        for action in slot.actions
        for phase in action.phase.parts
    }
    found: dict[Message, int] = {}
    for span in timeline.spans:
        if span.edge is not None:
            assert span.microbatch is not None
            assert span.sender is not None
            assert span.sent_us is not None
            safe = span.sent_us + SENT_MARGIN * (span.end_us - span.sent_us)
            sends = plan.job.edges[span.edge]
            first = makes[sends.source, sends.phase, span.microbatch] + 1
            later = (k for k in range(first, len(starts[span.sender])) if starts[span.sender][k] > safe)
            at_run = next(later, None)
            if at_run is not None:
                found[span.edge, span.microbatch] = at_run
    return found
