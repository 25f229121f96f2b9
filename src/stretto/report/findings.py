"""A step's figures in sentences; and who waits for whom, in a table of a measured run's ranks."""

from __future__ import annotations

from collections import defaultdict

from stretto.ir.compared import SHOWN, against, slower
from stretto.ir.costs import Prediction
from stretto.ir.timeline import SpanKind, Timeline
from stretto.report.grid import Grid, format_share, format_us, source_word
from stretto.report.tables import axes_of, communication_of

LEAST_SHARE = 0.005
"""Exposed time below this share of the step is not worth a reader's time."""


def findings(
    prediction: Prediction | None, simulated: Timeline | None, measured: Timeline | None
) -> tuple[str, ...]:
    """Sentences, the most important first; what is measured goes before what is predicted."""
    sentences: list[str] = []
    shown = measured or simulated
    if prediction is not None:
        step_us = prediction.step_us if measured is None else measured.step_us
        bound_us = prediction.bound_us
        if bound_us:
            word = "step" if measured is None else "measured step"
            sentences += [
                _beside_bound(word, step_us, bound_us),
                f"What binds the bound: {prediction.binds}.",
            ]
        if measured is not None:
            change = slower(against(measured.step_us, prediction.step_us) or 0.0)
            sentences.append(f"The measured step is {change} predicted ({format_us(prediction.step_us)}).")
    if shown is not None:
        sentences += _communication(shown)
        sentences += _idle(shown)
    return tuple(sentences)


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
    sentences = []
    for axis in axes_of(timeline):
        if not axis.total_us:
            continue
        share = axis.exposed_us / timeline.step_us if timeline.step_us else 0.0
        words = f"{axis.axis}: {format_share(axis.hidden or 0.0)} of {format_us(axis.total_us)} is hidden"
        if share < LEAST_SHARE:
            sentences.append(f"{words}; nothing worth mention is exposed.")
            continue
        rank, kind, most_us = _worst(timeline, axis.axis)
        exposed = f"{format_us(axis.exposed_us)} is exposed, {format_share(share)} of the step"
        sentences.append(
            f"{words}; {exposed} (mean of the {timeline.counted}). "
            f"Most on {timeline.who(rank)}: {format_us(most_us)} of {kind}."
        )
    kind = source_word(timeline.source)
    return sentences or [f"Communication, {kind}: none."]


def _worst(timeline: Timeline, axis: str) -> tuple[int, str, float]:
    """(rank, kind, microseconds) of an axis's largest exposed time."""
    result: dict[tuple[int, str], float] = {}
    for span in timeline.spans:
        if span.kind is SpanKind.EXPOSED:
            of, kind = communication_of(span.name)
            if of == axis:
                result[span.rank, kind] = result.get((span.rank, kind), 0.0) + span.duration_us
    (rank, kind), most_us = max(result.items(), key=lambda item: item[1])
    return rank, kind, most_us


def _idle(timeline: Timeline) -> list[str]:
    bubble = timeline.by_rank(SpanKind.BUBBLE)
    total_us = sum(bubble)
    if not total_us or not timeline.step_us:
        return []
    share = total_us / timeline.ranks / timeline.step_us
    rank = max(range(timeline.ranks), key=lambda r: bubble[r])
    return [
        f"Bubbles take {format_share(share)} of the {timeline.counted}' time, "
        f"most on {timeline.who(rank)} ({format_us(bubble[rank])})."
    ]


MOST_RANKS = 16
"""Rows of the table; of more ranks, those for which others wait longest."""


def stalls_grid(timeline: Timeline) -> Grid | None:
    """A row a rank of the run; None for a timeline without these times, and for one rank."""
    ranks = len(timeline.busy_us)
    if ranks < 2:
        return None
    by_rank, for_rank = [0.0] * ranks, [0.0] * ranks
    pairs: dict[int, dict[tuple[str, int], float]] = defaultdict(dict)
    for stall in timeline.stalls:
        by_rank[stall.rank] += stall.us
        for_rank[stall.on] += stall.us
        pairs[stall.rank][stall.axis, stall.on] = stall.us
    shown = sorted(sorted(range(ranks), key=lambda rank: -for_rank[rank])[:MOST_RANKS])
    rows = []
    for rank in shown:
        longest = max(pairs[rank].items(), key=lambda item: item[1], default=None)
        most_for = "-" if longest is None else f"rank {longest[0][1]} ({longest[0][0]})"
        computes, waits, waited = (
            _with_share(of[rank], timeline.step_us) for of in (timeline.busy_us, by_rank, for_rank)
        )
        rows.append((f"rank {rank}", computes, waits, most_for, waited))
    head = ("", "computes", "waits", "most for", "waited for")
    caption = (
        "waits: for other ranks, until they begin their part of a communication. waited for: how long all "
        "others stall for it."
    )
    return Grid("Who waits for whom", head, rows, (0,), caption)


def stalls_findings(timeline: Timeline) -> list[str]:
    """The worst of it, in a sentence; nothing where it is not worth one."""
    if not timeline.stalls or not timeline.step_us:
        return []
    worst = max(timeline.stalls, key=lambda stall: stall.us)
    if worst.us < LEAST_SHARE * timeline.step_us:
        return []
    busy = timeline.busy_us
    longer = ""
    if busy[worst.on] > busy[worst.rank]:
        longer = f", which computes for {format_us(busy[worst.on])} and it for {format_us(busy[worst.rank])}"
    return [
        f"Rank {worst.rank} waits {format_us(worst.us)} ({format_share(worst.us / timeline.step_us)} of the "
        f"step) on {worst.axis} for rank {worst.on}{longer}."
    ]


def _with_share(us: float, step_us: float) -> str:
    return f"{format_us(us)} ({format_share(us / step_us)})" if step_us else format_us(us)
