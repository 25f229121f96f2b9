"""Machines that others feed: hand cases, the hull by pairs of points, and no schedule beats the bound."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stretto.bounds.fed import Feeder, most_done
from stretto.bounds.machine import Held, Work, one_machine
from stretto.bounds.step import lower_bound
from tests.synthetic_comm import make_comm_costs, make_comm_job


def most(
    a_us: float, heads: list[float], each: list[float], needs: list[float], stages: list[int], m: int
) -> float:
    """`most_done` before one moment, of jobs with these heads; the feeder works from 0 on."""
    at = np.array([0 if head >= a_us else -1 for head in heads])
    room = np.array([a_us])
    found = most_done(room, at, np.array(each), np.array(needs), np.array(stages), room, m)
    return float(found[0])


def test_a_machine_does_what_its_feeder_lets_it() -> None:
    # 10 us of the feeder are 2.5 microbatches of 4 us, of the 4 that there are; and none of the late job.
    assert most(10, [4, 10], [1, 5], [4, 8], [0, 0], 4) == pytest.approx(2.5)
    # What needs nothing of the feeder is done.
    assert most(10, [0, 4], [3, 1], [0, 4], [0, 0], 4) == pytest.approx(4 * 3 + 2.5)
    # With room for all, all is done.
    assert most(16, [4, 10], [1, 5], [4, 4], [0, 0], 4) == pytest.approx(4 * 6)


def test_of_two_stages_the_one_that_gets_more_for_its_feed_comes_first() -> None:
    # 2 us of work for 2 of the feeder, four times; then 4 of 6 us are left for 1 us of work each.
    assert most(14, [2, 6], [2, 1], [2, 6], [0, 1], 4) == pytest.approx(4 * 2 + 1)


times = st.integers(0, 8)


@given(st.lists(st.tuples(times, times), min_size=1, max_size=6), st.integers(1, 3), st.integers(0, 30))
def test_the_most_is_the_hull_of_what_each_choice_of_needs_allows(
    jobs: list[tuple[int, int]], m: int, room: int
) -> None:
    each, needs = [float(p) for p, _ in jobs], [float(x) for _, x in jobs]
    stairs = {x: sum(p for p, other in zip(each, needs, strict=True) if other <= x) for x in {0.0, *needs}}
    share = min(room / m, max(stairs))
    hull = max(
        (stairs[x] if x == y else stairs[x] + (stairs[y] - stairs[x]) * (share - x) / (y - x))
        for x, y in product(stairs, stairs)
        if x <= share <= y
    )
    found = most(room, [-1] * len(jobs), each, needs, [0] * len(jobs), m)
    assert found == pytest.approx(m * hull)


def fed_work(*, backward: bool) -> Work:
    """A job of 1 us that needs 4 us of the feeder, and one of 5 us that cannot start before 10 us; or the
    same seen from the end of the step."""
    feeder = Feeder("the feeder", 5 if backward else 0, 0 if backward else 5)
    work = Work((feeder,))
    for head_us, tail_us, each_us, needs_us in ((4, 5, 1, (4,)), (10, 0, 5, (4,))):
        if backward:
            work.add(tail_us, head_us, each_us, feeds_us=needs_us)
        else:
            work.add(head_us, tail_us, each_us, needs_us=needs_us)
    return work


def test_a_fed_machine_is_bounded_by_hand() -> None:
    machine = one_machine(fed_work(backward=False), 4)
    assert machine is not None
    # Of 4 x 6 us, 2.5 us can be done before 10 us: the feeder has 2.5 times 4 us for the first job.
    assert machine.us == pytest.approx(10 + 4 * 6 - 2.5)
    assert (machine.head_us, machine.each_us, machine.tail_us) == (10, 6, 0)
    assert machine.at_first == Held("the feeder", 2.5)
    assert machine.at_last is None


def test_a_machine_that_feeds_is_bounded_at_the_end() -> None:
    machine = one_machine(fed_work(backward=True), 4)
    assert machine is not None
    assert machine.us == pytest.approx(4 * 6 - 2.5 + 10)
    assert machine.at_last == Held("the feeder", 2.5)
    assert machine.at_first is None


def test_work_of_once_a_step_is_not_fed() -> None:
    work = fed_work(backward=False)
    work.add(6, 0, once_us=2)
    machine = one_machine(work, 4)
    assert machine is not None
    # The 2 us may lie before 10 us, beside what the feeder lets be done there.
    assert machine.us == pytest.approx(10 + 4 * 6 - 2.5)
    assert (machine.once_us, machine.at_first) == (2, Held("the feeder", 4.5))


def test_a_first_stage_is_starved_by_its_collectives_until_its_first_backward() -> None:
    job = make_comm_job(2, 8)
    costs = make_comm_costs(job, op_us=100, collective_us=1000)
    costs = replace(costs, op_us={**costs.op_us, (0, "dw0.0"): 3000.0})
    bound = lower_bound(job, (0, 1), costs)
    # The first backward op comes after 300 + 1000 us here and 800 + 2000 us on rank 1. The lane works from
    # 100 us on: 4 of 8 forwards. Before their collectives are 8 x 100 us of compute, after 4 of them 200 us.
    done_us = 8 * 100 + 4 * 200
    assert bound.us == pytest.approx(4100 + 8 * 3800 - done_us)
    assert bound.binds == (
        "place 0's compute (8 x 3.8 ms), which tp collectives hold up until 4.1 ms:"
        " at most 1.6 ms of that is done by then"
    )


def test_a_lane_is_starved_by_compute() -> None:
    job = make_comm_job(2, 8)
    costs = make_comm_costs(job, op_us=0, collective_us=1000)
    costs = replace(costs, op_us={**costs.op_us, (0, "fm0.0"): 1900.0})
    bound = lower_bound(job, (0, 1), costs)
    # The first backward collective may start after 1900 + 1000 + 2000 us. By then compute has made ready
    # 4900 / 1900 of the forward collectives. The norm's sum comes once.
    once_us = 1000 * 2048 / (256 * 512 * 4)
    starved_us = 4900 + 8 * 2000 + once_us - 1000 * 4900 / 1900
    assert bound.parts["rank 0 tp"] > starved_us
    # The lane of the next place has two for each microbatch: the last may begin here after eight of them.
    assert bound.parts["rank 0 tp"] == pytest.approx(1900 + 1000 + 8 * 2000 + 1000)


# --- the property --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One of two machines (0, 1) does something for every microbatch, `gap` after what it reads."""

    machine: int
    us: int
    gap: int
    reads: tuple[int, ...]
    stage: int


