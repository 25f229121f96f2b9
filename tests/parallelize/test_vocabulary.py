"""Split logits look like the whole to a model's code, and give its numbers whatever the code does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.config import Parallel
from tests.parallelize.equality import step
from tests.runtime.equality import plain

ROWS, TOKENS, HIDDEN, VOCAB = 2, 5, 4, 8
PLAN = {"embedding": "vocabulary", "head": "vocabulary"}


class Head(nn.Module):
    """An embedding and an output head."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(VOCAB, HIDDEN, padding_idx=padding)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.embedding(tokens))


def flat(logits: Any, targets: Tensor) -> tuple[Any, Tensor]:
    return logits.view(-1, VOCAB), targets.reshape(-1)


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "mean": lambda x, t: F.cross_entropy(*flat(x, t)),
    "flattened": lambda x, t: F.cross_entropy(x.flatten(0, 1), t.flatten()),
    "sum": lambda x, t: F.cross_entropy(*flat(x, t), reduction="sum"),
    "none": lambda x, t: F.cross_entropy(*flat(x, t), reduction="none").square().mean(),
    "ignored": lambda x, t: F.cross_entropy(*flat(x, t.masked_fill(t == 3, 2)), ignore_index=2),
    "shifted": lambda x, t: F.cross_entropy(*flat(x[..., :-1, :].contiguous(), t[:, 1:])),
    "scaled": lambda x, t: F.cross_entropy(*flat(2.0 * torch.tanh(x / 2.0), t)),
    "inferred dim": lambda x, t: F.cross_entropy(x.reshape(ROWS * TOKENS, -1), t.flatten()),
    "typed": lambda x, t: F.cross_entropy(*flat(x.to(torch.float64).double(), t)),
    # What parts cannot do is done on the whole.
    "smoothed": lambda x, t: F.cross_entropy(*flat(x, t), label_smoothing=0.1),
    "weighted": lambda x, t: F.cross_entropy(*flat(x, t), weight=torch.arange(1.0, VOCAB + 1).double()),
    "probabilities": lambda x, t: F.cross_entropy(x.view(-1, VOCAB), F.one_hot(t.flatten(), VOCAB).double()),
    "by hand": lambda x, t: -x.log_softmax(-1).gather(-1, t.unsqueeze(-1)).mean(),
    "transposed": lambda x, t: F.cross_entropy(x.transpose(1, 2), t),
    "one column": lambda x, t: x[..., 3].square().mean() + x[0, 1, 2],
    "added": lambda x, t: F.cross_entropy(*flat(x + torch.arange(VOCAB).double(), t)),
    "mixed shape": lambda x, t: x.view(ROWS, TOKENS, 2, -1).square().mean(),
}


def tokens_of(seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (ROWS, TOKENS), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_on_split_logits(name: str, tp: int) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return LOSSES[name](model(batch["tokens"]), batch["targets"])

    check(Head().double(), loss, tp)


def test_the_padding_token_never_learns() -> None:
    model = Head(padding=3).double()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return LOSSES["mean"](model(batch["tokens"]), batch["targets"])

    grads = check(model, loss, 2)
    assert not grads["embedding.weight"][3].any()


@pytest.mark.parametrize("added", [-float("inf"), -1000.0, 1000.0])
def test_parts_whose_logits_are_far_apart(added: float) -> None:
    """Each rank adds up below the maximum of its own part; one whose part is all -inf adds nothing."""
    model = Head().double()
    with torch.no_grad():
        model.head.bias[VOCAB // 2 :] += added

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return LOSSES["mean"](model(batch["tokens"]), batch["targets"])

    check(model, loss, 2, tokens_of(2) % (VOCAB // 2))


def check(model: nn.Module, loss: Any, tp: int, targets: Tensor | None = None) -> dict[str, Tensor]:
    batch = {"tokens": tokens_of(1), "targets": tokens_of(2) if targets is None else targets}
    expected = plain(copy.deepcopy(model), batch, loss)
    told, grads = step(capture(model, batch, loss, Parallel(tp=tp), tp_plan=PLAN), model, batch)
    assert torch.allclose(told, expected.loss, rtol=1e-12, atol=0)
    for parameter, want in expected.grads.items():
        assert want is not None
        assert torch.allclose(grads[parameter], want, rtol=1e-10, atol=1e-14), parameter
    return grads


def test_only_numbers_for_each_token_are_communicated() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return LOSSES["mean"](model(batch["tokens"]), batch["targets"])

    batch = {"tokens": tokens_of(1), "targets": tokens_of(2)}
    job = capture(Head(), batch, loss, Parallel(tp=2), tp_plan=PLAN)
    found = [op.collective for ops in job.stages[0].ops.values() for op in ops if op.collective is not None]
    hidden, numbers = ROWS * TOKENS * HIDDEN * 4, 2 * 3 * ROWS * TOKENS * 4
    # Embedding; both ranks' three numbers a token; the gradient of the head's input.
    assert sorted((c.kind, c.nbytes) for c in found) == [
        ("all_gather", numbers),
        ("all_reduce", hidden),
        ("all_reduce", hidden),
    ]
