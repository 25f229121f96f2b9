"""Which ops the backward computes again: all, what is cheap, or as many as a limit of memory asks for.

    full        All ops of blocks whose results the backward needs are repeated from the block's inputs (Chen
                et al. 2016, arXiv 1604.06174).
    selective   Storages are dropped until the time that this adds to a stage reaches `SELECTIVE_SHARE` of it.
                Products with weights and collectives are not repeated (Korthikanti et al. 2022,
                arXiv 2205.05198).
    gathers     All-gathers of the forward with what only moves their results (same, section 4.2.2).
    a limit     Storages, nothing left out; of each rank as few as bring its peak under the limit, found
                by about what ranks keep, and some more where it is exactly more.

The order in which storages are dropped, the most bytes for each microsecond first (`StageChoice`):

    1. A candidate is a storage that F keeps for the backward, and no other block's forward reads. Repeating
       it takes the ops between it and what is kept; several candidates share those.
    2. In each block the candidate that saves most bytes for each microsecond is the next; then those
       that shared ops with it, or were repeated from it, are looked at again.
    3. Those of several blocks are merged, best first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, cycle

from stretto.errors import PlanError, UsageError
from stretto.ir.action import Phase, Schedule
from stretto.ir.collectives import ALL_GATHER
from stretto.ir.costs import Costs
from stretto.ir.flow import PHASES
from stretto.ir.program import Job, Op, Stage
from stretto.passes.recompute import Blocks, borders, forget, repeat, storages
from stretto.passes.sharded_state import sharded_state
from stretto.passes.step import Context, Step

SELECTIVE_SHARE = 0.05
"""Time that "selective" may add to a stage's ops. Assumed: elementwise ops and the attention's core of a
large transformer take of this order, each product with a weight more."""

PROBES = 64
"""The search for a limit ends when it is this share of a rank's steps from the fewest. Assumed: a plan is
made for each probe, and a 64th of the added time is not worth another."""

MOVES = ("aten.clone.default",)
"""Copies, which allocate but compute nothing."""

WORDS = ("none", "selective", "full", "gathers")

Peaks = Callable[[Job, bool], Sequence[int]]
"""The most bytes that each rank keeps when the job is planned, exactly or about (True)."""


def recomputed(step: Step, context: Context, *, stays: bool = False) -> Step:
    """The step whose backward computes again what `job.recompute` says. stays: whether a limit is to leave
    room for all that sharded state can keep full for a step (`stretto.passes.stays`).

    Raises PlanError for a limit that cannot be kept, UsageError for an unknown choice.
    """
    try:
        return _recomputed(step, context, stays)
    except PlanError:
        if step.asked == "off":
            raise
        # Overlap is an upper limit, and buffers of what is waited for at once are live for less long.
        return _recomputed(replace(step, asked="off"), context, stays)


def _recomputed(step: Step, context: Context, stays: bool) -> Step:
    job = step.job

    def peaks(made: Job, about: bool) -> Sequence[int]:
        counted = replace(step, job=made)
        return context.peaks(counted if stays else sharded_state(counted, context), about)

    choice = job.recompute if isinstance(job.recompute, str) else job.recompute - context.spare_bytes
    made = recompute(job, choice, context.costs_of(job), step.schedule, peaks)
    limits = [limit for limit in (job.recompute, step.max_bytes) if isinstance(limit, int)]
    return replace(step, job=made, max_bytes=min(limits, default=None))


def recompute(
    job: Job,
    choice: str | int,
    costs: Costs,
    schedule: Schedule,
    peak_bytes: Peaks,
) -> Job:
    """The job whose backward computes again what `choice` says.

    choice: "none", "selective", "full", "gathers", or the most bytes that a rank may use. A job that was so
    changed before is taken as it was before that. costs: those of the job. schedule: which rank has which
    stages. peak_bytes: asked for a limit only.

    Raises PlanError that names the ranks that cannot keep a limit and the least that they use, UsageError
    for an unknown choice.
    """
    job = forget(job)
    if choice == "none" or not job.trains:
        return job
    if choice == "gathers":
        return repeat(job, {stage.index: gathers(stage) for stage in job.stages})
    blocks = Blocks(job)
    if choice == "full":
        return repeat(job, {stage.index: _full(stage, blocks) for stage in job.stages})
    if choice == "selective":
        return repeat(job, {stage.index: _selective(stage, blocks, costs) for stage in job.stages})
    if isinstance(choice, str):
        words = ", ".join(map(repr, WORDS))
        raise UsageError(f"recompute = {choice!r}: give {words} or a number of bytes that a rank may use")
    return _within(job, choice, blocks, costs, schedule, peak_bytes)


def gathers(stage: Stage) -> list[str]:
    """The ops of a stage's forward that gather, and that move what is gathered: views, and copies into
    another order."""
    result: dict[str, None] = {}
    for op in stage.ops[Phase.F]:
        # A wait is a view of its start.
        moves = len(op.uses) == 1 and op.uses[0] in result and (op.alias is not None or op.target in MOVES)
        if op.target == ALL_GATHER.target or moves:
            result[op.name] = None
    return list(result)


def _full(stage: Stage, blocks: Blocks) -> list[str]:
    """All ops of blocks but those that make what another block reads."""
    forward = stage.ops[Phase.F]
    root = storages(forward)
    kept = borders(stage, blocks, root)
    return [op.name for op in forward if blocks.of(op) and root[op.name] not in kept]


def _selective(stage: Stage, blocks: Blocks, costs: Costs) -> set[str]:
    """Step 3 for one stage."""
    # Views and waits may be without a cost.
    total_us = sum(
        costs.op_us.get((stage.index, op.name), 0.0) for phase in PHASES for op in stage.ops[phase]
    )
    left_us = SELECTIVE_SHARE * total_us
    again: set[str] = set()
    for step in merged(StageChoice(stage, blocks, costs, cheap_only=True).steps()):
        left_us -= step.us
        if left_us < 0:
            break
        again |= step.ops
    return again


@dataclass(frozen=True, slots=True)
class _Probe:
    """So many of a rank's steps, and its peak with them."""

    count: int
    peak: int


