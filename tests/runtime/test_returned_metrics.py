"""Metrics that a loss function returns come back from the step as the plain model makes them of the batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.runtime import Runner, run_threads
from tests.cells import slow
from tests.clusters import cores
from tests.runtime.equality import Result, assert_equal, joined, tokens

TOLERANCE = 1e-10
ROWS, COLUMNS, WIDTH, KINDS = 8, 8, 8, 61


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.table, self.head = nn.Embedding(KINDS, WIDTH), nn.Linear(WIDTH, KINDS, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(4)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x)
        made: Tensor = self.head(x)
        return made


PLAN = {"layers.*.0": "colwise", "layers.*.2": "rowwise"}


def parts(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Sum, count and metrics, each joined otherwise."""
    labels = batch["labels"]
    kept = labels != -100
    logits = model(batch["ids"])
    total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    right = (logits.argmax(-1) == labels).sum()
    probability = logits.softmax(-1)
    entropy = -(probability * probability.log()).sum(-1)
    by_kind = nn.functional.one_hot(labels.clamp(min=0), KINDS).flatten(0, 1).sum(0)
    return (
        total,
        kept.sum(),
        {
            "accuracy": (right, kept.sum()),
            "entropy": entropy.mean(),
            "kinds": (by_kind, "sum"),
            "tokens": (kept.sum(), "sum"),
            "scale": 3,
            "rows": (labels.shape[0], "sum"),
            "per row": (entropy.sum(), labels.shape[0]),
        },
    )


def batch_of(columns: int = COLUMNS, rows: int = ROWS) -> dict[str, Tensor]:
    labels = tokens(rows, columns=columns, seed=6)
    labels[0, :3] = labels[-1, 1:6] = -100  # microbatches and ranks count unequally
    return {"ids": tokens(rows, columns=columns), "labels": labels}


def of_plain_model(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Result, dict[str, Any]]:
    own = copy.deepcopy(model)
    total, count, metrics = parts(own, batch)
    (total / count).backward()
    found = {n: p.grad for n, p in own.named_parameters()}
    right, kept = metrics["accuracy"]
    expected = {
        "accuracy": right.double() / kept,
        "entropy": metrics["entropy"].detach(),
        "kinds": metrics["kinds"][0],
        "tokens": kept,
        "scale": torch.tensor(3.0),
        "rows": torch.tensor(float(len(batch["ids"]))),
        "per row": metrics["per row"][0].detach() / len(batch["ids"]),
    }
    return Result((total / count).detach(), found), expected


def check_metrics(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype is torch.float64
        assert found[name].shape == value.shape
        assert torch.allclose(found[name], value.double(), rtol=TOLERANCE, atol=0.0), name


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2},
        slow({"dp": 2}),
        {"cp": 2, "dp": 2},
        slow({"tp": 2}),
        slow({"tp": 2, "sequence_parallel": True}),
        slow({"pp": 2, "cp": 2, "tp": 2}),
        slow({"dp": 2, "zero": 3, "pp": 2}),
    ],
    ids=str,
)
def test_metrics_are_those_of_the_batch(layout: dict[str, Any]) -> None:
    model = Net().double()
    plan = None
    if "tp" in layout:
        plan = PLAN
    job = stretto.capture(model, batch_of(), parts, stretto.Parallel(microbatches=2, **layout), tp_plan=plan)
    made = stretto.plan(job, cluster=cores(), order="list")

    def work(runner: Runner) -> Any:
        loss, metrics = runner.step(batch_of())
        assert runner.observed() == ()
        grads = {n: p.grad for n, p in runner.named_parameters() if p.grad is not None}
        return (runner.coordinates, loss, grads), metrics

    results = run_threads(made, lambda _: copy.deepcopy(model), work)
    want, expected = of_plain_model(model, batch_of())
    assert_equal(joined(made, [one for one, _ in results]), want, TOLERANCE)
    for _, metrics in results:
        check_metrics(metrics, expected)


def test_beside_a_mean_and_over_steps_of_several_shapes() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        total, count, metrics = parts(model, batch)
        return total / count, metrics

    model = Net().double()
    job = stretto.capture(model, batch_of(), loss, stretto.Parallel())
    runner = Runner(
        [stretto.plan(one, cluster=cores()) for one in (job, job.with_batch(batch_of(6)))],
        copy.deepcopy(model),
    )
    for columns in (COLUMNS, 6, COLUMNS):
        value, metrics = runner.step(batch_of(columns))
        want, expected = of_plain_model(model, batch_of(columns))
        assert abs(float(value - want.loss)) < TOLERANCE
        check_metrics(metrics, expected)


def test_in_bfloat16_they_are_summed_in_float64() -> None:
    """Of 16,384 ones bfloat16 adds up 256."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        logits = model(batch["ids"])
        return logits.square().mean(), {"ones": (logits.new_ones(()), "sum")}

    batch = {"ids": tokens(512, columns=2)}
    job = stretto.capture(Net(), batch, loss, stretto.Parallel(microbatches=512), precision="bf16")
    _, metrics = Runner(stretto.plan(job, cluster=cores(), order="list"), Net()).step(batch)
    assert float(metrics["ones"]) == 512.0


def test_constants_are_metrics() -> None:
    def constant(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return model(x).sum(), {"one": torch.tensor(1.0), "three": 3, "ones": (torch.ones(2), "sum")}

    job = stretto.capture(nn.Linear(3, 3), torch.ones(4, 3), constant, stretto.Parallel(microbatches=2))
    plan = stretto.plan(job, cluster=cores(), order="list")
    _, metrics = Runner(plan, nn.Linear(3, 3)).step(torch.ones(4, 3))
    assert {name: value.tolist() for name, value in metrics.items()} == {
        "one": 1.0,
        "three": 3.0,
        "ones": [2.0, 2.0],
    }


def test_check_and_evaluation_take_the_loss() -> None:
    model = Net().double()
    assert not stretto.check(model, batch_of(), parts, stretto.Parallel(microbatches=2)).wrong
    ours, parallel = copy.deepcopy(model), stretto.Parallel(microbatches=2)
    job = stretto.capture(ours, batch_of(), parts, parallel)
    runner = Runner(stretto.plan(job, cluster="local", order="list"), ours)
    evaluation = stretto.Evaluation(runner, ours, batch_of(), parts, parallel=parallel)
    assert abs(evaluation.loss([batch_of()]) - float(of_plain_model(model, batch_of())[0].loss)) < TOLERANCE
    assert evaluation.observed() == ()


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"a": "text"}, r"returned metrics, of which 'a' is a str: give a number, or a tensor"),
        (
            {"a": torch.zeros(5000)},
            r"'a' is a tensor of shape \[5000\]: give a number, or a tensor of at most 4096",
        ),
        ({"a": (torch.zeros(()), "max")}, r"'a' is joined by 'max': give 'mean', 'sum', or a count"),
        (
            {"a": lambda batch: (1, batch["labels"][0, :2])},
            r"'a' has a count of shape \[2\]: give one number",
        ),
        ({"a": None}, r"'a' is None"),
    ],
)
def test_what_is_no_metric(metrics: dict[str, Any], words: str) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        return model(batch["ids"]).mean(), {
            "a": metrics["a"](batch) if callable(metrics["a"]) else metrics["a"]
        }

    with pytest.raises(stretto.StrettoError, match=words):
        stretto.capture(Net(), batch_of(), loss, stretto.Parallel())
