"""Variants: lists of passes that make a plan's step out of a job and its schedule, which planning compares.

In the order of a list:

    split_products     products and the collectives of their results in parts, where it was asked for
    dense_messages     what crosses stages is in one piece of memory
    messages_in_parts  what tensor-parallel ranks have replicated crosses in parts
    sent_once, handed_on   values that several stages read are sent to each rank once, or handed on
    recomputed         what the backward computes again, and any other of `stretto.passes.STEP_PASSES`
    paired, one_window forwards share windows with backwards of other microbatches
    moved_across       communications go on from one window to the next
    at_once ...        windows in an order: at once, as captured, ordered, refined, whole_step

A new way to overlap is one more list here. What all lists have in common is done once (`planning.tries`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from stretto.ir.action import Overlap
from stretto.ir.program import Job
from stretto.order.policies import DEFAULT
from stretto.passes import STEP_PASSES
from stretto.passes.step import Pass, Step
from stretto.planning.schedules import moved_across, one_window, paired, writes_buffers
from stretto.planning.windows import as_captured, at_once, ordered, refined, whole_step

AHEAD = (0, 1)
"""How much longer than its own the warm-up of a paired schedule may be, in forwards for every rank behind:
with one more, 1F1B has the warm-up that pairs need, and eager 1F1B has room for its messages."""

AHEAD_ENDS = (1, 2)
"""The same with ends in windows of their own: forwards that share a window take less time, and one more fills
the time until the first backward's message."""

ENDS = 8
"""Ends in windows of their own are tried with at most this many microbatches a rank: they can win at most a
few windows of a step, and cost as much planning as all others. Assumed."""

Variant = tuple[Pass, ...]
"""Passes, in order. Of those that begin alike the beginning is run once."""


def begins() -> list[Variant]:
    """How variants begin: with what changes the job, with and without what is only tried."""
    found: list[Variant] = [()]
    for one in STEP_PASSES:
        longer = [(*begin, one.apply) for begin in found]
        found = [*found, *longer] if one.tried else longer
    return found


def ways(step: Step, order: str) -> list[Variant]:
    """How variants go on, which overlap nothing, then more and more, as the step may."""
    job = step.job
    if step.asked == "off":
        return [(at_once,)]
    if not communicates(job):
        return [(as_captured,)]
    found: list[Variant] = [(at_once,), (ordered,), (moved_across, ordered)]
    if may_pair(step):
        for pairs in _pairs(step):
            found += [(pairs, ordered), (pairs, moved_across, ordered)]
        if order == DEFAULT and not writes_buffers(job):
            found.append((one_window, whole_step))
    return found


def brief_ways(step: Step, ahead: int | None = AHEAD[-1]) -> list[Variant]:
    """How variants go on where one is enough to compare steps: that which is often the fastest first, or the
    one with `ahead` (None: without pairs)."""
    if step.asked == "off":
        return [(at_once,)]
    if not communicates(step.job):
        return [(as_captured,)]
    if not may_pair(step):
        return [(ordered,)]
    found: list[int | None] = [*reversed(AHEAD), None]
    found.sort(key=lambda one: one != ahead)
    return [(ordered,) if one is None else (partial(paired, ahead=one), ordered) for one in found]


def may_pair(step: Step) -> bool:
    """Whether forwards may share windows with backwards."""
    return step.asked == "window" and communicates(step.job) and step.job.trains and not overlaps(step)


def _pairs(step: Step) -> list[Pass]:
    job, schedule = step.job, step.schedule
    found: list[Pass] = [partial(paired, ahead=ahead) for ahead in AHEAD]
    # Forwards in one window all read buffers as they were before it.
    if job.microbatches <= ENDS * schedule.ranks and not writes_buffers(job):
        found += [partial(paired, ahead=ahead, ends=True) for ahead in AHEAD_ENDS]
    return found


def again(variants: Sequence[Variant]) -> list[Variant]:
    """The same, with windows that are ordered for the step as a whole."""
    return [(*variant[:-1], refined) for variant in variants]


def names(variant: Variant) -> str:
    """What a variant does to windows, for people: its last passes, without those of `begins`."""
    found = [one.func if isinstance(one, partial) else one for one in variant]
    job = {one.apply for one in STEP_PASSES}
    return ", ".join(one.__name__ for one in found if one not in job)


def overlaps(step: Step) -> bool:
    """Whether the schedule has windows that microbatches share by itself."""
    return any(isinstance(slot, Overlap) for slots in step.schedule.orders for slot in slots)


def communicates(job: Job) -> bool:
    """Whether any op starts a collective."""
    return any(op.kind is not None for stage in job.stages for ops in stage.ops.values() for op in ops)
