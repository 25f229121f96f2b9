"""Updates come once, behind their gradients and all that reads what they change, or a plan is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import stretto
from stretto.config import Parallel
from stretto.ir.action import AFTER, BEFORE, ONCE, Phase
from stretto.ir.plan import NORM, Item, ItemKind, Plan, shares_of
from stretto.ir.program import FREE, WAIT, Op, Ref, Stage
from stretto.ir.updates import SQUARES, UPDATE, update_op, updated
from stretto.passes import flat
from stretto.schedule import norm as norm_maker
from stretto.schedule import updates as updates_maker
from stretto.verifying import plan_faults
from tests.clusters import cores
from tests.parallelize.equality import batch_of
from tests.parallelize.test_key_heads import hf
from tests.parallelize.zero import ZeroCell
from tests.runtime.equality import huggingface_loss


@cache
def plan(zero: int, clipped: bool = False) -> Plan:
    """With zero 1 rows are updated, of which copies are made; with zero 0 what ops read is."""
    return ZeroCell(zero, pp=2, tied=True, updates=True, clipped=clipped).plan()  # type: ignore[arg-type]


def faults(given: Plan) -> str:
    return "\n".join(map(str, plan_faults(given)))


def updates(given: Plan) -> list[Op]:
    """Of the first rank."""
    return [op for op in given.once(0) if op.target == UPDATE]


def moved(given: Plan, name: str, window: str, at: int, phase: Phase = AFTER) -> Plan:
    """A plan in which an op that runs once a step is elsewhere on the first rank."""
    own = [given.windows[str(i.ref)] for i in given.orders[0] if str(i.ref) in given.windows]
    [(source, item)] = [
        (w.name, item)
        for w in {w.name: w for w in own}.values()
        for item in w.items
        if item.ref == name and item.kind is ItemKind.OP and w.parts[item.part][1] is phase
    ]
    windows, orders = dict(given.windows), [list(order) for order in given.orders]
    windows[source] = replace(windows[source], items=tuple(i for i in windows[source].items if i != item))
    into = windows[window]
    if (0, phase) not in into.parts:
        into = replace(into, parts=(*into.parts, (0, phase)))
        for k, run in enumerate(orders[0]):
            if run.ref == window:
                orders[0][k] = replace(run, microbatches=(*run.microbatches, ONCE))
                bound = zip((stage for stage, _ in into.parts), orders[0][k].microbatches, strict=True)
                into = replace(into, shares=shares_of(bound))
    items = list(into.items)
    items.insert(at, Item(ItemKind.OP, into.parts.index((0, phase)), name))
    windows[window] = replace(into, items=tuple(items))
    return replace(given, windows=windows, orders=tuple(map(tuple, orders)))


def last_window(given: Plan) -> str:
    """The one of the first rank's actions in which reductions start."""
    runs = (given.windows[str(i.ref)] for i in given.orders[0] if str(i.ref) in given.windows)
    return next(w.name for w in runs if w.actions and AFTER in {phase for _, phase in w.parts})


def with_program(given: Plan, change: Callable[[Sequence[Op]], Sequence[Op]]) -> Plan:
    """A plan of which the first rank reduces by another program, in that order, at the end."""
    first = given.job.stages[0]
    ops = tuple(change(first.ops[AFTER]))
    job = replace(given.job, stages=(Stage(0, {**first.ops, AFTER: ops}), *given.job.stages[1:]))
    end = str(given.orders[0][-1].ref)
    others = (given.windows[str(i.ref)] for i in given.orders[0][:-1] if str(i.ref) in given.windows)
    elsewhere = {item.ref for w in others for item in w.items if item.part not in w.actions}
    items = tuple(Item(ItemKind.OP, 0, op.name) for op in ops if op.name not in elsewhere)
    there = {(stage.index, op.name) for stage in job.stages for op in stage.all_ops}
    costs = replace(given.costs, op_us={key: us for key, us in given.costs.op_us.items() if key in there})
    windows = {**given.windows, end: replace(given.windows[end], items=items)}
    return replace(given, job=job, costs=costs, windows=windows)


