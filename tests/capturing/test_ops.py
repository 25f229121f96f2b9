"""Ops and modules that capture treats in a way of their own: norms, bags, derivatives, linear algebra."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import stretto
from tests.capturing.steps import assert_plain, plan_of
from tests.capturing.zoo import WIDTH, BatchNorm, Chain, mean_square, rows
from tests.cells import but, slow
from tests.clusters import cores

LAYERS = 2
PIPELINE = stretto.Parallel(pp=2, microbatches=2, schedule="zb-h1")
RECOMPUTED = stretto.Parallel(pp=2, microbatches=2, schedule="zb-h1", recompute="full")


def with_norms(make: Callable[[int], nn.Module]) -> BatchNorm:
    model = BatchNorm(layers=LAYERS)
    model.norms = nn.ModuleList(make(WIDTH) for _ in range(LAYERS)).double()
    return model


def over_all_batches(track: bool = True) -> BatchNorm:
    return with_norms(lambda n: nn.BatchNorm1d(n, momentum=None, track_running_stats=track))


def synchronised(momentum: float | None = 0.1) -> BatchNorm:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(BatchNorm(layers=LAYERS))
    assert isinstance(model, BatchNorm)
    assert isinstance(model.norms[0], nn.SyncBatchNorm)
    for norm in model.norms:
        norm.momentum = momentum
    return model


def frozen_norms(model: BatchNorm) -> BatchNorm:
    for norm in model.norms:
        norm.eval().requires_grad_(False)
    return model


class Bag(nn.Module):
    """Ids of rows become one row each; the layer after them makes a second stage."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.bag, self.out = nn.EmbeddingBag(20, WIDTH, mode=mode), nn.Linear(WIDTH, 2)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.bag(ids)))


IDS = torch.randint(0, 20, (8, 5), generator=torch.Generator().manual_seed(2))


