"""precision="bf16": the model computes in bfloat16, losses and their mean are float32 numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stretto
from stretto.capturing.evaluation import capture_evaluation
from stretto.capturing.substitutes import LOSSES as FUNCTIONS
from tests.cells import but
from tests.clusters import cores

Batch = dict[str, Tensor]


class Mean(nn.Module):
    """A loss that a model takes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


LOSSES: dict[str, Callable[[Tensor, Batch], Any]] = {
    "cross-entropy": lambda out, batch: F.cross_entropy(out, batch["label"]),
    "squares": lambda out, batch: F.mse_loss(out, batch["y"]),
    "written out": lambda out, batch: (out - batch["y"]).square().mean(),
    "torch.mean": lambda out, batch: torch.mean((out - batch["y"]).abs()),
    "sum and count": lambda out, batch: (F.l1_loss(out, batch["y"], reduction="sum"), batch["y"].numel()),
    "log-likelihood": lambda out, batch: F.nll_loss(out, batch["label"]),
    "bits": lambda out, batch: F.binary_cross_entropy_with_logits(out, batch["share"]),
    "divergence": lambda out, batch: F.kl_div(out, batch["share"], reduction="batchmean"),
    "Huber": lambda out, batch: F.huber_loss(out, batch["y"], delta=0.5),
    "Poisson": lambda out, batch: F.poisson_nll_loss(out, batch["share"]),
    "triplets": lambda out, batch: F.triplet_margin_loss(out, batch["y"], batch["share"]),
    "of a class": lambda out, batch: nn.SmoothL1Loss()(out, batch["y"]),
}


def batch(rows: int = 16) -> Batch:
    made = torch.Generator().manual_seed(3)
    x, y = (torch.randn(rows, n, generator=made) for n in (8, 5))
    label = torch.randint(0, 5, (rows,), generator=made)
    return {"x": x, "y": y, "share": y.sigmoid(), "label": label}


LIKE_OTHERS = ("torch.mean", "log-likelihood", "bits", "Huber", "Poisson", "divergence")


@pytest.mark.parametrize("name", but(LOSSES, LIKE_OTHERS))
def test_the_loss_and_the_mean_of_microbatches_are_in_float32(name: str) -> None:
    torch.manual_seed(1)
    model, data = Mean(), batch()

    def loss(model: nn.Module, batch: Batch) -> Any:
        return LOSSES[name](model(batch["x"]), batch)

    parallel = stretto.Parallel(pp=2, microbatches=4)
    job = stretto.capture(model, data, loss, parallel, precision="bf16")
    assert job.loss_spec.dtype == "float32"
    assert job.param_dtype == "bfloat16"
    assert capture_evaluation(model, data, loss, job).loss_spec.dtype == "float32"
    plan = stretto.plan(job, cores())
    found = stretto.run_threads(plan, lambda _: copy.deepcopy(model), lambda runner: float(runner.step(data)))

    low = copy.deepcopy(model).bfloat16()
    given = {key: one.bfloat16() if one.is_floating_point() else one for key, one in data.items()}
    out = low(given["x"])
    if name in ("written out", "torch.mean"):  # what is written out is computed as it is written
        off = out - given["y"]
        expected = (off.square() if name == "written out" else off.abs()).float().mean()
    else:
        expected = LOSSES[name](
            out.float(), {**given, "y": given["y"].float(), "share": given["share"].float()}
        )
        expected = expected[0] / expected[1] if isinstance(expected, tuple) else expected
    assert found == [pytest.approx(float(expected), rel=1e-6)] * 2
    assert float(torch.tensor(found[0]).bfloat16()) != found[0], "it has more than 8 bits"


def test_a_model_in_its_own_precision_is_left_alone() -> None:
    model, data = Mean().double(), {key: one.double() for key, one in batch().items()}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch["x"]), batch["y"])

    assert stretto.capture(model, data, loss, stretto.Parallel()).loss_spec.dtype == "float64"
    low, given = Mean().bfloat16(), {key: one.bfloat16() for key, one in batch().items()}
    assert stretto.capture(low, given, loss, stretto.Parallel()).loss_spec.dtype == "bfloat16"


def test_every_loss_function_of_pytorch_takes_part() -> None:
    """But the one that is given a head's weights, whose product would be in float32, too."""
    ends = ("_loss", "cross_entropy", "_with_logits", "kl_div")
    names = {name for name in dir(F) if name.endswith(ends) and not name.startswith("_")}
    names -= {"linear_cross_entropy"}
    assert {name for name in names if getattr(F, name) not in FUNCTIONS} == set()