@pytest.mark.parametrize("zero", [0, 1])
def test_the_plan_is_sound(zero: int) -> None:
    given = plan(zero)
    assert plan_faults(given) == []
    assert plan_faults(with_program(given, lambda ops: ops)) == []
    names = [name for op in updates(given) for _, names in updated(op) for name in names]
    assert len(names) == len(set(names)) > 5


@pytest.mark.parametrize("zero", [0, 1])
def test_an_update_before_its_gradients_last_addition_is_refused(zero: int) -> None:
    given = plan(zero)
    said = faults(moved(given, updates(given)[-1].name, last_window(given), 0))
    assert "reads grad/" in said
    assert "has added its part of" in said


@pytest.mark.parametrize("zero", [0, 1])
def test_an_update_before_its_reductions_wait_is_refused(zero: int) -> None:
    given = plan(zero)
    end = str(given.orders[0][-1].ref)
    said = faults(moved(given, updates(given)[-1].name, end, 0))
    assert "reads grad/" in said
    assert "has written it. Move it after" in said


def test_a_parameter_that_is_read_after_its_update_is_refused() -> None:
    """By a view of it as well, which the forward has left."""
    given = plan(0)
    window = last_window(given)
    said = faults(moved(given, updates(given)[-1].name, window, 0))
    assert "reads param/" in said
    assert f"after {updates(given)[-1].name} has changed it" in said


def gathered_early(given: Plan) -> tuple[Op, str, int]:
    """An op of the first rank that reads rows to gather them, a start if there is one, its window, and where
    it is there."""
    reading = [op for op in given.once(0, BEFORE) if any(name.startswith("shard/") for name in op.uses)]
    op = max(reading, key=lambda op: op.kind is not None)
    return next(
        (op, w.name, at) for w in given.windows.values() for at, i in enumerate(w.items) if i.ref == op.name
    )


def test_rows_that_are_gathered_after_their_update_are_refused() -> None:
    given = plan(1)
    end = str(given.orders[0][-1].ref)
    op, _, _ = gathered_early(given)
    said = faults(moved(given, op.name, end, len(given.windows[end].items), BEFORE))
    assert "reads shard/" in said
    assert "has changed it. Move it before that" in said


def test_rows_that_are_updated_while_they_are_gathered_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "LARGE_BYTES", 1)  # each travels by itself, from where it is
    given = ZeroCell(1, pp=2, tied=True, updates=True).plan()
    start, window, at = gathered_early(given)
    assert start.kind is not None
    update = next(op for op in updates(given) if start.uses[0] in op.writes)
    said = faults(moved(given, update.name, window, at + 1))
    assert f"while {start.name} is under way in its memory" in said


def test_rows_that_an_action_gathers_after_their_update_are_refused() -> None:
    """With zero 3 the last backward gathers by itself."""
    given = ZeroCell(3, updates=True).plan()
    runs = [i for i in given.orders[0] if str(i.ref) in given.windows]
    backward = next(i for i in reversed(runs) if given.windows[str(i.ref)].actions)
    others = [i for i in given.orders[0] if i is not backward]
    said = faults(replace(given, orders=((*others, backward), *given.orders[1:])))
    assert "reads shard/" in said
    assert "has changed it. Move it before that" in said


@pytest.mark.parametrize("zero", [0, 1])
def test_an_update_that_never_runs_is_refused(zero: int) -> None:
    given = plan(zero)
    name = updates(given)[-1].name
    windows = {
        w.name: replace(w, items=tuple(item for item in w.items if item.ref != name))
        for w in given.windows.values()
    }
    assert f"{name}: never runs" in faults(replace(given, windows=windows))
    left = with_program(replace(given, windows=windows), lambda ops: [op for op in ops if op.name != name])
    said = faults(left)
    assert "at the end, instead of" in said
    assert "Update each parameter once, by its own gradient" in said


@pytest.mark.parametrize("zero", [0, 1])
def test_an_update_that_runs_twice_is_refused(zero: int) -> None:
    given = plan(zero)
    op = updates(given)[-1]
    [end] = [w for w in given.windows.values() if any(item.ref == op.name for item in w.items)]
    at = next(k for k, item in enumerate(end.items) if item.ref == op.name)
    items = (*end.items[: at + 1], *end.items[at:])
    doubled = replace(given, windows={**given.windows, end.name: replace(end, items=items)})
    assert "is there a second time" in faults(doubled)

    def again(ops: Sequence[Op]) -> list[Op]:
        return [one for o in ops for one in ([o, replace(o, name="again")] if o is op else [o])]

    assert "Update each parameter once, by its own gradient" in faults(with_program(given, again))


