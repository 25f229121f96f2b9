"""A timeline: what every lane of every rank did, and when. `simulate` predicts one, `runtime` measures one.

Both have the same tracks and the same accounts, so that they can be drawn above each other and compared
number by number. Times are microseconds from the step's common start; memory is bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from stretto.errors import UsageError
from stretto.files.codec import Finite
from stretto.ir.action import ONCE_PHASES, Phase
from stretto.ir.axes import AXES, PIPELINE

COMPUTE_LANE = "compute"


class SpanKind(StrEnum):
    """compute: ops run. exposed: the compute lane waits for a message that is under way. bubble: the compute
    lane has nothing to do (it waits for a message whose sender has not made it yet, or for the end of the
    step; so does a rank that has no op left, whatever it waits for, while others work or end after it).
    message: a transfer, on the lane of its communicator, drawn at the receiver's rank."""

    COMPUTE = "compute"
    EXPOSED = "exposed"
    BUBBLE = "bubble"
    MESSAGE = "message"


def axis_of(name: str) -> str:
    """The axis of a communication by its name, of which it is the first word; pp if that is none."""
    word = name.partition(" ")[0]
    return word if word in AXES else PIPELINE


@dataclass(frozen=True, slots=True)
class Span:
    """One interval on one lane of one rank.

    `name` is the action's token (`1B0`) for compute. For communication, and for what waits for it, it begins
    with the axis: `pp 0>1 e3:0`, `pp loss`, `tp all_reduce mm_3_sum`, `dp 0.1` (a sum of gradients).
    For a message, (sender, sent_us) says who sent it and when the send was started, and `edge` which one of
    the job's it is.
    """

    rank: int
    lane: str
    kind: SpanKind
    name: str
    start_us: Finite
    end_us: Finite
    stage: int | None = None
    phase: Phase | None = None
    microbatch: int | None = None
    nbytes: int = 0
    sender: int | None = None
    sent_us: Finite | None = None
    edge: int | None = None

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us

    @property
    def axis(self) -> str:
        """The axis of a communication, or of what waits for one."""
        return axis_of(self.name)


@dataclass(frozen=True, slots=True)
class Stall:
    """A rank of the run waited for so long, in all, until `on` had begun its part of communications of an
    axis: it waited for that rank, not for the network."""

    axis: str
    rank: int
    on: int
    us: Finite


