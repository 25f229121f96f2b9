"""Several plans of one Runner: what they must share, and which of them a batch's shape asks for.

1. A further plan must have every parameter where the first has it, and as the same part: gradients and
   the optimizer's state are those of the first. What is computed may differ in all else: shapes,
   microbatches, the order of work.
2. A batch belongs to the plan whose leaves have its shapes; of several, to that of its constants. Other
   constants alone ask for no new plan, since they might differ in every step: they are refused.
3. Every rank is given the full batch, so all find the same plan; before a step they compare what they
   found, since ranks that walk different plans would wait for each other forever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.batch import tree
from stretto.batch.dims import shape_given
from stretto.errors import UsageError
from stretto.ir.plan import Plan
from stretto.ir.program import Job, Parameter
from stretto.runtime.fit import pipeline_ranks
from stretto.runtime.transport import Transport

PlanFor = Callable[[Any], Plan]
"""A batch -> a plan for its shape."""

_PARTS: Mapping[str, Callable[[Parameter], object]] = {
    "shape on a rank": lambda p: list(p.spec.shape),
    "dtype": lambda p: p.own_dtype or p.spec.dtype,
    "dtype in ops": lambda p: p.spec.dtype,
    "tie": lambda p: p.tied_to,
    "shards": lambda p: [(s.axis, s.dim, s.blocks, s.copies) for s in p.shards],
    "rows kept over": lambda p: list(p.kept),
    "place in a bucket": lambda p: p.slot,
    "frozen": lambda p: p.frozen,
}


def check_same(first: Plan, plan: Plan) -> None:
    """Step 1. Raises UsageError that names what differs."""
    difference = _difference(first, plan)
    if difference is not None:
        raise UsageError(
            f"{difference}: plans of one Runner share parameters, gradients and optimizer. Capture the other "
            "shape as the first was: stretto.plan(job.with_batch(batch, like=plan), ...)"
        )


def _difference(first: Plan, plan: Plan) -> str | None:
    def differs(what: str, has: object, wants: object) -> str:
        return f"the further plan has {what} {has}, and the Runner's first plan {wants}"

    of_plan: Mapping[str, Callable[[Plan], object]] = {
        "ranks": lambda one: " ".join(f"{axis}={size}" for axis, size in one.mesh.sizes),
        "device": lambda one: one.job.device,
        "a backward:": lambda one: one.job.trains,
        "updates =": lambda one: one.job.updates,
        "clip_norm =": lambda one: one.job.clip_norm,
        "buffers that it writes:": lambda one: sorted(b.name for b in one.job.buffers if b.updates),
    }
    for what, of in of_plan.items():
        if of(plan) != of(first):
            return differs(what, of(plan), of(first))
    names, wanted = ([p.name for p in one.job.parameters] for one in (plan, first))
    if names != wanted:
        [name, *_] = sorted({*names} ^ {*wanted}) or [n for n, w in zip(names, wanted, strict=True) if n != w]
        return f"the further plan has other parameters than the Runner's first plan, as {name!r}"
    ranks, ranks_wanted = pipeline_ranks(plan), pipeline_ranks(first)
    for mine, theirs in zip(plan.job.parameters, first.job.parameters, strict=True):
        for what, part in _PARTS.items():
            if part(mine) != part(theirs):
                return differs(f"of {mine.name!r} the {what}", part(mine), part(theirs))
        here, there = ({one.rank_of(s) for s in p.stages} for one, p in ((plan, mine), (first, theirs)))
        if here != there or ranks[mine.tied_to] != ranks_wanted[mine.tied_to]:
            return differs(f"{mine.name!r} on pipeline ranks", sorted(here), sorted(there))
    return None


@dataclass(frozen=True, slots=True)
class Shape:
    """What a batch must have to be a plan's: shapes of its leaves, and its constants."""

    leaves: tuple[tuple[str, tuple[int, ...]], ...]
    constants: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of_batch(batch: Any) -> Shape:
        """As the batch is given."""
        leaves = ((name, tuple(leaf.shape)) for name, leaf in tree.flatten(batch).items())
        return Shape(tuple(sorted(leaves)), tuple(sorted(tree.fixed(batch).items())))

    @staticmethod
    def of_job(job: Job) -> Shape:
        """Of the full batch."""
        leaves = ((name, full_shape(job, name, spec.shape)) for name, spec in job.batch)
        return Shape(tuple(sorted(leaves)), tuple(sorted(job.fixed)))

    def __str__(self) -> str:
        return ", ".join(f"{name} {list(shape)}" for name, shape in self.leaves)


def full_shape(job: Job, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a leaf of the full batch, as it is given, of one microbatch's."""
    full = shape if name in job.replicated else (shape[0] * job.pieces, *shape[1:])
    return shape_given(full, dict(job.batch_dims).get(name))


def find(known: Sequence[Shape], wanted: Shape) -> int | None:
    """Step 2: the place of a batch's plan. Where leaves alone fit, the first such one, which refuses the
    constants in words."""
    if wanted in known:
        return known.index(wanted)
    return next((at for at, one in enumerate(known) if one.leaves == wanted.leaves), None)


def agree_on_shape(transport: Transport, wanted: Shape) -> None:
    """Step 3; every rank must call it. Raises UsageError on all ranks."""
    gathered = transport.all_gather(wanted)
    for rank, other in enumerate(gathered):
        if other != gathered[0]:
            has, wants = map(str, (other, gathered[0]))
            if has == wants:
                has, wants = (f"constants {dict(one.constants)}" for one in (other, gathered[0]))
            raise UsageError(
                f"rank {rank} was given a batch of {has}, rank 0 one of {wants}: every rank must be given "
                "the full batch, the same on all, of which it reads its part"
            )


def no_plan(known: Sequence[Shape], wanted: Shape) -> UsageError:
    """The refusal of a batch that no plan is for."""
    has = "; ".join(map(str, known))
    return UsageError(
        f"no plan of this Runner is for a batch of {wanted}; it has plans for: {has}. Add one, "
        "runner.add(stretto.plan(job.with_batch(batch, like=plan), ...)), or let the Runner ask for it, "
        "Runner(plan, model, plan_for=lambda batch: stretto.plan(job.with_batch(batch, like=plan), ...))"
    )


def planned(transport: Transport, plan_for: PlanFor, batch: Any, threads: bool) -> Plan:
    """What `plan_for` gives; every rank must call it. Of ranks that are threads one plans for all."""
    if not threads:
        return _plan_of(plan_for, batch)
    mine = _plan_of(plan_for, batch) if transport.rank == 0 else None
    plan: Plan = transport.all_gather(mine)[0]
    return plan


def _plan_of(plan_for: PlanFor, batch: Any) -> Plan:
    made = plan_for(batch)
    if not isinstance(made, Plan):
        raise UsageError(f"plan_for gives a plan for the batch that it is given, not a {type(made).__name__}")
    return made
