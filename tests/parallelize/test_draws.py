"""Dropout under layouts: ranks draw each for its own slice, and alike for what all of them have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.ir.placed_programs import differing_in
from stretto.models.gpt import next_token_loss
from tests.parallelize.equality import SEQUENCE, batch_of, gpt, step

HIDDEN, INNER, ROWS = 8, 16, 64


class Dropped(nn.Module):
    """Whose dropouts are on what ranks share, and on what each has in full."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)
        nn.init.ones_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        inner = nn.functional.dropout(self.up(x), 0.5)
        return nn.functional.dropout(self.down(inner), 0.5)


def total(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum()  # type: ignore[no-any-return]


def test_slices_have_draws_of_their_own_and_copies_the_same() -> None:
    """All columns of `up` have the same gradient but for what is dropped of them. That ranks have the same
    loss, and the same gradient of what they all have, is for `step` to assert."""
    model = Dropped().double()
    x = torch.randn(ROWS, HIDDEN, dtype=torch.float64)
    job = capture(model, x, total, Parallel(tp=2), tp_plan={"up": "colwise", "down": "rowwise"})
    _, grads = step(job, model, x)
    first, second = grads["up.bias"].chunk(2)
    assert not torch.equal(first, second)
    kept = grads["down.bias"] / 2
    assert torch.equal(kept, kept.round()), "a number of rows that are kept"
    assert len(set(kept.tolist())) > 1
    for column in grads["up.bias"]:
        assert 0 < column < 2 * grads["down.bias"].sum()


@pytest.mark.parametrize("sequence", [False, True])
def test_what_ranks_draw_alike_is_what_all_have_in_full(sequence: bool) -> None:
    parallel = Parallel(tp=2, microbatches=2, sequence_parallel=sequence)
    job = capture(gpt(dropout=0.3), batch_of(), next_token_loss, parallel)
    own = differing_in(job, "tp")
    drawn: dict[str, tuple[int, ...]] = {
        op.name: op.outputs[0].shape  # type: ignore[union-attr]
        for stage in job.stages
        for ops in stage.ops.values()
        for op in ops
        if op.random
    }
    assert drawn
    for name, shape in drawn.items():
        is_full = len(shape) == 3 and shape[1] == SEQUENCE
        assert (name in own) != is_full, name
    in_full = [shape for shape in drawn.values() if len(shape) == 3 and shape[1] == SEQUENCE]
    assert len(in_full) == (0 if sequence else 5), "the embedding's, and two of each block"
