"""Sequence parallelism of models that call their blocks in ways of their own: the plain numbers, or a refusal
that names the module and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.config import Parallel
from tests.parallelize.equality import assert_plain

HIDDEN, VOCAB, LENGTH = 8, 16, 4


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        # What it adds over the sequence shows whether it sees all of it.
        h = self.up(x)
        return self.down(h + h.cumsum(1).sin())  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.part = nn.LayerNorm(HIDDEN), Part()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(self.norm(x))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Embedding, blocks, a norm and a head; `how` calls the blocks."""

    def __init__(
        self, how: Callable[[Any, Tensor], Any], make: Callable[[], nn.Module] = Block, blocks: int = 2
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.blocks = nn.ModuleList(make() for _ in range(blocks))
        self.early, self.after = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.how = how

    def forward(self, tokens: Tensor) -> Any:
        x = self.how(self, self.embedding(tokens))
        x, seen = x if isinstance(x, tuple) else (x, 0.0)
        return self.head(self.after(x) + seen)


def by_attributes(block: Any, x: Tensor) -> Tensor:
    return x + block.part(block.norm(x))  # type: ignore[no-any-return]


def in_order(net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
    return x


def twice(net: Net, x: Tensor) -> Tensor:
    return in_order(net, in_order(net, x))


def twice_with_the_norm_between(net: Net, x: Tensor) -> Tensor:
    return in_order(net, net.after(in_order(net, x)))  # type: ignore[no-any-return]


def a_norm_before(net: Net, x: Tensor) -> Tensor:
    """It is declared after the blocks, and called before them."""
    return in_order(net, net.early(x))


def a_norm_on_the_way(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    """The norm's result goes into the loss as well, and the residual goes on as slices."""
    x = net.blocks[0](x)
    seen = net.after(x)
    for block in net.blocks[1:]:
        x = block(x)
    return x, seen.cumsum(1)


def later_ones_by_attributes(net: Net, x: Tensor) -> Tensor:
    x = net.blocks[0](x)
    for block in net.blocks[1:]:
        x = by_attributes(block, x)
    return x


def all_by_attributes(net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = by_attributes(block, x)
    return x


def all_by_lists(net: Net, x: Tensor) -> Tensor:
    for norm, part in net.blocks:
        x = x + part(norm(x))
    return x


def norm_of_a_block_after_the_norm(net: Net, x: Tensor) -> Tensor:
    return net.blocks[0].norm(net.after(in_order(net, x)))  # type: ignore[no-any-return, operator, union-attr]


def its_matrices_by_hand(net: Net, x: Tensor) -> Tensor:
    x = net.blocks[0](x)
    part: Any = net.blocks[1].part
    return x + part.down(part.up(x))  # type: ignore[no-any-return]


def a_shorter_sequence(net: Net, x: Tensor) -> Tensor:
    x = net.blocks[0](x)
    return torch.cat((net.blocks[1](x[:, :1]), x[:, 1:]), 1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, tokens = model(batch["tokens"]), batch["tokens"]
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))


def captured(model: nn.Module) -> Any:
    plan = {"embedding": "vocabulary", "head": "vocabulary"}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "head":
            plan[name] = "colwise" if module.in_features == HIDDEN else "rowwise"
    parallel = Parallel(tp=2, sequence_parallel=True, microbatches=2)
    return capture(model, batch_of(), loss, parallel, tp_plan=plan)


def batch_of() -> dict[str, Tensor]:
    return {"tokens": torch.randint(0, VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(2))}


@pytest.mark.parametrize(
    "how",
    [
        *(pytest.param(one, marks=pytest.mark.slow) for one in (in_order, a_norm_before, twice)),
        twice_with_the_norm_between,
        a_norm_on_the_way,
        later_ones_by_attributes,
        all_by_attributes,
        norm_of_a_block_after_the_norm,
        its_matrices_by_hand,
        a_shorter_sequence,
    ],
)
def test_no_way_to_call_blocks_matters(how: Callable[[Any, Tensor], Any]) -> None:
    model = Net(how).double()
    assert_plain(captured(model), model, loss, batch_of())


def test_blocks_without_a_forward() -> None:
    model = Net(all_by_lists, lambda: nn.ModuleList([nn.LayerNorm(HIDDEN), Part()])).double()
    assert_plain(captured(model), model, loss, batch_of())


def test_parts_in_a_list_of_the_block() -> None:
    """The blocks are the outermost list; one in a block is a part of it."""

    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.parts = nn.LayerNorm(HIDDEN), nn.ModuleList([Part(), Part()])

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return x + self.parts[0](y) * self.parts[1](y)  # type: ignore[no-any-return]

    model = Net(in_order, Several, blocks=1).double()
    assert_plain(captured(model), model, loss, batch_of())


def test_blocks_in_a_dict() -> None:
    def by_name(net: Net, x: Tensor) -> Tensor:
        for block in net.blocks.values():
            x = block(x)
        return x

    model: Any = Net(by_name)
    model.blocks = nn.ModuleDict({"first": Block(), "second": Block()})
    model = model.double()
    assert_plain(captured(model), model, loss, batch_of())
