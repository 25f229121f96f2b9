"""What users write in models is captured and has the plain model's numbers, over two and four stages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import stretto
from stretto.capturing.evaluation import capture_evaluation
from stretto.capturing.trace import trace
from stretto.ir.action import Phase, Schedule, parse_slot
from tests.capturing.steps import assert_plain
from tests.capturing.zoo import (
    EQUAL,
    WIDTH,
    BatchNorm,
    Chain,
    OneGradForTwo,
    Skips,
    mean_square,
    rows,
)
from tests.cells import but, slow
from tests.clusters import cores
from tests.runtime.equality import (
    assert_equal,
    assert_same_bits,
    evenly,
    job_of,
    lowered,
    plain,
    plan_of,
    run,
)

WITHOUT = {"Frozen": "layers.2.weight", "Unused": "extra.weight"}
"""Parameters that have no gradient."""
BLOCKS = ["layers.1", "layers.2", "layers.3"]


LIKE_OTHERS = (
    "Encoder",
    "Recurrent",
    "WeightNorm",
    "Complex",
    "AddedLast",
    "InPlace",
    "Convolutions",
    "OneGradForTwo",
    "Skips",
)
"""What these do, others do in a smaller form."""


@pytest.mark.parametrize("name", but(EQUAL, LIKE_OTHERS))
def test_the_plain_models_numbers(name: str) -> None:
    model, batch = EQUAL[name](), rows()
    expected = plain(model, batch, mean_square)
    found = trace(model, batch, mean_square, microbatches=4)
    for stages in (2, 4):
        job = evenly(found, stages, 4)
        plan = plan_of(job, "zb-h1") if stages == 2 else lowered(job, "zb-h1")
        result = run(plan, model, batch)
        assert_equal(result, expected, 1e-10)
        if name == "Shared" and stages == 2:  # one part of each stage, summed once a step
            weight = next(p for p in job.parameters if p.name == "layers.0.weight")
            assert [stage for stage, _, _ in weight.grads] == list(weight.stages) == [0, 1]
        if name in WITHOUT:
            assert result.grads[WITHOUT[name]] is None


def test_skips_are_edges_to_the_stages_that_use_them() -> None:
    model, batch = Skips(), rows()
    job = job_of(trace(model, batch, mean_square, microbatches=4), 4, 4, BLOCKS)
    forward = {(e.source, e.target) for e in job.edges if e.phase is Phase.F}
    assert {(0, 2), (0, 3), (1, 3), (2, 3)} <= forward
    assert all(e.source > e.target for e in job.edges if e.phase is not Phase.F)
    for family in ("gpipe", "eager-1f1b", "zb-h2"):
        assert_equal(run(lowered(job, family), model, batch), plain(model, batch, mean_square), 1e-10)


def test_gradients_are_tensors_of_their_own() -> None:
    """Of one another's and of the next step's: what the user does to one changes no other."""
    model, batch = OneGradForTwo(), rows()
    plan = plan_of(evenly(trace(model, batch, mean_square, microbatches=2), 2, 2), "1f1b")

    def work(runner: stretto.Runner) -> tuple[list[Tensor], list[Tensor]]:
        runner.step(batch)
        first = [p.grad for p in runner.parameters() if p.grad is not None]
        before = [grad.clone() for grad in first]
        storages = {grad.untyped_storage().data_ptr() for grad in first}
        assert len(storages) == len(first)
        for parameter in runner.parameters():
            parameter.grad = None
        runner.step(batch)
        second = [p.grad for p in runner.parameters() if p.grad is not None]
        for grad in second:
            grad.zero_()
        return first, before

    for first, before in stretto.run_threads(plan, lambda _: copy.deepcopy(model), work):
        assert len(first) > 0
        assert all(torch.equal(a, b) for a, b in zip(first, before, strict=True))


@pytest.mark.parametrize(
    ("shared", "family"), [(False, "zb-h2"), (True, "gpipe"), slow(False, "gpipe"), slow(True, "zb-h2")]
)
def test_buffers_are_updated_microbatch_by_microbatch(shared: bool, family: str) -> None:
    model, batch = BatchNorm(shared), rows()
    expected = copy.deepcopy(model)
    for piece in batch.chunk(4):
        (mean_square(expected, piece) / 4).backward()
    job = job_of(trace(model, batch, mean_square, microbatches=4), 1 if shared else 4, 4)
    plan = plan_of(job, family)

    def work(runner: stretto.Runner) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
        runner.step(batch)
        return dict(runner.named_buffers()), {n: p.grad for n, p in runner.named_parameters()}

    buffers: dict[str, Tensor] = {}
    grads: dict[str, Tensor | None] = {}
    for kept, found in stretto.run_threads(plan, lambda _: copy.deepcopy(model), work):
        buffers |= kept
        grads |= found
    assert set(buffers) == {name for name, _ in expected.named_buffers()}
    for name, value in expected.named_buffers():
        assert torch.allclose(buffers[name], value, rtol=1e-12, atol=0), name
    for name, parameter in expected.named_parameters():
        got = grads[name]
        assert got is not None
        assert parameter.grad is not None
        # The bias before a norm has a gradient of zero, up to rounding.
        assert (got - parameter.grad).norm() <= 1e-10 * parameter.grad.norm() + 1e-15, name


def test_a_buffer_that_two_stages_write_is_refused() -> None:
    found = trace(BatchNorm(shared=True), rows(), mean_square, microbatches=4)
    with pytest.raises(stretto.CaptureError, match=r"buffer 'norms.0.running_mean' is written in stage"):
        job_of(found, 2, 4, ["layers.2"])


class Leaves(Chain):
    """Reads a tree: integers, booleans, nested tensors, and leaves that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH).double()

    def forward(self, tree: Any) -> Tensor:
        x = self.embedding(tree["ids"])
        x = torch.where(tree["mask"][:, None], x, tree["nested"]["pair"][1][0])
        assert tree["text"] == "as it is"
        assert tree["nested"]["pair"][0] is None
        return super().forward(x) * tree["scale"]


