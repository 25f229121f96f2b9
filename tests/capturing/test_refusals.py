"""Models that cannot be captured: the user's own line and the reason, in the user's words."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.capturing.trace import trace
from tests.capturing.zoo import WIDTH, Chain, mean_square, rows

VALUE = "the code asks for the value of a tensor, and at capture there are none"

INTERNALS = ("aten", "Fake", "Functional", "Proxy", "SymNode", "DataDependent", "functorch")
"""Words of the exporter's that tell a user nothing."""


def item(x: Tensor) -> Tensor:
    return x * x.sum().item()


def branch(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def boolean_index(x: Tensor) -> Tensor:
    return x[x > 0]


def formatted(x: Tensor) -> Tensor:
    assert f"{x.detach().mean():.3f}"
    return x


def as_list(x: Tensor) -> Tensor:
    return x * x[0].tolist()[0]


def through_numpy(x: Tensor) -> Tensor:
    return x * torch.from_numpy(x.detach().numpy()).sum()


def nonzero(x: Tensor) -> Tensor:
    return x + x.nonzero().sum()


LOOSE = torch.ones(WIDTH, dtype=torch.float64)


def loose_tensor(x: Tensor) -> Tensor:
    return x * LOOSE


def raises(x: Tensor) -> Tensor:
    raise KeyError("the user's own")


def wrong_shapes(x: Tensor) -> Tensor:
    return x @ torch.ones(3, 3, dtype=x.dtype)


REFUSED: list[tuple[Callable[[Tensor], Tensor], str]] = [
    (item, VALUE),
    (branch, VALUE),
    (boolean_index, "a tensor's shape depends on values"),
    (formatted, "the code writes the value of a tensor into a text, and at capture there are none"),
    (as_list, VALUE),
    (through_numpy, "the code asks for the values of a tensor"),
    (nonzero, "a tensor's shape depends on values"),
    (loose_tensor, "give it to the module with register_buffer"),
    (raises, "the user's own"),
    (wrong_shapes, "must have same reduction dim"),
]


class Acts(Chain):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act


@pytest.mark.parametrize(("act", "reason"), REFUSED, ids=lambda v: getattr(v, "__name__", ""))
def test_the_users_line_and_the_reason(act: Callable[[Tensor], Tensor], reason: str) -> None:
    with pytest.raises(stretto.CaptureError) as caught:
        trace(Acts(act), rows(), mean_square, microbatches=2)
    message = str(caught.value)
    assert reason in message
    assert f"cannot capture Acts at {__file__}:" in message
    line = int(message.split(f"{__file__}:")[1].split(":")[0])
    first = act.__code__.co_firstlineno
    assert first < line <= first + 2, "a line of the function that the user wrote"
    assert not [word for word in INTERNALS if word in message]


class Looks(nn.Module):
    """Looks rows up, with sparse gradients."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.table = nn.Embedding(9, WIDTH, sparse=how == "module")
        self.bag = nn.EmbeddingBag(9, WIDTH, sparse=how == "bag", mode="sum")
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor) -> Tensor:
        if self.how == "function":
            return self.out(nn.functional.embedding(ids, self.table.weight, sparse=True))
        if self.how == "gather":
            rows = ids.reshape(-1, 1).expand(-1, WIDTH)
            return self.out(torch.gather(self.table.weight, 0, rows, sparse_grad=True))
        return self.out(self.bag(ids) if self.how == "bag" else self.table(ids))


@pytest.mark.parametrize("how", ["module", "function", "bag", "gather"])
def test_sparse_gradients(how: str) -> None:
    with pytest.raises(stretto.CaptureError, match=r"sparse tensor.*give sparse=False to an embedding"):
        trace(Looks(how), torch.zeros(4, 3, dtype=torch.int64), mean_square, microbatches=2)


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


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (
            lambda model, batch: model(batch),
            "returned a tensor of shape [4, 2]: return its mean loss, a scalar",
        ),
        (
            lambda model, batch: float(model(batch).numel()),
            "returned a float: a number has no gradient; return",
        ),
        (
            lambda model, batch: None,
            "returned None: it lacks a return; return its mean loss, a scalar tensor",
        ),
        (
            lambda model, batch: {"loss": model(batch).sum()},
            'or (sum, count): the sum, and how many it is of; here out["loss"]',
        ),
        (lambda model, batch: Out(model(batch).sum()), "here out.loss"),
        (lambda model, batch: [model(batch).sum(), 1], "here out[0]"),
        (
            lambda model, batch: (model(batch).sum(), {"n": 1}),
            "returned a dict as the second of two: return its",
        ),
        (
            lambda model, batch: (model(batch).sum(), None),
            "returned None as the second of two: return its mean",
        ),
        (
            lambda model, batch: (model(batch).sum(), model(batch)),
            "a tensor of shape [4, 2] as the count of (sum",
        ),
        (lambda model, batch: (model(batch), 4), "a tensor of shape [4, 2] as the sum of (sum, count)"),
        (
            lambda model, batch: (model(batch).sum(), 0),
            "returned the count 0: (sum, count) is a mean over more",
        ),
        (lambda model, batch: (model(batch).sum(), math.nan), "returned the count nan"),
        (lambda model, batch: batch.sum(), "does not depend on any parameter that requires a gradient"),
        (lambda model, batch: model(batch).detach().sum(), "does not depend on any parameter"),
        (in_place_batch, "writes into the batch in place (tensor 1 of it); let it write into a copy"),
        (in_place_parameter, "writes into its param 'out.bias' in the forward"),
    ],
)
def test_losses_that_cannot_be(loss: Any, reason: str) -> None:
    with pytest.raises(stretto.CaptureError) as caught:
        trace(Chain(), rows(), loss, microbatches=2)
    assert reason in str(caught.value)
    assert f"{Path('stretto', 'loss.py')}:" not in str(caught.value), "the line is the user's"
    if "loss(" in str(caught.value) or "the loss at" in str(caught.value):
        assert f"{__file__}:{loss.__code__.co_firstlineno}" in str(caught.value)


def test_a_scripted_module_is_refused() -> None:
    with pytest.raises(stretto.CaptureError, match="holds a TorchScript module: give the Python module"):
        trace(torch.jit.script(nn.Sequential(nn.Linear(8, 8))), rows().float(), mean_square)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"a": 3}, "the batch holds no tensor"),
        (
            torch.tensor(1.0),
            "batch leaf 'batch' has no dims, so that it cannot be cut into microbatches: mark it "
            "stretto.whole(x), and every microbatch is given it; it may be another in every step",
        ),
        (torch.zeros(7, WIDTH), "batch leaf 'batch' has 7 rows, which do not divide into 2 microbatches"),
        (torch.zeros(0, WIDTH), "batch leaf 'batch' has no rows"),
        (
            {"a": torch.zeros(4, 1), "b": torch.zeros(8, 1)},
            "'a' has 4, 'b' has 8 rows. Bring the dim of the "
            "batch first (x.transpose(0, 1), and back in the loss), or mark what is the same for all rows "
            "stretto.whole(x)",
        ),
        (
            {"ids": torch.zeros(4, 3), "at": torch.zeros(1, 3, 2)},
            "'at' has 1 row, and 'ids' has 4: if it is for "
            "all rows, mark it stretto.whole(x), and every microbatch is given it; or give each row its own, "
            "x.expand(4, -1, -1)",
        ),
        ({"a": stretto.whole(torch.zeros(4))}, "every leaf of the batch is marked with stretto.whole"),
    ],
)
def test_batches_that_do_not_fit(batch: Any, message: str) -> None:
    with pytest.raises(stretto.UsageError) as caught:
        trace(Chain(), batch, mean_square, microbatches=2)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": 3}, "capture takes a model, a torch.nn.Module, not int"),
        ({"loss": 3}, "loss is a function loss(model, microbatch), not int"),
        ({"parallel": {"pp": 2}}, "parallel is a dict: give stretto.Parallel(...)"),
        ({"parallel": None}, "parallel is a NoneType: give stretto.Parallel(...)"),
        ({"device": "tpu"}, "unknown device 'tpu': give 'cpu' or 'cuda'"),
        ({"device": 3}, "unknown device 3: give 'cpu' or 'cuda'"),
        ({"stages": 0}, "stages = 0: give a whole number from 1 on"),
        ({"stages": 1.5}, "stages = 1.5: give a whole number from 1 on"),
    ],
)
def test_arguments_of_another_kind(wrong: dict[str, Any], message: str) -> None:
    given = {"model": Chain(), "batch": rows(), "loss": mean_square, "parallel": stretto.Parallel(), **wrong}
    with pytest.raises(stretto.UsageError) as caught:
        stretto.capture(**given)
    assert message in str(caught.value)


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
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert f"cannot capture Linear at {program}:4: stretto.capture(" in done.stdout


def test_what_a_library_does_is_refused_with_a_way_around_it() -> None:
    """Who calls a library cannot edit its lines."""
    code = compile("def forward(x):\n    return x.tolist()", "/any/transformers/integrations/moe.py", "exec")
    room: dict[str, Any] = {}
    exec(code, room)

    class Grouped(Chain):
        def forward(self, x: Tensor) -> Tensor:
            room["forward"](x)
            return super().forward(x)

    with pytest.raises(stretto.CaptureError, match=r"moe\.py:2(?s:.*)experts_implementation = 'batched_mm'"):
        trace(Grouped(), rows(), mean_square, microbatches=1)


def test_mappings_of_a_batch_are_read_by_keys() -> None:
    class Encoding(dict[str, Tensor]):
        def __getattr__(self, name: str) -> Tensor:
            return self[name]

    with pytest.raises(stretto.CaptureError, match=r"plain dicts in model and loss.*by keys, \['x'\]"):
        trace(Chain(), Encoding(x=rows()), lambda m, mb: m(mb.x).square().mean(), microbatches=2)