class Solves(Chain):
    """`of` makes of a square matrix and rows other rows."""

    def __init__(self, of: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(LAYERS)
        self.of = of

    def act(self, x: Tensor) -> Tensor:
        near_one = 0.3 * self.layers[0].weight + torch.eye(WIDTH, dtype=x.dtype)
        return torch.tanh(self.of(near_one, x))


def orthogonal() -> nn.Module:
    """By Cayley's map."""
    model = Chain(LAYERS)
    nn.utils.parametrizations.orthogonal(model.layers[1], orthogonal_map="cayley")
    return model


class Names(nn.Module):
    """Python writes none of these names, and takes some of them for one another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in ("x²", "ﬁ", "fi", "1 a-b", "class"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))
        for at, name in enumerate(("g²", "g2", "g_")):
            self.register_parameter(name, nn.Parameter(torch.full((WIDTH,), 1.0 + at)))
        self.register_buffer("ﬀ", torch.full((WIDTH,), 0.5))
        self.register_buffer("ff", torch.full((WIDTH,), 0.25))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = torch.tanh(layer(x)) * self._parameters["g²"] + self._buffers["ﬀ"]
        return x * self.g2 + self.ff * self.g_


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a mean over all batches": over_all_batches,
    "without statistics": lambda: over_all_batches(False),
    "a mean over all batches, evaluated": lambda: over_all_batches().eval(),
    "without statistics, evaluated": lambda: over_all_batches(False).eval(),
    "synchronised norms": synchronised,
    "synchronised over all batches": lambda: synchronised(None),
    "norms in evaluation": lambda: BatchNorm(layers=LAYERS).eval(),
    "frozen norms": lambda: frozen_norms(BatchNorm(layers=LAYERS)),
    "solve": lambda: Solves(lambda w, x: torch.linalg.solve(w, x.T).T),
    "inv": lambda: Solves(lambda w, x: x @ torch.linalg.inv(w)),
    "cholesky": lambda: Solves(lambda w, x: x @ torch.linalg.cholesky(w @ w.T)),
    "lu": lambda: Solves(lambda w, x: torch.linalg.lu_solve(*torch.linalg.lu_factor(w), x.T).T),
    "orthogonal": orthogonal,
    "names that are no identifiers": Names,
}
TWO_SCHEDULES = ("norms in evaluation", "frozen norms")


LIKE_OTHERS = (
    *("a mean over all batches, evaluated", "without statistics, evaluated", "norms in evaluation"),
    *("synchronised over all batches", "inv", "cholesky", "solve"),
)
"""Each is between two others."""


@pytest.mark.parametrize("name", but(MODELS, LIKE_OTHERS))
def test_models_are_the_plain_ones(name: str) -> None:
    assert_plain(MODELS[name](), rows(), mean_square, RECOMPUTED if name in TWO_SCHEDULES else PIPELINE)
    if name in TWO_SCHEDULES:
        layout = stretto.Parallel(pp=2, microbatches=2, schedule="1f1b", recompute="full")
        assert_plain(MODELS[name](), rows(), mean_square, layout)


@pytest.mark.parametrize("mode", [slow("sum"), "mean", "max"])
def test_embedding_bags(mode: str) -> None:
    assert_plain(Bag(mode), IDS, mean_square, stretto.Parallel(pp=2, microbatches=2, split=["out"]))


def along(model: nn.Module, batch: Tensor) -> Tensor:
    out, tangent = torch.func.jvp(model, (batch,), (torch.ones_like(batch),))
    return (out**2).mean() + (tangent**2).mean()


def curvature(model: nn.Module, batch: Tensor) -> Tensor:
    of_one = torch.func.hessian(lambda x: model(x).sum())(batch[0])
    return mean_square(model, batch) + (of_one**2).mean()


def dual(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        given = torch.autograd.forward_ad.make_dual(batch, torch.ones_like(batch))
        out, tangent = torch.autograd.forward_ad.unpack_dual(model(given))
    return (out**2).mean() + (tangent**2).mean()


@pytest.mark.parametrize(
    ("loss", "layout"),
    [slow(along, PIPELINE), (curvature, PIPELINE), (dual, PIPELINE), (along, RECOMPUTED)],
    ids=["along", "curvature", "dual", "along, recomputed"],
)
def test_derivatives_in_forward_mode(loss: Callable[..., Tensor], layout: stretto.Parallel) -> None:
    """Recomputed: zeros that the backward alone reads are not computed again."""
    assert_plain(Chain(LAYERS), rows(), loss, layout)


def test_a_transform_that_pytorch_cannot_trace_leaves_autograd_as_it_was() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out, tangent = torch.func.linearize(model, batch)
        return out.mean() + tangent(batch).mean()

    with pytest.raises(stretto.CaptureError, match="PyTorch's tracer cannot take this call"):
        stretto.capture(Chain(LAYERS), rows(), loss, PIPELINE)
    excluded = torch._C._dispatch_tls_local_exclude_set()
    assert not excluded.has(torch._C.DispatchKey.AutogradOther)
    assert mean_square(Chain(LAYERS), rows()).requires_grad


@pytest.mark.parametrize("of", [torch.linalg.inv, torch.linalg.cholesky])
def test_a_matrix_that_is_refused_makes_loss_and_gradients_nan(of: Callable[[Tensor], Tensor]) -> None:
    """The plain model raises an error there; no step goes on with what was left of it."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return mean_square(model, batch) + of(batch[:, :4] - 100).sum() * 1e-9

    batch = torch.ones(8, WIDTH, dtype=torch.float64)
    with pytest.raises(torch.linalg.LinAlgError):
        loss(Chain(LAYERS), batch[:4])
    plan = plan_of(Chain(LAYERS), batch, loss, PIPELINE)

    def work(runner: stretto.Runner) -> list[Tensor]:
        value = runner.step(batch)
        return [value, *(p.grad for p in runner.parameters() if p.grad is not None)]

    for found in stretto.run_threads(plan, lambda _: Chain(LAYERS), work):
        assert all(bool(x.isnan().all()) for x in found)


def test_buffers_after_several_steps() -> None:
    model, batch = over_all_batches(), rows()
    plan, own = plan_of(model, batch, mean_square, stretto.Parallel(microbatches=2)), copy.deepcopy(model)
    runner = stretto.Runner(plan, model)
    for _ in range(3):
        runner.step(batch)
        for piece in batch.chunk(2):
            mean_square(own, piece)
    expected = dict(own.named_buffers())
    assert int(expected["norms.0.num_batches_tracked"]) == 6
    for name, buffer in runner.named_buffers():
        torch.testing.assert_close(buffer, expected[name], rtol=1e-12, atol=0)


class Drops(BatchNorm):
    def act(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(x), 0.3, self.training)


def test_evaluation_and_check_of_batch_norm_with_dropout() -> None:
    model, batch, layout = Drops(layers=LAYERS), rows(), stretto.Parallel(pp=2, microbatches=2)
    assert "\n0 of" in str(stretto.check(model, batch, mean_square, parallel=layout))
    plan = plan_of(model, batch, mean_square, layout)
    models = [copy.deepcopy(model) for _ in range(2)]

    def work(runner: stretto.Runner) -> tuple[float, dict[str, Tensor]]:
        evaluation = stretto.Evaluation(runner, models[runner.rank], batch, mean_square, parallel=layout)
        runner.step(batch)
        return evaluation.loss([batch]), runner.state_dict()

    ((value, state), _) = stretto.run_threads(plan, models.__getitem__, work)
    model.load_state_dict(state)
    model.eval()
    assert value == pytest.approx(float(mean_square(model, batch).detach()), rel=1e-10)


def test_a_synchronised_norm_is_captured_where_there_are_processes(tmp_path: object) -> None:
    """PyTorch refuses it on processors where there are several, of which these are one copy."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        job = stretto.capture(synchronised(), rows(), mean_square, PIPELINE)
    finally:
        dist.destroy_process_group()
    assert len(job.stages) == 2


def test_a_frozen_synchronised_norm_has_no_statistics_to_reduce() -> None:
    model, batch = frozen_norms(synchronised()), rows()
    own = copy.deepcopy(model)
    for piece in batch.chunk(4):
        (mean_square(own, piece) / 4).backward()
    plan = plan_of(model, batch, mean_square, stretto.Parallel(dp=2, microbatches=2))
    expected = {name: p.grad for name, p in own.named_parameters()}

    def work(runner: stretto.Runner) -> None:
        runner.step(batch)
        for name, parameter in runner.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-12)

    stretto.run_threads(plan, lambda _: copy.deepcopy(model), work)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA: its own kernels are asked")
@pytest.mark.parametrize(
    ("model", "batch"),
    [(BatchNorm(layers=LAYERS).eval(), rows()), (Bag("sum"), IDS), (Bag("mean"), IDS), (Bag("max"), IDS)],
    ids=["batch norm", "sum", "mean", "max"],
)
def test_a_step_for_cuda_has_the_results_of_its_kernels(model: nn.Module, batch: Tensor) -> None:
    how = stretto.Parallel(microbatches=2)
    job = stretto.capture(model, batch, loss=mean_square, parallel=how, device="cuda")
    stretto.verify(stretto.plan(job, cluster=cores(), order="list"))