def test_batches_are_trees() -> None:
    model = Leaves()
    batch = {
        "ids": torch.arange(8) % 5,
        "mask": torch.arange(8) % 3 == 0,
        "nested": {"pair": (None, [rows()])},
        "scale": 2.0,
        "text": "as it is",
        "empty": torch.zeros(8, 0),
    }
    found = trace(model, batch, mean_square, microbatches=4)
    assert [name for name, _ in found.job.batch] == ["ids", "mask", "nested.pair.1.0", "empty"]
    plan = plan_of(evenly(found, 2, 4), "zb-h1")
    assert_equal(run(plan, model, batch), plain(model, batch, mean_square), 1e-10)


def test_a_compiled_model_is_captured_as_it_is_written() -> None:
    model, batch = Chain(), rows()
    compiled = torch.compile(model)
    job = evenly(trace(compiled, batch, mean_square, microbatches=2), 2, 2)
    expected = plain(model, batch, mean_square)
    found = run(plan_of(job), compiled, batch)
    assert torch.equal(found.loss, run(plan_of(job), compiled, batch).loss)
    for name, grad in expected.grads.items():
        got = found.grads[f"_orig_mod.{name}"]
        assert grad is not None
        assert got is not None
        assert (got - grad).norm() <= 1e-10 * grad.norm()


class Checkpointed(Chain):
    """The first layer is as peft leaves frozen embeddings."""

    def __init__(self, how: Callable[[nn.Module, Tensor], Tensor], frozen: bool) -> None:
        super().__init__()
        self.how = how
        self.layers[0].requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if not x.requires_grad:
            x.requires_grad_(True)
        for layer in self.layers[1:]:
            x = torch.tanh(self.how(layer, x))
        return self.out(x)


CHECKPOINTS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "its hooks": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "re-entrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "in parts": lambda layer, x: checkpoint_sequential([layer, nn.Tanh()], 2, x, use_reentrant=True),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_activation_checkpointing_is_said_to_have_no_effect(name: str, frozen: bool) -> None:
    model, batch = Checkpointed(CHECKPOINTS[name], frozen), rows()
    with pytest.warns(UserWarning, match="activation checkpointing .* has no effect: activations are kept"):
        found = trace(model, batch, mean_square, microbatches=2)
    assert_equal(run(plan_of(job_of(found, 2, 2)), model, batch), plain(model, batch, mean_square), 1e-10)


def test_a_re_entrant_checkpoint_trains_nothing_where_its_inputs_require_no_gradient() -> None:
    """As in PyTorch, which warns."""

    class Wrapped(Chain):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = checkpoint(self.layers[0], x, use_reentrant=True)
            return self.out(torch.tanh(made))

    model, batch = Wrapped(), rows()
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        found = trace(model, batch, mean_square, microbatches=1)
    assert_equal(run(plan_of(job_of(found, 1, 1)), model, batch), plain(model, batch, mean_square), 1e-10)


def test_autocast_inside_the_loss_is_captured() -> None:
    model, batch = Chain().float(), rows().float()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(batch).float().square().mean()

    found = trace(model, batch, loss, microbatches=1)
    assert any("bfloat16" in str(op.outputs[0]) for op, _ in found.program.ops)
    # The same casts and kernels in the same order: nothing may differ in one microbatch.
    expected = plain(model, batch, loss)
    assert_equal(run(lowered(job_of(found, 2, 1), "1f1b"), model, batch), expected, 1e-6)


