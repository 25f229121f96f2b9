"""One Runner, several shapes of batches: parameters, gradients and optimizer are as in the plain model."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.runtime import Runner, run_threads
from stretto.runtime.memory_adapter import MemoryMeter
from tests.cells import slow
from tests.clusters import cores
from tests.runtime.equality import (
    SMALL,
    VOCAB,
    Result,
    assert_equal,
    from_transformers,
    gpt,
    huggingface_loss,
    joined,
    plain,
    tokens,
)

TOLERANCE = 1e-10
LENGTHS = (9, 5, 12, 7, 16, 4, 3, 14)
ROWS = 4
LIKE_ADAM = functools.partial(torch.optim.AdamW, lr=1e-3)

Batch = dict[str, Tensor]


def batch_of(columns: int, rows: int = ROWS, seed: int = 0) -> Batch:
    ids = tokens(rows, columns=columns, seed=seed)
    return {"input_ids": ids, "labels": ids.clone()}


@functools.cache
def llama() -> nn.Module:
    config = {**SMALL, "num_hidden_layers": 2}
    return from_transformers("LlamaForCausalLM", **config, tie_word_embeddings=True).double()


def captured(model: nn.Module, batch: Any, **layout: Any) -> stretto.Job:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* is not sharded over ", UserWarning)
        parallel = stretto.Parallel(**{"microbatches": 2, **layout})
        return stretto.capture(model, batch, huggingface_loss, parallel)


def planned(job: stretto.Job) -> stretto.Plan:
    return stretto.plan(job, cluster=cores(), order="list")


def again(job: stretto.Job, batch: Any, **how: Any) -> stretto.Plan:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* is not sharded over ", UserWarning)
        return planned(job.with_batch(batch, **how))


@functools.cache
def of_layout(pp: int = 1, tp: int = 1, dp: int = 1) -> tuple[stretto.Job, stretto.Plan]:
    job = captured(llama(), batch_of(LENGTHS[0]), pp=pp, tp=tp, dp=dp)
    return job, planned(job)


@functools.cache
def of_shape(columns: int, rows: int = ROWS, **layout: int) -> stretto.Plan:
    job, first = of_layout(**layout)
    return again(job, batch_of(columns, rows), like=first)


def trained(
    plans: Sequence[stretto.Plan],
    batches: Sequence[Batch],
    model: nn.Module,
    work: Callable[..., Any] | None = None,
) -> list[Any]:
    """What each rank has after each batch: its coordinates, the loss, its gradients and its parameters."""

    def each(runner: Runner) -> list[Any]:
        for plan in plans[1:]:
            runner.add(plan)
        optimizer = LIKE_ADAM(runner.parameters())
        found = []
        for batch in batches:
            loss = runner.step(batch)
            grads = {n: p.grad.clone() for n, p in runner.named_parameters() if p.grad is not None}
            found.append((runner.coordinates, loss, grads))
            optimizer.step()
            optimizer.zero_grad()
        return found if work is None else work(runner, optimizer, found)

    return run_threads(plans[0], lambda _: copy.deepcopy(model), each)


def of_plain_model(batches: Sequence[Batch], model: nn.Module) -> tuple[list[Result], nn.Module]:
    own = copy.deepcopy(model)
    optimizer = LIKE_ADAM(own.parameters())
    results = []
    for batch in batches:
        results.append(plain(own, batch, huggingface_loss))
        for name, parameter in own.named_parameters():
            parameter.grad = results[-1].grads[name]
        optimizer.step()
        optimizer.zero_grad()
    return results, own


@pytest.mark.parametrize(
    ("layout", "count"),
    [({"pp": 2}, 3), slow({"pp": 2, "tp": 2}, 8), slow({"dp": 2, "tp": 2}, 8), slow({}, 8)],
    ids=str,
)
def test_many_lengths_train_as_the_plain_model_does(layout: dict[str, int], count: int) -> None:
    """Every step's gradients, with AdamW between them: a state that some shape did not reach would show."""
    _, first = of_layout(**layout)
    lengths = LENGTHS[:count]
    plans = [first, *(of_shape(columns, **layout) for columns in lengths[1:])]
    batches = [batch_of(columns, seed=at) for at, columns in enumerate((*lengths, *lengths[2:5]))]
    found = trained(plans, batches, llama())
    expected, _ = of_plain_model(batches, llama())
    for at, want in enumerate(expected):
        assert_equal(joined(first, [rank[at] for rank in found]), want, TOLERANCE)


