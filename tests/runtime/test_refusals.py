"""What a Runner refuses: the wrong model, batch, world or plan, each with what to do about it."""

from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from stretto.capturing.trace import trace
from stretto.ir.plan import Plan
from stretto.models.gpt import next_token_loss
from stretto.runtime.transport import ThreadTransport
from tests.capturing.zoo import Chain, mean_square, rows
from tests.runtime.equality import evenly, gpt, job_of, on_ends, plan_of, tokens

MICROBATCHES = 4


def plan_for(model: nn.Module, family: str = "1f1b", stages: int = 2) -> Plan:
    return plan_of(
        evenly(trace(model, rows(), mean_square, microbatches=MICROBATCHES), stages, MICROBATCHES), family
    )


def refused(plan: Plan, model: nn.Module, batch: Any) -> str:
    """What the first rank that refuses says."""
    with pytest.raises(stretto.UsageError) as caught:
        stretto.run_threads(plan, lambda _: model, lambda runner: runner.step(batch))
    return str(caught.value)


def without(model: nn.Module, name: str) -> nn.Module:
    owner, _, last = name.rpartition(".")
    delattr(model.get_submodule(owner), last)
    return model


def wider(model: nn.Module) -> nn.Module:
    model.out = nn.Linear(8, 3).double()
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: without(m, "out.bias"), "uses 'out.bias', which the model does not have: give the model"),
        (
            wider,
            "'out.weight' is float64[3, 8], but the plan was made for float64[2, 8]: capture this model "
            "again",
        ),
        (lambda m: m.float(), "is float32[8, 8], but the plan was made for float64[8, 8]"),
        (lambda m: m.to("meta"), "is on the meta device and has no values: initialise the model"),
    ],
)
def test_another_model(change: Callable[[nn.Module], nn.Module], message: str) -> None:
    told = refused(plan_for(Chain()), change(Chain()), rows())
    assert message in told


@pytest.mark.parametrize(
    ("was_tied", "word"),
    [(False, "one tensor in this model, but two in"), (True, "two tensors in this model, but one in")],
)
def test_a_model_whose_parameters_were_tied_or_untied_since(was_tied: bool, word: str) -> None:
    """Each rank would train a copy of its own; `to_empty` unties."""
    batch, model = tokens(4, columns=8), gpt(True)
    plan = plan_of(job_of(trace(gpt(was_tied), batch, next_token_loss, microbatches=4), 2, 4))
    if was_tied:
        model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    assert f"'embedding.weight' and 'head.weight' are {word}" in refused(plan, model, batch)


def test_a_tie_that_joins_ranks_may_be_on_meta_where_another_rank_holds_it() -> None:
    batch = tokens(4, columns=8)
    plan = plan_of(job_of(trace(gpt(True), batch, next_token_loss, microbatches=4), 2, 4))
    halves = [gpt(True), gpt(True)]
    absent = nn.Parameter(torch.empty_like(halves[0].head.weight, device="meta"))
    halves[0].head.weight = halves[1].embedding.weight = absent
    found = stretto.run_threads(plan, lambda rank: halves[rank], lambda runner: runner.step(batch))
    full = stretto.run_threads(plan, lambda _: gpt(True), lambda runner: runner.step(batch))
    assert found == full


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (rows(7), "batch leaf 'batch' has shape [7, 8]; the plan was made for [8, 8] (4 microbatches of 2)"),
        (rows(16), "has shape [16, 8]; the plan was made for [8, 8]"),
        (torch.zeros(8, 9, dtype=torch.float64), "has shape [8, 9]; the plan was made for [8, 8]"),
        (
            torch.zeros(8, 8, dtype=torch.int64),
            "is torch.int64; the plan was made for torch.float64",
        ),
        ({"x": rows()}, "the batch has leaves x; the plan was made for batch"),
        ({}, "the batch has leaves none; the plan was made for batch"),
    ],
)
def test_another_batch(batch: Any, message: str) -> None:
    model = Chain()
    assert message in refused(plan_for(model), model, batch)


def test_floating_point_numbers_of_another_dtype_are_converted() -> None:
    model = Chain()  # not by threads, which share the generator that it draws from
    plan = plan_for(model)
    exact = rows().float().double()
    one, other = (
        stretto.run_threads(
            plan, lambda _: copy.deepcopy(model), lambda runner, given=given: runner.step(given)
        )
        for given in (exact, exact.float())
    )
    assert one == other


def test_another_number_of_ranks() -> None:
    model = Chain()
    end = ThreadTransport.group(3)[0]
    with pytest.raises(stretto.UsageError, match=r"for 2 ranks, but 3 run: .*--nproc-per-node 2"):
        stretto.Runner(plan_for(model), model, transport=end)


def test_no_process_group() -> None:
    model = Chain()
    with pytest.raises(stretto.UsageError, match=r"torch.distributed is not initialised: run under torchrun"):
        stretto.Runner(plan_for(model), model)


def narrower() -> nn.Module:
    """Equal in every op's name to the others, and different in one number."""
    model = Chain()
    model.act = lambda x: torch.tanh(x * 0.5)
    return model


def test_different_plans_on_different_ranks() -> None:
    """By schedule, by microbatches, and by no more than one constant of one op."""
    half, double = narrower(), Chain()
    double.act = lambda x: torch.tanh(x * 2.0)
    pairs = [
        (plan_for(Chain(), "1f1b"), plan_for(Chain(), "gpipe")),
        (plan_for(Chain()), plan_of(evenly(trace(Chain(), rows(), mean_square, microbatches=2), 2, 2))),
        (plan_for(half), plan_for(double)),
    ]
    for plans in pairs:
        found = on_ends(
            ThreadTransport.group(2),
            lambda end, plans=plans: stretto.Runner(plans[end.rank], Chain(), transport=end),
        )
        assert all("ranks have different plans" in str(error) for error in found)


def test_one_rank_that_fails_wakes_the_others() -> None:
    model, batch = Chain(), rows()
    plan = plan_for(model, stages=4)

    def work(runner: stretto.Runner) -> torch.Tensor:
        if runner.rank == 2:
            raise ValueError("this rank's own error")
        return runner.step(batch)

    with pytest.raises((ValueError, stretto.RunError), match="this rank's own error"):
        stretto.run_threads(plan, lambda _: copy.deepcopy(model), work)


def test_an_interruption_ends_all_ranks() -> None:
    model = Chain()
    plan = plan_for(model)

    def work(runner: stretto.Runner) -> None:
        if runner.rank == 0:
            signal.pthread_kill(main, signal.SIGINT)
            runner.transport.all_gather(None)  # rank 1 never comes

    main = threading.main_thread().ident
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            stretto.run_threads(plan, lambda _: model, work)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_a_step_is_replayed_on_accelerators_only() -> None:
    model = Chain()
    with pytest.raises(stretto.UsageError, match="computes on a processor: leave it out"):
        stretto.Runner(plan_for(model, stages=1), model, cuda_graph=True)
