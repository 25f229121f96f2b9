"""One engine of mutations: ways to break a plan, each with the names of which the refusal must name one.

A place is an item of a window or an instruction of a rank's order. Most mutations are an edit (drop, double,
move, replace) of a place that is drawn among those of a kind; others change an op, a communicator or the job.
Most of what they make is wrong, and now and then it is harmless: `tests.verifying.reference` decides. Where
it does not look (shapes, axes, tables of communicators), the mutation is sure: what it makes must be refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from stretto.ir.action import Phase
from stretto.ir.flow import PHASES
from stretto.ir.plan import Instruction, InstructionKind, Item, ItemKind, Plan
from stretto.ir.program import FREE, GETITEM, STARTS, WAIT, Op, Ref, Shard, Stage
from stretto.passes.flat import CAT
from stretto.passes.flat import VIEWS as SPLIT
from stretto.schedule.once import around_starts


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


def once_items(*targets: str) -> Positions:
    """Ops that run once a step, of these targets; those besides actions, where there are any."""

    def places(plan: Plan) -> list[tuple[Holder, int]]:
        found = [
            (name, at)
            for name, window in plan.windows.items()
            for at, item in enumerate(window.items)
            if item.part not in window.actions and (not targets or op_at(plan, name, item).target in targets)
        ]
        return [place for place in found if plan.windows[str(place[0])].actions] or [*found]

    return places


def once_runs(plan: Plan) -> list[tuple[Holder, int]]:
    """Runs of windows of nothing else."""
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


def once_changed(*changes: Callable[[Op, Plan, Random], Op | None]) -> Mutation:
    """Another op in the place of one that runs once a step; of those that one of the changes fits."""

    def mutation(plan: Plan, chance: Random) -> Broken | None:
        found = [
            (stage, op, new)
            for stage in plan.job.stages
            for op in stage.ops.get(Phase.REDUCE_GRAD, ())
            for change in changes
            if (new := change(op, plan, chance)) is not None and new != op
        ]
        if not found:
            return None
        stage, op, new = chance.choice(found)
        program = tuple(new if one is op else one for one in stage.ops[Phase.REDUCE_GRAD])
        stages = list(plan.job.stages)
        stages[stage.index] = Stage(stage.index, {**stage.ops, Phase.REDUCE_GRAD: program})
        path = f"job.stages[{stage.index}].ops.{Phase.REDUCE_GRAD}[{program.index(new)}]"
        names = (op.name, path, *op.uses, *new.uses, *op.writes, *new.writes)
        leads, tails = around_starts(stage.ops[Phase.REDUCE_GRAD])
        for start, lead in leads.items():
            if op in (*lead, *tails[start]):
                names += tuple(name for one in lead for name in one.uses)
        return Broken(replace(plan, job=replace(plan.job, stages=tuple(stages))), names)

    return mutation


def another_gradient(plan: Plan, chance: Random, name: str) -> str:
    """The name of one of a like parameter, so that shapes fit; of any, where there is none."""
    known = {f"grad/{p.name}": p.spec for p in plan.job.parameters}
    others = [other for other in known if other != name]
    return chance.choice([o for o in others if known[o] == known[name]] or others or [name])


def reads_another(op: Op, plan: Plan, chance: Random) -> Op | None:
    found = [name for name in op.uses if name.startswith("grad/")]
    if not found:
        return None
    old = chance.choice(found)
    new = another_gradient(plan, chance, old)

    def changed(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return tuple(map(changed, arg))
        return Ref(new) if arg == Ref(old) else arg

    return replace(op, args=changed(op.args), alias=new if op.alias == old else op.alias)


def writes_another(op: Op, plan: Plan, chance: Random) -> Op | None:
    if not op.writes or not op.writes[0].startswith("grad/"):
        return None
    return replace(op, writes=chance.choice([(another_gradient(plan, chance, op.writes[0]),), ()]))


def other_lane(op: Op, plan: Plan, chance: Random) -> Op | None:
    """A communicator of another axis, of as many ranks where there is one."""
    if op.kind is None or op.lane == "loss":
        return None
    sizes = {c.name: math.prod([len(c.ranks), *map(plan.mesh.size, c.axes[1:])]) for c in plan.communicators}
    others = [name for name in sizes if name != op.lane]
    alike = [name for name in others if sizes[name] == op.args[-1]]
    name = chance.choice(alike or others or ["none"])
    return replace(op, args=(*op.args[:-2], name, sizes.get(name, op.args[-1])))


def other_size(op: Op, plan: Plan, chance: Random) -> Op | None:
    return None if op.kind is None else replace(op, args=(*op.args[:-1], op.args[-1] + 1))


def no_sum(op: Op, plan: Plan, chance: Random) -> Op | None:
    return None if op.kind is None else replace(op, args=(op.args[0], "max", *op.args[2:]))


def other_sizes(op: Op, plan: Plan, chance: Random) -> Op | None:
    """A bucket that is cut elsewhere."""
    if op.target != SPLIT or len(op.args[1]) < 2:
        return None
    first, second, *rest = op.args[1]
    sizes = (first + 1, second - 1, *rest)
    outputs = [replace(spec, shape=(1, size)) for spec, size in zip(op.outputs, sizes, strict=True) if spec]
    return replace(op, args=(op.args[0], sizes, 1), outputs=tuple(outputs))


def other_part(op: Op, plan: Plan, chance: Random) -> Op | None:
    """Another part of a bucket, or one less in it."""
    if op.target == GETITEM:
        return replace(op, args=(op.args[0], op.args[1] + chance.choice([-1, 1])))
    return replace(op, args=(op.args[0][1:], *op.args[1:])) if op.target == CAT else None


def another_window(plan: Plan, chance: Random) -> Broken | None:
    """An op that runs once a step moves to another window of its rank."""
    found = []
    for rank in range(plan.ranks):
        names = list(dict.fromkeys(str(i.ref) for i in plan.orders[rank] if i.kind is InstructionKind.RUN))
        owners = [name for name in names if len(plan.windows[name].actions) < len(plan.windows[name].parts)]
        found += [
            (name, at, other)
            for name in owners
            for at, item in enumerate(plan.windows[name].items)
            if item.part not in plan.windows[name].actions
            for other in owners
            if other != name
        ]
    if not found:
        return None
    name, at, other = chance.choice(found)
    source, target = plan.windows[name], plan.windows[other]
    moved = source.items[at]
    part = next(k for k in range(len(target.parts)) if k not in target.actions)
    items = list(target.items)
    items.insert(chance.randint(0, len(items)), replace(moved, part=part))
    windows = {
        **plan.windows,
        name: replace(source, items=(*source.items[:at], *source.items[at + 1 :])),
        other: replace(target, items=tuple(items)),
    }
    return Broken(replace(plan, windows=windows), (str(moved.ref), f"window {name}", f"window {other}"))


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
    "op once a step dropped": dropped(once_items()),
    "start or wait once a step dropped": dropped(once_items(*STARTS, WAIT)),
    "run once a step dropped": dropped(once_runs),
    "receive or departure doubled": doubled(instructions(InstructionKind.RECV, InstructionKind.SENT)),
    "run doubled": doubled(RUNS),
    "start doubled": doubled(items(ItemKind.OP, targets=STARTS)),
    "item doubled": doubled(ALL_ITEMS),
    "op once a step doubled": doubled(once_items()),
    "run once a step doubled": doubled(once_runs),
    "freed before it is sent": earlier(DEPARTURES),
    "item before what it needs": earlier(ALL_ITEMS),
    "wait before its start": earlier(items(ItemKind.OP, targets=(WAIT,))),
    "op before the last addition": earlier(once_items()),
    "run before the last addition": earlier(once_runs),
    "wait for a sum before its start": earlier(once_items(WAIT)),
    "freed before the last read": earlier(once_items(FREE)),
    "op once a step in another window": another_window,
    "wait for a message after its read": later(items(ItemKind.WAIT)),
    "receive after its run": later(RECEIVES),
    "receives exchanged": behind(RECEIVES, lane),
    "sends exchanged": behind(items(ItemKind.SEND), lane),
    "runs exchanged": behind(RUNS, lambda plan, run: None),
    "ops once a step exchanged": behind(once_items(), lambda plan, item: None),
    "runs once a step exchanged": behind(once_runs, lambda plan, run: None),
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
    "another gradient read": once_changed(reads_another),
    "another gradient written": once_changed(writes_another),
    "sum over another axis": once_changed(other_lane),
    "no sum, or of other ranks": once_changed(other_size, no_sum),
    "bucket of other sizes": once_changed(other_sizes, other_part),
    "job changed": job_changed,
}
"""Every way; the test takes each on every plan."""