@st.composite
def graphs(draw: st.DrawFn) -> list[Step]:
    """Any few steps."""
    gaps = st.sampled_from([0, 0, 0, 3, 20])
    return [
        Step(
            draw(st.integers(0, 1)),
            draw(st.integers(0, 6)),
            draw(gaps),
            tuple(sorted(draw(st.sets(st.integers(0, at - 1), max_size=2)))) if at else (),
            draw(st.integers(0, 1)),
        )
        for at in range(draw(st.integers(2, 7)))
    ]


@st.composite
def starved(draw: st.DrawFn) -> list[Step]:
    """Small steps of the machines in turns, and after a long gap a large one; or the same from the end."""
    us = [draw(st.integers(1, 6)) for _ in range(draw(st.integers(2, 5)))]
    first, gap, large = draw(st.integers(0, 1)), draw(st.integers(5, 30)), draw(st.integers(5, 15))
    turns = [(first + at) % 2 for at in range(len(us))]
    if draw(st.booleans()):
        steps = [Step(turns[at], us[at], 0, (at - 1,) if at else (), 0) for at in range(len(us))]
        return [*steps, Step(draw(st.integers(0, 1)), large, gap, (len(us) - 1,), 0)]
    rest = [Step(turns[at], us[at], 0 if at else gap, (at,), 0) for at in range(len(us))]
    return [Step(draw(st.integers(0, 1)), large, 0, (), 0), *rest]


def needed(steps: list[Step]) -> list[set[int]]:
    """By step, all that it needs, without itself."""
    found: list[set[int]] = []
    for step in steps:
        found.append(set(step.reads).union(*(found[read] for read in step.reads)))
    return found


def heads_and_tails(steps: list[Step]) -> tuple[list[int], list[int]]:
    heads: list[int] = []
    for step in steps:
        heads.append(step.gap + max((heads[r] + steps[r].us for r in step.reads), default=0))
    tails = [0] * len(steps)
    for at in reversed(range(len(steps))):
        for read in steps[at].reads:
            tails[read] = max(tails[read], tails[at] + steps[at].us + steps[at].gap)
    return heads, tails


def work_of(steps: list[Step], machine: int) -> Work:
    """The work of one machine, which the other feeds."""
    heads, tails = heads_and_tails(steps)
    needs = needed(steps)
    other = [at for at, step in enumerate(steps) if step.machine != machine]
    feeder = Feeder("the other", min(heads[at] for at in other), min(tails[at] for at in other))
    work = Work((feeder,))
    for at, step in enumerate(steps):
        if step.machine == machine:
            same = [o for o in other if steps[o].stage == step.stage]
            before = sum(steps[o].us for o in same if o in needs[at])
            after = sum(steps[o].us for o in same if at in needs[o])
            work.add(heads[at], tails[at], step.us, stage=step.stage, needs_us=(before,), feeds_us=(after,))
    return work


def makespan(steps: list[Step], m: int, ranks: list[int]) -> int:
    """How long the two machines take when of what may start first, the lowest of `ranks` does."""
    ended: dict[tuple[int, int], int] = {}
    free = [0, 0]
    left = {(i, at) for i in range(m) for at in range(len(steps))}
    while left:
        ready = []
        for i, at in left:
            step = steps[at]
            if all((i, read) in ended for read in step.reads):
                start = step.gap + max((ended[i, read] for read in step.reads), default=0)
                ready.append((max(start, free[step.machine]), ranks[i * len(steps) + at], i, at))
        start, _, i, at = min(ready)
        ended[i, at] = free[steps[at].machine] = start + steps[at].us
        left.remove((i, at))
    return max(ended.values())


def shortest(steps: list[Step], m: int, tries: int) -> int:
    """The best of a few priorities: of steps, microbatch by microbatch or step by step."""
    draw, found = random.Random(0), []
    for _ in range(tries):
        of = draw.sample(range(len(steps)), len(steps))
        found.append(makespan(steps, m, [i * len(steps) + p for i in range(m) for p in of]))
        found.append(makespan(steps, m, [p * m + i for i in range(m) for p in of]))
    return min(found)


@settings(max_examples=200, deadline=None)
@given(graphs() | starved(), st.integers(1, 6))
def test_no_schedule_of_two_machines_beats_the_bound(steps: list[Step], m: int) -> None:
    assume({step.machine for step in steps} == {0, 1})
    reached = shortest(steps, m, tries=4)
    for machine in (0, 1):
        found = one_machine(work_of(steps, machine), m)
        assert found is not None
        assert found.us <= reached * (1 + 1e-9)