def test_bf16_computes_in_bfloat16_and_gives_float32_gradients() -> None:
    model, batch = Chain().float(), rows(16).float()
    parallel = stretto.Parallel(pp=2, microbatches=4)
    job = stretto.capture(model, batch, mean_square, parallel, precision="bf16")
    assert [len(s.ops[Phase.F]) > 0 for s in job.stages] == [True, True]
    assert job.param_dtype == "bfloat16"
    results = [run(plan_of(job, family), model, batch) for family in ("gpipe", "1f1b", "zb-h2")]
    for result in results[1:]:
        assert_same_bits(result, results[0])
    expected = plain(model, batch, mean_square)
    # bfloat16 has 8 bits: one rounding is 2**-8 of the value, and each gradient passes through a few.
    assert_equal(results[0], expected, 0.04)
    assert max(float((results[0].grads[n] - g).norm() / g.norm()) for n, g in expected.grads.items()) > 1e-4


FOUR = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
NAMES = ["1", "2", "3"]


def job_of_four(model: nn.Module = FOUR, columns: int = 4, **given: Any) -> stretto.Job:
    parallel = stretto.Parallel(microbatches=2, **given)
    return stretto.capture(model, torch.randn(2, columns), loss=mean_square, parallel=parallel)


def linears(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))


class Tied(nn.Module):
    def __init__(self, detached: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.detached = detached
        self.embedding = nn.Embedding(16, 8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.embedding.weight.requires_grad_(not frozen)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.hidden(self.embedding(tokens))
        return nn.functional.linear(x, self.head.weight.detach()) if self.detached else self.head(x)


def next_tokens(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(batch["x"])
    return nn.functional.cross_entropy(logits.reshape(-1, 16), batch["y"].reshape(-1))


IDS = torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(0))
X = torch.randn(4, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
CASES: dict[str, tuple[Callable[[], nn.Module], Any, Any, dict[str, Any]]] = {
    **{
        f"views cut at {cut}": (lambda: linears(4), X, mean_square, {"split": [cut], "schedule": "zb-h1"})
        for cut in NAMES
    },
    "a tie": (Tied, IDS, mean_square, {"split": ["hidden"]}),
    "a tie that one stage trains": (lambda: Tied(True), IDS, mean_square, {"split": ["hidden"]}),
    "a tie that none trains": (lambda: Tied(frozen=True), IDS, mean_square, {"split": ["hidden"]}),
    "slices of one tensor": (
        lambda: nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)),
        {"x": IDS[:, :-1], "y": IDS[:, 1:]},
        next_tokens,
        {"microbatches": 2},
    ),
}


@pytest.mark.parametrize("name", but(CASES, ["views cut at 1", "views cut at 3"]))
def test_numbers_are_the_plain_models(name: str) -> None:
    make, batch, loss, layout = CASES[name]
    torch.manual_seed(0)
    assert_plain(make().double(), batch, loss, stretto.Parallel(**{"pp": 2, "microbatches": 4, **layout}))


def test_replaced_and_frozen_parameters() -> None:
    model = nn.Linear(4, 4)
    runner = stretto.Runner(stretto.plan(job_of_four(model), cores()), model)
    model.bias.requires_grad_(False)
    runner.step(torch.randn(2, 4))
    assert model.bias.grad is None
    assert model.weight.grad is not None
    model.weight.data = torch.randn(4, 4)
    with pytest.raises(stretto.UsageError, match="parameter 'weight' has got another tensor"):
        runner.step(torch.randn(2, 4))


def test_capture_works_where_gradients_are_off() -> None:
    with torch.no_grad():
        job = job_of_four()
    assert all(parameter.grads for parameter in job.parameters)


def own_order(*ranks: str) -> Schedule:
    orders = tuple(tuple(parse_slot(token) for token in order.split()) for order in ranks)
    return Schedule("by hand", 4, 2, (0, 1, 0, 1), orders)


LOOPED = own_order("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1")


def test_stages_that_are_not_one_a_rank_need_a_schedule_of_ones_own() -> None:
    job = job_of_four(pp=2, split=NAMES, schedule="1f1b")
    with pytest.raises(stretto.UsageError, match="capture with 2 stages"):
        stretto.plan(job, cores())
    assert stretto.plan(job, cores(), schedule=LOOPED).ranks == 2
    with pytest.raises(stretto.UsageError, match="is for 2 ranks, but pp = 4"):
        stretto.plan(replace(job, pp=4), cores(), schedule=LOOPED)
    with pytest.raises(stretto.UsageError, match="max_live = 1"):
        stretto.plan(replace(job, max_live=1), cores(), schedule=LOOPED)


def test_evaluation_stays_on_the_ranks_of_the_training() -> None:
    x, job = torch.randn(2, 4), job_of_four(pp=2, split=NAMES)
    training = stretto.plan(job, cores(), schedule=LOOPED)
    evaluation = capture_evaluation(FOUR, x, mean_square, job)
    plan = stretto.plan(evaluation, cores(), schedule=training.schedule)
    assert plan.schedule.stage_ranks == (0, 1, 0, 1)
    results = stretto.run_threads(plan, lambda _: FOUR, lambda runner: float(runner.step(x)))
    assert results == pytest.approx([mean_square(FOUR, x).item()] * 2, rel=1e-5)
