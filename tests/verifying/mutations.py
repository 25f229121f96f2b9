"""One engine of mutations: ways to break a plan, each with the names of which the refusal must name one.

A place is an item of a window or an instruction of a rank's order. Most mutations are an edit (drop, double,
move, replace) of a place that is drawn among those of a kind; others change an op, a communicator or the job.
Most of what they make is wrong, and now and then it is harmless: `tests.verifying.reference` decides. Where
it does not look (shapes, axes, tables of communicators), the mutation is sure: what it makes must be refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from stretto.ir.flow import PHASES
from stretto.ir.plan import Instruction, InstructionKind, Item, ItemKind, Plan
from stretto.ir.program import STARTS, WAIT, Op, Ref, Shard, Stage, TensorSpec
from tests.verifying.edits import summing, with_sum


@dataclass(frozen=True)
class Broken:
    """names: of the window, instruction, op or communicator; any of them says where to look."""

    plan: Plan
    names: tuple[str, ...]
    sure: bool = False


Mutation = Callable[[Plan, Random], Broken | None]
"""None: the plan has no place for it."""

Holder = str | int
"""A window by its name, or a rank."""

Positions = Callable[[Plan], list[tuple[Holder, int]]]

# --- places ---------------------------------------------------------------------------------------------


def parts_of(plan: Plan, owner: Holder) -> Sequence[Any]:
    return plan.windows[owner].items if isinstance(owner, str) else plan.orders[owner]


def op_at(plan: Plan, window: str, item: Item) -> Op:
    stage, phase = plan.windows[window].parts[item.part]
    return next(op for sub in phase.programs for op in plan.job.stages[stage].ops[sub] if op.name == item.ref)


def items(*kinds: ItemKind, targets: Sequence[str] = ()) -> Positions:
    """Items of these kinds, of ops with these targets."""
    return lambda plan: [
        (name, at)
        for name, window in plan.windows.items()
        for at, item in enumerate(window.items)
        if item.kind in kinds and (not targets or op_at(plan, name, item).target in targets)
    ]


def instructions(*kinds: InstructionKind) -> Positions:
    return lambda plan: [
        (rank, at)
        for rank, order in enumerate(plan.orders)
        for at, instruction in enumerate(order)
        if instruction.kind in kinds
    ]


def sums(plan: Plan) -> list[tuple[Holder, int]]:
    """Starts of sums and waits for them; those besides actions, where there are any."""
    found = [
        (name, at)
        for name, window in plan.windows.items()
        for at, item in enumerate(window.items)
        if item.part not in window.actions
    ]
    return [place for place in found if plan.windows[place[0]].actions] or [*found]


def sums_alone(plan: Plan) -> list[tuple[Holder, int]]:
    """Runs of windows of sums alone."""
    return [
        (rank, at)
        for rank, order in enumerate(plan.orders)
        for at, i in enumerate(order)
        if i.kind is InstructionKind.RUN and not plan.windows[str(i.ref)].actions
    ]


OPS = items(ItemKind.OP)
ALL_ITEMS = items(*ItemKind)
RECEIVES = instructions(InstructionKind.RECV)
DEPARTURES = instructions(InstructionKind.SENT)
RUNS = instructions(InstructionKind.RUN)

# --- edits of a place -----------------------------------------------------------------------------------


def with_parts(plan: Plan, owner: Holder, parts: Sequence[Any], *names: object) -> Broken:
    found = tuple(map(str, names))
    if isinstance(owner, str):
        changed = replace(plan.windows[owner], items=tuple(parts))
        found += (f"window {owner}", f"windows.{owner}", f'windows["{owner}"]')
        return Broken(replace(plan, windows={**plan.windows, owner: changed}), found)
    orders = (*plan.orders[:owner], tuple(parts), *plan.orders[owner + 1 :])
    return Broken(replace(plan, orders=orders), (*found, f"rank {owner}"))


def edited(places: Positions, edit: Callable[[list[Any], int, Random], None]) -> Mutation:
    """Apply an edit of (parts, index) to a place."""

    def mutation(plan: Plan, chance: Random) -> Broken | None:
        found = places(plan)
        if not found:
            return None
        owner, at = chance.choice(found)
        parts = list(parts_of(plan, owner))
        name = parts[at].ref if isinstance(parts[at], Item) else parts[at]
        edit(parts, at, chance)
        return with_parts(plan, owner, parts, name)

    return mutation


def dropped(places: Positions) -> Mutation:
    return edited(places, lambda parts, at, _: parts.pop(at))


def doubled(places: Positions) -> Mutation:
    return edited(places, lambda parts, at, chance: parts.insert(chance.randint(at, len(parts)), parts[at]))


def earlier(places: Positions) -> Mutation:
    return edited(places, lambda parts, at, chance: parts.insert(chance.randint(0, at), parts.pop(at)))


def later(places: Positions) -> Mutation:
    return edited(
        places, lambda parts, at, chance: parts.insert(chance.randint(at, len(parts) - 1), parts.pop(at))
    )


def behind(places: Positions, key: Callable[[Plan, Any], object]) -> Mutation:
    """One of two places of a key is moved behind the other."""

    def mutation(plan: Plan, chance: Random) -> Broken | None:
        groups: dict[object, list[tuple[Holder, int]]] = {}
        for owner, at in places(plan):
            groups.setdefault((owner, key(plan, parts_of(plan, owner)[at])), []).append((owner, at))
        several = [group for group in groups.values() if len(group) > 1]
        if not several:
            return None
        (owner, first), (_, second) = sorted(chance.sample(chance.choice(several), 2), key=lambda p: p[1])
        parts = list(parts_of(plan, owner))
        moved, other = parts[first], parts[second]
        parts.insert(second, parts.pop(first))
        return with_parts(plan, owner, parts, moved.ref, other.ref, f"e{moved.ref}:", f"e{other.ref}:")

    return mutation


def replaced(places: Positions, change: Callable[[Plan, Any, Random], Any]) -> Mutation:
    """Another item or instruction in the place of one."""

    def mutation(plan: Plan, chance: Random) -> Broken | None:
        found = places(plan)
        if not found:
            return None
        owner, at = chance.choice(found)
        parts = list(parts_of(plan, owner))
        parts[at] = change(plan, parts[at], chance)
        return with_parts(plan, owner, parts, parts[at].ref)

    return mutation


def lane(plan: Plan, part: Item | Instruction) -> str:
    return plan.lane_of(int(part.ref))


def other_microbatch(plan: Plan, run: Instruction, chance: Random) -> Instruction:
    part = chance.randrange(len(run.microbatches))
    bound = list(run.microbatches)
    bound[part] += chance.choice([-1, 1])
    return replace(run, microbatches=tuple(bound))


def other_window(plan: Plan, run: Instruction, chance: Random) -> Instruction:
    return replace(run, ref=chance.choice([name for name in plan.windows if name != run.ref] or ["none"]))


def other_edge(plan: Plan, message: Instruction, chance: Random) -> Instruction:
    return replace(
        message, ref=chance.choice([e.index for e in plan.job.edges if e.index != message.ref] or [99])
    )


def op_of_another_stage(plan: Plan, item: Item, chance: Random) -> Item:
    names = [op.name for s in plan.job.stages for ops in s.ops.values() for op in ops if op.name != item.ref]
    return replace(item, ref=chance.choice(names))


# --- edits of ops and of what is beside the orders ------------------------------------------------------


def op_changed(
    targets: Sequence[str], change: Callable[[Op, Plan, Random], Op | None], sure: bool = True
) -> Mutation:
    """Another op in the place of one with these targets; of any op that draws, where there are none."""

    def mutation(plan: Plan, chance: Random) -> Broken | None:
        found = [
            (stage, phase, op)
            for stage in plan.job.stages
            for phase in PHASES
            for op in stage.ops[phase]
            if op.target in targets or (not targets and op.random and phase is not PHASES[0])
        ]
        if not found:
            return None
        stage, phase, op = chance.choice(found)
        new = change(op, plan, chance)
        if new is None:
            return None
        programs = {**stage.ops, phase: tuple(new if other is op else other for other in stage.ops[phase])}
        stages = tuple(Stage(s.index, programs) if s is stage else s for s in plan.job.stages)
        path = f"job.stages[{stage.index}].ops.{phase}[{programs[phase].index(new)}]"
        names = (op.name, *op.uses, path)
        return Broken(replace(plan, job=replace(plan.job, stages=stages)), names, sure)

    return mutation


def repeats_another(op: Op, plan: Plan, chance: Random) -> Op:
    return replace(op, repeats=chance.choice(["nothing", f"{op.name}_too"]))


def other_group(op: Op, plan: Plan, chance: Random) -> Op:
    """A collective over another axis or of another size."""
    *args, axis, size = op.args
    other = chance.choice([a for a in ("pp", "", 0) if a != axis])
    return replace(op, args=chance.choice([(*args, other, size), (*args, axis, size + 1), (*args, axis, -1)]))


def other_kind(op: Op, plan: Plan, chance: Random) -> Op:
    return replace(op, target=chance.choice([k for k in (*STARTS, "comm.broadcast") if k != op.target]))


def other_spec(op: Op, plan: Plan, chance: Random) -> Op:
    [spec] = op.outputs
    assert spec is not None
    changed = [replace(spec, shape=(*spec.shape, 2)), replace(spec, dtype="int8")]
    return replace(op, outputs=(chance.choice(changed),))


def reads_the_start(plan: Plan, chance: Random) -> Broken | None:
    """What reads a wait reads its start instead, which is being filled."""
    waits = {op.name: op for s in plan.job.stages for p in PHASES for op in s.ops[p] if op.target == WAIT}
    readers = [
        op
        for stage in plan.job.stages
        for phase in PHASES
        for op in stage.ops[phase]
        if any(isinstance(arg, Ref) and arg.name in waits for arg in op.args)
    ]
    if not readers:
        return None
    reader = chance.choice(readers)
    args = tuple(waits[a.name].args[0] if isinstance(a, Ref) and a.name in waits else a for a in reader.args)
    stages = tuple(
        Stage(
            s.index, {p: tuple(replace(o, args=args) if o is reader else o for o in s.ops[p]) for p in s.ops}
        )
        for s in plan.job.stages
    )
    names = (reader.name, *(use for use in reader.uses if use in waits))
    return Broken(replace(plan, job=replace(plan.job, stages=stages)), names, True)


def receive_on_another_rank(plan: Plan, chance: Random) -> Broken | None:
    found = RECEIVES(plan)
    if not found:
        return None
    rank, at = chance.choice(found)
    assert isinstance(rank, int)
    other, orders = (rank + 1) % plan.ranks, [list(order) for order in plan.orders]
    orders[other].insert(0, orders[rank].pop(at))
    moved = replace(plan, orders=tuple(map(tuple, orders)))
    return Broken(moved, (f"rank {rank}", f"rank {other}"), True)


def swap_ranks(plan: Plan, chance: Random) -> Broken | None:
    if plan.ranks < 2:
        return None
    first, second = chance.sample(range(plan.ranks), 2)
    orders = list(plan.orders)
    orders[first], orders[second] = orders[second], orders[first]
    return Broken(replace(plan, orders=tuple(orders)), (f"rank {first}", f"rank {second}"), True)


def communicator_changed(plan: Plan, chance: Random) -> Broken | None:
    """One has gone, is there twice, or has other members or axes."""
    if not plan.communicators:
        return None
    all_of = list(plan.communicators)
    at = chance.randrange(len(all_of))
    one = all_of[at]
    axes = [axes for axes in (("pp",), ("tp",), ("pp", "pp")) if axes != one.axes]
    others = [(), (one, one), (replace(one, axes=chance.choice(axes)),)]
    if len(one.ranks) > 1:
        gone = chance.choice(one.ranks)
        others += [(replace(one, ranks=tuple(rank for rank in one.ranks if rank != gone)),)]
        others += [(replace(one, ranks=one.ranks[::-1]),)]
    changed = replace(plan, communicators=(*all_of[:at], *chance.choice(others), *all_of[at + 1 :]))
    return Broken(
        changed, (f"communicator {one.name}", f"communicators[{at}]", f"communicator {one.name!r}"), True
    )


def sum_changed(plan: Plan, chance: Random) -> Broken | None:
    """A sum is on another communicator, of another size, or with a gradient less or more."""
    found = [op for rank in range(plan.ranks) for op in plan.sums(rank) if op.sums and op.lane != "loss"]
    if not found:
        return None
    op = chance.choice(found)
    [spec] = op.outputs
    assert spec is not None
    changed = [
        replace(op, outputs=(TensorSpec((spec.shape[0] + 1,), spec.dtype),)),
        replace(op, args=(*op.args[:-1], op.args[-1] + 1)),
        *(summing(plan, op, op.sums, c.name) for c in plan.communicators if c.name != op.lane),
        *(summing(plan, op, [n for n in op.sums if n != gone]) for gone in op.sums if len(op.sums) > 1),
        *(summing(plan, op, (*op.sums, p.tied_to)) for p in plan.job.parameters if p.tied_to not in op.sums),
    ]
    new = chance.choice(changed)
    groups = {*op.sums, *new.sums}
    return Broken(with_sum(plan, new), (op.name, *(f"gradient of {group}" for group in groups)), True)


def job_changed(plan: Plan, chance: Random) -> Broken | None:
    """What the job says of microbatches, axes, stages, edges and shards is not what the plan is for."""
    job, chosen = plan.job, []
    chosen.append(
        (plan, replace(job, microbatches=job.microbatches + chance.choice([-1, 1, 5])), "microbatches")
    )
    for at, (axis, size) in enumerate(job.axes):
        axes = (*job.axes[:at], (axis, size * 2), *job.axes[at + 1 :])
        chosen.append((plan, replace(job, axes=axes), ""))
    if plan.ranks > 1:
        ranks = list(plan.schedule.stage_ranks)
        ranks[0] = (ranks[0] + 1) % plan.ranks
        schedule = replace(plan.schedule, stage_ranks=tuple(ranks))
        chosen.append((replace(plan, schedule=schedule), job, "0"))
    for at, edge in enumerate(job.edges):
        other = replace(edge, target=(edge.target + 1) % (len(job.stages) + 1))
        chosen.append(
            (plan, replace(job, edges=(*job.edges[:at], other, *job.edges[at + 1 :])), f"edges[{at}]")
        )
    for at, one in enumerate(job.parameters):
        shard = chance.choice([Shard("ep", 9), Shard("tp", -1), Shard("tp", 0, 0), Shard("tp", 0, 7)])
        others = (*job.parameters[:at], replace(one, shards=(shard,)), *job.parameters[at + 1 :])
        chosen.append((plan, replace(job, parameters=others), one.name))
    base, changed, name = chance.choice(chosen)
    return Broken(replace(base, job=changed), (name,), True)


MUTATIONS: dict[str, Mutation] = {
    "send dropped": dropped(items(ItemKind.SEND)),
    "wait for a message dropped": dropped(items(ItemKind.WAIT)),
    "receive dropped": dropped(RECEIVES),
    "departure dropped": dropped(DEPARTURES),
    "run dropped": dropped(RUNS),
    "wait dropped": dropped(items(ItemKind.OP, targets=(WAIT,))),
    "op dropped": dropped(OPS),
    "sum dropped": dropped(sums),
    "run of sums dropped": dropped(sums_alone),
    "receive or departure doubled": doubled(instructions(InstructionKind.RECV, InstructionKind.SENT)),
    "run doubled": doubled(RUNS),
    "start doubled": doubled(items(ItemKind.OP, targets=STARTS)),
    "item doubled": doubled(ALL_ITEMS),
    "sum doubled": doubled(sums),
    "run of sums doubled": doubled(sums_alone),
    "freed before it is sent": earlier(DEPARTURES),
    "item before what it needs": earlier(ALL_ITEMS),
    "wait before its start": earlier(items(ItemKind.OP, targets=(WAIT,))),
    "sum before its last partial_sum": earlier(sums),
    "run of sums before its last partial_sum": earlier(sums_alone),
    "wait for a message after its read": later(items(ItemKind.WAIT)),
    "receive after its run": later(RECEIVES),
    "receives exchanged": behind(RECEIVES, lane),
    "sends exchanged": behind(items(ItemKind.SEND), lane),
    "runs exchanged": behind(RUNS, lambda plan, run: None),
    "sums exchanged": behind(sums, lambda plan, item: None),
    "runs of sums exchanged": behind(sums_alone, lambda plan, run: None),
    "other microbatch": replaced(RUNS, other_microbatch),
    "other window": replaced(RUNS, other_window),
    "other edge": replaced(instructions(InstructionKind.RECV, InstructionKind.SENT), other_edge),
    "op of another stage": replaced(OPS, op_of_another_stage),
    "item of another part": replaced(ALL_ITEMS, lambda plan, item, _: replace(item, part=item.part + 1)),
    "repeats nothing": op_changed((), repeats_another),
    "wait is no wait": op_changed((WAIT,), lambda op, *_: replace(op, target="aten.alias.default")),
    "wait for something else": op_changed(
        (WAIT,), lambda op, *_: replace(op, args=(Ref("batch/x"),), alias=None)
    ),
    "other group": op_changed(STARTS, other_group),
    "other kind": op_changed(STARTS, other_kind),
    "other spec": op_changed(STARTS, other_spec),
    "start read": reads_the_start,
    "receive on another rank": receive_on_another_rank,
    "ranks exchanged": swap_ranks,
    "communicator changed": communicator_changed,
    "sum changed": sum_changed,
    "job changed": job_changed,
}
"""Every way; the test takes each on every plan."""