def test_gradients_add_up_over_shapes_and_rows() -> None:
    _, first = of_layout(pp=2)
    shapes = ((9, 4), (5, 4), (9, 2), (9, 1))
    others = [of_shape(columns, rows, pp=2) for columns, rows in shapes[1:]]
    assert [plan.job.microbatches for plan in others] == [2, 2, 1]
    batches = [batch_of(columns, rows, seed=rows) for columns, rows in shapes]

    def work(runner: Runner) -> Any:
        losses = [runner.step(batch) for batch in batches]
        return (
            runner.coordinates,
            torch.stack(losses).sum(),
            {n: p.grad for n, p in runner.named_parameters()},
        )

    def several(runner: Runner) -> Any:
        assert runner.plans == (first,)
        for plan in others:
            runner.add(plan)
        assert runner.plans == (first, *others)
        return work(runner)

    own = copy.deepcopy(llama())
    total = sum(huggingface_loss(own, batch) for batch in batches)
    assert isinstance(total, Tensor)
    total.backward()
    want = Result(total.detach(), {n: p.grad for n, p in own.named_parameters()})
    assert_equal(
        joined(first, run_threads(first, lambda _: copy.deepcopy(llama()), several)), want, TOLERANCE
    )


def test_plans_are_made_when_they_are_asked_for_and_once() -> None:
    job, first = of_layout()
    asked: list[int] = []

    def plan_for(batch: Batch) -> stretto.Plan:
        asked.append(batch["input_ids"].shape[1])
        return again(job, batch)

    model = copy.deepcopy(llama())
    runner = Runner([first, of_shape(5)], model, plan_for=plan_for)
    for columns in (9, 7, 5, 7, 7):
        loss = runner.step(batch_of(columns))
        want = plain(llama(), batch_of(columns), huggingface_loss).loss
        assert abs(float(loss - want)) < TOLERANCE
    assert asked == [7]
    assert runner.timeline().step_us > 0
    assert "predicted" in str(runner.report())
    runner = Runner(first, model, plan_for=lambda _: of_shape(5))
    with pytest.raises(
        stretto.UsageError, match=r"given a batch of input_ids \[4, 7\].*plan is for .*\[4, 5\]"
    ):
        runner.step(batch_of(7))
    runner = Runner(first, model, plan_for=lambda _: job)  # type: ignore[arg-type, return-value]
    with pytest.raises(stretto.UsageError, match=r"plan_for gives a plan .*, not a Job"):
        runner.step(batch_of(7))


def test_ranks_that_are_threads_ask_for_one_plan() -> None:
    job, first = of_layout(pp=2)
    asked: list[int] = []

    def work(runner: Runner) -> float:
        def plan_for(batch: Batch) -> stretto.Plan:
            asked.append(runner.rank)
            return again(job, batch, like=first)

        runner._plan_for = plan_for  # as `Runner(plan_for=...)` has it
        return float(runner.step(batch_of(6)))

    want = float(plain(llama(), batch_of(6), huggingface_loss).loss)
    assert all(
        abs(loss - want) < TOLERANCE for loss in run_threads(first, lambda _: copy.deepcopy(llama()), work)
    )
    assert asked == [0]


def test_what_no_plan_is_for() -> None:
    _, first = of_layout()
    runner = Runner([first, of_shape(5)], copy.deepcopy(llama()))
    with pytest.raises(
        stretto.UsageError,
        match=r"no plan of this Runner is for a batch of input_ids \[4, 6\], labels \[4, 6\]; it has "
        r"plans for: input_ids \[4, 9\].*; input_ids \[4, 5\].*runner\.add.*plan_for=",
    ):
        runner.step(batch_of(6))
    with pytest.raises(stretto.UsageError, match=r"every batch must have that shape.*runner\.add"):
        Runner(first, copy.deepcopy(llama())).step(batch_of(6))
    with pytest.raises(stretto.UsageError, match=r"Runner\.add takes a plan, not Job"):
        runner.add(first.job)  # type: ignore[arg-type]


