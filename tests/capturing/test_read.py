"""Python values that a captured step has read: a change that matters is noticed at the next step."""

from __future__ import annotations

import copy
import pickle
import re
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stretto
from stretto.batch.constants import part
from tests.capturing.steps import assert_plain, plan_of
from tests.capturing.zoo import WIDTH, Chain, mean_square, rows

PIPELINE = stretto.Parallel(pp=2, microbatches=2)
ONE = stretto.Parallel(microbatches=2)
GLOBAL = 0.5
SETTINGS = types.SimpleNamespace(weight=1.0, step=0)


@dataclass
class Config:
    beta: float = 1.0
    step: int = 0
    sizes: list[float] = field(default_factory=lambda: [1.0, 2.0])


class Reader(Chain):
    """Reads values of many kinds, and has some that it does not read."""

    share = 1.0

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.drop = nn.Dropout(0.0)
        self.alpha, self.steps, self.calls = 2.0, 0, 0
        self.config = Config()
        self.table = {"a": 1.0, "steps": 0}

    @property
    def scale(self) -> float:
        return self.alpha * self.config.beta

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = self.drop(super().forward(x)) * self.scale * self.table["a"] * self.share
        return out * self.config.sizes[1]


class Weighted:
    """A loss that is an object with a criterion."""

    def __init__(self) -> None:
        self.weight, self.steps = 0.3, 0
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        targets = torch.zeros(batch.shape[0], dtype=torch.int64)
        return self.criterion(model(batch), targets) * self.weight * GLOBAL * SETTINGS.weight


def after_a_change(
    model: nn.Module, loss: Callable[..., Tensor], change: Callable[[nn.Module], object]
) -> None:
    """A step, the change, a step; raises what the second raises."""
    change_between(plan_of(model, rows(), loss, PIPELINE), model, change)


def change_between(plan: stretto.Plan, model: nn.Module, change: Callable[[nn.Module], object]) -> None:
    """The same of a plan. The model stays: copies are changed."""
    models: dict[int, nn.Module] = {}

    def made(rank: int) -> nn.Module:
        models[rank] = copy.deepcopy(model)
        return models[rank]

    def work(runner: stretto.Runner) -> None:
        runner.step(rows())
        change(models[runner.rank])
        runner.step(rows())

    stretto.run_threads(plan, made, work)


@pytest.fixture(scope="module")
def reading() -> stretto.Plan:
    return plan_of(Reader(), rows(), mean_square, PIPELINE)


CHANGES: list[tuple[str, Callable[[Any], object]]] = [
    ("drop.p is 0.5 now, and was 0.0", lambda m: setattr(m.drop, "p", 0.5)),
    ("alpha is 1.5 now, and was 2.0", lambda m: setattr(m, "alpha", 1.5)),
    ("config.beta is 0.5 now, and was 1.0", lambda m: setattr(m.config, "beta", 0.5)),
    ("config.sizes is list[1.0, 3.0] now", lambda m: m.config.sizes.__setitem__(1, 3.0)),
    ("table['a'] is 7 now, and was 1.0", lambda m: m.table.update(a=7)),
    ("share is 2.0 now, and was 1.0", lambda m: setattr(m, "share", 2.0)),
    ("drop.training is False now, and was True", lambda m: m.eval()),
    ("alpha is Tensor now, and was 2.0", lambda m: setattr(m, "alpha", torch.ones(()))),
]


@pytest.mark.parametrize(
    ("message", "change"), CHANGES, ids=lambda v: v.split()[0] if isinstance(v, str) else ""
)
def test_values_below_the_model(
    reading: stretto.Plan, message: str, change: Callable[[nn.Module], object]
) -> None:
    with pytest.raises(stretto.UsageError) as caught:
        change_between(reading, Reader(), change)
    assert message in str(caught.value)
    assert "marked stretto.replicated(x), or a buffer of the model" in str(caught.value)
    assert "capture the step again" in str(caught.value)


def unread(model: Any) -> None:
    model.steps += 1
    model.calls += 1
    model.config.step += 1
    model.table["steps"] += 1
    model.other = "new"


def test_values_that_the_forward_does_not_need_may_change(reading: stretto.Plan) -> None:
    change_between(reading, Reader(), unread)
    loss = Weighted()

    def change(_: nn.Module) -> None:
        loss.steps += 1
        SETTINGS.step += 1

    after_a_change(Reader(), loss, change)


WEIGHTED = Weighted()
LOSS: list[tuple[str, Callable[[pytest.MonkeyPatch], None]]] = [
    ("weight is 0.5 now, and was 0.3", lambda to: to.setattr(WEIGHTED, "weight", 0.5)),
    ("criterion.label_smoothing is 0.2", lambda to: to.setattr(WEIGHTED.criterion, "label_smoothing", 0.2)),
    ("GLOBAL is 0.25 now, and was 0.5", lambda to: to.setitem(globals(), "GLOBAL", 0.25)),
    ("SETTINGS.weight is 3.0 now, and was 1.0", lambda to: to.setattr(SETTINGS, "weight", 3.0)),
]


@pytest.fixture(scope="module")
def weighted() -> stretto.Plan:
    return plan_of(Reader(), rows(), WEIGHTED, PIPELINE)


