"""What drawings of a timeline share: its rows, the ops of each window, and which spans are one run of it.

A window is written once, however often it runs: a drawing lays its ops over the compute spans of a run, each
op's share of the run's compute time being its share of the window's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stretto.ir.action import ONCE, ONCE_PHASES, Phase
from stretto.ir.plan import InstructionKind, ItemKind, Plan
from stretto.ir.prices import specs_of as specs_of
from stretto.ir.program import Op, TensorSpec
from stretto.ir.timeline import COMPUTE_LANE, Span, SpanKind, Timeline
from stretto.ir.transfers import time_of

RECOMPUTATION = "R"
"""Category of a forward op that the backward repeats."""

ONCE_A_STEP = "S"
"""Category of what runs once a step."""

Rows = dict[str, list[Span]]
"""Name -> spans, ascending in time; the compute lane first, the others by name."""


def rows_of(timeline: Timeline) -> list[Rows]:
    """By rank, the rows on which its spans are drawn: one a lane, and one for small reductions, once a step
    each."""
    result: list[Rows] = [defaultdict(list) for _ in range(timeline.ranks)]
    for rows in result:
        rows[COMPUTE_LANE] = []
    for span in sorted(timeline.spans, key=lambda span: (span.start_us, span.end_us)):
        small = span.lane == "loss" or span.lane.startswith("tied ")
        result[span.rank]["reductions" if small else span.lane].append(span)
    return [
        dict(sorted(rows.items(), key=lambda item: (item[0] != COMPUTE_LANE, item[0]))) for rows in result
    ]


@dataclass(frozen=True, slots=True)
class OpRow:
    """One op of a window. us: predicted time on the compute lane."""

    op: Op
    stage: int
    phase: Phase
    part: int
    us: float


@dataclass(frozen=True, slots=True)
class WindowRun:
    """One run of a window on a rank: its compute spans in order."""

    window: str
    microbatches: tuple[int, ...]
    spans: tuple[Span, ...]


def op_category(op: Op, phase: Phase) -> str:
    """The phase's letter, `S` for what runs once a step; `R` for an op that computes again what another has
    made."""
    return RECOMPUTATION if op.repeats else ONCE_A_STEP if phase in ONCE_PHASES else phase.value


def span_category(span: Span) -> str:
    """F, I, W, B or S for compute, F where it is not known of which; else exposed, bubble or message."""
    if span.kind is SpanKind.COMPUTE:
        return ONCE_A_STEP if span.phase in ONCE_PHASES else (span.phase or Phase.F).value
    return span.kind.value


def window_ops(plan: Plan) -> dict[str, tuple[OpRow, ...]]:
    """The ops of every window's actions in order with their predicted times, without its waits and sends; by
    `0UNSHARD` and the like those of a program that runs once a step, as if it had a window of its own.

    An item that names no op is passed over: whether a plan is sound is for `stretto.verify`.
    """
    result: dict[str, tuple[OpRow, ...]] = {}
    for name, window in plan.windows.items():
        programs = {
            (part, op.name): (op, sub)
            for part in window.actions
            for stage, phase in (window.parts[part],)
            for sub in phase.programs
            for op in plan.job.stages[stage].ops[sub]
        }
        rows = []
        for item in window.items:
            known = programs.get((item.part, str(item.ref))) if item.kind is ItemKind.OP else None
            if known is not None:
                op, sub = known
                stage = window.parts[item.part][0]
                rows.append(OpRow(op, stage, sub, item.part, time_of(plan.costs, stage, op)))
        result[name] = tuple(rows)
    for stage_ in plan.job.stages:
        for phase in ONCE_PHASES:
            if stage_.ops.get(phase):
                result[f"{stage_.index}{phase}"] = tuple(once_ops(plan, stage_.index, phase))
    return result


def once_ops(plan: Plan, stage: int, phase: Phase) -> Iterator[OpRow]:
    """The ops of a program that runs once a step, in the order of all windows that run some of it."""
    ops = {op.name: op for op in plan.job.stages[stage].ops[phase]}
    runs = (one for one in plan.orders[plan.rank_of(stage)] if one.kind is InstructionKind.RUN)
    for name in dict.fromkeys(str(run.ref) for run in runs):
        window = plan.windows[name]
        for item in window.items:
            op = ops.get(str(item.ref)) if item.kind is ItemKind.OP else None
            if op is not None and window.parts[item.part] == (stage, phase):
                yield OpRow(op, stage, phase, 0, time_of(plan.costs, stage, op))


def runs_of(plan: Plan, timeline: Timeline) -> tuple[tuple[WindowRun, ...], ...]:
    """By rank, the runs of windows in a timeline of `plan`, behind them its programs that run once a step;
    spans that none of these explains are left out."""
    spans: dict[tuple[int, int], list[Span]] = defaultdict(list)
    once: list[dict[str, list[Span]]] = [defaultdict(list) for _ in range(plan.ranks)]
    slots = {
        (rank, str(action)): at
        for rank, order in enumerate(plan.schedule.orders)
        for at, slot in enumerate(order)
        for action in slot.actions
    }
    for span in sorted(timeline.spans, key=lambda s: s.start_us):
        if span.lane == COMPUTE_LANE and span.kind is SpanKind.COMPUTE:
            at = slots.get((span.rank, span.name))
            if at is not None:
                spans[span.rank, at].append(span)
            elif span.phase in ONCE_PHASES:
                once[span.rank][span.name].append(span)
    return tuple(
        (
            *(
                WindowRun(str(run.ref), run.microbatches, tuple(spans[rank, at]))
                for at, (_, run, _) in enumerate(plan.runs(rank))
                if (rank, at) in spans
            ),
            *(WindowRun(name, (ONCE,), tuple(of)) for name, of in once[rank].items()),
        )
        for rank in range(plan.ranks)
    )


def laid_over(times_us: Sequence[float], spans: Sequence[Span]) -> Iterator[tuple[int, Span, float, float]]:
    """Lay ops, one after another, over a run's compute spans: (index of the op, span, start, end) in
    microseconds.

    The run takes what it took, so all ops are stretched or shrunk by one factor; one that does not fit before
    a wait goes on after it, as a second piece. Ops without time are left out.
    """
    total_us = sum(times_us)
    compute_us = sum(span.duration_us for span in spans)
    if not total_us or not compute_us:
        return
    scale = compute_us / total_us
    least_us = 1e-9 * compute_us
    pieces = iter(spans)
    span = next(pieces)
    at_us = span.start_us
    for index, time_us in enumerate(times_us):
        left_us = time_us * scale
        while left_us > least_us:
            room_us = span.end_us - at_us
            if room_us <= least_us:
                following = next(pieces, None)
                if following is None:
                    return
                span, at_us = following, following.start_us
                continue
            took_us = min(left_us, room_us)
            yield index, span, at_us, at_us + took_us
            at_us += took_us
            left_us -= took_us


def op_data(op: Op, specs: Mapping[str, TensorSpec]) -> dict[str, str | int]:
    """What is shown of an op wherever it is; shapes as text: `float32[16,32] float32[32]`."""
    return {
        "name": op.name,
        "op": op.target,
        "module": op.module,
        "reads": " ".join(str(specs.get(name) or "(several)") for name in op.uses),
        "makes": " ".join(str(spec) for spec in op.outputs if spec is not None),
        "bytes": op.nbytes,
        "flops": op.flops,
    }