def _between(few: _Probe, enough: _Probe, saved: Sequence[int], limit: int, turn: int, near: int) -> int:
    """How many steps to try next: where the peak meets the limit if it falls as what is `saved` grows, a bit
    more and then a bit less; and the middle, in case that it falls otherwise."""
    middle = (few.count + enough.count) // 2
    if turn == 2 or few.peak <= enough.peak:
        return middle
    share = (few.peak - limit) / (few.peak - enough.peak)
    wanted = saved[few.count] + share * (saved[enough.count] - saved[few.count])
    at = bisect_left(saved, wanted) + (near // 2 if turn == 0 else -1 - near // 2)
    return min(max(at, few.count + 1), enough.count - 1)


def _within(job: Job, limit: int, blocks: Blocks, costs: Costs, schedule: Schedule, peak_bytes: Peaks) -> Job:
    """The limit: of each rank's steps the fewest with which its peak is not above it."""
    result = [StageChoice(stage, blocks, costs, cheap_only=False).steps() for stage in job.stages]
    steps = [
        list(merged([block for stage in schedule.stages_of(rank) for block in result[stage]]))
        for rank in range(schedule.ranks)
    ]
    saved = [[0, *accumulate(step.nbytes for step in own)] for own in steps]
    ranks = range(schedule.ranks)
    lowest: list[int] = []

    def made(counts: Sequence[int]) -> Job:
        again: dict[int, set[str]] = {stage.index: set() for stage in job.stages}
        for rank, count in enumerate(counts):
            for step in steps[rank][:count]:
                again[step.stage] |= step.ops
        return repeat(job, again)

    def peaks(counts: Sequence[int], about: bool = False) -> Sequence[int]:
        found = peak_bytes(made(counts), about)
        if not about:
            lowest[:] = [min(pair) for pair in zip(lowest or found, found, strict=True)]
        return found

    def over(counts: Sequence[int]) -> list[bool]:
        return [peak > limit for peak in peaks(counts)]

    # below[rank] steps are too few, enough[rank] are not.
    below = [_Probe(0, peak) for peak in peaks([0] * schedule.ranks)]
    too_much = [one.peak > limit for one in below]
    if not any(too_much):
        return job
    enough = [len(steps[rank]) if much else 0 for rank, much in enumerate(too_much)]
    found = peaks(enough, about=True)
    cannot = over(enough) if max(found) > limit else [False for _ in ranks]
    for part in (1, 2, 3):
        # Repeating all of it at once may itself need the most.
        if any(cannot):
            tried = [len(steps[r]) * part // 4 if cannot[r] else enough[r] for r in ranks]
            found = peaks(tried)
            still = [peak > limit for peak in found]
            enough = [
                t if c and not s else e for e, t, c, s in zip(enough, tried, cannot, still, strict=True)
            ]
            cannot = [c and s for c, s in zip(cannot, still, strict=True)]
    if any(cannot):
        raise PlanError(
            f"cannot keep recompute = {limit:,} bytes a rank",
            [
                f"rank {rank} needs at least {lowest[rank]:,} bytes, even when its backward computes again "
                "all that it can. Allow as much, or use more stages, smaller microbatches or a schedule with "
                "fewer live microbatches"
                for rank in ranks
                if cannot[rank]
            ],
        )
    least = [_Probe(*pair) for pair in zip(enough, found, strict=True)]
    near = [max(1, len(own) // PROBES) for own in steps]
    for turn in cycle(range(3)):
        apart = [least[r].count - below[r].count > near[r] for r in ranks]
        if not any(apart):
            break
        tried = [
            _between(below[r], least[r], saved[r], limit, turn, near[r]) if apart[r] else least[r].count
            for r in ranks
        ]
        for r, peak in enumerate(peaks(tried, about=True)):
            if apart[r]:
                (below if peak > limit else least)[r] = _Probe(tried[r], peak)
    enough = [one.count for one in least]
    # When a message leaves depends on other ranks too, and with it how long its buffer lives.
    for _ in range(PROBES):
        too_much = over(enough)
        if not any(too_much):
            break
        enough = [
            min(len(s), e + 1 + len(s) // PROBES) if much else e
            for s, e, much in zip(steps, enough, too_much, strict=True)
        ]
    return made(enough)


@dataclass(slots=True)
class StorageDrop:
    """One more storage is not kept. stage: its owner; nbytes: of it; ops: those repeated for it that were not
    repeated before; us: their time."""

    stage: int
    nbytes: int
    ops: frozenset[str]
    us: float

    @property
    def rate(self) -> float:
        return self.nbytes / max(self.us, 1e-3)


def merged(blocks: Sequence[Sequence[StorageDrop]]) -> Iterator[StorageDrop]:
    """Steps of several blocks, the best first; those of one block in their order."""
    at = [0] * len(blocks)
    waiting = {index for index, steps in enumerate(blocks) if steps}
    while waiting:
        best = max(waiting, key=lambda index: (blocks[index][at[index]].rate, -index))
        yield blocks[best][at[best]]
        at[best] += 1
        if at[best] == len(blocks[best]):
            waiting.discard(best)


@dataclass(slots=True)
class _Candidate:
    """A storage that is kept. reads: what the backward reads of it; ops: what repeating it takes, as far as
    it is not repeated yet; stops: kept storages that these read."""

    nbytes: int
    reads: list[str] = field(default_factory=list)
    ops: frozenset[str] = frozenset()
    stops: frozenset[str] = frozenset()
    us: float = 0.0


class StageChoice:
    """Steps 1 and 2 for one stage."""

    def __init__(self, stage: Stage, blocks: Blocks, costs: Costs, *, cheap_only: bool) -> None:
        self.stage = stage
        self.costs = costs
        self.cheap_only = cheap_only
        self.forward = stage.ops[Phase.F]
        self.made = {op.name: op for op in self.forward}
        self.root = storages(self.forward)
        self.home = {op.name: blocks.of(op) for op in self.forward}
        self.borders = borders(stage, blocks, self.root)
        # Storages that are kept for the backward, and can be repeated.
        self.kept: dict[str, _Candidate] = {}
        for phase in (Phase.I, Phase.W):
            for op in stage.ops[phase]:
                for name in op.uses:
                    owner = self.root.get(name, "")
                    if owner in self.made and owner not in self.borders:
                        candidate = self.kept.setdefault(owner, _Candidate(self.made[owner].nbytes))
                        candidate.reads.append(name)
        self.repeated: set[str] = set()

    def steps(self) -> list[list[StorageDrop]]:
        """For each block its steps, in order."""
        by_block: dict[str, dict[str, _Candidate]] = {}
        for owner, candidate in self.kept.items():
            by_block.setdefault(self.home[owner], {})[owner] = candidate
        return [list(self._block(waiting)) for waiting in by_block.values()]

    def _block(self, waiting: dict[str, _Candidate]) -> Iterator[StorageDrop]:
        for owner in waiting:
            self._look(owner)
        while True:
            open_ = [owner for owner, candidate in waiting.items() if self._allowed(candidate)]
            if not open_:
                return
            best = max(open_, key=lambda owner: waiting[owner].nbytes / max(waiting[owner].us, 1e-3))
            chosen = waiting.pop(best)
            del self.kept[best]
            self.repeated |= chosen.ops
            yield StorageDrop(self.stage.index, chosen.nbytes, chosen.ops, chosen.us)
            for owner, candidate in waiting.items():
                if best in candidate.stops or candidate.ops & chosen.ops:
                    self._look(owner)

    def _look(self, owner: str) -> None:
        """What it takes now to repeat a storage."""
        candidate = self.kept[owner]
        ops: set[str] = set()
        stops: set[str] = set()
        reached = list(candidate.reads)
        while reached:
            name = reached.pop()
            if name in ops or name in self.repeated:
                continue
            ops.add(name)
            for use in self.made[name].uses:
                source = self.root.get(use, "")
                if source not in self.made or source in self.borders:
                    continue
                if source != owner and source in self.kept:
                    stops.add(source)
                elif self.home[source] == self.home[owner]:
                    reached.append(use)
        candidate.ops, candidate.stops = frozenset(ops), frozenset(stops)
        candidate.us = sum(self._us(self.made[name]) for name in ops)

    def _us(self, op: Op) -> float:
        """An op's time, with that of the collective that it starts: nothing may be there to hide it."""
        us = self.costs.op_us.get((self.stage.index, op.name), 0.0)  # views and waits may be without a cost
        asked = op.collective
        cost = None if asked is None else self.costs.collectives.get((asked.axis, asked.kind))
        return us if cost is None or asked is None else us + cost.curve.us(asked.nbytes)

    def _allowed(self, candidate: _Candidate) -> bool:
        if not candidate.nbytes:
            return False
        return not self.cheap_only or not any(self._is_dear(self.made[name]) for name in candidate.ops)

    def _is_dear(self, op: Op) -> bool:
        """A collective, or a product with a weight."""
        weight = any(self.root.get(name, name).startswith("param/") for name in op.uses)
        return op.collective is not None or (op.flops > 0 and weight)
