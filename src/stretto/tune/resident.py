"""What ranks of a layout have in memory: what is fixed, what microbatches keep, and what is there briefly.

fixed      Parameters, gradients and the optimizer's state, by `zero`.
saved      What a forward keeps until its backward has read it.
extra      The rest: of a short step of few stages, with ops in the order of a list, what its ranks have at
           most beyond both. Logits, gathered parameters, gradients on their way, what is computed again,
           buffers of messages.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf

from stretto.ir.action import Phase, Schedule
from stretto.ir.parameters import STATES, Parameter, Zero
from stretto.ir.prices import Prices
from stretto.ir.program import Job
from stretto.passes.recompute import Blocks, storages
from stretto.passes.step import Context, Step
from stretto.planning.choose import QUICK, ways
from stretto.planning.finish import sends_waited
from stretto.planning.peaks import Peaks
from stretto.planning.windows import lowered
from stretto.schedule.families import make_schedule
from stretto.schedule.timing import most_kept
from stretto.verifying.memory import peak_bytes


@dataclass(frozen=True, slots=True)
class Fixed:
    """Bytes that each rank has in full, and those that `zero` deals out."""

    full: float
    dealt: float = 0.0

    def bytes_over(self, ranks: int) -> float:
        """What a rank has, of so many with copies."""
        return self.full + self.dealt / ranks


@dataclass(frozen=True, slots=True)
class Extra:
    """Bytes of a rank without the last stage, and of one with it: in steps of many microbatches, and of few,
    as many as pipeline ranks, of which fewer messages wait. alone: in a step of one, whose gradients begin as
    what is saved goes."""

    many: tuple[float, float] = (0.0, 0.0)
    few: tuple[float, float] = (0.0, 0.0)
    alone: float = 0.0

    def of(self, last: bool, microbatches: int, pp: int) -> float:
        """What such a rank has in a step of so many microbatches."""
        if microbatches == 1:
            return self.alone
        return (self.few if microbatches <= pp else self.many)[last]

    def scaled(self, by: float) -> Extra:
        """For so many times the rows: a guess."""
        many, few = ((first * by, last * by) for first, last in (self.many, self.few))
        return Extra(many, few, self.alone * by)


NOTHING = Extra()


@dataclass(frozen=True, slots=True)
class Shares:
    """By stage, what each has of all work, of what is fixed, and of what is saved but for the head's."""

    work: Sequence[float]
    fixed: Sequence[float]
    saved: Sequence[float]

    @staticmethod
    def even(stages: int) -> Shares:
        each = (1 / stages,) * stages
        return Shares(each, each, each)


def parts_of(amounts: Sequence[float]) -> tuple[float, ...]:
    """Each as a part of all."""
    return tuple(one / (sum(amounts) or 1) for one in amounts)


def fixed_of(job: Job, ep: int, zero: Zero, stages: Collection[int] | None = None) -> Fixed:
    """Of these stages, or all. Of experts, which ranks of ep share, what is dealt out over the ranks of dp is
    so many times what is dealt out over fewer."""
    full = dealt = 0
    trained = {parameter.tied_to for parameter in job.parameters if parameter.grads}
    here: dict[str, Parameter] = {}
    for parameter in job.parameters:
        if stages is None or any(stage in stages for stage in parameter.stages):
            here.setdefault(parameter.tied_to, parameter)
    for parameter in here.values():
        own, read = parameter.grad_nbytes, parameter.spec.nbytes
        gradient = own if parameter.tied_to in trained else 0
        state = STATES[job.optimizer] * gradient
        if zero == 0:
            full += own + (read if parameter.own_dtype is not None else 0) + gradient + state
            continue
        # Of "auto" the least.
        parts = own + state + (0 if zero == 1 else gradient)
        full += (read if zero in (1, 2) else 0) + (gradient if zero == 1 else 0)
        dealt += parts * (ep if parameter.is_sharded("ep") else 1)
    return Fixed(full, dealt)


@dataclass(frozen=True, slots=True)
class Saved:
    """By stage, what a microbatch's forward keeps for its backward. head: of that of the last, what is behind
    the model's blocks, of which shares differ as more is computed again."""

    by_stage: Sequence[int]
    head: int

    @property
    def body(self) -> Sequence[int]:
        """Without the head."""
        *others, last = self.by_stage
        return *others, last - self.head


def saved_of(job: Job) -> Saved:
    """What the forwards of a job keep."""
    blocks = Blocks(job)
    head = 0
    received: dict[int, dict[str, int]] = defaultdict(dict)
    for edge in job.edges:
        if edge.phase is Phase.F:
            received[edge.target][edge.value] = edge.spec.nbytes
    result: list[int] = []
    for stage in job.stages:
        forward = stage.ops[Phase.F]
        root = storages(forward)
        sizes = {op.name: op.nbytes for op in forward}
        behind = {op.name: op.nbytes for op in forward if not blocks.of(op)}
        used = {name for phase in (Phase.I, Phase.W) for op in stage.ops[phase] for name in op.uses}
        owners = {root[name] for name in used if name in root}
        head = sum(behind.get(owner, 0) for owner in owners)  # of the last, in the end
        saved = sum(sizes.get(owner, 0) for owner in owners)
        result.append(saved + sum(size for name, size in received[stage.index].items() if name in used))
    return Saved(result, head)


def extra_of(made: Job, job: Job, prices: Prices, schedule: Schedule, ep: int) -> Extra:
    """made: the job as its programs are; job: as captured; schedule: where its stages are, and in which
    family."""
    context = Context(prices, QUICK, Peaks(prices))
    copies = math.prod(job.size(axis) for axis in ("dp", "cp", "ep"))
    saved, last = saved_of(made).by_stage, len(made.stages) - 1
    found: dict[int, tuple[float, float]] = {}
    for count in {1, schedule.ranks, 2 * schedule.ranks}:
        each = len(made.stages) // schedule.ranks
        short = make_schedule(schedule.family, schedule.ranks, count, virtual_stages=each)
        step = Step(made, short, short, "local", asked="local")
        for apply in ways(step)[-1]:
            step = apply(step, context)
        plan = lowered(sends_waited(step, context), context)
        kept = most_kept(short, short.stage_ranks, saved, saved)
        more: dict[bool, float] = {}
        for rank in range(short.ranks):
            stages = short.stages_of(rank)
            known = fixed_of(job, ep, job.zero, stages).bytes_over(copies) + kept[rank]
            more[last in stages] = max(more.get(last in stages, -inf), peak_bytes(plan, rank) - known)
        found[count] = more.get(False, more[True]), more[True]
    return Extra(found[2 * schedule.ranks], found[schedule.ranks], found[1][True])