@pytest.mark.parametrize(("message", "change"), LOSS)
def test_values_of_a_loss_that_is_an_object(
    weighted: stretto.Plan, message: str, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    with pytest.MonkeyPatch.context() as to, pytest.raises(stretto.UsageError, match=re.escape(message)):
        change_between(weighted, Reader(), lambda _: change(to))
    change_between(weighted, Reader(), lambda _: None)  # all is as it was


def test_values_of_a_closure() -> None:
    weight, calls, table = 0.3, 0, {"lam": 0.1, "steps": 0}

    def closure(model: nn.Module, batch: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return mean_square(model, batch) * weight * table["lam"]

    def set_weight(to: float) -> None:
        nonlocal weight
        weight = to

    plan = plan_of(Reader(), rows(), closure, PIPELINE)
    change_between(plan, Reader(), lambda _: table.update(steps=1))
    with pytest.raises(stretto.UsageError, match=r"weight is 0\.4 now, and was 0\.3"):
        change_between(plan, Reader(), lambda _: set_weight(0.4))
    set_weight(0.3)
    with pytest.raises(stretto.UsageError, match=r"table\['lam'\] is 0\.2 now, and was 0\.1"):
        change_between(plan, Reader(), lambda _: table.update(lam=0.2))


def test_equal_layers_that_were_not_traced() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(torch.tanh(self.linear(x)))

    model = nn.Sequential(*(Layer() for _ in range(6))).double()
    jobs = [
        stretto.capture(model, rows(), mean_square, PIPELINE, equal_layers=equal) for equal in (True, False)
    ]
    assert jobs[0].read == jobs[1].read
    assert (((".4", ".drop", ".p"), "0.0")) in jobs[0].read
    with pytest.raises(stretto.UsageError, match=r"4\.drop\.p is 0\.1 now"):
        after_a_change(model, mean_square, lambda m: setattr(m[4].drop, "p", 0.1))  # type: ignore[index]


def test_a_plan_from_a_file_looks_at_its_own_model(tmp_path: Path) -> None:
    model, file = Reader(), tmp_path / "plan.json"
    plan_of(model, rows(), mean_square, ONE).save(file)
    runner = stretto.Runner(stretto.load_plan(file), model)
    runner.step(rows())
    model.drop.p = 0.25
    with pytest.raises(stretto.UsageError, match=r"drop\.p is 0\.25 now, and was 0\.0"):
        runner.step(rows())
    model.drop.p = 0.0
    runner.step(rows())
    other = Reader()
    other.alpha = 3.0
    with pytest.raises(stretto.UsageError, match=r"alpha is 3\.0 now, and was 2\.0"):
        stretto.Runner(stretto.load_plan(file), other).step(rows())


def test_what_may_change_in_every_step() -> None:
    """The way out that the message names: a leaf that is full, and a buffer."""

    class Buffered(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("alpha", torch.tensor(2.0, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.alpha

    def loss(m: nn.Module, mb: Any) -> Tensor:
        return mean_square(m, mb["x"]) * mb["weight"]

    model = Buffered()
    plan = plan_of(model, {"x": rows(), "weight": stretto.replicated(0.5)}, loss, ONE)
    runner = stretto.Runner(plan, model)
    first = float(runner.step({"x": rows(), "weight": stretto.replicated(0.5)}))
    dict(runner.named_buffers())["alpha"].fill_(4.0)
    second = float(runner.step({"x": rows(), "weight": stretto.replicated(0.25)}))
    assert second == pytest.approx(first * 4 * 0.5, rel=1e-12)


def test_an_evaluation_is_of_any_mode() -> None:
    model = Reader()
    runner = stretto.Runner(plan_of(model, rows(), mean_square, ONE), model)
    evaluation = stretto.Evaluation(runner, model, rows(), mean_square, parallel=ONE)
    runner.step(rows())
    model.eval()
    assert evaluation.loss([rows()]) > 0
    model.train()
    runner.step(rows())


def test_classes_are_as_they_were_and_the_step_is_the_plain_models() -> None:
    kinds = (Reader, Config, nn.Dropout, nn.Linear, Weighted)
    before = [dict(vars(kind)) for kind in kinds]
    assert_plain(Reader(), rows(), mean_square, PIPELINE)
    plan_of(Reader(), rows(), Weighted(), PIPELINE)
    assert [dict(vars(kind)) for kind in kinds] == before

    def broken(model: nn.Module, batch: Tensor) -> Tensor:
        raise RuntimeError("the user's own")

    with pytest.raises(stretto.CaptureError):
        plan_of(Reader(), rows(), broken, PIPELINE)
    assert [dict(vars(kind)) for kind in kinds] == before


def test_copies_of_a_job_watch_nothing() -> None:
    job = stretto.capture(Reader(), rows(), Weighted(), PIPELINE)
    for copied in (pickle.loads(pickle.dumps(job)), copy.deepcopy(job)):
        assert copied == job
        copied.watch.check()


class Trap:
    @property
    def value(self) -> int:
        raise AssertionError("a property was called")

    def __getitem__(self, key: object) -> int:
        raise AssertionError("code was called")


def test_paths_run_no_code() -> None:
    for step in (".value", ".missing", "[0", "['a'", "[__import__('os')"):
        part(Trap(), step)
    assert part({"a": 1}, "['a'") == 1
    assert F.relu is part(F, ".relu")
