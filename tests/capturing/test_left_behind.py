"""What a forward leaves in Python is put back after the capture, and no microbatch reads it unseen."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.capturing.evaluation import capture_evaluation
from stretto.capturing.state import State
from tests.capturing.zoo import WIDTH, Chain, mean_square, rows

CLUSTER = stretto.Cluster()
PARALLEL = stretto.Parallel(pp=2, microbatches=2)


class Notes:
    """An object of the user's that a model holds."""

    __slots__ = ("__dict__", "last")

    def __init__(self) -> None:
        self.calls, self.seen = 0, {"means": []}


class Keeps(Chain):
    """Leaves what its forward made in all kinds of places."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.calls, self.pair = None, 0, (1, [])
        self.history, self.recent, self.kinds = [], deque(maxlen=2), {float}
        self.table, self.ordered, self.counts = {"a": 1}, OrderedDict(b=2), defaultdict(int)
        self.notes, self.moments = Notes(), np.zeros(3)
        self.layers[1].inner = {"states": [None, None]}  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        mean = y.detach().mean()
        self.last, self.calls, self.new = y, self.calls + 1, mean
        self.history.append(mean)
        self.recent.append(mean)
        self.kinds.add(mean)
        self.pair[1].append(mean)
        self.table["y"] = mean
        self.ordered["b"] = mean
        self.ordered.move_to_end("b")
        self.counts["calls"] += 1
        self.notes.last, self.notes.calls = mean, self.notes.calls + 1
        self.notes.seen["means"].append(mean)
        self.moments += 1
        self.layers[1].inner["states"][0] = y
        self.layers[2].__dict__.pop("bias_kept", None)
        return y


def keeps() -> nn.Module:
    model = Keeps()
    model.layers[2].bias_kept = True  # type: ignore[assignment]
    return model


def told(model: Any) -> list[Any]:
    """All that it keeps, to compare."""
    return [
        *(model.last, model.calls, hasattr(model, "new"), model.pair, model.history, list(model.recent)),
        *(model.kinds, model.table, list(model.ordered), dict(model.counts), model.moments.tolist()),
        *(model.notes.__dict__, hasattr(model.notes, "last"), model.layers[1].inner),
        model.layers[2].bias_kept,
    ]


def test_all_that_a_forward_leaves_is_put_back() -> None:
    model = keeps()
    before = copy.deepcopy(told(model))
    history, notes = model.history, model.notes
    losses: list[Tensor] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        losses.append(mean_square(model, batch))
        return losses[-1]

    stretto.capture(model, rows(), loss, PARALLEL)
    assert told(model) == before
    assert not losses
    assert model.history is history
    assert model.notes is notes
    copy.deepcopy(model)
    mean_square(model, rows())
    assert model.history
    assert float(model.history[0]) == pytest.approx(float(model.table["y"]))


def test_after_a_capture_that_failed() -> None:
    model = keeps()
    before = copy.deepcopy(told(model))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return mean_square(model, batch) * float(model.last.sum())

    with pytest.raises(stretto.CaptureError, match="asks for the value of a tensor"):
        stretto.capture(model, rows(), loss, PARALLEL)
    assert told(model) == before


def refused(model: nn.Module) -> str:
    with pytest.raises(stretto.CaptureError) as caught:
        stretto.capture(model, rows(), mean_square, PARALLEL)
    return str(caught.value)


class Carries(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x if self.last is None else x + self.last)
        self.last = y.detach().mean()
        return y


class Counts(Chain):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


CALLS = 0


class CountsInAGlobal(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / counted()


def counted() -> int:
    global CALLS
    CALLS += 1
    return CALLS


class CountsInItsClass(Chain):
    number = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).number += 1
        return super().forward(x) / self.number


class Sums(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.history.append(super().forward(x))
        return torch.stack([y.detach() for y in self.history]).mean() + self.history[-1]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Carries, "last"),
        (Counts, "calls"),
        (Sums, "history"),
        (CountsInAGlobal, f"{__name__}.CALLS"),
        (CountsInItsClass, "CountsInItsClass.number"),
    ],
)
def test_what_a_later_call_reads_is_refused(kind: type[nn.Module], name: str) -> None:
    """The plain model hands it from one microbatch to the next, and a plan does not."""
    model = kind()
    message = refused(model)
    assert (
        f"the forward reads what an earlier call of it left in {name}, and a plan hands on nothing" in message
    )
    assert "register_buffer" in message
    assert not model.__dict__.get(name)
    assert CALLS == CountsInItsClass.number == 0


class Cached(Chain):
    """Makes a mask at its first call, and keeps it."""

    size = 0

    def act(self, x: Tensor) -> Tensor:
        if self.size < WIDTH:
            self.size, self.mask = WIDTH, torch.arange(WIDTH, dtype=torch.float64).tanh()
        return torch.tanh(x) * self.mask


class Reassigns(Chain):
    """Puts another tensor in the place of its buffer, where the plain model reads it next time."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean()
        return y - self.mean


