"""What a job has of the process that captured it; a file of it has none of that."""

from __future__ import annotations

from typing import Any, Protocol


class Watched(Protocol):
    """Values that must stay what they are."""

    def check(self) -> None:
        """Raises UsageError for one that is another now."""


class PlannedJob(Protocol):
    """A plan, as far as another capture asks."""

    @property
    def job(self) -> Any: ...
    @property
    def schedule(self) -> Any: ...


class Recipe(Protocol):
    """Captures another batch as a job was captured (`Job.with_batch`)."""

    def __call__(self, job: Any, batch: Any, microbatches: int | None, like: PlannedJob | None) -> Any: ...
