"""Updates as ops of the step are those of the optimizer's own step, bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.config import Parallel
from stretto.errors import UsageError
from stretto.ir.updates import UPDATE
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.passes import flat
from stretto.runtime import updates
from stretto.train.clip import GradientClip
from stretto.verifying import plan_faults
from tests.clusters import cores
from tests.parallelize.equality import batch_of
from tests.parallelize.test_key_heads import hf
from tests.parallelize.zero import (
    ZeroCell,
    assert_same_parameters,
    batch,
    optimizer_of,
    plain_training,
    training,
    worst_error,
)
from tests.runtime.equality import huggingface_loss

CELLS = [
    ZeroCell(0, tied=True, frozen=True),
    ZeroCell(1, pp=2, tied=True, frozen=True),
    ZeroCell(1, precision="bf16", pp=2),
]
SLOW_CELLS = [
    ZeroCell(0),
    ZeroCell(1, dp_shard=2, tp=2),
    ZeroCell(3, recompute="full", tied=True),
    ZeroCell(2, ep=2),
    ZeroCell(0, precision="bf16", tied=True),
]
CLIPPED = [
    ZeroCell(1, pp=2, tied=True, frozen=True, clipped=True),
    ZeroCell(1, dp_shard=2, tp=2, clipped=True),
    ZeroCell(1, pp=2, frozen_later=True, clipped=True),
]
SLOW_CLIPPED = [
    ZeroCell(0, tied=True, clipped=True),
    ZeroCell(3, ep=2, clipped=True),
    ZeroCell(3, ep=2, frozen_later=True, clipped=True),
    ZeroCell(0, tied=True, frozen_later=True, clipped=True),
]


def slow(cells: Sequence[Any]) -> list[Any]:
    return [pytest.param(one, marks=pytest.mark.slow) for one in cells]


@pytest.mark.parametrize("cell", [*CELLS, *slow(SLOW_CELLS)], ids=str)
def test_updates_are_those_of_the_optimizers_own_step(cell: ZeroCell) -> None:
    with_updates = replace(cell, updates=True)
    plan = with_updates.plan()
    assert plan_faults(plan) == []
    found = training(with_updates, plan)
    assert_same_parameters(found, training(cell, cell.plan()))
    if cell.precision == "float64":
        error, name = worst_error(found, plain_training(cell))
        assert error < 1e-10, name


@pytest.mark.parametrize("cell", [*CLIPPED, *slow(SLOW_CLIPPED)], ids=str)
def test_the_norm_is_that_of_all_gradients(cell: ZeroCell) -> None:
    """As `GradientClip` has it, and the plain model."""
    with_updates = replace(cell, updates=True)
    plan = with_updates.plan()
    assert plan_faults(plan) == []
    found = training(with_updates, plan)
    for expected in (training(cell, cell.plan()), plain_training(cell)):
        error, name = worst_error(found, expected)
        assert error < 1e-12, name


SMALL = ZeroCell(1, tied=True, updates=True)


def one_rank(parallel: Parallel, **how: Any) -> stretto.Runner:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    job = stretto.capture(model, DATA, loss, parallel)
    return stretto.Runner(stretto.plan(job, cores(), order="list"), model, **how)


DATA = torch.linspace(-1, 2, 32, dtype=torch.float64).reshape(8, 4)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch)
    return out.square().mean()


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def test_gradients_are_gone_and_the_optimizer_is_an_ordinary_one() -> None:
    """A scheduler of its rate works with it; its groups are whole between steps, and hooks see gradients."""
    torch.manual_seed(0)
    runner = one_rank(Parallel(updates=True, microbatches=2), optimizer=adamw)
    other = copy.deepcopy([*runner.parameters()])
    torch.manual_seed(0)
    plain = one_rank(Parallel(microbatches=2))
    assert all(torch.equal(a, b) for a, b in zip(other, plain.parameters(), strict=True))
    made = runner.optimizer
    assert made is not None
    own = adamw([*plain.parameters()])
    rates = [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in (made, own)]
    seen: list[int] = []
    first = next(runner.parameters())
    first.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))  # type: ignore[arg-type]
    for _ in range(3):
        assert torch.equal(runner.step(DATA), plain.step(DATA))
        assert all(p.grad is None for p in runner.parameters())
        own.step()
        own.zero_grad()
        for rate in rates:
            rate.step()
    assert seen == [1, 1, 1]
    assert [*made.param_groups[0]["params"]] == [*runner.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(runner.parameters(), plain.parameters(), strict=True))
    assert made.state_dict()["param_groups"] == own.state_dict()["param_groups"]


def test_what_is_frozen_later_is_left_alone() -> None:
    runner = one_rank(Parallel(updates=True), optimizer=adamw)
    first, second, *_ = runner.parameters()
    before = [p.detach().clone() for p in (first, second)]
    first.requires_grad_(False)
    runner.step(DATA)
    assert torch.equal(first, before[0])
    assert not torch.equal(second, before[1])


@pytest.mark.parametrize("trained", [0, 1, 3])
def test_what_is_frozen_later_is_not_of_the_norm(trained: int) -> None:
    """Gradients of all are reduced, and the norm is of those of what trains."""
    torch.manual_seed(0)
    runner = one_rank(Parallel(updates=True, clip_norm=0.01), optimizer=adamw)
    torch.manual_seed(0)
    plain = one_rank(Parallel())
    for of in (runner, plain):
        for parameter in [*of.parameters()][trained:]:
            parameter.requires_grad_(False)
    clip, own = GradientClip(plain, 0.01), adamw([*plain.parameters()])
    runner.step(DATA)
    plain.step(DATA)
    assert runner.grad_norm == pytest.approx(float(clip()), rel=1e-14)
    own.step()
    pairs = zip(runner.parameters(), plain.parameters(), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-13, atol=0) for a, b in pairs)


def test_several_groups_keep_their_options() -> None:
    def groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        matrices, vectors = ([p for p in parameters if (p.dim() > 1) is kind] for kind in (True, False))
        return torch.optim.SGD([{"params": matrices, "lr": 0.0}, {"params": vectors}], lr=0.5)

    runner = one_rank(Parallel(updates=True), optimizer=groups)
    before = [p.detach().clone() for p in runner.parameters()]
    runner.step(DATA)
    same = [torch.equal(p, kept) for p, kept in zip(runner.parameters(), before, strict=True)]
    assert same == [p.dim() > 1 for p in runner.parameters()]


class CountsInGroups(torch.optim.Optimizer):
    """Its steps are smaller and smaller, as its groups count."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.5})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.data.sub_(p.grad, alpha=group["lr"] / group["step"])


