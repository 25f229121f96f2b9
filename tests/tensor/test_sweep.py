"""Ops with placements: every one is right, or refused by all ranks alike, those off the mesh too."""

from __future__ import annotations

import pytest

from tests.tensor.sweep import WHICH
from tests.tensor.world import all_end_well

SWEPT = "tests.tensor.sweep:swept"


def test_uneven_parts_on_two_ranks_and_one_off_the_mesh() -> None:
    all_end_well([(3, SWEPT)], {WHICH: "2:5x7:lean:0/1"})


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(
    ("ranks", "which"),
    [(3, "2:5x7:wide"), (3, "2:6x4:wide"), (4, "3:5x7,7x4:wide"), (5, "2x2:5x7,4x6:wide")],
)
def test_all_placements(ranks: int, which: str, part: int) -> None:
    all_end_well([(ranks, SWEPT)], {WHICH: f"{which}:{part}/4"})
