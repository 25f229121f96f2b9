"""Tables of the style `vocabulary`: whatever their rows meet, the step is the plain model's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stretto
from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import CaptureError
from tests.parallelize.equality import assert_plan_is_plain

pytestmark = pytest.mark.filterwarnings("ignore:the tensor-parallel plan of:UserWarning")

HIDDEN, INNER, ROWS = 8, 16, 16
PLAN = {"up": "colwise", "down": "rowwise", "table": "vocabulary"}


class Gained(nn.Embedding):
    """A table with a parameter of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.gain


class Centred(nn.Embedding):
    """A table whose rows depend on those of other tokens."""

    def forward(self, ids: Tensor) -> Tensor:
        found = super().forward(ids)
        return found - found.mean(0, keepdim=True)


class Negated(nn.Embedding):
    """A table that is changed before it is read."""

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, -self.weight.tanh(), self.padding_idx)


class Shifted(nn.Embedding):
    """A table whose rows have a common part, which is a parameter of its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight * self.gain + self.gain)


class Borrowed(nn.Embedding):
    """A table that looks up in another one of as many rows as a rank holds."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.other = nn.Parameter(torch.randn(ROWS // 2, HIDDEN))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + F.embedding(ids % (ROWS // 2), self.other)


class Net(nn.Module):
    """Two matrices that are sharded, and a table."""

    def __init__(self, way: str, table: nn.Embedding) -> None:
        super().__init__()
        self.way, self.table = way, table
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x, row = batch["x"], self.table(batch["ids"])
        return WAYS[self.way](self, x, row)


def flattened(row: Tensor) -> Tensor:
    return row.flatten(0, 1).mean(-1, keepdim=True).expand(-1, 2).reshape(row.shape[0], -1, 2)[..., :1]


WAYS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "before": lambda m, x, row: m.down(m.up(x + row).relu()),
    "behind": lambda m, x, row: m.down(m.up(x).relu()) + row,
    "scales features": lambda m, x, row: m.down(m.up(x).relu() * row.mean(-1, keepdim=True)),
    "is added to features": lambda m, x, row: m.down(m.up(x).relu() + row[..., :1]),
    "is compared with features": lambda m, x, row: m.down(torch.maximum(m.up(x), row.sum(-1, keepdim=True))),
    "is flattened": lambda m, x, row: m.down(m.up(x).relu() * flattened(row)),
    "on both sides": lambda m, x, row: m.down(m.up(x + row).relu() * row.norm(dim=-1, keepdim=True)) + row,
}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def shared_gain(model: Net, batch: dict[str, Tensor]) -> Tensor:
    """The table's own parameter is used beside the table, too."""
    return (model(batch) * model.table.gain).square().mean()  # type: ignore[no-any-return]


def batch_of(rows: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, ROWS, (rows, 3), generator=generator)
    return {"x": torch.randn(rows, 3, HIDDEN, generator=generator, dtype=torch.float64), "ids": ids}


def net(way: str, kind: type[nn.Embedding] = nn.Embedding, **options: Any) -> Net:
    torch.manual_seed(0)
    return Net(way, kind(ROWS, HIDDEN, **options)).double()


def check(model: Net, loss: Any = loss_of, **layout: Any) -> None:
    job = capture(model, batch_of(), loss, Parallel(microbatches=2, **layout), tp_plan=PLAN)
    plan = stretto.plan(job, stretto.Cluster(), order="list")
    assert_plan_is_plain(plan, copy.deepcopy(model), loss, batch_of())


@pytest.mark.parametrize("way", WAYS)
def test_rows_meet_sharded_features(way: str) -> None:
    check(net(way), tp=2)


def test_rows_that_meet_features_on_four_ranks_with_a_padding_row() -> None:
    check(net("scales features", padding_idx=5), tp=4)


@pytest.mark.parametrize("kind", [Gained, Centred, Negated, Borrowed])
def test_tables_with_code_of_their_own(kind: type[nn.Embedding]) -> None:
    check(net("scales features", kind), tp=2)


@pytest.mark.parametrize("kind", [Gained, Shifted])
def test_a_table_s_own_parameter_is_used_elsewhere_too(kind: type[nn.Embedding]) -> None:
    check(net("before", kind), shared_gain, tp=2)


def test_a_table_that_is_read_as_a_whole_is_refused() -> None:
    class Normed(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) / self.weight.amax()

    with pytest.raises(
        CaptureError, match=r"(?s)table cannot be computed in parts.*or leave the spread one out"
    ):
        check(net("before", Normed), tp=2)


@pytest.mark.parametrize("way", ["before", "behind", "scales features"])
def test_a_table_is_computed_again(way: str) -> None:
    """The number that stands for tokens out of the vocabulary is no number, which is not equal to itself."""
    check(net(way), tp=2, recompute="full")
