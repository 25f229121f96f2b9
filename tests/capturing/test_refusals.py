"""What cannot be captured: input, error, key word; and that the process is left as it was."""

from __future__ import annotations

import math
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.autograd import backward as torch_backward
from torch.nn.modules.module import register_module_full_backward_hook, register_module_full_backward_pre_hook

import stretto
from tests.capturing.steps import assert_plain
from tests.capturing.zoo import WIDTH, BatchNorm, Chain, mean_square, rows
from tests.cells import but, slow
from tests.clusters import cores
from tests.forks import Fork, run_forks

PARALLEL = stretto.Parallel(microbatches=2)
INTERNALS = ("aten", "Fake", "Functional", "Proxy", "SymNode", "DataDependent", "functorch")
"""Words of the exporter that mean nothing to a user."""


def refusal(
    model: Any, batch: Any, loss: Any, error: type[Exception] = stretto.CaptureError, **given: Any
) -> str:
    """The message of a capture that is refused."""
    with pytest.raises(error) as caught:
        stretto.capture(**{"model": model, "batch": batch, "loss": loss, "parallel": PARALLEL, **given})
    return str(caught.value)


class Acts(Chain):
    """`act` is the code that cannot be captured."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__(layers=1)
        self.act = act


LOOSE = torch.ones(WIDTH, dtype=torch.float64)


def formatted(x: Tensor) -> Tensor:
    assert f"{x.detach().mean():.3f}"
    return x


def raises(x: Tensor) -> Tensor:
    raise KeyError("the user's own")


CODE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "item": (lambda x: x * x.sum().item(), "asks for the value of a tensor"),
    "branch": (lambda x: x if x.sum() > 0 else -x, "asks for the value of a tensor"),
    "boolean index": (lambda x: x[x > 0], "shape depends on values"),
    "formatted": (formatted, "writes the value of a tensor into a text"),
    "list": (lambda x: x * x[0].tolist()[0], "asks for the value of a tensor"),
    "numpy": (lambda x: x * torch.from_numpy(x.detach().numpy()).sum(), "asks for the values of a tensor"),
    "nonzero": (lambda x: x + x.nonzero().sum(), "shape depends on values"),
    "loose tensor": (lambda x: x * LOOSE, "register_buffer"),
    "own error": (raises, "the user's own"),
    "shapes": (lambda x: x @ torch.ones(3, 3, dtype=x.dtype), "must have same reduction dim"),
    "Python's random": (lambda x: x * random.random(), "draws from Python's random"),
    "NumPy's random": (lambda x: x * np.random.rand(), "draws from numpy.random"),
    "cond": (
        lambda x: torch.cond(x.sum() > 0, lambda t: t.tanh(), lambda t: t.sin(), (x,)),
        "choose with torch.where",
    ),
    "while_loop": (
        lambda x: while_loop(lambda i, t: i < 3, lambda i, t: (i + 1, t.sin()), (x[0, 0].long(), x))[1],
        "choose with torch.where",
    ),
    "scan": (
        lambda x: scan(lambda c, t: (c + t, c * t), torch.zeros_like(x[0]), x)[1],
        "choose with torch.where",
    ),
    "error in a branch": (
        lambda x: torch.cond(x.sum() > 0, lambda t: t @ torch.ones(3, 3), lambda t: t, (x,)),
        "cannot capture Acts",
    ),
}
WITHOUT_A_LINE = {"Python's random", "NumPy's random", "while_loop", "scan", "cond", "error in a branch"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n == "scan" else []) for n in CODE]
)
def test_code_of_a_model(name: str) -> None:
    act, word = CODE[name]
    states = random.getstate(), np.random.get_state()[1].tolist()
    message = refusal(Acts(act), rows(), mean_square)
    assert word in message
    if name not in WITHOUT_A_LINE:
        line = int(message.split(f"cannot capture Acts at {__file__}:")[1].split(":")[0])
        assert 0 <= line - act.__code__.co_firstlineno <= 2, "a line of the function that the user wrote"
        assert not [one for one in INTERNALS if one in message]
    assert states == (random.getstate(), np.random.get_state()[1].tolist())


def in_place_batch(model: nn.Module, batch: Tensor) -> Tensor:
    return mean_square(model, batch.add_(1))


def in_place_parameter(model: Chain, batch: Tensor) -> Tensor:
    with torch.no_grad():
        model.out.bias.mul_(0.5)
    return mean_square(model, batch)


@dataclass
class Out:
    """As models of `transformers` return it."""

    loss: Tensor


def raising(error: BaseException) -> Callable[[nn.Module, Tensor], Tensor]:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        raise error

    return loss


class SilentError(Exception):
    def __str__(self) -> str:
        raise ValueError("cannot show")


def backward_in_loss(model: nn.Module, batch: Tensor) -> Tensor:
    value = mean_square(model, batch)
    value.backward()
    return value


LOSSES: list[tuple[Any, str]] = [
    (lambda model, batch: model(batch), "a tensor of shape [4, 2]"),
    (lambda model, batch: float(model(batch).numel()), "a number has no gradient"),
    (lambda model, batch: None, "it lacks a return"),
    (lambda model, batch: {"loss": model(batch).sum()}, "its loss"),
    (lambda model, batch: Out(model(batch).sum()), "its loss"),
    (lambda model, batch: [model(batch).sum(), 1], "its loss"),
    (lambda model, batch: (model(batch).sum(), [1]), "a list as the second of two"),
    (lambda model, batch: (model(batch).sum(), None), "None as the second of two"),
    (lambda model, batch: (model(batch).sum(), model(batch)), "as the count of (sum, count)"),
    (lambda model, batch: (model(batch), 4), "as the sum of (sum, count)"),
    (lambda model, batch: (model(batch).sum(), 0), "returned the count 0"),
    (lambda model, batch: (model(batch).sum(), math.nan), "returned the count nan"),
    (lambda model, batch: batch.sum(), "does not depend on any parameter"),
    (lambda model, batch: model(batch).detach().sum(), "does not depend on any parameter"),
    (torch.no_grad()(mean_square), "torch.no_grad"),
    (lambda model, batch: torch.complex(*[mean_square(model, batch)] * 2), "is a complex number"),
    (in_place_batch, "writes into the batch in place (tensor 1 of it)"),
    (in_place_parameter, "writes into its param 'out.bias'"),
    (backward_in_loss, "of which capture makes the backward"),
    (raising(SilentError()), "SilentError"),
    (raising(RecursionError("deep")), "RecursionError: deep"),
    (raising(StopIteration()), "StopIteration"),
    (raising(AssertionError()), "AssertionError"),
    (lambda model: 1, "takes 1 positional argument but 2 were given"),
]


@pytest.mark.parametrize(("loss", "word"), LOSSES)
def test_losses(loss: Any, word: str) -> None:
    message = refusal(Chain(1), rows(), loss)
    assert word in message
    assert "ValueError: " not in message
    if "loss(model, microbatch) at" in message or "the loss at" in message:
        code = getattr(loss, "__wrapped__", loss).__code__
        assert "mean_square" in code.co_name or f"{__file__}:{code.co_firstlineno}" in message


def test_an_interrupt_of_the_loss_stays_one() -> None:
    with pytest.raises(KeyboardInterrupt):
        stretto.capture(Chain(), rows(), raising(KeyboardInterrupt()), PARALLEL)


# --- models and batches ------------------------------------------------------------------------------------


def with_parameter(value: Tensor) -> nn.Module:
    model = Chain()
    model.out.__dict__["_parameters"]["weight"] = value
    return model


def with_buffer(value: Tensor, layer: str = "") -> nn.Module:
    model = Chain()
    model.get_submodule(layer).register_buffer("rows", value)
    return model


class Grows(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.detach().mean(0)
        return super().forward(x)


class Replaces(Chain):
    def forward(self, x: Tensor) -> Tensor:
        self.out.weight = nn.Parameter(self.out.weight.detach() * 2)
        return super().forward(x)


MODELS: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: nn.Sequential(nn.LazyLinear(4)), "parameter '0.weight' has no shape"),
    (lambda: nn.Sequential(nn.Linear(8, 8), nn.LazyBatchNorm1d()), "'1.weight' has no shape"),
    (lambda: with_parameter(nn.Parameter(torch.eye(2, WIDTH).to_sparse())), "'out.weight' is a sparse"),
    (lambda: with_parameter(Chain().out.weight * 1), "'out.weight' is the result of a computation"),
    (lambda: with_buffer(torch.eye(3).to_sparse()), "buffer 'rows' is a sparse"),
    (lambda: with_buffer(torch.eye(3).to_sparse_csr(), "layers.2"), "buffer 'layers.2.rows' is a sparse"),
    (lambda: torch.jit.script(nn.Sequential(nn.Linear(8, 8)).double()), "TorchScript"),
    (Grows, "puts torch.float64[8] in the place of buffer 'mean', which is torch.float64[]"),
    (Replaces, "another tensor in the place of parameter 'out.weight'"),
]


@pytest.mark.parametrize(("make", "word"), MODELS)
def test_models(make: Callable[[], nn.Module], word: str) -> None:
    assert word in refusal(make(), rows(), mean_square)


class Looks(nn.Module):
    """Looks rows up, with sparse gradients."""

    def __init__(self, by: Callable[[Tensor, Tensor], Tensor] | None) -> None:
        super().__init__()
        self.table, self.by = nn.Embedding(9, WIDTH, sparse=True), by

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids) if self.by is None else self.by(ids, self.table.weight)


LOOKUPS: list[Callable[[Tensor, Tensor], Tensor] | None] = [
    None,
    lambda ids, w: nn.functional.embedding(ids, w, sparse=True),
    lambda ids, w: nn.functional.embedding_bag(ids, w, sparse=True, mode="sum"),
    lambda ids, w: torch.gather(w, 0, ids.reshape(-1, 1).expand(-1, WIDTH), sparse_grad=True),
]


@pytest.mark.parametrize("by", LOOKUPS)
def test_sparse_gradients(by: Callable[[Tensor, Tensor], Tensor] | None) -> None:
    assert "give sparse=False" in refusal(Looks(by), torch.zeros(4, 3, dtype=torch.int64), mean_square)


def test_a_model_on_two_devices() -> None:
    model = Chain()
    model.layers[1].to("meta")
    assert "several devices (cpu, meta)" in refusal(model, rows(), mean_square, stretto.UsageError)


class Encoding(dict[str, Tensor]):
    def __getattr__(self, name: str) -> Tensor:
        return self[name]


BATCHES: list[tuple[Any, str]] = [
    ({"a": 3}, "the batch has no tensor"),
    (torch.tensor(1.0), "has no dims"),
    (torch.zeros(7, WIDTH), "has 7 rows, which do not divide into 2 microbatches"),
    (torch.zeros(0, WIDTH), "has no rows"),
    ({"a": torch.zeros(4, 1), "b": torch.zeros(8, 1)}, "'a' has 4, 'b' has 8 rows"),
    ({"ids": torch.zeros(4, 3), "at": torch.zeros(1, 3, 2)}, "batch_dims={'at': None}"),
    ({"ids": torch.zeros(4, 3), "at": torch.zeros(2, 4, 3)}, "batch_dims={'at': 1}"),
    ({"a": stretto.replicated(torch.zeros(4))}, "every leaf of the batch is marked"),
    (rows().to_sparse(), "'batch' is a sparse_coo tensor"),
    ({"x": torch.nested.nested_tensor([rows(2), rows(1)])}, "'x' is a nested tensor"),
    ({"x": rows().requires_grad_()}, "'x' requires a gradient"),
    ({"y": nn.Linear(2, 2).double()(rows()[:, :2])}, "detach it (x.detach())"),
]


@pytest.mark.parametrize(("batch", "word"), BATCHES)
def test_batches(batch: Any, word: str) -> None:
    assert word in refusal(Chain(), batch, mean_square, stretto.UsageError)


def test_mappings_of_a_batch_are_read_by_keys() -> None:
    message = refusal(Chain(), {"x": rows()}, lambda m, mb: m(mb.x).square().mean())
    assert "by keys, ['x']" in message


def test_a_leaf_of_a_step_that_waits_for_a_gradient() -> None:
    plan = stretto.plan(stretto.capture(Chain(), rows(), mean_square, PARALLEL), cores())
    with pytest.raises(stretto.UsageError, match="requires a gradient"):
        stretto.Runner(plan, Chain()).step(rows().requires_grad_())


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"model": 3}, "a torch.nn.Module, not int"),
        ({"loss": 3}, "loss is a function"),
        ({"parallel": {"pp": 2}}, "give stretto.Parallel(...)"),
        ({"parallel": None}, "parallel is a NoneType"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"device": 3}, "unknown device 3"),
        ({"stages": 0}, "stages = 0"),
        ({"stages": 1.5}, "stages = 1.5"),
        ({"precision": "fp16"}, "unknown precision 'fp16'"),
    ],
)
def test_arguments_of_another_kind(wrong: dict[str, Any], word: str) -> None:
    given = {"model": Chain(), "batch": rows(), "loss": mean_square, **wrong}
    assert word in refusal(**given, error=stretto.UsageError)


# --- backwards of the user's own ---------------------------------------------------------------------------


class Own(torch.autograd.Function):
    """Checkpointing as other libraries have it."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        y.backward(grad)
        return None, x.grad