def test_what_groups_count_is_counted_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.passes.flat.LARGE_BYTES", 1)  # so that there are several updates
    torch.manual_seed(0)
    runner = one_rank(Parallel(updates=True), optimizer=CountsInGroups)
    torch.manual_seed(0)
    plain = one_rank(Parallel())
    own = CountsInGroups(plain.parameters())
    assert sum(op.target == UPDATE for op in runner.plan.once(0)) > 1
    for _ in range(3):
        runner.step(DATA)
        plain.step(DATA)
        own.step()
        own.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(runner.parameters(), plain.parameters(), strict=True))
    assert runner.optimizer is not None
    assert runner.optimizer.param_groups[0]["step"] == 3


class Read(list[Any]):
    """A list that counts what is read of it."""

    count = 0

    def __iter__(self) -> Iterator[Any]:
        for one in super().__iter__():
            self.count += 1
            yield one


def test_all_parameters_are_gone_through_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for each of many buckets: on the host that takes longer than their kernels."""
    monkeypatch.setattr(flat, "LARGE_BYTES", 1)  # a bucket each
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))).double()
    job = stretto.capture(model, DATA, loss, Parallel(updates=True))
    plan = stretto.plan(job, cores(), order="list")
    buckets = sum(op.target == UPDATE for op in plan.once(0))
    assert buckets == 40
    runner = stretto.Runner(plan, model, optimizer=adamw)
    assert runner.optimizer is not None
    runner.step(DATA)
    [group] = runner.optimizer.param_groups
    group["params"] = read = Read(group["params"])
    runner.step(DATA)
    assert 40 <= read.count <= 40 + 2 * buckets


def test_the_norm_alone_is_measured() -> None:
    torch.manual_seed(0)
    runner = one_rank(Parallel(updates=True, clip_norm=0), optimizer=adamw)
    torch.manual_seed(0)
    plain = one_rank(Parallel())
    with pytest.raises(UsageError, match="known after a step"):
        _ = runner.grad_norm
    runner.step(DATA)
    plain.step(DATA)
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    assert runner.grad_norm == pytest.approx(float(norm), rel=1e-14)
    adamw([*plain.parameters()]).step()
    assert all(torch.equal(a, b) for a, b in zip(runner.parameters(), plain.parameters(), strict=True))


def test_an_optimizer_without_updates_and_updates_without_one_are_refused() -> None:
    with pytest.raises(UsageError, match=r"has no optimizer for it: give one"):
        one_rank(Parallel(updates=True))
    with pytest.raises(UsageError, match=r"capture with Parallel\(updates=True\)"):
        one_rank(Parallel(), optimizer=adamw)
    with pytest.raises(UsageError, match=r"it gave a list"):
        one_rank(Parallel(updates=True), optimizer=lambda parameters: parameters)
    with pytest.raises(UsageError, match=r"clip_norm = 1.0 is about updates"):
        Parallel(clip_norm=1.0)


def test_a_graph_of_the_step_holds_no_optimizer() -> None:
    plan = one_rank(Parallel(updates=True), optimizer=adamw).plan
    with pytest.raises(UsageError, match=r"cuda_graph=True replays what was recorded"):
        updates.optimizer_of(plan, adamw, [], cuda_graph=True)


def test_gradients_that_are_gone_are_not_clipped() -> None:
    runner = one_rank(Parallel(updates=True), optimizer=adamw)
    with pytest.raises(UsageError, match=r"no gradients are left to clip"):
        GradientClip(runner, 1.0)


class OfAll(torch.optim.SGD):
    """Its step depends on all parameters that it has."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        kept = [p for group in self.param_groups for p in group["params"]]
        norm = torch.nn.utils.get_total_norm([p.grad for p in kept if p.grad is not None])
        for p in kept:
            if p.grad is not None:
                p.sub_(p.grad / norm)


