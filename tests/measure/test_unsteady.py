"""How unsteady ranks are, from rounds that are made up with a known answer."""

from __future__ import annotations

import random

import pytest

from stretto.measure.unsteady import Pieces, unsteady_of
from stretto.simulate.members import Spells

OPS = 60
OP_US = 4_000.0


def rounds_of(
    speeds: Spells, rounds: int, jumps: float = 0.0, common: Spells | None = None
) -> dict[str, list[float]]:
    """Rounds of `OPS` equal ops, a while apart; by `jumps` slower from the first to the last of them."""
    shares: dict[str, list[float]] = {f"op{k}": [] for k in range(OPS)}
    for number in range(rounds):
        now_us = number * 1e6
        for took in shares.values():
            speed = 1.0 + speeds.at(now_us)[0] + (common.at(now_us)[0] if common is not None else 0.0)
            took.append(OP_US / speed * (1.0 + jumps * number / rounds))
            now_us += OP_US
    return shares


def found_in(*ranks: dict[str, list[float]]) -> list[Pieces]:
    return [pieces for shares in ranks if (pieces := Pieces.of(shares)) is not None]


@pytest.mark.parametrize("jumps", [0.0, 0.5], ids=["steady hours", "slower by the hour"])
def test_a_known_process_is_found_again(jumps: float) -> None:
    own = [Spells(0.12, 80_000.0, random.Random(k)) for k in range(2)]
    found = unsteady_of(found_in(*(rounds_of(one, 400, jumps) for one in own)))
    assert found is not None
    assert found.spread == pytest.approx(0.12, rel=0.1)
    assert found.spell_us == pytest.approx(80_000, rel=0.3)
    assert found.common < 0.25


def test_what_ranks_have_in_common_is_told_apart() -> None:
    common = Spells(0.1, 80_000.0, random.Random(9))
    own = [Spells(0.1, 80_000.0, random.Random(k)) for k in range(3)]
    found = unsteady_of(found_in(*(rounds_of(one, 120, common=common) for one in own)))
    assert found is not None
    assert found.common == pytest.approx(0.5, abs=0.15)
    same = rounds_of(own[0], 20)
    equal = unsteady_of(found_in(same, same))
    assert equal is not None
    assert equal.common == pytest.approx(1.0)


def test_a_moment_in_which_something_else_ran_does_not_decide() -> None:
    shares = rounds_of(Spells(0.1, 80_000.0, random.Random(0)), 40)
    before = unsteady_of(found_in(shares))
    shares["op7"][3] *= 1000.0
    after = unsteady_of(found_in(shares))
    assert before is not None
    assert after is not None
    assert after.spread == pytest.approx(before.spread, rel=0.1)


def test_few_rounds_are_not_decided_by_a_moment_either() -> None:
    rng = random.Random(5)
    shares = {f"op{k}": [10_000.0 * rng.gauss(1.0, 0.05) for _ in range(10)] for k in range(5)}
    before = unsteady_of(found_in(shares))
    shares["op2"][4] += 400_000.0
    after = unsteady_of(found_in(shares))
    assert before is not None
    assert after is not None
    assert after.spread == pytest.approx(before.spread, rel=0.3)
    assert after.spell_us < 3 * before.spell_us < 60_000


def test_too_little_says_nothing() -> None:
    spells = Spells(0.1, 80_000.0, random.Random(0))
    assert Pieces.of({}) is None
    assert Pieces.of(rounds_of(spells, 3)) is None
    assert Pieces.of({"op": [10.0, 12.0, 11.0, 10.0, 13.0]}) is None, "shorter than a piece"
    assert Pieces.of({f"op{k}": [20_000.0 + k] * 6 for k in range(3)}) is None, "too few pieces"
    assert unsteady_of([]) is None
    assert unsteady_of(found_in({f"op{k}": [20_000.0] * 6 for k in range(4)})) is None, (
        "a speed that never changes"
    )