class Imported(Own):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        torch_backward(ctx.function(ctx.saved_tensors[0]), grad)


class Checkpointed(Chain):
    def __init__(self, how: Any, frozen: bool) -> None:
        super().__init__()
        self.how = how
        self.layers[0].requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if not x.requires_grad:
            x.requires_grad_(True)  # as peft does for frozen embeddings
        for layer in self.layers[1:]:
            x = torch.tanh(self.how(layer, x))
        return self.out(x)


BACKWARDS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "own": lambda layer, x: Own.apply(layer, x),
    "imported": lambda layer, x: Imported.apply(layer, x),
}


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        *(("own", False), ("imported", True)),
        *(slow(*cell) for cell in (("own", True), ("imported", False))),
    ],
)
def test_a_backward_within_the_backward(name: str, frozen: bool) -> None:
    model = Checkpointed(BACKWARDS[name], frozen)
    message = refusal(model, rows(), mean_square)
    assert "runs a backward of its own" in message
    assert "recompute='full'" in message
    if name == "own" and not frozen:  # the process is left as it was
        backward_in_loss(model, rows())
        assert all(p.grad is not None for p in model.parameters())
        Own.apply(model.out, rows().requires_grad_()).sum().backward()


class Stopped(torch.autograd.Function):
    """Ctrl-C comes while PyTorch traces the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise KeyboardInterrupt


def test_an_interrupt_in_the_backward_is_no_error_of_an_op() -> None:
    with warnings.catch_warnings(record=True, action="always") as seen, pytest.raises(KeyboardInterrupt):
        stretto.capture(Acts(Stopped.apply), rows(), mean_square, PARALLEL)
    assert not [one for one in seen if "Error detected" in str(one.message)]


def of_a_value(layer: nn.Module, watch: Any) -> Any:
    return layer.register_forward_hook(lambda _, args, out: out.register_hook(watch) and None)


HOOKS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "module 'layers.1'": lambda layer, watch: layer.register_full_backward_hook(watch),
    "the module 'layers.1'": lambda layer, watch: layer.register_full_backward_pre_hook(watch),
    "all modules": lambda layer, watch: register_module_full_backward_hook(watch),
    "of all modules": lambda layer, watch: register_module_full_backward_pre_hook(watch),
    "a hook on a tensor": of_a_value,
}
"""Key word -> how a backward hook that only watches is registered."""


@pytest.mark.parametrize("word", but(HOOKS, ["the module 'layers.1'", "of all modules"]))
def test_a_backward_hook_that_only_watches(word: str) -> None:
    seen: list[Any] = []
    model = Chain(2)
    handle = HOOKS[word](model.get_submodule("layers.1"), lambda *given: seen.append(given))
    try:
        message = refusal(model, rows(), mean_square)
        assert word in message
        assert "handle.remove()" in message
        seen.clear()
        mean_square(model, rows()).backward()  # as it was
        assert seen
    finally:
        handle.remove()
    stretto.capture(model, rows(), mean_square, PARALLEL)


# --- communication, and parameters of the loss -------------------------------------------------------------


@pytest.fixture
def world() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def reduced(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def gathered(x: Tensor) -> Tensor:
    found = [torch.empty_like(x)]
    dist.all_gather(found, x)
    return found[0]


def exchanged(x: Tensor) -> Tensor:
    dist.all_gather_object([None], 1)
    return x


def waited(x: Tensor) -> Tensor:
    dist.barrier()
    return x


@pytest.mark.parametrize("act", [reduced, gathered, exchanged, waited])
def test_collectives_of_the_models_own(act: Callable[[Tensor], Tensor], world: None) -> None:
    message = refusal(Acts(act), rows(), mean_square)
    assert "communicates by torch.distributed" in message
    assert f"{__file__}:" in message


def test_collectives_without_a_process_group() -> None:
    assert "communicates by torch.distributed" in refusal(Acts(reduced), rows(), mean_square)


@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_a_synchronised_norm_of_several_copies(layout: dict[str, int]) -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(BatchNorm())
    message = refusal(model, rows(), mean_square, parallel=stretto.Parallel(microbatches=2, **layout))
    assert "norms.0 is a SyncBatchNorm" in message


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log_var = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, out: Tensor) -> Tensor:
        return (out**2).mean() * (-self.log_var).exp() + self.log_var


def test_a_criterion_with_parameters() -> None:
    criterion, alone = Criterion(), nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    constant = torch.ones(())
    start = "the loss has parameters that the model does not have"
    assert f"{start} (criterion.log_var)" in refusal(Chain(), rows(), lambda m, mb: criterion(m(mb)))
    assert f"{start} (alone)" in refusal(Chain(), rows(), lambda m, mb: mean_square(m, mb) * alone)
    message = refusal(Chain(), rows(), lambda m, mb: mean_square(m, mb) * constant)
    assert "register_buffer" in message
    assert start not in message
    both = nn.ModuleDict({"model": Chain(), "criterion": criterion})  # the way out that is named
    assert_plain(both, rows(), lambda m, mb: m["criterion"](m["model"](mb)), PARALLEL)


# --- what is printed ---------------------------------------------------------------------------------------


def test_nothing_of_the_exporters_is_printed(tmp_path: Path) -> None:
    """A program that catches the error has clean output; PyTorch's log would go to stderr otherwise."""
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, stretto\n"
        "model = torch.nn.Linear(8, 3)\n"
        "try:\n"
        "    stretto.capture(model, torch.zeros(4, 5), lambda m, b: m(b).mean(), stretto.Parallel())\n"
        "except stretto.CaptureError as error:\n"
        "    print(error)\n"
    )
    told, errors = tmp_path / "told", tmp_path / "errors"
    ended = run_forks([Fork(str(program), (), {}, str(told), str(errors))], timeout_s=60.0)
    assert ended.statuses == (0,), errors.read_text()
    assert errors.read_text() == ""
    assert f"cannot capture Linear at {program}:4: stretto.capture(" in told.read_text()


def test_what_a_library_does_is_refused_with_a_way_around_it() -> None:
    """Users of a library cannot edit its lines."""
    code = compile("def forward(x):\n    return x.tolist()", "/any/transformers/integrations/moe.py", "exec")
    room: dict[str, Any] = {}
    exec(code, room)
    message = refusal(Acts(lambda x: room["forward"](x) and x), rows(), mean_square)
    assert "moe.py:2" in message
    assert "experts_implementation = 'batched_mm'" in message
