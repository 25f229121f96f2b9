"""The baseline's windows: every collective is waited for directly after its start, so nothing hides it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.ir.plan import Item, ItemKind, Window
from stretto.ir.program import WAIT, Job


def waits_at_once(job: Job, window: Window) -> Window:
    """The window in its captured order, but every collective is waited for directly after its start."""
    ops = [
        {op.name: op for sub in phase.parts for op in job.stages[stage].ops[sub]}
        for stage, phase in window.parts
    ]
    waits: dict[tuple[int, str], Item] = {}
    for item in window.items:
        if item.kind is ItemKind.OP and ops[item.part][str(item.ref)].target == WAIT:
            waits[item.part, ops[item.part][str(item.ref)].uses[0]] = item
    placed: list[Item] = []
    here = {(item.part, str(item.ref)) for item in window.items if item.kind is ItemKind.OP}
    moved = {item for key, item in waits.items() if key in here}
    for item in window.items:
        if item in moved:
            continue
        placed.append(item)
        wait = waits.get((item.part, str(item.ref))) if item.kind is ItemKind.OP else None
        if wait is not None:
            placed.append(wait)
    return replace(window, items=tuple(_sends_behind(job, window, placed)))


def _sends_behind(job: Job, window: Window, items: Sequence[Item]) -> list[Item]:
    """The items with every send directly after the item that makes what it sends."""
    sends: dict[tuple[int, str], list[Item]] = {}
    for item in items:
        if item.kind is ItemKind.SEND:
            sends.setdefault((item.part, job.edges[int(item.ref)].value), []).append(item)
    found: list[Item] = []
    for item in items:
        if item.kind is ItemKind.SEND:
            continue
        found.append(item)
        if item.kind is ItemKind.OP:
            found += sends.get((item.part, str(item.ref)), ())
    return found
