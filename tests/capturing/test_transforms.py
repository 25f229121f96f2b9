"""Derivatives within the loss, linear algebra, odd names; control flow and collectives are refused."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import stretto
from stretto.capturing.calls_adapter import OpsSeen
from stretto.capturing.torch_state_adapter import tracing_state
from tests.capturing.steps import assert_plain, plan_of
from tests.capturing.zoo import WIDTH, Chain, mean_square, rows

PIPELINE = stretto.Parallel(pp=2, microbatches=2, schedule="zb-h1")


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


@pytest.mark.parametrize("loss", [along, curvature, dual])
def test_derivatives_in_forward_mode(loss: Callable[..., Tensor]) -> None:
    assert_plain(Chain(), rows(), loss, PIPELINE)


def test_zeros_that_the_backward_alone_reads_are_not_computed_again() -> None:
    parallel = stretto.Parallel(pp=2, microbatches=2, schedule="zb-h1", recompute="full")
    assert_plain(Chain(), rows(), along, parallel)


def test_a_transform_that_pytorch_cannot_trace_leaves_autograd_as_it_was() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out, tangent = torch.func.linearize(model, batch)
        return out.mean() + tangent(batch).mean()

    with pytest.raises(stretto.CaptureError, match="PyTorch's tracer cannot take this call"):
        stretto.capture(Chain(), rows(), loss, PIPELINE)
    excluded = torch._C._dispatch_tls_local_exclude_set()
    assert not excluded.has(torch._C.DispatchKey.AutogradOther)
    assert mean_square(Chain(), rows()).requires_grad


class Solves(Chain):
    """`of` makes of a square matrix and rows other rows."""

    def __init__(self, of: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.of = of

    def act(self, x: Tensor) -> Tensor:
        near_one = 0.3 * self.layers[0].weight + torch.eye(WIDTH, dtype=x.dtype)
        return torch.tanh(self.of(near_one, x))


@pytest.mark.parametrize(
    "of",
    [
        lambda w, x: torch.linalg.solve(w, x.T).T,
        lambda w, x: x @ torch.linalg.inv(w),
        lambda w, x: x @ torch.linalg.cholesky(w @ w.T),
        lambda w, x: torch.linalg.lu_solve(*torch.linalg.lu_factor(w), x.T).T,
    ],
    ids=["solve", "inv", "cholesky", "lu"],
)
def test_linear_algebra_whose_matrices_are_checked(of: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert_plain(Solves(of), rows(), mean_square, PIPELINE)


def test_orthogonal_weights_by_cayleys_map() -> None:
    model = Chain()
    nn.utils.parametrizations.orthogonal(model.layers[1], orthogonal_map="cayley")
    assert_plain(model, rows(), mean_square, PIPELINE)


@pytest.mark.parametrize("of", [torch.linalg.inv, torch.linalg.cholesky])
def test_a_matrix_that_is_refused_makes_loss_and_gradients_nan(of: Callable[[Tensor], Tensor]) -> None:
    """The plain model raises an error there; no step goes on with what was left of it."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return mean_square(model, batch) + of(batch[:, :4] - 100).sum() * 1e-9

    batch = torch.ones(8, WIDTH, dtype=torch.float64)
    with pytest.raises(torch.linalg.LinAlgError):
        loss(Chain(), batch[:4])
    plan = plan_of(Chain(), batch, loss, PIPELINE)

    def work(runner: stretto.Runner) -> list[Tensor]:
        value = runner.step(batch)
        return [value, *(p.grad for p in runner.parameters() if p.grad is not None)]

    for found in stretto.run_threads(plan, lambda _: Chain(), work):
        assert all(bool(x.isnan().all()) for x in found)


def test_the_exporters_checks_have_no_effect_while_a_model_is_traced() -> None:
    matrix = torch.zeros(2, 2)
    with tracing_state(), OpsSeen() as seen:
        torch.linalg.inv(matrix)
    assert [int(info) for info in seen.infos] == [1]
    assert bool(seen.not_a_number(torch.ones(())).isnan())
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.inv(matrix)


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


def test_names_that_are_no_identifiers() -> None:
    assert_plain(Names(), rows(), mean_square, PIPELINE)


CONTROL = "compute both sides and choose with torch.where, write a loop as one of Python"


@pytest.mark.parametrize(
    "act",
    [
        lambda x: torch.cond(x.sum() > 0, lambda t: t.tanh(), lambda t: t.sin(), (x,)),
        lambda x: while_loop(lambda i, t: i < 3, lambda i, t: (i + 1, t.sin()), (x[0, 0].long(), x))[1],
        pytest.param(
            lambda x: scan(lambda c, t: (c + t, c * t), torch.zeros_like(x[0]), x)[1], marks=pytest.mark.slow
        ),
    ],
    ids=["cond", "while_loop", "scan"],
)
def test_control_flow_operators(act: Callable[[Tensor], Tensor]) -> None:
    model = Chain()
    model.act = act
    with pytest.raises(stretto.CaptureError) as caught:
        stretto.capture(model, rows(), mean_square, PIPELINE)
    assert CONTROL in str(caught.value)


