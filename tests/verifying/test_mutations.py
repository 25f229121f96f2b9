"""500 random programs on 2 to 8 ranks: what the planner makes computes what its job says, and is accepted;
what a mutation has broken is refused, with the place. A reference decides whether a plan is right: it walks
the plan op by op on all ranks and shares no code with the proofs.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from random import Random

import pytest

from stretto.ir.action import Overlap, Phase
from stretto.ir.plan import Plan
from stretto.simulating import simulate
from stretto.verifying import plan_faults, verify
from stretto.verifying.memory import memory_faults
from tests.verifying.meaning import Results, meaning
from tests.verifying.mutations import MUTATIONS
from tests.verifying.random_programs import random_plan, random_program
from tests.verifying.reference import WrongPlanError, runs

FAST = (*range(12), 14, 15, 26, 28, 31, 32, 37, 52, 53, 58)
"""Among these are programs of all kinds, and for each mutation some that it breaks; all are in the longer
run."""
ALL = range(500)
BLOCK = 20


def blocks(fast: range, every: range) -> list[object]:
    """The numbers in blocks; those that are not fast are marked."""
    starts = range(every.start, every.stop, BLOCK)
    return [
        pytest.param(
            range(first, first + BLOCK),
            id=f"{first}-{first + BLOCK - 1}",
            marks=() if first in fast else pytest.mark.slow,
        )
        for first in starts
    ]


@cache
def meant(seed: int) -> Results:
    """What the program of a number computes."""
    program = random_program(seed)
    return meaning(program.job, program.schedule.stage_ranks)


def wrong(plan: Plan, results: Results) -> str:
    """Why the plan is wrong, by the reference; "" if it is not."""
    try:
        return "" if runs(plan) == results else "other numbers"
    except WrongPlanError as error:
        return str(error)
    except (LookupError, ValueError) as error:
        return f"names what is not there: {error}"


@pytest.mark.parametrize("seeds", blocks(range(20), ALL))
def test_what_the_planner_makes_is_right_and_accepted(seeds: range) -> None:
    for seed in seeds:
        plan = random_plan(seed)
        assert 2 <= plan.world <= 8
        assert wrong(plan, meant(seed)) == "", f"program {seed}"
        verify(plan)
        timeline = simulate(plan)
        assert plan.prediction is not None
        assert timeline.step_us == plan.prediction.step_us
        assert math.isfinite(timeline.step_us)


def test_what_arrives_for_weight_gradients_alone_is_gathered_there() -> None:
    """The gather may not start in I, which would wait for a message that it does not need."""
    plan = random_plan(98)
    skip = next(edge for edge in plan.job.edges if edge.value == "f2.0_own")
    assert skip.user_phase is Phase.W
    starts = [op.name for op in plan.job.stages[1].ops[Phase.W] if op.collective is not None]
    assert "f2.0_gather_1" in starts
    assert wrong(plan, meant(98)) == ""


def test_programs_are_of_all_kinds() -> None:
    """What the fast ones have among them: else less is proved than is said."""
    seen: Counter[str] = Counter()
    for seed in FAST:
        program, plan = random_program(seed), random_plan(seed)
        kinds = {f"world {plan.world}", f"asked {program.overlap}", f"made {plan.overlap}"}
        kinds |= {program.schedule.family, f"recompute {program.job.recompute}", *dict(plan.job.axes)}
        if any(isinstance(slot, Overlap) for order in plan.schedule.orders for slot in order):
            kinds.add("pairs")
        if len(plan.job.stages) > plan.ranks:
            kinds.add("virtual stages")
        if any(abs(edge.source - edge.target) > 1 for edge in plan.job.edges):
            kinds.add("skips")
        starts = {op.collective for s in plan.job.stages for ops in s.ops.values() for op in ops} - {None}
        kinds |= {f"{found.kind} on {found.axis}" for found in starts if found is not None}
        if any(op.lane.startswith("tied ") for rank in range(plan.ranks) for op in plan.once(rank)):
            kinds.add("ties")
        if any(op.repeats for s in plan.job.stages for ops in s.ops.values() for op in ops):
            kinds.add("repeated ops")
        if plan.job.edges and {e.value for e in plan.job.edges} - {e.value for e in program.job.edges}:
            kinds.add("messages in parts")
        seen.update(kinds)
    wanted = {f"world {world}" for world in (2, 3, 4, 6, 8)} | {"drawn", "gpipe", "1f1b", "zb-h1", "zb-h2"}
    wanted |= {f"{what} {mode}" for what in ("asked", "made") for mode in ("off", "local", "window")}
    wanted |= {"dp", "cp", "ep", "tp", "pairs", "virtual stages", "skips", "ties", "repeated ops"}
    wanted.add("messages in parts")
    wanted |= {f"{kind} on tp" for kind in ("all_reduce", "all_gather", "reduce_scatter")}
    assert not wanted - seen.keys()


LEAST = 3
"""Plans among the fast ones that a mutation must have broken for good."""


def broken_and_refused(name: str, seeds: range) -> int:
    """How many plans the mutation has broken; each must be refused by a fault that names the place."""
    count = 0
    for seed in seeds:
        plan = random_plan(seed)
        broken = MUTATIONS[name](plan, Random(seed))
        if broken is None or broken.plan == plan:
            continue
        faults = [str(fault) for fault in plan_faults(broken.plan)]
        why = "surely wrong" if broken.sure else wrong(broken.plan, meant(seed))
        if not why:
            continue
        count += 1
        assert faults, f"program {seed}: accepted, but {why}"
        named = any(part in fault for fault in faults for part in broken.names)
        assert named, f"program {seed}: none of {broken.names} in {faults}"
    return count


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_a_mutation_breaks_is_refused_by_name(name: str) -> None:
    assert broken_and_refused(name, FAST) >= LEAST


@pytest.mark.slow
@pytest.mark.timeout(1200)  # on its own it plans all programs first
@pytest.mark.parametrize("name", MUTATIONS)
def test_what_a_mutation_breaks_in_any_program_is_refused_by_name(name: str) -> None:
    assert broken_and_refused(name, ALL) >= len(ALL) // 8


@pytest.mark.parametrize("seeds", blocks(range(20), ALL))
def test_a_limit_below_what_a_rank_holds_is_refused(seeds: range) -> None:
    """The simulation says what is kept, and when; the proof may only ask for more."""
    for seed in seeds:
        plan = random_plan(seed)
        assert plan.prediction is not None
        peaks = plan.prediction.peak_bytes
        refused = [fault.rank for fault in memory_faults(plan, max(peaks) - 1)]
        assert set(refused) >= {rank for rank, peak in enumerate(peaks) if peak == max(peaks)}
        faults = [str(fault) for fault in memory_faults(plan, min(peaks) - 1)]
        assert len(faults) == plan.ranks
        for rank, fault in enumerate(faults):
            runs_of = {f"rank {rank}, {i}: keeps" for i in plan.orders[rank]}
            assert any(fault.startswith(text) for text in runs_of), fault


def test_the_reference_tells_right_from_wrong() -> None:
    """By hand: a plan that is right, one whose order is harmless to change, and one that waits forever."""
    seed = next(s for s in FAST if random_plan(s).ranks > 1)
    plan, results = random_plan(seed), meant(seed)
    assert wrong(plan, results) == ""
    assert wrong(plan, {**results, next(iter(results)): -1}) == "other numbers"
    loss = next(op.name for op in plan.once(0) if op.lane == "loss")
    without = {
        name: replace(window, items=tuple(i for i in window.items if i.ref != loss or window.parts[0][0]))
        for name, window in plan.windows.items()
    }
    assert f"{loss} is not being summed" in wrong(replace(plan, windows=without), results)
