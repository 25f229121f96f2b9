"""Context parallelism beside all that goes with it: kinds, chunks, tensor parallelism, schedules, masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.capturing import capture
from stretto.config import Parallel
from tests.clusters import cores
from tests.parallelize.equality import assert_plan_is_plain

LENGTH, ROWS, HIDDEN, HEADS, WINDOW = 32, 4, 32, 8, 5


class Block(nn.Module):
    """mask: causal, none, sliding (a window), or packed (documents)."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.mask = mask
        self.norm, self.behind = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        normed = self.norm(x)
        q, k, v = (
            of(normed).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for of in (self.q, self.k, self.v)
        )
        made = nn.functional.scaled_dot_product_attention(q, k, v, seen, is_causal=self.mask == "causal")
        x = x + self.out(made.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.behind(x))))  # type: ignore[no-any-return]


class Masked(nn.Module):
    def __init__(self, mask: str) -> None:
        super().__init__()
        self.mask, self.embed, self.head = mask, nn.Embedding(64, HIDDEN), nn.Linear(HIDDEN, 64)
        self.norm, self.blocks = nn.LayerNorm(HIDDEN), nn.ModuleList(Block(mask) for _ in range(2))

    def forward(self, ids: Tensor, document: Tensor) -> Tensor:
        at = torch.arange(LENGTH, device=ids.device)
        seen = None
        if self.mask == "sliding":
            seen = (at[:, None] >= at) & (at[:, None] - at < WINDOW)
        elif self.mask == "packed":
            seen = (document[:, None, :, None] == document[:, None, None, :]) & (at[:, None] >= at)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, seen)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


TP_PLAN = {
    **{f"blocks.*.{name}": "colwise" for name in ("q", "k", "v", "up")},
    **{f"blocks.*.{name}": "rowwise" for name in ("out", "down")},
}


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids, labels = (torch.randint(0, 61, (ROWS, LENGTH), generator=generator) for _ in range(2))
    labels[:, 2] = -100
    ends = torch.tensor([[3, 9, 20], [5, 12, 13], [8, 10, 31], [1, 15, 17]])
    return {
        "ids": ids,
        "labels": labels,
        "document": torch.searchsorted(ends, torch.arange(LENGTH).repeat(4, 1)),
    }


def loss(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    made = model(given["ids"], given["document"])
    return nn.functional.cross_entropy(made.flatten(0, 1), given["labels"].flatten())


GRID: dict[str, tuple[Any, ...]] = {
    "mask": ("causal", "none", "sliding", "packed"),
    "cp_kind": ("ring", "gathered", "ulysses"),
    "schedule": ("1f1b", "zb-h2", "interleaved-1f1b"),
    "cp": (2, 4),
    "ampipe_degree": (1, 2),
    "sequence_parallel": (False, True),
}


def covering(grid: Mapping[str, Sequence[Any]], together: int) -> list[dict[str, Any]]:
    """Cells that have between them all values of any so many settings together: each next one is the first
    that has most of those that are missing."""

    def sets(cell: dict[str, Any]) -> frozenset[Any]:
        return frozenset(combinations(cell.items(), together))

    cells = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    missing = frozenset[Any]().union(*map(sets, cells))
    result = []
    while missing:
        result.append(max(cells, key=lambda cell: len(sets(cell) & missing)))
        missing -= sets(result[-1])
    return result


def assert_is_plain(mask: str, **how: Any) -> None:
    torch.manual_seed(1)
    model = Masked(mask).double()
    stages = {"stages": 4} if how["schedule"] == "interleaved-1f1b" else {}
    parallel = Parallel(pp=2, tp=2, microbatches=2, **stages, **how)
    job = capture(model, batch(), loss, parallel, tp_plan=TP_PLAN)
    # A bias of keys has no gradient where all that a query sees is as much larger.
    assert_plan_is_plain(stretto.plan(job, cores(), order="list"), model, loss, batch(), least=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("cell", covering(GRID, 2), ids=lambda cell: "-".join(map(str, cell.values())))
def test_all_pairs_of_settings_give_what_the_plain_model_gives(cell: dict[str, Any]) -> None:
    assert_is_plain(**cell)


@pytest.mark.parametrize(
    ("mask", "kind", "schedule"),
    [("causal", "ring", "zb-h2"), ("sliding", "gathered", "1f1b"), ("packed", "ulysses", "interleaved-1f1b")],
)
def test_chunks_of_a_rank_give_what_the_plain_model_gives(mask: str, kind: str, schedule: str) -> None:
    assert_is_plain(mask, cp=2, cp_kind=kind, ampipe_degree=2, schedule=schedule, sequence_parallel=True)
