"""Forwards that begin when an earlier backward is done: no order of a rank's actions holds more live then."""

from __future__ import annotations

import random

import pytest

from stretto.ir.action import Action, Phase
from stretto.planning.pair import frees
from stretto.schedule.families import make_schedule


def live(actions: list[Action]) -> int:
    """The most live microbatches, of all stages together."""
    last = {(a.stage, a.microbatch): at for at, a in enumerate(actions) if a.phase is not Phase.F}
    ends = sorted(last.values())
    most = count = 0
    for at, action in enumerate(actions):
        count += (action.phase is Phase.F) - (at in ends)
        most = max(most, count + (at in ends))
    return most


@pytest.mark.parametrize("more", [0, 2])
@pytest.mark.parametrize("family", ["1f1b", "zb-h2", "interleaved-1f1b", "zb-v", "v-min", "dualpipev"])
def test_no_order_holds_more(family: str, more: int) -> None:
    draw = random.Random(0)
    for order in make_schedule(family, 3, 9).orders:
        actions = [action for slot in order for action in slot.actions]
        kept = frees(order, more)
        assert kept
        assert {actions[forward].phase for _, forward in kept} == {Phase.F}
        assert Phase.F not in {actions[backward].phase for backward, _ in kept}
        needs: dict[int, set[int]] = {at: set() for at in range(len(actions))}
        for backward, forward in kept:
            assert backward < forward, "the schedule's own order keeps them"
            needs[forward].add(backward)
        for at, action in enumerate(actions):
            place = action.stage, action.microbatch
            needs[at] |= {n for n, a in enumerate(actions[:at]) if (a.stage, a.microbatch) == place}
        for _ in range(20):
            done: list[int] = []
            left = set(needs)
            while left:
                ready = [at for at in left if needs[at] <= set(done)]
                forwards = [at for at in ready if actions[at].phase is Phase.F]
                at = draw.choice(forwards if forwards and draw.random() < 0.9 else ready)
                left.remove(at)
                done.append(at)
            assert live([actions[at] for at in done]) <= live(actions) + more
