"""Ops with placements: every one is right, or refused by all ranks alike, those off the mesh too."""

from __future__ import annotations

import pytest

from tests.cells import slow
from tests.tensor.sweep import ANSWERS, WHICH
from tests.tensor.world import worlds

SWEPT = "tests.tensor.sweep:swept"
LEAST = 100
"""Of cases of a run."""


def answers(ranks: int, which: str) -> int:
    """How many cases all ranks have answered alike, and right or by a refusal."""
    (ended,) = worlds([(ranks, SWEPT)], {WHICH: which})
    assert ended.statuses == (0,) * ranks, ended.output
    return int(ended.output.partition(ANSWERS)[2].split()[0])


@pytest.mark.parametrize("part", [0, *map(slow, range(1, 6))])
def test_uneven_parts_on_two_ranks_and_one_off_the_mesh(part: int) -> None:
    assert answers(3, f"2:5x7:lean:{part}/6") > LEAST / 2


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(
    ("ranks", "which"),
    [(3, "2:5x7:wide"), (3, "2:6x4:wide"), (4, "3:5x7,7x4:wide"), (5, "2x2:5x7,4x6:wide")],
)
def test_all_placements(ranks: int, which: str, part: int) -> None:
    assert answers(ranks, f"{which}:{part}/4") > LEAST
