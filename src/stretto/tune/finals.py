"""What is planned in full at the end: the best, also with "auto" for a schedule, and the settings' own."""

from __future__ import annotations

from dataclasses import replace

from stretto.ir.stage_maps import AUTO
from stretto.tune.choices import Candidate, Choices
from stretto.tune.standing import Standing

FINALISTS = 3
"""Candidates that are planned in full. Assumed."""

SEVERAL = 2
"""Stages a rank, at least, from which "auto" chooses: it has them as one where that is faster."""


def finalists(standing: Standing, choices: Choices) -> list[Candidate]:
    """What wins most likely first, as the time may be over before the last. The settings' own is there, so
    that what is gained is told of plans of one kind."""
    best, others = standing.ranked()[:1], standing.ranked()[1:FINALISTS]
    found = [*best, *(auto for one in best for auto in with_any_schedule(one, choices)), *others]
    own = choices.own()
    return [*found, own] if own in standing.plans and own not in found else found


def with_any_schedule(one: Candidate, choices: Choices) -> list[Candidate]:
    """The candidate with the schedule that planning finds, where that may be chosen."""
    if "schedule" in choices.fixed or one.layout.pp == 1 or one.schedule == AUTO:
        return []
    found = replace(one, schedule=AUTO)
    enough = choices.layers is None or choices.layers >= SEVERAL * one.layout.pp
    if "virtual_stages" not in choices.fixed and enough:
        found = replace(found, virtual_stages=max(SEVERAL, one.virtual_stages))
    return [found] if choices.allowed(found) else []
