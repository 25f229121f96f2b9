"""A plan and a job in a notebook: a picture of the step, and a table. Reached by `ir.shown`.

The picture is an image of its own, so that its style and the page's do not mix. A plan's is its simulated
timeline; a job's is its schedule, every phase as long as its arithmetic, since a job knows nothing of time.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from html import escape
from importlib.resources import files

from stretto.errors import StrettoError
from stretto.ir.action import Phase
from stretto.ir.plan import Plan
from stretto.ir.program import Job
from stretto.ir.work import speed_words
from stretto.planning.schedules import choose_schedule
from stretto.report.grid import Grid, format_bytes, format_flops
from stretto.report.html import section
from stretto.report.svg import draw, draw_schedule
from stretto.report.tables import summary_grid
from stretto.schedule.timing import PhaseTimes, time_schedule
from stretto.simulating import simulate

MOST_BOXES = 6_000
"""Boxes of a picture, at most: a notebook keeps it in its file. That is about 1.5 MB. Assumed."""


UNITS = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"), (1.0, "FLOP"))
"""Units of a phase's arithmetic in the picture, of which the longest phase has 10 or more."""


def plan_page(plan: Plan) -> str:
    """The HTML of a plan."""
    timeline = simulate(plan)
    parts = [_line(plan.line)]
    if plan.prediction is not None:
        parts.append(_line(speed_words(plan.job, plan.work, plan.world, timeline.step_us)))
    if len(timeline.spans) <= MOST_BOXES:
        parts.append(_picture(draw([timeline])))
    else:
        parts.append(_line(f"{len(timeline.spans):,} boxes are too many to draw here: stretto report PLAN"))
    if plan.prediction is not None:
        parts.append(section(summary_grid(timeline, plan.prediction)))
    return _page(parts)


def job_page(job: Job) -> str:
    """The HTML of a job."""
    return _page([_line(job.line), *_schedule(job), section(_stages(job))])


def _schedule(job: Job) -> Iterator[str]:
    """Its schedule, each phase as long as it computes; nothing where it cannot be drawn."""
    try:
        schedule = choose_schedule(job)
        flops = [_flops(job, phase) for phase in (Phase.F, Phase.I, Phase.W)]
        unit, name = next(one for one in UNITS if one[0] == 1.0 or max(map(max, flops)) >= 10 * one[0])
        f, i, w = (tuple(round(one / unit, 1) for one in times) for times in flops)
        timing = time_schedule(schedule, PhaseTimes(f, i, w))
    except StrettoError:  # planning says why
        return
    if sum(len(order) for order in schedule.orders) <= MOST_BOXES and timing.makespan:
        yield _picture(draw_schedule(schedule, timing))
        yield _line(f"Each phase is as long as its {name}s; messages take no time here.")


def _stages(job: Job) -> Grid:
    """What each stage computes for a microbatch, keeps, and sends."""
    flops = {phase: _flops(job, phase) for phase in (Phase.F, Phase.I, Phase.W)}
    rows = []
    for stage in job.stages:
        own = [p.spec.nbytes for p in job.parameters if stage.index in p.stages]
        sent = [edge.spec.nbytes for edge in job.edges if edge.source == stage.index]
        cells = [format_flops(flops[phase][stage.index]) for phase in flops]
        rows.append(
            (
                str(stage.index),
                f"{len(list(stage.all_ops)):,}",
                *cells,
                format_bytes(sum(own)),
                format_bytes(sum(sent)),
            )
        )
    head = ("stage", "ops", "F", "I", "W", "parameters", "sends")
    return Grid("Stages, for a microbatch", head, rows)


def _flops(job: Job, phase: Phase) -> tuple[float, ...]:
    return tuple(sum(op.flops for op in stage.ops.get(phase, ())) for stage in job.stages)


def _line(words: str) -> str:
    return f"<p>{escape(words)}</p>" if words else ""


def _picture(svg: str) -> str:
    data = b64encode(svg.encode()).decode()
    return f'<div class="scroll"><img alt="timeline" src="data:image/svg+xml;base64,{data}"></div>'


def _page(parts: list[str]) -> str:
    style = files("stretto.report").joinpath("page", "notebook.css").read_text(encoding="utf-8")
    return f'<div class="stretto"><style>{style}</style>{"".join(parts)}</div>'
