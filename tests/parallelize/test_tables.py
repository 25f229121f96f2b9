"""Code of other libraries' models under tp, whose step is the plain model's: tables of the style `vocabulary`
whose rows meet anything, rotary angles as complex numbers, cross-attention that counts heads."""

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
from tests.clusters import cores
from tests.parallelize.equality import assert_plan_is_plain
from tests.parallelize.random_lines import Centred, Scaled

pytestmark = pytest.mark.filterwarnings("ignore:the tensor-parallel plan of:UserWarning")

HIDDEN, INNER, ROWS = 8, 16, 16
PLAN = {"up": "colwise", "down": "rowwise", "table": "vocabulary"}


class Negated(nn.Embedding):
    """A table that is changed before it is read."""

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, -self.weight.tanh(), self.padding_idx)


class Borrowed(nn.Embedding):
    """A table that looks up in another one of as many rows as a rank has."""

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
    """The table's own parameter is used besides the table, too."""
    return (model(batch) * model.table.gain).square().mean()  # type: ignore[no-any-return]


def batch_of(rows: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, ROWS, (rows, 3), generator=generator)
    return {"x": torch.randn(rows, 3, HIDDEN, generator=generator, dtype=torch.float64), "ids": ids}


def net(way: str, kind: type[nn.Embedding] = nn.Embedding, **options: Any) -> Net:
    torch.manual_seed(0)
    return Net(way, kind(ROWS, HIDDEN, **options)).double()


def planned_is_plain(model: nn.Module, loss: Any, batch: Any, tp_plan: dict[str, str], **layout: Any) -> None:
    job = capture(model, batch, loss, Parallel(microbatches=2, **layout), tp_plan=tp_plan)
    plan = stretto.plan(job, cores(), order="list")
    assert_plan_is_plain(plan, copy.deepcopy(model), loss, batch)


def check(model: Net, loss: Any = loss_of, **layout: Any) -> None:
    planned_is_plain(model, loss, batch_of(), PLAN, **layout)


SLOW = ("behind", "is added to features", "is compared with features")


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow) if way in SLOW else way for way in WAYS]
)
def test_rows_meet_sharded_features(way: str) -> None:
    check(net(way), tp=2)


def test_rows_that_meet_features_on_four_ranks_with_a_padding_row() -> None:
    check(net("scales features", padding_idx=5), tp=4)


@pytest.mark.parametrize("kind", [Scaled, Centred, Negated, Borrowed])
def test_tables_with_code_of_their_own(kind: type[nn.Embedding]) -> None:
    check(net("scales features", kind), tp=2)


def test_a_table_s_own_parameter_is_used_elsewhere_too() -> None:
    check(net("before", Scaled), shared_gain, tp=2)


def test_a_table_that_is_read_in_full_is_right() -> None:
    class Normed(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) / self.weight.amax()

    check(net("before", Normed), tp=2)


@pytest.mark.parametrize("way", ["before", "scales features"])
def test_a_table_is_computed_again(way: str) -> None:
    """The number for tokens out of the vocabulary is no number, which is not equal to itself."""
    check(net(way), tp=2, recompute="full")


# Attention as models of other libraries write it.

WIDE, HEADS, WIDTH, LENGTH, KEYS = 16, 4, 4, 5, 3
ATTENTION = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}


def paired(x: Tensor, angles: Tensor) -> Tensor:
    by = torch.polar(torch.ones_like(angles), angles.detach()) * (1 + angles - angles.detach())
    turned = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)) * by
    return torch.view_as_real(turned).flatten(-2)


def halved(x: Tensor, angles: Tensor) -> Tensor:
    turned = torch.complex(*x.chunk(2, -1)) * torch.complex(angles.cos(), angles.sin())
    return torch.cat((turned.real, turned.imag), -1)


def conjugated(x: Tensor, angles: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2).contiguous()).conj() * torch.complex(
        angles.cos(), angles.sin()
    )
    return torch.stack((turned.abs(), turned.imag), -1).flatten(-2)


ROTATIONS = {"paired": paired, "halved": halved, "conjugated": conjugated}


class Rotary(nn.Module):
    def __init__(self, rotate: Callable[[Tensor, Tensor], Tensor], learned: bool) -> None:
        super().__init__()
        self.rotate = rotate
        self.q, self.k, self.v, self.o = (nn.Linear(WIDE, WIDE, bias=False) for _ in range(4))
        angles = torch.outer(torch.arange(LENGTH), torch.tensor([1.0, 0.1]))[:, None]
        if learned:
            self.angles = nn.Parameter(angles)
        else:
            self.register_buffer("angles", angles)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        q, k, v = (m(batch["x"]).unflatten(-1, (-1, WIDTH)) for m in (self.q, self.k, self.v))
        q, k = (self.rotate(x, self.angles) for x in (q, k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """One module around the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = Cross()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"] + self.cross(batch)  # type: ignore[no-any-return]


class Cross(nn.Module):
    """Queries of one sequence, keys of another, and a bias of as many heads as an attribute says."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDE, WIDE, bias=False) for _ in range(4))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x, memory = batch["x"], batch["memory"].tanh()
        q, k, v = (
            m(a).view(*a.shape[:2], -1, WIDTH).transpose(1, 2)
            for m, a in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        bias = torch.zeros(1, self.heads, x.shape[1], memory.shape[1], dtype=x.dtype)
        scores = q @ k.transpose(-1, -2) + (bias + batch["mask"][:, None, None])
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def attends(model: nn.Module, plan: dict[str, str], **layout: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    batch = {
        "x": torch.randn(4, LENGTH, WIDE, generator=generator, dtype=torch.float64),
        "memory": torch.randn(4, KEYS, WIDE, generator=generator, dtype=torch.float64),
        "mask": torch.tensor([[0.0, 0.0, -9.0]] * 4, dtype=torch.float64),
    }
    planned_is_plain(model.double(), loss_of, batch, plan, **layout)


@pytest.mark.parametrize(
    ("rotation", "learned"),
    [
        *(("paired", False), ("halved", True), ("conjugated", True)),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (("paired", True), ("halved", False), ("conjugated", False))
        ),
    ],
)
def test_rotary_angles_are_complex_numbers(rotation: str, learned: bool) -> None:
    torch.manual_seed(0)
    attends(Rotary(ROTATIONS[rotation], learned), ATTENTION, tp=4 if learned else 2)


def test_cross_attention_that_counts_heads_by_an_attribute() -> None:
    """As T5's does."""
    torch.manual_seed(0)
    attends(Decoder(), {f"cross.{name}": style for name, style in ATTENTION.items()}, tp=2)


def test_a_complex_number_in_the_code_is_refused_with_the_way_out() -> None:
    with pytest.raises(CaptureError, match=r"(?s)the number 1j, .* multiply by torch.complex\(real, imag\)"):
        attends(
            Rotary(lambda x, a: halved(x, a) * torch.exp(1j * a).abs().repeat(1, 1, 2), True), ATTENTION, tp=2
        )
