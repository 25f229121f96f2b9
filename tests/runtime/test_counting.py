"""Counts of microbatches, ranks with different batches, marks, and the note on means."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stretto
from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import UsageError
from stretto.ir.plan import Plan
from stretto.runtime import run_threads
from stretto.runtime.counting import Counter
from stretto.runtime.fit import fit_batch
from tests.capturing.zoo import Chain, rows
from tests.runtime.equality import lowered

LABELS = torch.tensor([0, -100, 1, 1, -100, -100, 0, 1])
CPU = torch.device("cpu")
MODEL = Chain()


@torch.library.custom_op("stretto_test::tally", mutates_args=())
def tally(labels: Tensor) -> list[Tensor]:
    """An op that returns a list."""
    return [(labels >= 0).sum(), labels.clone()]


@tally.register_fake
def _(labels: Tensor) -> list[Tensor]:
    return [labels.new_empty(()), labels.new_empty(labels.shape)]


def batch_of(labels: Tensor = LABELS, scale: Any = 2.0) -> dict[str, Any]:
    return {"x": rows(), "labels": labels, "scale": stretto.replicated(scale)}


def summed(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(model(batch["x"]), batch["labels"], reduction="sum")
    return total, (batch["labels"] != -100).sum()


def tallied(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return summed(model, batch)[0], tally(batch["labels"])[0] * batch["scale"]


def mean(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"])


def plan_for(loss: Any, **parallel: Any) -> Plan:
    return lowered(capture(MODEL, batch_of(), loss, Parallel(**{"microbatches": 2, **parallel})), "1f1b")


def steps(plan: Plan, *batches: Any) -> list[str]:
    """Steps with these batches; the warnings in them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_threads(plan, lambda _: copy.deepcopy(MODEL), lambda r: [float(r.step(b)) for b in batches])
    return [str(w.message) for w in caught]


@pytest.mark.parametrize(("loss", "factor"), [(summed, 1), (tallied, 2)])
def test_each_microbatch_is_counted(loss: Any, factor: int) -> None:
    job = plan_for(loss, microbatches=4).job
    assert job.count is not None
    counter = Counter(job, job.count, CPU)
    counts = counter.counts(fit_batch(job, batch_of(), CPU))
    assert counts.dtype is torch.float64
    assert counts.tolist() == [1 * factor, 2 * factor, 0 * factor, 2 * factor]


@pytest.mark.parametrize("layout", [{"dp": 2}, {"pp": 2}], ids=str)
def test_ranks_that_are_given_different_batches_are_refused(layout: dict[str, int]) -> None:
    def work(runner: stretto.Runner) -> str:
        with pytest.raises(UsageError) as caught:
            runner.step(batch_of(LABELS if runner.rank == 0 else LABELS.roll(1).clamp(min=0)))
        return str(caught.value)

    told = run_threads(plan_for(summed, **layout), lambda _: copy.deepcopy(MODEL), work)
    message = (
        "rank 1 counts 8 in the batch, rank 0 5: every rank must be given the full batch, the same on all"
    )
    assert all(message in text for text in told)


def test_a_mean_over_unequal_numbers_of_labels_says_so_once() -> None:
    told = steps(plan_for(mean, pp=2, dp=2), batch_of(), batch_of())
    assert len(told) == 1
    assert "returns a mean, and microbatches count unequally (1, 2, 0, 2)" in told[0]
    assert "the mean of their means" in told[0]
    assert 'return (sum, count), such as F.cross_entropy(..., reduction="sum"), (labels != -100)' in told[0]


@pytest.mark.parametrize("loss", [summed, lambda model, batch: summed(model, batch)[0] / batch["scale"]])
def test_other_losses_say_nothing(loss: Any) -> None:
    assert steps(plan_for(loss), batch_of()) == []
    assert steps(plan_for(mean, microbatches=1), batch_of()) == [], "one microbatch is the full batch"


NOT_MARKED = "is not marked stretto.replicated, but was when"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"scale": 2.0}, NOT_MARKED),
        ({"scale": torch.tensor(2.0)}, NOT_MARKED),
        ({"x": stretto.replicated(rows())}, "is marked stretto.replicated, but was not when"),
        ({"scale": stretto.replicated(torch.ones(2))}, r"has shape \[2\]"),
        ({"scale": stretto.replicated(torch.tensor(2j))}, "complex64"),
    ],
    ids=["a number", "a tensor", "marked", "shape", "dtype"],
)
def test_marks_are_those_of_the_captured_batch(change: dict[str, Any], word: str) -> None:
    job = plan_for(summed).job
    fit_batch(job, batch_of(scale=3), CPU)
    with pytest.raises(UsageError, match=word):
        fit_batch(job, {**batch_of(), **change}, CPU)


def test_a_constant_that_changes_names_the_mark() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return mean(model, batch) * batch["scale"]

    job = capture(MODEL, {**batch_of(), "scale": 2}, loss, Parallel(microbatches=2))
    with pytest.raises(
        UsageError, match=r"'scale' is 3, but .* 2: .* Mark a number .* stretto\.replicated\(x\), in"
    ):
        fit_batch(job, {**batch_of(), "scale": 3}, CPU)
