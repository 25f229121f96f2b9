"""A timeline: what every lane of every rank did, and when. `simulate` predicts one, `runtime` measures one.

Both have the same tracks and the same accounts, so that they can be drawn above each other and compared
number by number. Times are microseconds from the step's common start; memory is bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from stretto.errors import UsageError
from stretto.ir.action import Phase

COMPUTE_LANE = "compute"


class SpanKind(StrEnum):
    """compute: ops run. exposed: the compute lane waits for a message that is under way. bubble: the compute
    lane has nothing to do (it waits for a message whose sender has not made it yet, or for the end of the
    step). message: a transfer, on the lane of its communicator, drawn at the receiver's rank."""

    COMPUTE = "compute"
    EXPOSED = "exposed"
    BUBBLE = "bubble"
    MESSAGE = "message"


@dataclass(frozen=True, slots=True)
class Span:
    """One interval on one lane of one rank.

    `name` is the action's token (`1B0`) for compute, the edge's or collective's for the rest. For a
    message, (sender, sent_us) says who sent it and when the send was started.
    """

    rank: int
    lane: str
    kind: SpanKind
    name: str
    start_us: float
    end_us: float
    stage: int | None = None
    phase: Phase | None = None
    microbatch: int | None = None
    nbytes: int = 0
    sender: int | None = None
    sent_us: float | None = None

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us


Saver = Callable[["Timeline", Path], None]
SAVERS: dict[str, Saver] = {}
"""File suffix -> writer. `stretto.report` fills it, so that a timeline can be saved from below it."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans by rank and lane, with the step's accounts. source: `simulated` or `measured`.

    memory[rank]: (time, bytes held) steps, ascending in time; empty where it was not recorded.
    """

    source: str
    ranks: int
    step_us: float
    spans: tuple[Span, ...] = field(repr=False)
    peak_bytes: tuple[int, ...]
    memory: tuple[tuple[tuple[float, int], ...], ...] = field(default=(), repr=False)

    def total_us(self, kind: SpanKind, rank: int) -> float:
        """Time of one kind on one rank's compute lane (for `message`: on all of its lanes)."""
        return sum(span.duration_us for span in self.spans if span.rank == rank and span.kind is kind)

    def by_rank(self, kind: SpanKind) -> tuple[float, ...]:
        return tuple(self.total_us(kind, rank) for rank in range(self.ranks))

    @property
    def exposed_us(self) -> dict[str, float]:
        """Axis -> exposed communication, the mean over ranks. Lanes are named `<axis> ...`."""
        result: dict[str, float] = {"pp": 0.0}
        for span in self.spans:
            if span.kind is SpanKind.EXPOSED:
                axis = span.name.split()[0] if " " in span.name else "pp"
                result[axis] = result.get(axis, 0.0) + span.duration_us / self.ranks
        return result

    def save(self, path: str | Path) -> None:
        """Write the timeline; the suffix says how (`.perfetto-trace`, `.svg`, `.json`).

        Raises UsageError for a suffix that no writer serves.
        """
        path = Path(path)
        saver = SAVERS.get(path.suffix)
        if saver is None:
            known = ", ".join(sorted(SAVERS)) or "none; import stretto first"
            raise UsageError(f"cannot save a timeline as {path}: known suffixes are {known}")
        saver(self, path)