def test_an_optimizer_that_looks_at_all_parameters_is_refused() -> None:
    runner = one_rank(Parallel(updates=True), optimizer=lambda parameters: OfAll(parameters, lr=1.0))
    with pytest.raises(UsageError, match=r"OfAll updates a parameter by what others are"):
        runner.step(DATA)


def test_a_saved_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    plan = SMALL.plan()

    def work(runner: stretto.Runner) -> list[Tensor]:
        assert runner.optimizer is not None
        runner.step(batch(0))
        stretto.save(tmp_path / "one", runner, runner.optimizer)
        runner.step(batch(1))
        expected = [p.detach().clone() for p in runner.parameters()]
        runner.step(batch(2))
        stretto.load(tmp_path / "one", runner, runner.optimizer)
        runner.step(batch(1))
        assert all(torch.equal(a, b) for a, b in zip(expected, runner.parameters(), strict=True))
        return expected

    stretto.run_threads(plan, lambda _: SMALL.model(), work, optimizer=optimizer_of)


def test_a_rehearsal_updates() -> None:
    plan = SMALL.plan()
    rehearsed = stretto.rehearse(plan, 0, steps=1)
    assert rehearsed.peak_bytes == pytest.approx(plan.prediction.peak_bytes[0], rel=0.1)  # type: ignore[union-attr]


