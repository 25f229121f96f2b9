"""Results that depend on the kernel: batch norm in evaluation, embedding bags."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stretto
from stretto.verifying.fake_adapter import no_elements
from tests.capturing.steps import assert_plain, plan_of
from tests.capturing.zoo import WIDTH, BatchNorm, mean_square, rows

PIPELINE = stretto.Parallel(pp=2, microbatches=2)


class Drops(BatchNorm):
    def act(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(x), 0.3, self.training)


class Bag(nn.Module):
    """Ids of rows become one row each; the layer after them makes a second stage."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.bag, self.out = nn.EmbeddingBag(20, WIDTH, mode=mode), nn.Linear(WIDTH, 2)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.bag(ids)))
        return out


def frozen_norms() -> nn.Module:
    model = BatchNorm()
    for norm in model.norms:
        norm.eval().requires_grad_(False)
    return model


def ids() -> Tensor:
    return torch.randint(0, 20, (8, 5), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("model", [BatchNorm().eval(), frozen_norms()], ids=["evaluation", "frozen norms"])
def test_batch_norm_with_its_running_statistics(model: nn.Module, schedule: str) -> None:
    parallel = stretto.Parallel(pp=2, microbatches=2, schedule=schedule, recompute="full")
    assert_plain(model, rows(), mean_square, parallel)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bags(mode: str) -> None:
    parallel = stretto.Parallel(pp=2, microbatches=2, split=["out"])
    assert_plain(Bag(mode), ids(), mean_square, parallel)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA: its own kernels are asked")
@pytest.mark.parametrize(
    ("model", "batch"),
    [(BatchNorm().eval(), rows()), (Bag("sum"), ids()), (Bag("mean"), ids()), (Bag("max"), ids())],
    ids=["batch norm", "sum", "mean", "max"],
)
def test_a_step_for_cuda_has_the_results_of_its_kernels(model: nn.Module, batch: Tensor) -> None:
    how = stretto.Parallel(microbatches=2)
    job = stretto.capture(model, batch, loss=mean_square, parallel=how, device="cuda")
    stretto.verify(stretto.plan(job, cluster=stretto.Cluster(), order="list"))


def test_evaluation_and_check_of_batch_norm_with_dropout() -> None:
    model, batch = Drops(), rows()
    assert "\n0 of" in str(stretto.check(model, batch, mean_square, parallel=PIPELINE))
    plan, models = plan_of(model, batch, mean_square, PIPELINE), {}

    def made(rank: int) -> nn.Module:
        models[rank] = copy.deepcopy(model)
        return models[rank]

    def work(runner: stretto.Runner) -> tuple[float, dict[str, Tensor]]:
        evaluation = stretto.Evaluation(runner, models[runner.rank], batch, mean_square, parallel=PIPELINE)
        runner.step(batch)
        return evaluation.loss([batch]), runner.state_dict()

    ((told, state), _) = stretto.run_threads(plan, made, work)
    model.load_state_dict(state)
    model.eval()
    assert told == pytest.approx(float(mean_square(model, batch).detach()), rel=1e-10)


def test_no_kernel_runs_where_shapes_are_asked_for() -> None:
    batch_norm = torch.ops.aten._native_batch_norm_legit_no_training
    with no_elements(), torch.no_grad():
        for device, kept in (("cpu", 0), ("cuda", 16)):
            x, w = torch.empty(4, 16, device=device), torch.empty(16, device=device)
            made = batch_norm(x, w, w, w, w, 0.1, 1e-5)
            assert [list(t.shape) for t in made] == [[4, 16], [kept], [kept]], device
            with pytest.raises(RuntimeError):
                torch.ops.aten.nonzero(x)