@pytest.mark.parametrize("zero", [0, 1])
def test_an_update_by_what_is_not_reduced_is_refused(zero: int) -> None:
    """In the program itself."""
    given = plan(zero)
    op = updates(given)[-1]

    def before(ops: Sequence[Op]) -> list[Op]:
        others = [o for o in ops if o is not op and not (o.target == FREE and set(o.writes) & set(op.uses))]
        frees = [o for o in ops if o.target == FREE and set(o.writes) & set(op.uses)]
        wait = next(k for k, o in enumerate(others) if o.target == WAIT)
        return [*others[:wait], op, *others[wait:], *frees]

    said = faults(with_program(given, before))
    # With rows, a full gradient has another shape as well.
    expected = "of which every rank has only a partial sum" if zero == 0 else "by grad/"
    assert expected in said


def test_an_update_by_anothers_gradient_is_refused() -> None:
    given = plan(1)
    op = updates(given)[-1]
    pairs = [*updated(op)]
    specs = {p.name: p.spec for p in given.job.parameters}
    one, other = next(
        (a, b)
        for a in range(len(pairs))
        for b in range(a)
        if specs[pairs[a][0].removeprefix("grad/")] == specs[pairs[b][0].removeprefix("grad/")]
    )
    pairs[one], pairs[other] = (pairs[other][0], pairs[one][1]), (pairs[one][0], pairs[other][1])
    exchanged = update_op(op.name, pairs, op.args[2])
    said = faults(with_program(given, lambda ops: [exchanged if o is op else o for o in ops]))
    assert "Update each parameter once, by its own gradient" in said


@pytest.mark.parametrize(
    "changed",
    [
        lambda op: replace(op, writes=op.writes[1:]),
        lambda op: replace(op, args=op.args[:2]),
        lambda op: replace(op, args=((Ref("grad/none"), *op.args[0][1:]), *op.args[1:])),
        lambda op: replace(op, args=(op.args[0], (), op.args[2])),
        lambda op: replace(op, args=(op.args[0], op.args[0], op.args[2])),
        lambda op: replace(op, target="aten.add.Tensor"),
    ],
)
def test_what_cannot_be_read_is_refused(changed: Callable[[Op], Op]) -> None:
    given = plan(1)
    op = updates(given)[-1]
    said = faults(with_program(given, lambda ops: [changed(o) if o is op else o for o in ops]))
    assert f"{op.name}: " in said


# The norm.


def squares(ops: Sequence[Op]) -> Op:
    return next(op for op in ops if op.target == SQUARES and len(op.uses) > 1)


def with_squares(change: Callable[[Op], Op]) -> Callable[[Sequence[Op]], Sequence[Op]]:
    def changed(ops: Sequence[Op]) -> Sequence[Op]:
        one = squares(ops)
        return [change(op) if op is one else op for op in ops]

    return changed


def without_reduction(lane: str) -> Callable[[Sequence[Op]], Sequence[Op]]:
    """What is reduced is taken as it is."""

    def changed(ops: Sequence[Op]) -> Sequence[Op]:
        start = next(op for op in ops if op.kind is not None and op.lane == lane and ".norm" in f".{op.name}")
        given = start.uses[0]
        kept = [op for op in ops if op is not start and not (op.target == WAIT and start.name in op.uses)]
        result = []
        for op in kept:
            args = tuple(Ref(given) if arg == Ref(f"{start.name}.sum") else arg for arg in op.args)
            result.append(replace(op, args=args))
        return result

    return changed