def test_an_error_within_a_branch_is_the_users() -> None:
    def act(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: t @ torch.ones(3, 3), lambda t: t, (x,))

    model = Chain()
    model.act = act
    with pytest.raises(stretto.CaptureError):
        stretto.capture(model, rows(), mean_square, PIPELINE)


@pytest.fixture
def world() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def summed(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def gathered(x: Tensor) -> Tensor:
    found = [torch.empty_like(x)]
    dist.all_gather(found, x)
    return found[0]


def waited(x: Tensor) -> Tensor:
    dist.barrier()
    return x


def told(x: Tensor) -> Tensor:
    dist.all_gather_object([None], 1)
    return x


@pytest.mark.parametrize("act", [summed, gathered, waited, told])
def test_collectives_of_the_models_own(act: Callable[[Tensor], Tensor], world: None) -> None:
    model = Chain()
    model.act = act
    with pytest.raises(stretto.CaptureError) as caught:
        stretto.capture(model, rows(), mean_square, PIPELINE)
    assert "communicates by torch.distributed, which a plan does not have" in str(caught.value)
    assert "give dp, tp or ep to Parallel" in str(caught.value)
    assert f"{__file__}:" in str(caught.value)


def test_collectives_without_a_world() -> None:
    model = Chain()
    model.act = summed
    with pytest.raises(stretto.CaptureError, match=r"communicates by torch\.distributed"):
        stretto.capture(model, rows(), mean_square, PIPELINE)


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log_var = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, out: Tensor) -> Tensor:
        return (out**2).mean() * (-self.log_var).exp() + self.log_var


def test_a_criterion_with_parameters_is_refused_and_the_way_works() -> None:
    criterion, alone = Criterion(), nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    model, batch = Chain(), rows()
    for loss, name in (
        (lambda m, mb: criterion(m(mb)), "criterion.log_var"),
        (lambda m, mb: mean_square(m, mb) * alone, "alone"),
    ):
        with pytest.raises(stretto.CaptureError) as caught:
            stretto.capture(model, batch, loss, PIPELINE)
        assert f"the loss holds parameters that the model does not have ({name})" in str(caught.value)
        assert 'loss=lambda m, mb: m["criterion"](m["model"](mb["x"]), mb["y"])' in str(caught.value)
    both = nn.ModuleDict({"model": model, "criterion": criterion})
    assert_plain(both, batch, lambda m, mb: m["criterion"](m["model"](mb)), PIPELINE)
    constant = torch.ones(())
    with pytest.raises(stretto.CaptureError) as caught:
        stretto.capture(model, batch, lambda m, mb: mean_square(m, mb) * constant, PIPELINE)
    assert "register_buffer" in str(caught.value)
    assert "the loss holds" not in str(caught.value)


def test_a_leaf_that_waits_for_a_gradient_is_refused() -> None:
    model, batch = Chain(), {"x": rows(), "y": rows(seed=2)[:, :2]}

    def loss(m: nn.Module, mb: Any) -> Tensor:
        return F.mse_loss(m(mb["x"]), mb["y"])

    plan = plan_of(model, batch, loss, PIPELINE)
    asks = {**batch, "x": rows().requires_grad_()}
    made = {**batch, "y": nn.Linear(2, 2).double()(rows()[:, :2])}
    for given, name in ((asks, "x"), (made, "y")):
        with pytest.raises(stretto.UsageError, match=f"leaf '{name}' requires a gradient"):
            stretto.capture(model, given, loss, PIPELINE)
        with pytest.raises(stretto.UsageError, match=r"detach it \(x\.detach\(\)\)"):
            stretto.run_threads(plan, lambda _: copy.deepcopy(model), lambda r, g=given: r.step(g))


def test_a_sparse_buffer_is_refused() -> None:
    model = Chain()
    model.register_buffer("adjacent", torch.eye(3).to_sparse())
    with pytest.raises(stretto.CaptureError, match=r"'adjacent' is a sparse.*index_select and index_add"):
        stretto.capture(model, rows(), mean_square, PIPELINE)
    del model._buffers["adjacent"]
    model.layers[2].register_buffer("rows", torch.eye(3).to_sparse_csr())
    with pytest.raises(stretto.CaptureError, match=r"buffer 'layers\.2\.rows' is a sparse"):
        stretto.capture(model, rows(), mean_square, PIPELINE)