@pytest.mark.parametrize(("zero", "precision"), [(0, "float32"), (1, "bf16"), (3, "float32")])
def test_memory_is_as_predicted(zero: Any, precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients go with their updates."""
    monkeypatch.setattr("stretto.passes.flat.LARGE_BYTES", 2**15)
    model = GPT(GPTConfig(vocab_size=130, layers=2, hidden=128, heads=4, context=4), seed=3)
    data = torch.randint(0, 130, (4, 5), generator=torch.Generator().manual_seed(5))
    parallel = Parallel(microbatches=2, dp=2, zero=zero, updates=True)
    plan = stretto.plan(
        stretto.capture(model, data, next_token_loss, parallel, precision=precision), cores(), order="list"
    )
    assert plan.prediction is not None

    def work(runner: stretto.Runner) -> tuple[int, ...]:
        runner.step(data)
        return runner.timeline().peak_bytes

    for measured in stretto.run_threads(plan, lambda _: copy.deepcopy(model), work, optimizer=optimizer_of):
        assert measured == pytest.approx(plan.prediction.peak_bytes, rel=0.05)


STAGES = {
    "one rank": Parallel(microbatches=2),
    "two pipeline ranks": Parallel(pp=2, microbatches=2),
    "waits at once": Parallel(pp=2, microbatches=2, overlap="off"),
    "virtual stages": Parallel(pp=2, microbatches=2, schedule="zb-v", stages=4),
    "interleaved": Parallel(pp=2, microbatches=4, schedule="interleaved-1f1b", stages=4),
    "tensor-parallel": Parallel(tp=2, microbatches=2, sequence_parallel=True),
    "copies too": Parallel(pp=2, dp=2, microbatches=2, schedule="zb-h2", zero=1),
}


FAST = ("one rank", "two pipeline ranks", "copies too")


@pytest.mark.parametrize("frozen", [(), ("head", "blocks.1", "blocks.2", "blocks.3", "norm")], ids=str)
@pytest.mark.parametrize("name", [*FAST, *slow([name for name in STAGES if name not in FAST])])
def test_few_ranks_have_little_to_reduce(name: str, frozen: tuple[str, ...]) -> None:
    """Tied parameters on one rank and on two; a rank that trains nothing but for a tie, or nothing at all."""
    parallel = STAGES[name].model_copy(update={"updates": True, "clip_norm": 0.1})
    config = GPTConfig(vocab_size=20, layers=4, hidden=8, heads=2, context=4, tie_embeddings=not frozen)
    model = GPT(config, seed=3).double()
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(not key.startswith(frozen) if frozen else True)
    data = torch.randint(0, 20, (8, 5), generator=torch.Generator().manual_seed(5))
    plan = stretto.plan(stretto.capture(model, data, next_token_loss, parallel), cores(), order="list")
    assert plan_faults(plan) == []

    def work(runner: stretto.Runner) -> tuple[dict[str, Any], float]:
        for _ in range(2):
            runner.step(data)
        return runner.state_dict(), float(runner.grad_norm)

    results = stretto.run_threads(plan, lambda _: copy.deepcopy(model), work, optimizer=adamw)
    plain = copy.deepcopy(model)
    own = adamw([*plain.parameters()])
    for _ in range(2):
        own.zero_grad()
        next_token_loss(plain, data).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        own.step()
    assert norm > 0.1
    for state, found in results:
        assert found == pytest.approx(float(norm), rel=1e-12)
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-11, atol=1e-12)


class ReadOnly(nn.Module):
    """Embedding and head are one tensor, and one of them adds nothing to its gradient."""

    def __init__(self, detached: str) -> None:
        super().__init__()
        self.detached = detached
        self.embedding = nn.Embedding(12, 8)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        full, fixed = self.embedding.weight, self.embedding.weight.detach()
        first, last = (fixed, full) if self.detached == "embedding" else (full, fixed)
        hidden: Tensor = self.blocks(nn.functional.embedding(x, first))
        return hidden @ last.T


READ_ONLY = [
    ({"zero": 2}, "off", "head"),
    ({"zero": 3, "schedule": "interleaved-1f1b", "stages": 4}, "local", "head"),
    pytest.param(
        {"zero": 2, "schedule": "interleaved-1f1b", "stages": 4}, "off", "embedding", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("layout", "overlap", "detached"), READ_ONLY)
def test_a_tie_that_one_rank_only_reads(layout: dict[str, Any], overlap: Any, detached: str) -> None:
    """That rank's part of the norm needs no sum of the tie, and its update does."""
    torch.manual_seed(0)
    model, data = ReadOnly(detached).double(), torch.randint(0, 12, (16, 6))

    def cross_entropy(model: nn.Module, rows: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    parallel = Parallel(pp=2, dp=2, microbatches=4, updates=True, clip_norm=0.1, **layout)
    job = stretto.capture(model, data, cross_entropy, parallel)
    plan = stretto.plan(job, cores(), order="list", overlap=overlap)
    assert plan_faults(plan) == []

    def work(runner: stretto.Runner) -> dict[str, Any]:
        for _ in range(2):
            runner.step(data)
        return runner.state_dict()

    results = stretto.run_threads(plan, lambda _: copy.deepcopy(model), work, optimizer=adamw)
    plain = copy.deepcopy(model)
    own = adamw([*plain.parameters()])
    for _ in range(2):
        own.zero_grad()
        cross_entropy(plain, data).backward()
        assert torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1) > 0.1
        own.step()
    for state in results:
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-11, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*is not sharded over tp:UserWarning")
@pytest.mark.filterwarnings("ignore:the tensor-parallel plan of:UserWarning")
@pytest.mark.parametrize("zero", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_head_that_ranks_share_counts_once(zero: Any) -> None:
    model = hf("LlamaForCausalLM", 2)
    parallel = Parallel(tp=4, dp=2, zero=zero, microbatches=2, updates=True, clip_norm=0.1)
    job = stretto.capture(model, batch_of(), huggingface_loss, parallel)
    assert any(shard.copies == 2 for p in job.parameters for shard in p.shards)
    plan = stretto.plan(job, cores(), order="list")
    assert plan_faults(plan) == []

    def work(runner: stretto.Runner) -> tuple[dict[str, Any], float]:
        runner.step(batch_of())
        return runner.state_dict(), float(runner.grad_norm)

    results = stretto.run_threads(plan, lambda _: copy.deepcopy(model), work, optimizer=adamw)
    plain = copy.deepcopy(model)
    own = adamw([*plain.parameters()])
    huggingface_loss(plain, batch_of()).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    own.step()
    for state, found in results:
        assert found == pytest.approx(float(norm), rel=1e-6)
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6)
