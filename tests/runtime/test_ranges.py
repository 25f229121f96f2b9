"""Labels and tokens out of range are told before a step, in our words, on every rank."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stretto
from stretto.models.gpt import GPT, GPTConfig, next_token_sum
from tests.clusters import cores

CLUSTER = cores()


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=50, layers=2, hidden=16, heads=2, context=8), seed=1)


def tokens(*changes: tuple[int, int, int]) -> Tensor:
    made = torch.randint(0, 50, (8, 9), generator=torch.Generator().manual_seed(0))
    for row, column, value in changes:
        made[row, column] = value
    return made


def refused(plan: stretto.Plan, model: nn.Module, batch: object) -> str:
    with pytest.raises(stretto.UsageError) as caught:
        stretto.run_threads(plan, lambda _: copy.deepcopy(model), lambda runner: runner.step(batch))
    return str(caught.value)


@pytest.mark.parametrize("pp", [1, 2])
def test_of_tokens_that_are_also_labels(pp: int) -> None:
    model = gpt()
    job = stretto.capture(model, tokens(), next_token_sum, stretto.Parallel(pp=pp, microbatches=4))
    plan = stretto.plan(job, CLUSTER)
    said = refused(plan, model, tokens((5, 2, 50)))
    assert re.search(
        r"batch leaf 'batch' has 50 \(microbatch 2\), and the (embedding '.*' has 50 rows|loss is over 50 "
        r"classes): give numbers from 0 to 49",
        said,
    )
    # The last token is a label alone, and the first is none.
    assert "the loss is over 50 classes: give numbers from 0 to 49, or -100" in refused(
        plan, model, tokens((0, 8, 777))
    )
    assert "the embedding" in refused(plan, model, tokens((0, 0, -1)))
    stretto.run_threads(
        plan, lambda _: copy.deepcopy(model), lambda runner: runner.step(tokens((1, 8, -100)))
    )


class Two(nn.Module):
    """Columns of one leaf are rows of two tables, of which the second is larger."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large, self.head = nn.Embedding(4, 8), nn.Embedding(40, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.small(ids[:, 0]) + self.large(ids[:, 1]))
        return out


def test_of_parts_of_a_leaf_with_ranges_of_their_own() -> None:
    torch.manual_seed(0)
    model = Two()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        out, label = model(batch["ids"]), batch["label"]
        return F.cross_entropy(out, label, ignore_index=7, reduction="sum"), (label != 7).sum()

    good = {"ids": torch.tensor([[3, 39], [0, 20]] * 2), "label": torch.tensor([2, 7, 0, 1])}
    plan = stretto.plan(stretto.capture(model, good, loss, stretto.Parallel(microbatches=2)), CLUSTER)
    (runner,) = stretto.run_threads(plan, lambda _: model, lambda runner: runner)
    runner.step(good)
    for leaf, at, value, words in (
        ("ids", (1, 0), 4, "the embedding 'small' has 4 rows: give numbers from 0 to 3"),
        ("ids", (3, 1), 40, "the embedding 'large' has 40 rows"),
        (
            "label",
            (2,),
            3,
            "the loss is over 3 classes: give numbers from 0 to 2, or 7, which does not",
        ),
        ("label", (2,), -100, "the loss is over 3 classes"),
    ):
        bad = {key: one.clone() for key, one in good.items()}
        bad[leaf][at] = value
        with pytest.raises(stretto.UsageError, match=re.escape(words)) as caught:
            runner.step(bad)
        assert f"batch leaf {leaf!r} has {value} (microbatch {at[0] // 2})" in str(caught.value)
    runner.step(good)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int32])
def test_of_ids_in_the_dtype_of_a_file_of_them(dtype: torch.dtype) -> None:
    model = gpt()

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor | int]:
        return next_token_sum(model, batch.long())

    given = tokens().to(dtype)
    plan = stretto.plan(stretto.capture(model, given, loss, stretto.Parallel(microbatches=2)), CLUSTER)
    (runner,) = stretto.run_threads(plan, lambda _: model, lambda runner: runner)
    runner.step(given)
    with pytest.raises(stretto.UsageError, match=r"has 50 \(microbatch 1\)"):
        runner.step(tokens((5, 2, 50)).to(dtype))
