"""Processes of a tuning that are none: each piece is done when it is waited for, in this one."""

from __future__ import annotations

from collections.abc import Callable

from stretto.config import TrainSettings
from stretto.price.cluster import Description
from stretto.tune.work import Answer, Asked, TuneWork


class Here:
    """In the place of `stretto.tune.work.Workers`. before: called with each piece before it is done."""

    def __init__(
        self,
        settings: TrainSettings,
        devices: int,
        found: Description,
        before: Callable[[Asked], None] = lambda asked: None,
    ) -> None:
        self.work = TuneWork(settings, devices, found, {})
        self.before = before
        self.busy: Asked | None = None
        self.done: list[Asked] = []

    @property
    def free(self) -> bool:
        return self.busy is None

    def give(self, asked: Asked) -> None:
        self.busy = asked

    def answers(self, timeout_s: float) -> list[tuple[Asked, Answer]]:
        asked, self.busy = self.busy, None
        assert asked is not None
        self.before(asked)
        self.done.append(asked)
        return [(asked, self.work.do(asked))]
