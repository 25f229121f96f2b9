"""What a step's figures say, in sentences: how long, how far from the best and why, what is hidden."""

from __future__ import annotations

from stretto.ir.compared import SHOWN, against, slower
from stretto.ir.costs import Prediction
from stretto.ir.timeline import SpanKind, Timeline
from stretto.report.traffic import axes_of, communication_of
from stretto.report.words import KINDS, format_share, format_us

LEAST_SHARE = 0.005
"""Exposed time below this share of the step is not worth a reader's time."""


def findings(
    prediction: Prediction | None, simulated: Timeline | None, measured: Timeline | None
) -> tuple[str, ...]:
    """Sentences, the most important first; what is measured goes before what is predicted."""
    said: list[str] = []
    shown = measured or simulated
    if prediction is not None:
        step_us = prediction.step_us if measured is None else measured.step_us
        bound_us = prediction.bound_us
        if bound_us:
            word = "step" if measured is None else "measured step"
            said += [_beside_bound(word, step_us, bound_us), f"What binds the bound: {prediction.binds}."]
        if measured is not None:
            change = slower(against(measured.step_us, prediction.step_us) or 0.0)
            said.append(f"The measured step is {change} predicted ({format_us(prediction.step_us)}).")
    if shown is not None:
        said += _communication(shown)
        said += _idle(shown)
    return tuple(said)


def _beside_bound(word: str, step_us: float, bound_us: float) -> str:
    gap = against(step_us, bound_us) or 0.0
    if gap >= -SHOWN:
        best = f"No order of this work can be faster than {format_us(bound_us)}"
        if gap < SHOWN:
            return f"{best}; the {word} takes just that."
        return f"{best}; the {word} is {format_share(gap)} above that ({format_us(step_us)})."
    # The bound is of ranks at even speed; chance may make a step of uneven ones a little faster.
    why = (
        "which takes ranks at their mean speed: it is as good as it can be"
        if word == "step"
        else "so the plan's costs are too high: measure them again"
    )
    return (
        f"The {word} ({format_us(step_us)}) is {slower(gap)} the lower bound ({format_us(bound_us)}), {why}."
    )


def _communication(timeline: Timeline) -> list[str]:
    said = []
    for axis in axes_of(timeline):
        if not axis.total_us:
            continue
        share = axis.exposed_us / timeline.step_us if timeline.step_us else 0.0
        words = f"{axis.axis}: {format_share(axis.hidden or 0.0)} of {format_us(axis.total_us)} is hidden"
        if share < LEAST_SHARE:
            said.append(f"{words}; nothing worth mention is exposed.")
            continue
        rank, kind, most_us = _worst(timeline, axis.axis)
        exposed = f"{format_us(axis.exposed_us)} is exposed, {format_share(share)} of the step"
        if timeline.ranks == 1:
            said.append(f"{words}; {exposed}, most of it in {kind} ({format_us(most_us)}).")
            continue
        said.append(
            f"{words}; {exposed} (mean of the {timeline.counted}). "
            f"Most on {timeline.who(rank)}: {format_us(most_us)} of {kind}."
        )
    kind = KINDS.get(timeline.source, timeline.source)
    return said or [f"Communication, {kind}: none."]


def _worst(timeline: Timeline, axis: str) -> tuple[int, str, float]:
    """(rank, kind, microseconds) of an axis's largest exposed time."""
    found: dict[tuple[int, str], float] = {}
    for span in timeline.spans:
        if span.kind is SpanKind.EXPOSED:
            of, kind = communication_of(span.name)
            if of == axis:
                found[span.rank, kind] = found.get((span.rank, kind), 0.0) + span.duration_us
    (rank, kind), most_us = max(found.items(), key=lambda item: item[1])
    return rank, kind, most_us


def _idle(timeline: Timeline) -> list[str]:
    bubble = timeline.by_rank(SpanKind.BUBBLE)
    total_us = sum(bubble)
    if not total_us or not timeline.step_us:
        return []
    share = total_us / timeline.ranks / timeline.step_us
    rank = max(range(timeline.ranks), key=lambda r: bubble[r])
    if timeline.ranks == 1:
        return [f"Bubbles take {format_share(share)} of the step ({format_us(total_us)})."]
    return [
        f"Bubbles take {format_share(share)} of the {timeline.counted}' time, "
        f"most on {timeline.who(rank)} ({format_us(bubble[rank])})."
    ]