def another_limit(op: Op) -> Op:
    return replace(op, args=(*op.args[:4], 2 * op.args[4])) if op.target == UPDATE else op


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_squares(lambda op: replace(op, args=(op.args[0][1:], 1))), "Count each gradient once"),
        (with_squares(lambda op: replace(op, args=((*op.args[0], op.args[0][0]), 1))), "Count each gradient"),
        (with_squares(lambda op: replace(op, args=(op.args[0], 2))), "as if 2 ranks had the same, and 1 do"),
        (without_reduction("dp"), "every rank has only a partial sum (along dp)"),
        (without_reduction(NORM), "every rank has only a partial sum (along pipeline ranks)"),
        (lambda ops: [another_limit(op) for op in ops], "does not scale as clip_norm = 0.3 asks"),
        (
            lambda ops: [replace(op, args=op.args[:3]) if op.target == UPDATE else op for op in ops],
            "does not scale as clip_norm = 0.3 asks",
        ),
    ],
)
def test_another_norm_is_refused(change: Callable[[Sequence[Op]], Sequence[Op]], said: str) -> None:
    given = plan(1, clipped=True)
    assert plan_faults(with_program(given, lambda ops: ops)) == []
    assert said in faults(with_program(given, change))


def test_a_norm_of_gradients_that_are_not_reduced_is_refused() -> None:
    given = plan(1, clipped=True)
    name = squares(given.once(0)).name
    said = faults(moved(given, name, last_window(given), 0))
    assert "reads grad/" in said


# What planning gets wrong wherever it asks: the proof asks others.


def test_the_proof_asks_nothing_of_those_who_make_updates() -> None:
    texts = {path.name: path.read_text() for path in Path(stretto.__file__).parent.glob("verifying/*.py")}
    makers = ("stretto.schedule.updates", "stretto.schedule.norm")
    assert [name for name, text in texts.items() if any(f"from {maker} " in text for maker in makers)] == []
    assert "reduced.py" in texts


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (lambda p, rank, tied: True, "is counted 2 times, on ranks 0, 1"),
        (lambda p, rank, tied: p.tied_to not in tied, "is counted 0 times, on no rank"),
        (lambda p, rank, tied: max(tied.get(p.tied_to, (rank,))) == rank, ""),  # another rank is as right
    ],
)
def test_copies_that_count_otherwise(monkeypatch: pytest.MonkeyPatch, counts: Any, said: str) -> None:
    monkeypatch.setattr(updates_maker, "counts", counts)
    given = ZeroCell(1, pp=2, tied=True, updates=True, clipped=True).plan
    if not said:
        assert plan_faults(given()) == []
        return
    with pytest.raises(stretto.PlanError, match=said):
        given()


@pytest.mark.parametrize("zero", [0, 1])
def test_a_name_of_a_tie_that_updates_forget(monkeypatch: pytest.MonkeyPatch, zero: int) -> None:
    """Both ends of a model are on one rank, so ops read one tensor by two names."""
    made = updates_maker.changed_by
    monkeypatch.setattr(updates_maker, "changed_by", lambda *given: made(*given)[:1])
    plan = ZeroCell(zero, tied=True, updates=True).plan  # type: ignore[arg-type]
    if zero:
        assert plan_faults(plan()) == []  # rows have one name
        return
    with pytest.raises(stretto.PlanError, match=r"param/.* at the end, instead of param/.*, grad/"):
        plan()


@pytest.mark.filterwarnings("ignore:.*is not sharded over tp:UserWarning")
@pytest.mark.filterwarnings("ignore:the tensor-parallel plan of:UserWarning")
def test_parts_that_ranks_share_and_that_count_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    made = norm_maker.parts_over
    monkeypatch.setattr(norm_maker, "parts_over", lambda *given: (made(*given)[0], 1))
    parallel = Parallel(tp=4, microbatches=2, updates=True, clip_norm=0.1)
    job = stretto.capture(hf("LlamaForCausalLM", 2), batch_of(), huggingface_loss, parallel)
    with pytest.raises(stretto.PlanError, match="as if 1 ranks had the same, and 2 do"):
        stretto.plan(job, cores(), order="list")


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_an_axis_over_which_squares_are_not_added_up(monkeypatch: pytest.MonkeyPatch, axis: str) -> None:
    made = norm_maker.parts_over

    def short(*given: Any) -> tuple[tuple[str, ...], int]:
        axes, copies = made(*given)
        return tuple(one for one in axes if one != axis), copies

    monkeypatch.setattr(norm_maker, "parts_over", short)
    with pytest.raises(stretto.PlanError, match=rf"only a partial sum .along {axis}"):
        ZeroCell(1, tp=2, updates=True, clipped=True).plan()
