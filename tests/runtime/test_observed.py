"""What a model's code lets users see is what the plain model makes, however its step is sharded."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.capturing import capture
from stretto.capturing.evaluation import capture_evaluation
from stretto.config import Parallel
from stretto.errors import CaptureError, UsageError
from stretto.ir.metrics import Observed, one_after_another
from stretto.ir.plan import Plan
from stretto.ir.timeline import Stall, Timeline
from stretto.parallelize.layout import layout_of
from stretto.planning.make_plan import make_plan
from stretto.price.cluster import described_costs
from stretto.runtime import Runner, run_threads
from stretto.runtime.compare import metric_line, stall_lines
from stretto.runtime.memory_adapter import MemoryMeter
from tests.clusters import cores

WIDTH, ROWS = 8, 8
STEPS = 3

Seen = dict[tuple[str, str], list[list[float]]]


class Layer(nn.Module):
    """Lets see which of its outputs are above zero, how often, and the greatest."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x)).relu()
        made: Tensor = x + self.down(hidden)
        stretto.observe("above", (made > 0).sum(dim=0))
        stretto.observe("greatest", made.amax(), "max")
        return made


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    made: Tensor = model(batch["x"]).square().mean()
    return made


def batch(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)}


def expected(model: Stack) -> Seen:
    """By hooks on the layers of the plain model."""
    found: Seen = {}

    def see(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, made: Tensor) -> None:
            found.setdefault((name, "above"), []).append((made > 0).sum(dim=0).tolist())
            found.setdefault((name, "greatest"), []).append([made.detach().amax().item()])

        return hook

    own = copy.deepcopy(model)
    for name, layer in own.layers.named_children():
        layer.register_forward_hook(see(f"layers.{name}"))
    for step in range(STEPS):
        loss(own, batch(step))
    return found


def plan_of(model: nn.Module, parallel: Parallel) -> Plan:
    job = capture(model, batch(0), loss, parallel)
    return make_plan(job, described_costs(job, cores(latency_us=20.0, link_gbps=0.05)))


def seen_by(plan: Plan, model: nn.Module) -> tuple[Observed, ...]:
    def work(runner: Runner) -> tuple[Observed, ...]:
        assert runner.observed() == ()
        for step in range(STEPS):
            runner.step(batch(step))
        found = runner.observed()
        assert runner.observed() == ()
        return found

    told = run_threads(plan, lambda _: copy.deepcopy(model), work)
    assert all(one == told[0] for one in told)
    return told[0]


def assert_seen(found: tuple[Observed, ...], model: Stack) -> None:
    want = expected(model)
    assert [(one.module, one.name) for one in found] == list(want)
    for one in found:
        steps = torch.tensor(want[one.module, one.name], dtype=torch.float64)
        assert one.steps == STEPS
        for got, reduced in (
            (one.mean, steps.mean(0)),
            (one.least, steps.amin(0)),
            (one.most, steps.amax(0)),
        ):
            torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), reduced)