@pytest.mark.parametrize("kind", [Cached, Reassigns])
def test_what_is_right_with_every_microbatch(kind: type[nn.Module]) -> None:
    model = kind()
    job = stretto.capture(model, rows(), mean_square, PARALLEL)
    assert {"mask", "size"}.isdisjoint(model.__dict__)
    models = [copy.deepcopy(model) for _ in range(2)]

    def work(runner: stretto.Runner) -> tuple[float, dict[str, Tensor]]:
        runner.step(rows())
        return float(runner.step(rows())), {name: b.clone() for name, b in runner.named_buffers()}

    results = stretto.run_threads(stretto.plan(job, CLUSTER, order="list"), models.__getitem__, work)
    losses = [mean_square(model, part).detach() for part in rows().repeat(2, 1).chunk(4)]
    assert results[0][0] == pytest.approx(float(losses[2] + losses[3]) / 2, rel=1e-12)
    buffers = {name: value for _, held in results for name, value in held.items()}
    torch.testing.assert_close(buffers, dict(model.named_buffers()), rtol=1e-12, atol=0)


def test_another_shape_in_a_buffers_place() -> None:
    class Grows(Reassigns):
        def forward(self, x: Tensor) -> Tensor:
            self.mean = x.detach().mean(0)
            return super(Reassigns, self).forward(x)

    assert "puts torch.float64[8] in the place of buffer 'mean', which is torch.float64[]" in refused(Grows())


def test_another_parameter_in_a_parameters_place() -> None:
    class Replaces(Chain):
        def forward(self, x: Tensor) -> Tensor:
            self.out.weight = nn.Parameter(self.out.weight.detach() * 2)
            return super().forward(x)

    assert "puts another tensor in the place of parameter 'out.weight'" in refused(Replaces())


@pytest.mark.parametrize(
    ("draw", "source"), [(random.random, "Python's random"), (np.random.rand, "numpy.random")]
)
def test_draws_that_are_not_pytorchs_are_refused(draw: Any, source: str) -> None:
    class Draws(Chain):
        def act(self, x: Tensor) -> Tensor:
            return x * draw()

    states = random.getstate(), np.random.get_state()[1].tolist()
    message = refused(Draws())
    assert f"the forward draws from {source}, and the draw would be a constant of the plan" in message
    assert states == (random.getstate(), np.random.get_state()[1].tolist())


def test_evaluation_leaves_each_modules_mode() -> None:
    model = Keeps().train()
    model.layers[2].bias_kept = True  # type: ignore[assignment]
    model.layers[0].eval()  # as a frozen batch norm is
    before = copy.deepcopy(told(model))
    job = stretto.capture(model, rows(), mean_square, PARALLEL)
    capture_evaluation(model, rows(), mean_square, job)
    assert model.training
    assert not model.layers[0].training
    assert told(model) == before


def test_check_copies_a_model_that_holds_what_a_call_left() -> None:
    model = Keeps()
    model.layers[2].bias_kept = True  # type: ignore[assignment]
    model.last = model.pair[1]  # type: ignore[assignment]
    model.pair[1].append(mean_square(model.out, rows()))  # of a graph, which PyTorch does not copy
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    assert not stretto.check(model, rows(), mean_square, PARALLEL).wrong
    assert len(model.pair[1]) == 1
    model.stream = (x for x in "abc")  # type: ignore[assignment]
    with pytest.raises(stretto.UsageError, match="Keeps cannot be copied"):
        stretto.check(model, rows(), mean_square, PARALLEL)


def test_what_threads_share_is_left_alone() -> None:
    import queue

    class Holds(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.inbox: queue.Queue[int] = queue.Queue()

    model = Holds()
    state = State(("", model))
    model.inbox.put(3)
    model.out.note = 3  # type: ignore[assignment]
    assert state.changes() == ["out.note"]
    state.restore()
    assert model.inbox.get_nowait() == 3
