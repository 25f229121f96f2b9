"""Schedule families: legal over a grid of sizes, the published orders, figures and memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.test_schedule_csv import torch_schedule

from stretto.errors import PlanError, UsageError
from stretto.ir.action import Action, Overlap, Phase, Schedule
from stretto.schedule.families import FAMILIES, make_schedule
from stretto.schedule.loops import groups_of, visits
from stretto.schedule.timing import PhaseTimes, peak_live, time_schedule
from stretto.verifying import schedule_faults

LIVE = {
    "gpipe": lambda n, i: 10**9,
    "1f1b": lambda n, i: n - i,
    "eager-1f1b": lambda n, i: 2 * (n - i) - 1,
    "eager-1f1b-split": lambda n, i: 2 * (n - i) - 1,
    "zb-h1": lambda n, i: n,
    "zb-h2": lambda n, i: 2 * n - 1,
}

"""Family with one stage a rank -> live microbatches of stage i of n, where there are as many."""

families = st.sampled_from([*FAMILIES])
rank_counts = st.integers(1, 6)
microbatch_counts = st.integers(1, 13)


def live_on(schedule: Schedule, rank: int) -> int:
    """The most live microbatches of a rank, counted once for each of its stages."""
    live = peak = 0
    for slot in schedule.orders[rank]:
        live += sum(a.phase is Phase.F for a in slot.actions)
        peak = max(peak, live)
        live -= sum(a.phase in (Phase.B, Phase.W) for a in slot.actions)
    return peak


def check_legal(schedule: Schedule) -> None:
    """Every action once, and every phase of a stage through the microbatches in ascending order."""
    every = list(range(schedule.microbatches))
    for stage, rank in enumerate(schedule.stage_ranks):
        own = [a for a in schedule.actions(rank) if a.stage == stage]
        for phases in ((Phase.F,), (Phase.I, Phase.B), (Phase.W, Phase.B)):
            assert [a.microbatch for a in own if a.phase in phases] == every
    assert schedule_faults(schedule) == []


def stages_each(data: st.DataObject, family: str) -> int:
    places = FAMILIES[family].places
    return data.draw(st.integers(places.least, places.most or 4))


def virtual_orders(family: str, ranks: int, microbatches: int, each: int | None = None) -> list[list[str]]:
    made = make_schedule(family, ranks, microbatches, virtual_stages=each)
    return [[str(slot) for slot in order] for order in made.orders]


def torch_orders(name: str, ranks: int, each: int, microbatches: int) -> list[list[str]]:
    """What PyTorch makes; ValueError where it refuses. No process group is needed for that."""
    stages = ranks * each
    kept = (
        [0, stages - 1] if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV") else range(0, stages, ranks)
    )
    made = torch_schedule(name, stages, ranks, [*kept], microbatches)
    return [[str(a) for a in made.pipeline_order[rank] if a is not None] for rank in range(ranks)]


# --- every family ------------------------------------------------------------------------------------


@given(families, rank_counts, microbatch_counts, st.data())
@settings(max_examples=150, deadline=None)
def test_every_family_is_complete_ordered_and_progresses(family, ranks, microbatches, data):
    each = stages_each(data, family)
    schedule = make_schedule(family, ranks, microbatches, virtual_stages=each)
    assert (schedule.family, schedule.stages, schedule.microbatches) == (family, ranks * each, microbatches)
    assert schedule.stage_ranks == FAMILIES[family].places.stage_ranks(ranks, each)
    check_legal(schedule)
    f, i, w = (data.draw(st.floats(0.1, 10)) for _ in range(3))
    message = data.draw(st.floats(0, 5))
    timing = time_schedule(schedule, PhaseTimes(f, i, w, message))
    hops = sum(a != b for a, b in zip(schedule.stage_ranks, schedule.stage_ranks[1:], strict=False))
    # No schedule beats the way of one microbatch through all stages and back, nor one rank's own work.
    assert timing.makespan >= schedule.stages * (f + i) + 2 * hops * message - 1e-6
    assert timing.makespan >= microbatches * each * (f + i + w) - 1e-6
    if family in LIVE:
        expected = tuple(min(microbatches, LIVE[family](ranks, stage)) for stage in range(ranks))
        assert timing.peak_live == expected


@given(families, rank_counts, microbatch_counts, st.integers(1, 14), st.data())
@settings(max_examples=100, deadline=None)
def test_a_memory_limit_is_kept_or_refused(family, ranks, microbatches, max_live, data):
    each = stages_each(data, family)
    free = make_schedule(family, ranks, microbatches, virtual_stages=each)
    least = 1 if FAMILIES[family].keeps_any_limit else max(peak_live(free))
    if max_live < least:
        with pytest.raises(UsageError, match=rf"cannot keep max_live={max_live} .* its minimum is {least}\."):
            make_schedule(family, ranks, microbatches, virtual_stages=each, max_live=max_live)
        return
    schedule = make_schedule(family, ranks, microbatches, virtual_stages=each, max_live=max_live)
    check_legal(schedule)
    assert max(peak_live(schedule)) <= max_live
    if family in LIVE:
        assert peak_live(schedule) == tuple(min(max_live, live) for live in peak_live(free))
    if max_live >= max(peak_live(free)):
        assert schedule == free


def test_the_page_says_of_every_family_what_its_row_says() -> None:
    page = (Path(__file__).parents[2] / "docs/schedules.md").read_text(encoding="utf-8")
    tables = page.split("## Families")[1].split("\n## ")[0]
    assert re.findall(r"^\| `([^`]+)` \|", tables, re.MULTILINE) == [*FAMILIES]
    [unlimited] = re.findall(r"(?<=bubble grows\. ).*(?= take no limit)", tables)
    assert re.findall(r"`([^`]+)`", unlimited) == [
        name for name, one in FAMILIES.items() if not one.keeps_any_limit
    ]
    assert {one.eager for one in FAMILIES.values()} - {None} <= FAMILIES.keys()


# --- published orders --------------------------------------------------------------------------------


def test_groups_of_megatron() -> None:
    """2 ranks, groups of 3, 5 microbatches, 2 stages a rank: (microbatch, which of the rank's stages)."""
    order = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)]
    assert visits(groups_of(5, 2, group=3), 2) == order
    schedule = make_schedule("interleaved-1f1b", 2, 5, group=3)
    for rank in (0, 1):
        actions = [*schedule.actions(rank)]
        forwards = [(a.microbatch, a.stage // 2) for a in actions if a.phase is Phase.F]
        backwards = [(a.microbatch, 1 - a.stage // 2) for a in actions if a.phase is Phase.B]
        assert forwards == backwards == order
        # Megatron's warm-up: 2(p - 1 - r) and the group once for every stage but the last.
        assert next(at for at, a in enumerate(actions) if a.phase is Phase.B) == 2 * (1 - rank) + 3 + 1


@pytest.mark.parametrize(
    ("family", "name", "numbers"),
    [
        ("interleaved-1f1b", "ScheduleInterleaved1F1B", (1, 2, 3)),
        ("zb-v", "ScheduleZBVZeroBubble", (2,)),
        ("dualpipev", "ScheduleDualPipeV", (2,)),
    ],
)
def test_the_orders_are_those_of_pytorch(family: str, name: str, numbers: tuple[int, ...]) -> None:
    """DualPipeV's is the one that its authors publish: 4 ranks and 10 microbatches are among the sizes."""
    compared = set()
    for ranks in (1, 2, 3, 4):
        for each in numbers:
            for microbatches in (1, 2, 3, 4, 5, 8, 10, 11):
                try:
                    theirs = torch_orders(name, ranks, each, microbatches)
                except ValueError:  # sizes that PyTorch does not have
                    continue
                assert virtual_orders(family, ranks, microbatches, each) == theirs, (
                    ranks,
                    each,
                    microbatches,
                )
                compared.add((ranks, microbatches))
    assert len(compared) >= 15
    assert (4, 10) in compared


def test_breadth_first_is_pytorchs_with_ascending_backwards() -> None:
    """PyTorch runs backwards in the opposite order; ours ascend, as gradients are summed in one order."""
    ours, theirs = virtual_orders("looped-bfs", 2, 3, 2), torch_orders("ScheduleLoopedBFS", 2, 2, 3)
    assert " ".join(ours[1]) == "1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2"
    for own, other in zip(ours, theirs, strict=True):
        assert own[:6] == other[:6]
        assert [own[at] for at in (8, 7, 6, 11, 10, 9)] == other[6:]


# --- published figures -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "makespans"), [(4, (172, 157, 131, 111, 108, 105)), (8, (192, 185, 151, 131, 124, 117))]
)
def test_forward_1_backward_2_message_1(ranks: int, makespans: tuple[int, ...]) -> None:
    """The laws of resharding that hides (arXiv 2211.05322, Alpa pull request #773), 32 microbatches."""

    def makespan(family: str, message: float = 1.0, blocking: bool = False) -> float:
        return time_schedule(
            make_schedule(family, ranks, 32), PhaseTimes(1.0, 1.0, 1.0, message, blocking)
        ).makespan

    assert makespans == (
        makespan("1f1b", blocking=True),
        makespan("1f1b"),
        makespan("zb-h1"),  # 1F1B with weight delay
        makespan("eager-1f1b"),
        makespan("eager-1f1b-split"),  # eager with weight delay
        makespan("1f1b", message=0.0),  # ideal
    )


@pytest.mark.parametrize(("ranks", "microbatches", "makespan"), [(2, 4, 26), (4, 8, 54), (8, 16, 110)])
def test_dualpipev_takes_what_its_authors_say(ranks: int, microbatches: int, makespan: int) -> None:
    schedule = make_schedule("dualpipev", ranks, microbatches)
    assert time_schedule(schedule).makespan == makespan
    assert [live_on(schedule, rank) for rank in range(ranks)] == [2 * ranks + 1] * ranks
    assert any(isinstance(slot, Overlap) for slot in schedule.orders[0])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 8, 12, 16])
def test_v_shaped_families_hold_and_idle_as_published(ranks: int) -> None:
    """Of a rank's 6m units of work, idle: ZB-V none, V-Half p/2m, V-Min 2p/3m. Live on a rank, where 1F1B's
    first has p microbatches: p, (p + 2) // 2 and (p + 4) // 3, each on both of the rank's stages."""
    for microbatches in (2 * ranks, 4 * ranks):
        for family, shares, idle in (
            ("zb-v", ranks, 0.0),
            ("v-half", (ranks + 2) // 2, 3 * ranks),
            ("v-min", (ranks + 4) // 3, 4 * ranks),
        ):
            schedule = make_schedule(family, ranks, microbatches)
            assert max(live_on(schedule, rank) for rank in range(ranks)) <= 2 * shares
            assert time_schedule(schedule).cost - 6 * microbatches <= idle


def test_more_stages_a_rank_make_the_bubble_smaller() -> None:
    """(p - 1)(F + B) / v for v stages a rank, each a v-th of the work (arXiv 2104.04473)."""
    for each in (1, 2, 4):
        times = PhaseTimes(1.0 / each, 1.0 / each, 1.0 / each)
        timing = time_schedule(make_schedule("interleaved-1f1b", 4, 16, virtual_stages=each), times)
        assert timing.makespan == pytest.approx(16 * 3 + 3 * 3 / each)


def test_eager_interleaving_hides_messages_of_two_slots() -> None:
    """What messages add does not grow with the number of microbatches; in the plain one it does."""

    def added(family: str, microbatches: int, message: float) -> float:
        schedule = make_schedule(family, 4, microbatches)
        made = [time_schedule(schedule, PhaseTimes(1.0, 1.0, 1.0, one)).makespan for one in (message, 0.0)]
        return made[0] - made[1]

    assert added("eager-interleaved-1f1b", 64, 2.0) == added("eager-interleaved-1f1b", 16, 2.0) < 20
    assert added("interleaved-1f1b", 64, 2.0) > 100


# --- refusals ----------------------------------------------------------------------------------------


def test_groups_that_stop_each_other_are_refused() -> None:
    """Groups of 4, and one of a single microbatch left: Megatron-LM refuses them as well."""
    with pytest.raises(UsageError, match=r"groups of 4 of 5 .* forever\. Give (\d), or no group") as refused:
        make_schedule("interleaved-1f1b", 4, 5, virtual_stages=3, group=4)
    group = int(str(refused.value).split("Give ")[1][0])
    check_legal(make_schedule("interleaved-1f1b", 4, 5, virtual_stages=3, group=group))
    check_legal(make_schedule("interleaved-1f1b", 4, 5, virtual_stages=3))


def test_receivers_stand_where_messages_block() -> None:
    times = PhaseTimes(1.0, 1.0, 1.0, 0.5, blocking=True)
    timing = time_schedule(make_schedule("1f1b", 2, 2), times)
    assert timing.start[Action.parse("1F1")] == timing.end[Action.parse("1B0")] + 0.5
    with pytest.raises(PlanError):
        time_schedule(Schedule("stuck", 1, 1, (0,), ((Action(0, Phase.B, 0), Action(0, Phase.F, 0)),)), times)


def test_the_orders_are_those_of_the_sources():
    def tokens(family: str, stage: int) -> str:
        return " ".join(str(a)[1:] for a in make_schedule(family, 3, 5).actions(stage))

    assert tokens("gpipe", 1) == "F0 F1 F2 F3 F4 B0 B1 B2 B3 B4"
    assert tokens("1f1b", 0) == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
    assert tokens("1f1b", 2) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"
    assert tokens("eager-1f1b", 0) == "F0 F1 F2 F3 F4 B0 B1 B2 B3 B4"
    assert tokens("eager-1f1b", 1) == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
    assert tokens("zb-h1", 0) == "F0 F1 F2 I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4"
    assert tokens("zb-h1", 2) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4"
    assert tokens("zb-h2", 1) == "F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4"
