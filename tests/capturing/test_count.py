"""What a microbatch's loss counts follows from it alone, as a small program; all else is refused."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stretto
from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import CaptureError
from stretto.ir.program import Count, Job
from tests.capturing.zoo import WIDTH, Chain, rows
from tests.clusters import cores

LABELS = torch.tensor([0, -100, 1, 1, -100, -100, 0, 1])


class Buffered(Chain):
    def __init__(self) -> None:
        super().__init__(layers=1)
        self.register_buffer("weights", torch.tensor([0.5, 2.0], dtype=torch.float64))


def batch_of(**more: Any) -> dict[str, Any]:
    return {"x": rows(), "labels": LABELS, "n": stretto.replicated(5), **more}


def captured(loss: Any, model: nn.Module | None = None, **parallel: Any) -> Job:
    return capture(model or Buffered(), batch_of(), loss, Parallel(**{"microbatches": 2, **parallel}))


def total(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"], reduction="sum")


def targets(count: Count | None) -> list[str]:
    assert count is not None
    return [op.target.split(".")[1] for op in count.ops]


class Sum(NamedTuple):
    total: Tensor
    count: Tensor


def test_the_count_is_a_program_of_its_own_and_no_op_of_a_stage() -> None:
    job = captured(lambda model, batch: (total(model, batch), (batch["labels"] != -100).sum()), pp=2)
    assert targets(job.count) == ["ne", "sum"]
    used = {op.target for stage in job.stages for ops in stage.ops.values() for op in ops}
    assert not used & {"aten.ne.Scalar"}
    assert job.mean_over is None
    named = captured(lambda model, batch: Sum(total(model, batch), (batch["labels"] != -100).sum()), pp=2)
    assert named == job


def test_what_does_not_depend_on_the_batch_is_a_count_too() -> None:
    job = captured(lambda model, batch: (total(model, batch), torch.ones_like(batch["x"]).sum()))
    assert targets(job.count)[-1] == "sum"
    assert captured(lambda model, batch: (total(model, batch), 4)).count == Count(4.0)


REFUSED: list[tuple[Any, str]] = [
    (lambda m, mb: (total(m, mb), m(mb["x"]).sum()), "a count that depends on a parameter"),
    (lambda m, mb: (total(m, mb), (m(mb["x"]) > 0).sum()), "depends on parameter '"),
    (lambda m, mb: (total(m, mb), m.weights.sum()), "reads buffer 'weights'"),
    (lambda m, mb: (total(m, mb), F.dropout(mb["x"]).sum()), "is not made from the microbatch alone"),
    (lambda m, mb: (total(m, mb), mb["n"]), "by batch leaf 'n', which is marked stretto.replicated"),
    (lambda m, mb: (total(m, mb), mb["n"] * 2), "is the same for all microbatches"),
    (
        lambda m, mb: (F.cross_entropy(m(mb["x"]), mb["labels"]), (mb["labels"] != -100).sum()),
        "(mean, count)",
    ),
    (lambda m, mb: (m(mb["x"]).mean().float(), 4), "returned (mean, count)"),
]


@pytest.mark.parametrize(("loss", "message"), REFUSED)
def test_counts_that_cannot_be(loss: Any, message: str) -> None:
    with pytest.raises(CaptureError) as caught:
        captured(loss)
    assert message in str(caught.value)


def test_a_mean_with_the_count_one_is_a_mean_of_means() -> None:
    job = captured(lambda model, batch: (model(batch["x"]).mean(), 1))
    assert job.count == Count(1.0)
    assert job.tangent == 0.5


def own_mask(model: nn.Module, batch: Any) -> Tensor:
    kept = (batch["labels"] >= 0).double()
    return (model(batch["x"]).square().mean(1) * kept).sum() / kept.sum().clamp(min=1)


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda model, batch: F.cross_entropy(model(batch["x"]), batch["labels"]), ["ne", "sum"]),
        (own_mask, ["ge", "_to_copy", "sum", "clamp"]),
        (lambda model, batch: total(model, batch), None),
        (lambda model, batch: total(model, batch) / batch["n"], None),
        (lambda model, batch: model(batch["x"]).mean(), None),
        (lambda model, batch: (model(batch["x"]) / batch["labels"].abs().sum()).sum(), None),
    ],
    ids=["cross-entropy", "own mask", "sum", "over the step's number", "mean", "values that are scaled"],
)
def test_what_a_mean_is_over(loss: Any, found: list[str] | None) -> None:
    job = captured(loss)
    assert job.count is None
    assert (job.mean_over and targets(job.mean_over)) == found


def test_labels_that_are_a_leaf_of_the_batch_have_its_shape() -> None:
    job = captured(lambda model, batch: F.cross_entropy(model(batch["x"]), batch["labels"]))
    assert job.mean_over is not None
    kept = next(op for op in job.mean_over.ops if op.name == "kept")
    assert kept.outputs[0] is not None
    assert kept.outputs[0].shape == dict(job.batch)["labels"].shape
    stretto.verify(stretto.plan(job, cluster=cores(), order="list"))


def test_a_spread_vocabulary_is_a_mean_over_its_labels_too() -> None:
    class Classes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4, bias=False)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(x)))

    def mean(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["labels"])

    parallel = Parallel(tp=2, microbatches=2, tp_plan={"head": "vocabulary"})
    job = capture(Classes(), batch_of(), mean, parallel)
    assert targets(job.mean_over)[-1] == "sum"
