"""What expert-parallel ranks send, cut in pieces: the same values, and all-to-alls of their own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import UsageError
from stretto.models.moe import moe_token_sum
from tests.parallelize.test_ampipe import by_chunks
from tests.parallelize.test_experts import ALL, DROPLESS, FEW, assert_equals, batch, model_of

SLICES: tuple[dict[str, Any], ...] = ({"pipe_experts_multi_data": 2}, {"pipe_experts_multi_data": 12})
EACH: tuple[dict[str, Any], ...] = (
    {"pipe_experts": True},
    {"pipe_experts": True, "pipe_experts_multi_data": 3},
    {"pipe_experts": True, "pipe_experts_multi_data": 3, "ampipe_degree": 2},
)
CASES = [
    *((capacity, how) for capacity in (DROPLESS, FEW, ALL) for how in SLICES),
    *((capacity, how) for capacity in (FEW, ALL) for how in EACH),
]
FAST = ((DROPLESS, SLICES[0]), (FEW, SLICES[0]), (FEW, EACH[2]), (ALL, EACH[0]))


@pytest.mark.parametrize(
    ("capacity", "how"),
    [pytest.param(*case, marks=[] if case in FAST else [pytest.mark.slow]) for case in CASES],
)
def test_it_gives_the_values_of_the_plain_model(capacity: float | None, how: dict[str, Any]) -> None:
    model = model_of(capacity, shared=1)
    degree = how.get("ampipe_degree", 1)
    expected = by_chunks(model, degree) if degree > 1 else None
    assert_equals(model, Parallel(ep=2, dp=2, ep_buffer=4.0, **how), 1e-12, expected)


def test_each_piece_has_its_own_all_to_alls() -> None:
    def count(**how: Any) -> int:
        job = capture(model_of(ALL), batch(), moe_token_sum, Parallel(ep=2, dp=2, **how))
        ops = (op for stage in job.stages for ops in stage.ops.values() for op in ops)
        return Counter(op.target for op in ops)["comm.all_to_all"]

    assert count(pipe_experts_multi_data=3) == 3 * count()
    assert count(pipe_experts=True) == 2 * count()  # two experts a rank
    assert count(pipe_experts=True, pipe_experts_multi_data=2) == 4 * count()


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(UsageError, match="pipe_experts_multi_data"):
        capture(model_of(DROPLESS), batch(), moe_token_sum, Parallel(ep=2, dp=2, pipe_experts=True))
    with pytest.raises(UsageError, match="give ep = 2 or more"):
        Parallel(pipe_experts=True)