Saver = Callable[["Timeline", Path], None]
SAVERS: dict[str, Saver] = {}
"""File suffix -> writer. `stretto.report` fills it, so that a timeline can be saved from below it."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans by rank and lane, with the step's accounts. source: `simulated` or `measured`.

    memory[rank]: (time, bytes kept) steps, ascending in time; empty where it was not recorded.
    members: how many ranks of the run each rank here is, those of one pipeline rank, which do equal
    work.
    busy_us: of each rank of the run, how long its compute lane ran ops; empty where that was not measured.
    stalls: who waits for whom, by axis and pair of ranks, likewise.
    """

    source: str
    ranks: int
    step_us: Finite
    spans: tuple[Span, ...] = field(repr=False)
    peak_bytes: tuple[int, ...]
    memory: tuple[tuple[tuple[Finite, int], ...], ...] = field(default=(), repr=False)
    members: int = 1
    busy_us: tuple[Finite, ...] = ()
    stalls: tuple[Stall, ...] = ()

    def who(self, rank: int) -> str:
        """A rank in words, as the run counts: `rank 1`, or `ranks 2-3` for a pipeline rank of two."""
        if self.members == 1:
            return f"rank {rank}"
        return f"ranks {rank * self.members}-{(rank + 1) * self.members - 1}"

    @property
    def counted(self) -> str:
        """What `ranks` counts, in a word: `pipeline ranks`, where one is of several ranks."""
        return "ranks" if self.members == 1 else "pipeline ranks"

    def total_us(self, kind: SpanKind, rank: int) -> float:
        """Time of one kind on one rank's compute lane (for `message`: on all of its lanes)."""
        return self.by_rank(kind)[rank]

    def by_rank(self, kind: SpanKind) -> tuple[float, ...]:
        """`total_us` of every rank."""
        totals = [0.0] * self.ranks
        for span in self.spans:
            if span.kind is kind:
                totals[span.rank] += span.duration_us
        return tuple(totals)

    def exposed_axis_us(self) -> dict[str, tuple[float, ...]]:
        """Axis -> by rank, exposed communication."""
        totals: dict[str, list[float]] = {PIPELINE: [0.0] * self.ranks}
        for span in self.spans:
            if span.kind is SpanKind.EXPOSED:
                totals.setdefault(span.axis, [0.0] * self.ranks)[span.rank] += span.duration_us
        return {axis: tuple(totals[axis]) for axis in AXES if axis in totals}

    def comm_axis_us(self) -> dict[str, tuple[float, ...]]:
        """Axis -> by rank, the time in which a communication of the axis that the rank takes part in (at
        either end) is on its way, or is waited for; what overlaps counts once. So it is never less than what
        is exposed."""
        intervals: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        for span in self.spans:
            if span.kind in (SpanKind.MESSAGE, SpanKind.EXPOSED):
                ends = (span.rank,) if span.sender is None else (span.rank, span.sender)
                for rank in ends:
                    intervals[span.axis, rank].append((span.start_us, span.end_us))
        used = {axis for axis, _ in intervals}
        return {
            axis: tuple(_covered_us(intervals.get((axis, rank), [])) for rank in range(self.ranks))
            for axis in AXES
            if axis in used
        }

    @property
    def exposed_us(self) -> dict[str, float]:
        """Axis -> exposed communication, the mean over ranks."""
        return {axis: sum(by_rank) / self.ranks for axis, by_rank in self.exposed_axis_us().items()}

    @property
    def comm_us(self) -> dict[str, float]:
        """Axis -> time of its communications, hidden or exposed, the mean over ranks (see `comm_axis_us`)."""
        return {axis: sum(by_rank) / self.ranks for axis, by_rank in self.comm_axis_us().items()}

    @property
    def hidden(self) -> dict[str, float]:
        """Axis -> share of its communication that is hidden, 0 to 1, for axes that communicate."""
        exposed_us = self.exposed_us
        return {
            axis: 1.0 - exposed_us.get(axis, 0.0) / total_us
            for axis, total_us in self.comm_us.items()
            if total_us
        }

    def save(self, path: str | Path) -> None:
        """Write the timeline; the suffix says how (`.perfetto-trace`, `.svg`, `.json`).

        Raises UsageError for a suffix that no writer serves.
        """
        path = Path(path)
        saver = SAVERS.get(path.suffix)
        if saver is None:
            known = ", ".join(sorted(SAVERS)) or "none; import stretto.report first"
            raise UsageError(f"cannot save a timeline as {path}: known suffixes are {known}")
        saver(self, path)


SAME_END = 0.001
"""A rank whose last wait ends so close to the end of the last, as a share of the step, ends with it. Assumed:
what clocks of ranks differ by."""


def without_closing_waits(spans: Iterable[Span]) -> list[Span]:
    """The spans, where a rank that has no op left waits for the end of the step (bubble) and not for
    communication (exposed): while another rank works, and throughout if it is done before others are."""
    spans = list(spans)
    worked_us: dict[int, float] = defaultdict(float)
    ended_us: dict[int, float] = defaultdict(float)
    for span in spans:
        if span.kind is SpanKind.COMPUTE and span.phase not in ONCE_PHASES:
            worked_us[span.rank] = max(worked_us[span.rank], span.end_us)
        if span.kind in (SpanKind.COMPUTE, SpanKind.EXPOSED):
            ended_us[span.rank] = max(ended_us[span.rank], span.end_us)
    others_us = max(worked_us.values(), default=0.0)
    last_us = max(ended_us.values(), default=0.0)
    result: list[Span] = []
    for span in spans:
        if span.kind is not SpanKind.EXPOSED or span.start_us < worked_us[span.rank]:
            result.append(span)
            continue
        ends_first = ended_us[span.rank] < (1.0 - SAME_END) * last_us
        middle_us = span.end_us if ends_first else min(max(others_us, span.start_us), span.end_us)
        if middle_us > span.start_us:
            result.append(replace(span, kind=SpanKind.BUBBLE, end_us=middle_us))
        if middle_us < span.end_us:
            result.append(replace(span, start_us=middle_us))
    return result


def _covered_us(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total_us, until_us = 0.0, 0.0
    for start_us, end_us in sorted(intervals):
        if end_us > until_us:
            total_us += end_us - max(start_us, until_us)
            until_us = end_us
    return total_us