@pytest.mark.parametrize(
    "parallel",
    [
        Parallel(),
        pytest.param(Parallel(microbatches=2), marks=pytest.mark.slow),
        pytest.param(Parallel(dp=2, microbatches=2), marks=pytest.mark.slow),
        pytest.param(Parallel(pp=2, microbatches=4), marks=pytest.mark.slow),
        Parallel(pp=2, microbatches=2, dp=2, schedule="zb-h1"),
        Parallel(pp=2, microbatches=4, recompute="full"),
        pytest.param(Parallel(microbatches=2, recompute="full"), marks=pytest.mark.slow),
        Parallel(tp=2, microbatches=2, tp_plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"}),
    ],
    ids=lambda p: f"pp{p.pp} dp{p.dp} tp{p.tp} mb{p.microbatches} {p.schedule} {p.recompute}",
)
def test_it_is_what_the_plain_model_makes(parallel: Parallel) -> None:
    model = Stack(4).double()
    assert_seen(seen_by(plan_of(model, parallel), model), model)


def test_addends_of_tensor_parallel_ranks_are_summed() -> None:
    class Own(Layer):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(self.norm(x)).relu()
            stretto.observe("mass", hidden.sum(dim=1).sum(dim=0))
            made: Tensor = x + self.down(hidden)
            return made

    model = nn.Sequential(Own()).double()
    sharded = Parallel(tp=2, tp_plan={"0.up": "colwise", "0.down": "rowwise"})
    plans = [plan_of(model, parallel) for parallel in (Parallel(), sharded)]
    assert [plan.job.metrics[0].partial for plan in plans] == [(), ("tp",)]
    [alone], [together] = (seen_by(plan, model) for plan in plans)
    assert alone.mean == pytest.approx(together.mean, rel=1e-12)
    assert alone.mean[0] > 0


def test_the_greatest_of_partial_sums_is_that_of_their_sum() -> None:
    class Own(Layer):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(self.norm(x)).relu()
            stretto.observe("mass", hidden.sum(), "max")
            made: Tensor = x + self.down(hidden)
            return made

    model = nn.Sequential(Own()).double()
    sharded = Parallel(tp=2, tp_plan={"0.up": "colwise", "0.down": "rowwise"})
    [alone], [together] = (seen_by(plan_of(model, parallel), model) for parallel in (Parallel(), sharded))
    assert alone.mean == pytest.approx(together.mean, rel=1e-12)


def test_an_evaluation_lets_see_as_well() -> None:
    model = Stack(2).double()
    parallel = Parallel(pp=2, microbatches=2, dp=2)
    training = capture(model, batch(0), loss, parallel)
    job = capture_evaluation(model, batch(0), loss, training, layout=layout_of(model, parallel))
    costs, of_ops = (described_costs(one, cores(latency_us=20.0, link_gbps=0.05)) for one in (training, job))
    assert_seen(seen_by(make_plan(job, replace(costs, op_us=of_ops.op_us)), model), model)


def test_a_plan_with_metrics_is_written_and_read() -> None:
    from stretto.ir.serialize import plan_from_text, plan_to_text

    plan = plan_of(Stack(2).double(), Parallel(pp=2, microbatches=2))
    assert plan_from_text(plan_to_text(plan)) == plan
    lost = plan_to_text(plan).replace('"name": "greatest", "stage": 1', '"name": "greatest", "stage": 0')
    with pytest.raises(UsageError, match="stage 0 makes no value"):
        plan_from_text(lost)


def test_without_a_capture_it_does_nothing() -> None:
    value, trained = torch.ones(3), torch.ones(3, requires_grad=True)
    with MemoryMeter(()) as meter:
        stretto.observe("any", value)
        stretto.observe("any", trained, "max")
        stretto.observe("any", [1.0])  # type: ignore[arg-type]
    assert meter.peak_bytes == 0


@pytest.mark.parametrize(
    ("value", "joined", "said"),
    [
        (lambda x: x.expand(1000, ROWS, WIDTH), "sum", "at most 4096"),
        (lambda x: 3.0, "sum", "not float"),
        (lambda x: x.sum(), "mean", "not 'mean'"),
        (lambda x: stretto.observe("wrong", x.sum()) or x.sum(dim=0), "sum", "give them two names"),
    ],
)
def test_what_it_does_not_take_is_refused(value: Any, joined: Any, said: str) -> None:
    class Wrong(Layer):
        def forward(self, x: Tensor) -> Tensor:
            stretto.observe("wrong", value(x), joined)
            return super().forward(x)

    with pytest.raises((UsageError, CaptureError), match=said):
        capture(nn.Sequential(Wrong()), {"x": torch.ones(ROWS, WIDTH)}, loss, Parallel())


def test_stretches_of_steps_follow_each_other() -> None:
    one = Observed("m", "n", "sum", 1, (4.0, 0.0), (4.0, 0.0), (4.0, 0.0))
    other = Observed("m", "n", "sum", 3, (8.0, 4.0), (1.0, 2.0), (9.0, 5.0))
    [both] = one_after_another([(one,), (other,)])
    assert both == Observed("m", "n", "sum", 4, (7.0, 3.0), (1.0, 0.0), (9.0, 5.0))


def test_a_report_names_them_and_who_waits() -> None:
    one = Observed("layers.0", "above", "sum", 3, (6.0, 2.0), (5.0, 1.0), (7.0, 3.0))
    assert metric_line(one) == "  layers.0 above: 8, of it 25.0 % ([1]) to 75.0 % ([0]) (mean of 3 steps)"
    signed = replace(one, mean=(-1.0, 2.0))
    assert metric_line(signed) == "  layers.0 above: -1 to 2 (mean of 3 steps)"
    number = Observed("", "loss", "max", 3, (2.0,), (1.0,), (3.5,))
    assert metric_line(number) == "  loss: 2 (1 to 3.5 in 3 steps)"
    stalls = (Stall("ep", 0, 1, 1500.0), Stall("ep", 1, 0, 2500.0))
    timeline = Timeline("measured", 1, 1e4, (), (0,), members=2, busy_us=(1.0, 1.0), stalls=stalls)
    assert list(stall_lines(timeline)) == [
        "  rank 1 waits for rank 0, ep: 2.5 ms",
        "  rank 0 waits for rank 1, ep: 1.5 ms",
    ]