def test_other_constants_alone_ask_for_no_plan() -> None:
    """Which might be others in every step."""

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return mean_loss(model, batch) * batch["k"]

    job = stretto.capture(Other(), {**small(7), "k": 2}, loss, stretto.Parallel())
    asked: list[int] = []

    def plan_for(batch: dict[str, Any]) -> stretto.Plan:
        asked.append(batch["k"])
        return planned(job.with_batch(batch))

    runner = Runner(planned(job), Other(), plan_for=plan_for)
    with pytest.raises(stretto.UsageError, match=r"'k' is 3, but the plan was captured with 2"):
        runner.step({**small(7), "k": 3})
    short = runner.step({**small(5), "k": 3})  # with a shape of its own a constant may be another
    assert float(short) == pytest.approx(3.0 * float(mean_loss(Other(), small(5)).detach()), rel=1e-5)
    runner.add(planned(job.with_batch({**small(7), "k": 3})))
    assert float(runner.step({**small(7), "k": 3})) == pytest.approx(
        1.5 * float(runner.step({**small(7), "k": 2}))
    )
    assert asked == [3]


def test_ranks_with_batches_of_several_shapes_are_told_so() -> None:
    """They would wait for each other forever."""
    _, first = of_layout(pp=2)

    def work(runner: Runner) -> None:
        runner.add(of_shape(5, pp=2))
        with pytest.raises(
            stretto.UsageError, match=r"rank 1 was given a batch of .*\[4, 5\].*rank 0 one of .*\[4, 9\]"
        ):
            runner.step(batch_of((9, 5)[runner.rank]))

    run_threads(first, lambda _: copy.deepcopy(llama()), work)


class Other(nn.Module):
    def __init__(self, inner: int = 8, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(VOCAB, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, inner), nn.Linear(inner, 8)) for _ in range(4))
        self.head = nn.Linear(8, VOCAB, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        made: Tensor = self.head(x)
        return made


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits, labels = model(batch["ids"]), batch["ids"]
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def small(columns: int, rows: int = ROWS) -> Batch:
    return {"ids": tokens(rows, columns=columns)}


def other_plan(model: nn.Module, columns: int, precision: str = "float32", **layout: Any) -> stretto.Plan:
    parallel = stretto.Parallel(**{"microbatches": 2, **layout})
    return planned(stretto.capture(model, small(columns), mean_loss, parallel, precision=precision))


def frozen() -> nn.Module:
    model = Other()
    model.layers[1].requires_grad_(False)
    return model


CUT = {"pp": 2, "split": ["layers.2"]}


@pytest.mark.parametrize(
    ("first", "other", "words"),
    [
        ({"pp": 2}, {"dp": 2}, r"has ranks pp=1 dp=2, and the Runner's first plan pp=2"),
        (
            CUT,
            {**CUT, "split": ["layers.3"]},
            r"'layers\.2\.0\.weight' on pipeline ranks \[0\], and .* \[1\]",
        ),
        ({"dp": 2}, {"dp": 2, "zero": 3}, r"rows kept over \['dp'\], and .* \[\]"),
        ({"dp": 2}, {"dp": 2, "updates": True}, r"updates = True, and .* False"),
        (
            {},
            {"model": Other(inner=6)},
            r"'layers\.0\.0\.weight' the shape on a rank \[6, 8\], and .* \[8, 8\]",
        ),
        ({}, {"model": Other(tied=True)}, r"of 'head\.weight' the tie table\.weight, and .* head\.weight"),
        ({}, {"model": frozen()}, r"'layers\.1\.0\.weight' the frozen True, and .* False"),
        ({}, {"model": nn.Sequential(Other())}, r"other parameters .*, as '0\.head\.weight'"),
        ({}, {"model": Other().double()}, r"of 'table\.weight' the dtype float64, and .* float32"),
        ({}, {"precision": "bf16"}, r"the dtype in ops bfloat16, and .* float32"),
    ],
    ids=lambda item: str(item)[:40] if isinstance(item, dict) else "",
)
def test_a_plan_of_another_layout_is_refused_by_what_differs(
    first: dict[str, Any], other: dict[str, Any], words: str
) -> None:
    changed = {**other}
    further = other_plan(changed.pop("model", Other()), 5, **changed)

    def work(runner: Runner) -> None:
        with pytest.raises(stretto.UsageError, match=words) as told:
            runner.add(further)
        assert "job.with_batch(batch, like=plan)" in str(told.value)

    run_threads(other_plan(Other(), 7, **first), lambda _: Other(), work)


def test_a_job_of_which_planning_chooses_needs_the_plan_of_the_first_shape() -> None:
    model = Other().double()
    parallel = stretto.Parallel(pp=2, microbatches=4, schedule="auto", virtual_stages="auto")
    job = stretto.capture(model, small(7), mean_loss, parallel)
    with pytest.raises(stretto.UsageError, match=r"job\.with_batch\(batch, like=plan\)"):
        job.with_batch(small(5))
    first = planned(job)
    for rows in (4, 2):
        other = planned(job.with_batch(small(5, rows), like=first))
        assert len(other.job.stages) == len(first.job.stages)
        assert other.schedule.stage_ranks == first.schedule.stage_ranks

        def work(runner: Runner, plan: stretto.Plan, batch: Batch) -> Tensor:
            runner.add(plan)
            return runner.step(batch)

        step = functools.partial(work, plan=other, batch=small(5, rows))
        found, _ = run_threads(first, lambda _: copy.deepcopy(model), step)
        assert abs(float(found - mean_loss(model, small(5, rows)).detach())) < TOLERANCE


def test_rows_that_copies_cannot_share() -> None:
    job = stretto.capture(Other(), small(7), mean_loss, stretto.Parallel(dp=2, microbatches=2))
    with pytest.raises(stretto.UsageError, match=r"3 rows cannot be shared by dp = 2 copies.*fill up"):
        job.with_batch(small(7, 3))
    assert job.with_batch(small(7, 6)).microbatches == 1
    assert job.with_batch(small(7, 8), microbatches=4).microbatches == 4


def test_a_plan_has_no_model_and_no_recipe(tmp_path: Path) -> None:
    job, first = of_layout()
    assert job.recipe is not None
    assert first.job.recipe is None
    first.save(tmp_path / "plan.json")
    for one in (first, stretto.load_plan(tmp_path / "plan.json")):
        with pytest.raises(stretto.UsageError, match=r"keep what stretto\.capture returned"):
            one.job.with_batch(batch_of(5))


def test_a_plan_read_from_a_file_serves_a_model_that_was_dropped(tmp_path: Path) -> None:
    _, first = of_layout(pp=2)
    of_shape(5, pp=2).save(tmp_path / "short.json")

    def work(runner: Runner) -> float:
        runner.add(stretto.load_plan(tmp_path / "short.json"))
        return float(runner.step(batch_of(5)))

    for loss in run_threads(first, lambda _: copy.deepcopy(llama()), work):  # which no one else has
        assert abs(loss - float(plain(llama(), batch_of(5), huggingface_loss).loss)) < TOLERANCE


def test_draws_go_on_over_shapes() -> None:
    """The third step draws as a third step does, whatever was before it."""
    model = gpt(False, dropout=0.5).double()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["ids"]).square().mean()

    job = stretto.capture(model, small(7), loss, stretto.Parallel())
    plans = [planned(job), planned(job.with_batch(small(5)))]
    found = []
    for lengths in ((7, 7, 7), (7, 5, 7), (5, 5, 7)):
        runner = Runner(plans, copy.deepcopy(model), seed=3)
        found.append([float(runner.step(small(columns))) for columns in lengths][-1])
        assert runner.state.steps == 3
    assert len(set(found)) == 1
    assert float(Runner(plans, copy.deepcopy(model), seed=3).step(small(7))) != found[0]


