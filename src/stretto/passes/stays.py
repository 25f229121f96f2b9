"""What of sharded state is full for longer than a program, within a limit of memory (`Stays`).

    1. With one microbatch a parameter that the forward has gathered stays for the backward. Those that the
       backward reads first come first: they are there for the shortest time, and nothing is there yet that
       could hide a gather.
    2. With several it is gathered once a step. Those that the forward reads first come first: they are needed
       first, and all that is gathered once a step goes before what is gathered where it is read.
    3. With several, gradients are added up in full and scattered once a step. Those that are made last come
       first: nothing is left that could hide their scatter.
    4. Of each pipeline rank as many stay as fit it: of all of them the part that memory grows by as a
       straight line, and less where a count says that it is too much; none where that is never enough.

Step 2 saves a gather more for each byte than step 3 saves scatters, but a scatter is in turn harder to hide.
So planning tries both orders. All three rules were found by the clock, against others: GPTs on links at which
transfers take as long as compute, Llama of 8 layers with 1 and 2 pipeline ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stretto.ir.action import Phase
from stretto.ir.flow import PHASES
from stretto.ir.kept import shard_spec
from stretto.ir.parameters import gathers
from stretto.ir.program import PARAM, Job
from stretto.passes.sharded_state import Stays, in_programs
from stretto.passes.step import Context, LeftOutError, Step

COUNTS = 4
"""How often less stays where a count says that it is too much. Assumed: each time far less is too much."""

LESS = 0.95
"""Of what a straight line says, what stays. Assumed: memory does not grow quite as one."""

Kind = Literal["parameters", "gradients"]
KINDS: tuple[Kind, ...] = ("parameters", "gradients")


@dataclass(frozen=True, slots=True)
class Stay:
    """A tied group that may stay, with its bytes. stages: of one pipeline rank, that read it; none of a
    gradient."""

    kind: Kind
    name: str
    stages: tuple[int, ...]
    nbytes: int


def kept_full(step: Step, context: Context, *, first: Kind, share: float, spare_bytes: int = 0) -> Step:
    """The step in which so much of what fits stays, in place of `sharded_state`. first: what is to stay
    before the others; spare_bytes: of the limit, what is left to others than ops as captured.

    Left out where nothing may stay, no limit of memory is known, or nothing fits."""
    job = step.job
    may = [_may_stay(job, step.schedule.stages_of(rank), first) for rank in range(step.schedule.ranks)]
    if first == "gradients" and len({stay.kind for of_rank in may for stay in of_rank}) < 2:
        raise LeftOutError  # as with parameters first
    if not any(may):
        raise LeftOutError
    if step.max_bytes is None:
        raise LeftOutError("nothing stays full: no limit of memory is known")
    limit = step.max_bytes - context.spare_bytes - spare_bytes

    def made(budgets: Sequence[float]) -> Job:
        return _with(job, [stay for pair in zip(may, budgets, strict=True) for stay in _within(*pair)])

    def budgets() -> Sequence[float]:
        return _most(may, lambda some: context.peaks(replace(step, job=made(some)), True), limit)

    most = context.once(job, ("stays", first, limit, step.schedule), budgets)
    if share == 1 and first == "gradients" and most == [_total(of_rank) for of_rank in may]:
        raise LeftOutError
    some = [share * nbytes for nbytes in most]
    stays = [[*_within(*pair)] for pair in zip(may, some, strict=True)]
    if not any(stays):
        raise LeftOutError("nothing stays full: nothing more fits")
    return replace(step, job=made(some), stays=_said(job, may, stays))


def _said(job: Job, may: Sequence[Sequence[Stay]], stays: Sequence[Sequence[Stay]]) -> str:
    """How many of all stay, in words."""
    until = "the step" if job.microbatches > 1 else "the backward"
    texts: list[str] = []
    for kind in KINDS:
        some, every = (sum(s.kind == kind for of in one for s in of) for one in (stays, may))
        if every:
            texts.append(f"{some} of {every} {kind}")
    return f"{' and '.join(texts)} stay full until the end of {until}"


def _with(job: Job, stays: Sequence[Stay]) -> Job:
    read = {(stage, stay.name) for stay in stays for stage in stay.stages}
    gradients = {stay.name for stay in stays if stay.kind == "gradients"}
    once = job.microbatches > 1
    return in_programs(job, Stays(read if once else (), () if once else read, gradients))


def _may_stay(job: Job, stages: Sequence[int], first: Kind) -> list[Stay]:
    """Of a pipeline rank, in the order in which they are to stay."""
    read = _gathered(job, stages) if gathers(job.zero) else []
    added = _added(job, stages) if job.microbatches > 1 else []
    return [*read, *added] if first == "parameters" else [*added, *read]


def _gathered(job: Job, stages: Sequence[int]) -> list[Stay]:
    """Steps 1 and 2."""
    known = {PARAM + parameter.name: parameter for parameter in job.parameters if parameter.kept}
    phases: dict[tuple[int, str], set[Phase]] = defaultdict(set)
    for phase in PHASES if job.microbatches > 1 else (Phase.I, Phase.W, Phase.F):
        for stage in stages:
            for op in job.stages[stage].ops[phase]:
                for name in op.uses:
                    if name in known:
                        phases[stage, known[name].tied_to].add(phase)
    nbytes = {parameter.tied_to: parameter.spec.nbytes for parameter in known.values()}
    if job.microbatches == 1:
        return [
            Stay("parameters", name, (stage,), nbytes[name])
            for (stage, name), found in phases.items()
            if Phase.F in found and len(found) > 1
        ]
    of: dict[str, list[int]] = defaultdict(list)
    for stage, name in phases:
        of[name].append(stage)
    return [Stay("parameters", name, tuple(where), nbytes[name]) for name, where in of.items()]


def _added(job: Job, stages: Sequence[int]) -> list[Stay]:
    """Step 3, of those that no other pipeline rank adds to."""
    left: dict[tuple[int, str], int] = {}
    """(stage, value) -> ops of the backward that come after it."""
    for stage in stages:
        ops = [op.name for phase in (Phase.I, Phase.W) for op in job.stages[stage].ops[phase]]
        left.update(((stage, name), len(ops) - at) for at, name in enumerate(ops, 1))
    after: dict[str, int] = {}
    nbytes: dict[str, int] = {}
    elsewhere: set[str] = set()
    for parameter in job.parameters:
        name = parameter.tied_to
        if not set(parameter.stages) <= set(stages):
            elsewhere.add(name)
        elif parameter.kept and parameter.grads and not parameter.scattered:
            places = (left[stage, value] for stage, _, value in parameter.grads)
            after[name] = min(*places, after.get(name, len(left)))
            nbytes[name] = parameter.grad_nbytes - shard_spec(job, parameter).nbytes
    found = sorted(after.keys() - elsewhere, key=lambda name: (after[name], name))
    return [Stay("gradients", name, (), nbytes[name]) for name in found]


def _within(may: Sequence[Stay], budget: float) -> Iterator[Stay]:
    """The first of them that have no more bytes together; what is too large is left out."""
    for stay in may:
        if stay.nbytes <= budget:
            budget -= stay.nbytes
            yield stay


def _total(may: Sequence[Stay]) -> float:
    return float(sum(stay.nbytes for stay in may))


def _most(
    may: Sequence[Sequence[Stay]], peaks: Callable[[Sequence[float]], Sequence[int]], limit: int
) -> Sequence[float]:
    """Step 4: bytes of what may stay on each rank; peaks: the most that ranks have with so much."""
    totals = [_total(of_rank) for of_rank in may]
    found, bare = peaks(totals), None
    budgets = list(totals)
    for _ in range(COUNTS):
        if all(peak <= limit for peak in found):
            return budgets
        bare = bare or peaks([0.0 for _ in may])
        budgets = [
            budget if peak <= limit else LESS * budget * max(0, limit - least) / max(1, peak - least)
            for budget, peak, least in zip(budgets, found, bare, strict=True)
        ]
        found = peaks(budgets)
    return [budget if peak <= limit else 0.0 for budget, peak in zip(budgets, found, strict=True)]
