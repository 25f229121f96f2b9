"""Blocks of a mask that hide all are found, and no other is said to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.capturing.trace import trace
from stretto.passes.layout.ahead import Ahead
from stretto.passes.layout.kernels import KERNELS, mask_of
from stretto.passes.layout.mask_blocks import blocks_seen

LENGTH, BLOCKS = 24, 8


def at() -> tuple[Tensor, Tensor]:
    positions = torch.arange(LENGTH)
    return positions[:, None], positions


def window(ids: Tensor) -> Tensor:
    rows, columns = at()
    return (columns <= rows) & (columns > rows - 4)


def documents(ids: Tensor) -> Tensor:
    """By what the batch says, and causal."""
    rows, columns = at()
    of = ids.lt(2).cumsum(-1)
    return ((of[:, :, None] == of[:, None, :]) & (rows >= columns))[:, None]


def added(ids: Tensor) -> Tensor:
    return torch.full((LENGTH, LENGTH), -torch.inf).triu(4)


def band(ids: Tensor) -> Tensor:
    ones = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    return torch.logical_and(ones.tril(2), ones.triu(-5).logical_or(ones.tril(-20)))


def filled(ids: Tensor) -> Tensor:
    rows, columns = at()
    return torch.zeros(LENGTH, LENGTH).masked_fill(~(columns - rows).eq(3), -torch.inf)


def prefix(ids: Tensor) -> Tensor:
    rows, columns = at()
    return torch.where(columns < 6, torch.ones(LENGTH, LENGTH) > 0, columns.le(rows)).expand(2, 1, -1, -1)


def unknown(ids: Tensor) -> Tensor:
    rows, columns = at()
    return (rows * columns) % 3 < 1


MASKS: list[tuple[Callable[[Tensor], Tensor], bool]] = [
    *((mask, True) for mask in (window, added, band, filled, prefix)),
    *((mask, False) for mask in (documents, unknown)),
]
"""Masks, and whether all of what they hide is known from positions."""


class Attention(nn.Module):
    def __init__(self, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding, self.mask = nn.Embedding(8, 16), mask

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).unflatten(-1, (2, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=self.mask(ids)).sum()


@pytest.mark.parametrize(("mask", "is_exact"), MASKS, ids=lambda of: getattr(of, "__name__", None))
def test_blocks_that_hide_all(mask: Callable[[Tensor], Tensor], is_exact: bool) -> None:
    ids = torch.randint(0, 8, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    program = trace(Attention(mask), ids, lambda model, given: model(given)).program
    ahead = Ahead(program, 1, dict(program.given))
    name = next(mask_of(op) for op, _ in program.ops if op.target in KERNELS)
    assert name is not None
    found = blocks_seen(ahead, name, BLOCKS, BLOCKS)

    made = mask(ids)
    sees = made if made.dtype == torch.bool else made > -torch.inf
    size = LENGTH // BLOCKS
    blocks = sees.expand(2, 1, LENGTH, LENGTH).reshape(2, BLOCKS, size, BLOCKS, size)
    truth = {tuple(pair) for pair in blocks.any(4).any(2).any(0).nonzero().tolist()}
    assert truth <= found
    if is_exact:
        assert truth == found
    assert len(found) < BLOCKS**2 or mask is unknown