def test_memory_is_that_of_the_largest() -> None:
    _, first = of_layout()
    runner = Runner([first, of_shape(5), of_shape(16)], copy.deepcopy(llama()))

    def peak(*lengths: int) -> int:
        """Bytes beyond what is there, after a step of each that has allocated the gradients."""
        meter = MemoryMeter(())
        with meter:
            for columns in lengths:
                runner.step(batch_of(columns))
        return meter.peak_bytes

    for columns in (9, 5, 16):
        runner.step(batch_of(columns))
    alone = {columns: peak(columns) for columns in (9, 5, 16)}
    assert alone[5] < alone[9] < alone[16]
    assert peak(5, 9, 16, 5, 9, 16) <= 1.001 * peak(*(16,) * 6)  # losses are a few bytes


def test_communicators_are_opened_once() -> None:
    _, first = of_layout(pp=2, tp=2)

    def work(runner: Runner) -> tuple[set[str], set[str]]:
        before = {*runner.transport.members}
        runner.add(of_shape(LENGTHS[1], pp=2, tp=2))
        return before, {*runner.transport.members}

    for before, after in run_threads(first, lambda _: copy.deepcopy(llama()), work):
        assert before == after


@pytest.mark.parametrize("layout", [{"pp": 2}, slow({"dp": 2, "zero": 3})], ids=str)
def test_updates_that_are_ops_of_the_step(layout: dict[str, Any]) -> None:
    model = Other().double()
    job = stretto.capture(
        model, small(7), mean_loss, stretto.Parallel(microbatches=2, updates=True, clip_norm=0.5, **layout)
    )
    plans = [planned(job), planned(job.with_batch(small(5))), planned(job.with_batch(small(9, 8)))]
    shapes = ((7, 4), (5, 4), (9, 8), (7, 4), (5, 4))

    def work(runner: Runner) -> Any:
        for plan in plans[1:]:
            runner.add(plan)
        norms = []
        for columns, rows in shapes:
            runner.step(small(columns, rows))
            norms.append(float(runner.grad_norm))
        return norms, runner.state_dict()

    own = copy.deepcopy(model)
    optimizer, norms = LIKE_ADAM(own.parameters()), []
    for columns, rows in shapes:
        mean_loss(own, small(columns, rows)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(own.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    want = own.state_dict()
    for found, values in run_threads(plans[0], lambda _: copy.deepcopy(model), work, optimizer=LIKE_ADAM):
        assert torch.allclose(torch.tensor(found), torch.tensor(norms), rtol=1e-6)
        assert all(torch.allclose(values[name], want[name], rtol=1e-9, atol=1e-12) for name in want)


@pytest.mark.parametrize("layout", [{"pp": 2}, slow({"pp": 2, "tp": 2})], ids=str)
def test_a_run_over_shapes_is_saved_and_goes_on(layout: dict[str, int], tmp_path: Path) -> None:
    """Resumed under another order of plans, so that nothing hangs on which is the first."""
    _, first = of_layout(**layout)
    plans = [first, *(of_shape(columns, **layout) for columns in (5, 7))]
    lengths = (9, 5, 7, 5, 9, 7)
    batches = [batch_of(columns, seed=at) for at, columns in enumerate(lengths)]
    expected, _ = of_plain_model(batches, llama())

    def keep(runner: Runner, optimizer: Any, found: Any) -> Any:
        stretto.save(tmp_path / "kept", runner, optimizer)
        return found

    trained(plans, batches[:3], llama(), keep)

    def resumed(runner: Runner) -> list[Any]:
        for plan in (plans[0], plans[2]):
            runner.add(plan)
        optimizer = LIKE_ADAM(runner.parameters())
        stretto.load(tmp_path / "kept", runner, optimizer)
        assert runner.state.steps == 3
        found = []
        for batch in batches[3:]:
            loss = runner.step(batch)
            grads = {n: p.grad.clone() for n, p in runner.named_parameters() if p.grad is not None}
            found.append((runner.coordinates, loss, grads))
            optimizer.step()
            optimizer.zero_grad()
        return found

    results = run_threads(plans[1], lambda _: copy.deepcopy(llama()), resumed)
    for at, want in enumerate(expected[3:]):
        assert_equal(joined(plans[1], [rank[at] for rank in results]), want, TOLERANCE)


def test_what_is_seen_is_of_all_shapes() -> None:
    class Seen(Other):
        def forward(self, ids: Tensor) -> Tensor:
            stretto.observe("tokens", torch.ones_like(ids).sum())
            return super().forward(ids)

    job = stretto.capture(Seen(), small(7), mean_loss, stretto.Parallel(microbatches=2))
    runner = Runner([planned(job), planned(job.with_batch(small(5)))], Seen())
    for columns in (7, 5, 5):
        runner.step(small(columns))
    [one] = runner.observed()
    assert (one.steps, one.least, one.most) == (3, (20.0,), (28.0,))
    assert runner.observed() == ()


def test_a_buffer_is_written_by_steps_of_all_shapes() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.norm, self.up = nn.BatchNorm1d(6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.norm(self.up(x))
            return made

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"]).square().mean() + model(batch["x"]).sum()

    def rows(count: int) -> Batch:
        return {"x": torch.randn(count, 6, generator=torch.Generator().manual_seed(count)).double()}

    own = Normed().double()
    job = stretto.capture(own, rows(8), loss, stretto.Parallel())
    ours = copy.deepcopy(own)
    runner = Runner([planned(job), planned(job.with_batch(rows(5)))], ours)
    for count in (8, 5, 8):
        runner.step(rows(count))
        loss(own, rows(count))
    found = runner.state_dict()
    assert all(torch.allclose(found[n], b, rtol=1e-12) for n, b in own.named_buffers())
