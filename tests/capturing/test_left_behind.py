"""Capture leaves model, process and memory as they were; no microbatch reads unseen what a forward left."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.capturing.evaluation import capture_evaluation
from stretto.capturing.state import PythonState
from stretto.capturing.trace import trace
from stretto.models.gpt import next_token_loss
from tests.capturing.zoo import WIDTH, BatchNorm, Chain, Hooked, mean_square, rows
from tests.cells import slow
from tests.clusters import cores
from tests.runtime.equality import gpt, tokens

CLUSTER = cores()
PARALLEL = stretto.Parallel(pp=2, microbatches=2)


class Notes:
    """An object of the user's that a model has."""

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
    with pytest.raises(stretto.CaptureError, match="asks for the value of a tensor"):
        stretto.capture(model, rows(), lambda m, mb: mean_square(m, mb) * float(m.last.sum()), PARALLEL)
    assert told(model) == before
    copy.deepcopy(model)
    mean_square(model, rows())
    assert model.history
    assert float(model.history[0]) == pytest.approx(float(model.table["y"]))


class Carries(Chain):
    def __init__(self, layers: int = 4) -> None:
        super().__init__(layers)
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
    def __init__(self, layers: int = 4) -> None:
        super().__init__(layers)
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.history.append(super().forward(x))
        return torch.stack([y.detach() for y in self.history]).mean() + self.history[-1]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Carries, "last"),
        (Counts, "calls"),
        slow(Sums, "history"),
        (CountsInAGlobal, f"{__name__}.CALLS"),
        (CountsInItsClass, "CountsInItsClass.number"),
    ],
)
def test_what_a_later_call_reads_is_refused(kind: type[nn.Module], name: str) -> None:
    """The plain model hands it from one microbatch to the next, and a plan does not."""
    model = kind(layers=2)
    with pytest.raises(stretto.CaptureError) as caught:
        stretto.capture(model, rows(), mean_square, PARALLEL)
    assert f"left in {name}," in str(caught.value)
    assert "register_buffer" in str(caught.value)
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

    def __init__(self, layers: int = 4) -> None:
        super().__init__(layers)
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean()
        return y - self.mean


@pytest.mark.parametrize("kind", [Cached, Reassigns])
def test_what_is_right_with_every_microbatch(kind: type[nn.Module]) -> None:
    model = kind(layers=2)
    job = stretto.capture(model, rows(), mean_square, PARALLEL)
    assert {"mask", "size"}.isdisjoint(model.__dict__)
    models = [copy.deepcopy(model) for _ in range(2)]

    def work(runner: stretto.Runner) -> tuple[float, dict[str, Tensor]]:
        runner.step(rows())
        return float(runner.step(rows())), {name: b.clone() for name, b in runner.named_buffers()}

    results = stretto.run_threads(stretto.plan(job, CLUSTER, order="list"), models.__getitem__, work)
    losses = [mean_square(model, part).detach() for part in rows().repeat(2, 1).chunk(4)]
    assert results[0][0] == pytest.approx(float(losses[2] + losses[3]) / 2, rel=1e-12)
    buffers = {name: value for _, kept in results for name, value in kept.items()}
    torch.testing.assert_close(buffers, dict(model.named_buffers()), rtol=1e-12, atol=0)


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

    class Keeps(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.inbox: queue.Queue[int] = queue.Queue()

    model = Keeps()
    state = PythonState(("", model))
    model.inbox.put(3)
    model.out.note = 3  # type: ignore[assignment]
    assert state.changes() == ["out.note"]
    state.restore()
    assert model.inbox.get_nowait() == 3


# --- the model and the process ------------------------------------------------------------------------------


def hooks_of(module: nn.Module) -> list[list[int]]:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [list(getattr(sub, table)) for sub in module.modules() for table in tables]


@pytest.mark.parametrize(
    ("kind", "training"), [(BatchNorm, True), (Hooked, False), slow(BatchNorm, False), slow(Hooked, True)]
)
def test_the_model_is_left_as_it_was(kind: type[nn.Module], training: bool) -> None:
    model = kind().train(training)
    model.get_parameter("out.bias").grad = torch.ones(2, dtype=torch.float64)
    identities = [id(t) for t in (*model.parameters(), *model.buffers())]
    values = copy.deepcopy(model.state_dict())
    hooks = hooks_of(model)
    trace(model, rows(), mean_square, microbatches=2)
    assert [id(t) for t in (*model.parameters(), *model.buffers())] == identities
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert hooks_of(model) == hooks
    assert model.training is training
    assert torch.equal(model.get_parameter("out.bias").grad, torch.ones(2, dtype=torch.float64))
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["out.bias"]


def test_a_failed_capture_leaves_it_too() -> None:
    class Fails(Chain):
        def act(self, x):
            raise RuntimeError("no")

    model = Fails()
    identities = [id(p) for p in model.parameters()]
    hooks = hooks_of(model)
    with pytest.raises(stretto.CaptureError):
        trace(model, rows(), mean_square)
    assert [id(p) for p in model.parameters()] == identities
    assert hooks_of(model) == hooks
    assert not torch.compiler.is_compiling()
    assert torch.backends.mkldnn.enabled
    assert logging.getLogger("torch._functorch").level != logging.CRITICAL
    assert torch.is_grad_enabled()
    model.act = torch.tanh
    mean_square(model, rows()).backward()


def test_equal_models_and_those_on_meta_give_equal_jobs() -> None:
    """So that ranks that capture for themselves have one plan, whatever was captured before."""
    with torch.device("meta"):
        meta = gpt(True, layers=1)
    given = (
        (gpt(True, layers=1), tokens(4, columns=8)),
        (gpt(True, layers=1), tokens(4, columns=8, seed=2)),
        (meta, tokens(4, columns=8)),
    )
    jobs = [stretto.capture(model, batch, next_token_loss, PARALLEL) for model, batch in given]
    assert jobs[0] == jobs[1] == jobs[2]


LARGE = """
import torch, stretto
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
with torch.device("meta"):
    model = GPT(GPTConfig(vocab_size=32_000, layers=16, hidden=8192, heads=64, context=2048), seed=0)
weight = sum(p.nbytes for p in model.parameters())
parallel = stretto.Parallel(pp=8, microbatches=32)
batch = torch.zeros(32, 2049, dtype=torch.int64, device="meta")
job = stretto.capture(model, batch, next_token_loss, parallel)
cluster = stretto.Cluster(peak_tflops=0.08, memory_gbps=10, link_gbps=1)
plan = stretto.plan(job, cluster=cluster)
# Not getrusage: its peak is inherited from the process that started this one.
(peak,) = (line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(weight, int(peak) * 1024, max(plan.prediction.peak_bytes))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.slow
def test_planning_a_model_of_fifty_gigabytes_takes_little_memory(tmp_path: Path) -> None:
    program = tmp_path / "large.py"
    program.write_text(LARGE)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True)
    weight, resident, peak = map(int, done.stdout.split())
    assert weight > 50e9
    assert resident < 1e9
    assert peak > 10e9, "the plan knows what the ranks will need"
