"""Gradient reductions within the last backward: how much of them is hidden, and what that may cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import stretto
from stretto.ir.action import AFTER, BEFORE, Action, Phase
from stretto.ir.plan import Plan, Window
from stretto.ir.program import WAIT, Job
from stretto.ir.updates import UPDATE
from stretto.models.build import huggingface_sum
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.passes.flat import LARGE_BYTES
from stretto.planning.make_plan import make_plan
from stretto.planning.schedules import choose_schedule
from stretto.schedule.once import with_once
from stretto.schedule.windows import Guests, make_window, with_guests
from stretto.verifying import verify
from tests.clusters import cores
from tests.synthetic_comm import make_comm_costs, reduced
from tests.verifying.comm_plans import comm_job


def cluster(bytes_per_us: float) -> stretto.Cluster:
    return cores(
        peak_tflops=0.085,
        memory_gbps=10.0,
        op_overhead_us=3.0,
        latency_us=100.0,
        link_gbps=bytes_per_us / 1000,
    )


@pytest.fixture(scope="module")
def job() -> Job:
    """GPT of 8 layers, one microbatch on each of two copies of the data."""
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=4096, layers=8, hidden=512, heads=8, context=256))
    tokens = torch.zeros(6, 257, dtype=torch.int64)
    return stretto.capture(model, tokens, loss=next_token_loss, parallel=stretto.Parallel(dp=2))


def backward_us(plan: Plan) -> float:
    [stage] = plan.job.stages
    ops = (*stage.ops[Phase.I], *stage.ops[Phase.W])
    return sum(plan.costs.op_us.get((0, op.name), 0.0) for op in ops)


def hidden(plan: Plan) -> float:
    assert plan.prediction is not None
    share = plan.prediction.hidden("dp")
    assert share is not None
    return share


def test_sums_that_take_as_long_as_the_backward_are_hidden_in_it(job: Job) -> None:
    plan = stretto.plan(job, cluster(102.0))
    assert plan.prediction is not None
    summed_us = sum(plan.prediction.comm_axis_us["dp"]) / plan.ranks
    assert summed_us == pytest.approx(backward_us(plan), rel=0.02)
    assert hidden(plan) >= 0.8
    # By a policy that knows nothing of sums they start in the order that it gives.
    plain = stretto.plan(job, cluster(102.0), order="captured")
    assert hidden(plain) < hidden(plan)
    off = stretto.plan(job, cluster(102.0), overlap="off")
    assert hidden(off) == pytest.approx(0.0, abs=1e-3)
    assert off.prediction is not None
    assert off.prediction.step_us - plan.prediction.step_us == pytest.approx(
        hidden(plan) * summed_us, rel=0.01
    )


def windows_with_sums(plan: Plan) -> list[Window]:
    """Those of actions in which sums start."""
    return [w for w in plan.windows.values() if 0 < len(w.actions) < len(w.parts)]


def test_small_gradients_share_a_sum_in_the_order_in_which_they_are_ready(job: Job) -> None:
    plan = stretto.plan(job, cluster(102.0))
    bytes_of = {p.tied_to: p.grad_nbytes for p in plan.job.parameters}
    groups = reduced(plan.once(0))
    sums = [op for op in plan.once(0) if op.lane == "dp"]
    shared = [op.name for op in sums if len(groups[op.name]) > 1]
    assert len(shared) > 2
    for op in sums:
        assert op.collective is not None
        alone = len(groups[op.name]) == 1
        assert alone or all(bytes_of[name] < LARGE_BYTES for name in groups[op.name])
        assert alone or op.collective.nbytes < 2 * LARGE_BYTES
    [window] = windows_with_sums(plan)
    started = [str(item.ref) for item in window.items if item.part and item.ref in groups]
    assert sorted(started) == sorted(op.name for op in sums)
    assert [name for name in started if name in shared] == shared


@pytest.mark.parametrize("family", ["1f1b", "zb-h1", "gpipe"])
def test_sums_start_in_last_runs_only(family: str) -> None:
    made = comm_job(2, 4, (("dp", 2), ("tp", 2)), blocks=2, sequence=True, tied=True)
    made = replace(made, schedule=family)
    plan = make_plan(made, make_comm_costs(made, op_us=100.0, collective_us=80.0))
    verify(plan)
    starting = {window.name for window in windows_with_sums(plan)}
    for rank in range(plan.ranks):
        runs = [window.name for _, _, window in plan.runs(rank)]
        inside = [name for name in runs if name in starting]
        assert inside
        assert len(inside) == len(set(inside))
        assert {name.removesuffix(" last") for name in inside}.isdisjoint(runs[runs.index(inside[0]) + 1 :])


def test_sums_that_take_what_compute_waits_for_start_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives of tp and of dp share slow cards: sums that start early make a step longer than waiting at
    once, and those at the end of last runs do not."""
    monkeypatch.setattr("stretto.passes.flat.LARGE_BYTES", 3000)  # so that there are several
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=64, layers=4, hidden=32, heads=4, context=16))
    parallel = stretto.Parallel(pp=2, dp=2, tp=2, microbatches=3, sequence_parallel=True)
    batch = torch.zeros(12, 17, dtype=torch.int64)
    job = stretto.capture(model, batch, loss=next_token_loss, parallel=parallel)
    cluster = cores(link_gbps=0.005, latency_us=2.0)
    off, local = (stretto.plan(job, cluster, overlap=overlap) for overlap in ("off", "local"))
    assert off.prediction is not None
    assert local.prediction is not None
    assert local.overlap == "local"
    assert local.prediction.step_us < 0.995 * off.prediction.step_us


# Orders of last runs. The last gradient is that of the embedding, much larger than any other.


def late(dp: int = 2, **parallel: Any) -> Job:
    """A Llama on accelerators that compute for much longer than they reduce."""
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=32_000,
                hidden_size=1024,
                intermediate_size=3584,
                num_hidden_layers=4,
                num_attention_heads=8,
                num_key_value_heads=2,
                tie_word_embeddings=False,
            )
        )
    tokens = torch.zeros(8 * dp, 1024, dtype=torch.int64)
    batch, how = {"input_ids": tokens, "labels": tokens}, stretto.Parallel(dp=dp, **parallel)
    return stretto.capture(model, batch, huggingface_sum, how, precision="bf16", device="cuda")


@pytest.fixture(scope="module")
def late_job() -> Job:
    return late()


def accelerators(**given: int) -> stretto.Cluster:
    return stretto.Cluster(
        peak_tflops=100, memory_gbps=3000, link_gbps=100, latency_us=5, op_overhead_us=1, **given
    )


def peak(plan: Plan) -> int:
    assert plan.prediction is not None
    return max(plan.prediction.peak_bytes)


@pytest.mark.parametrize("order", ["improve", "list"])
def test_a_large_gradient_that_comes_last_is_reduced_under_others(late_job: Job, order: str) -> None:
    plan = stretto.plan(late_job, accelerators(memory_bytes=80 * 10**9), order=order)
    assert hidden(plan) > 0.98
    plain = stretto.plan(late_job, accelerators(), order="captured")
    assert hidden(plain) < 0.9


def test_sums_that_need_others_start_inside_windows() -> None:
    """Shards of gradients are summed over groups; so far only the last window would start that."""
    plan = stretto.plan(late(4, zero=1, dp_shard=2), accelerators(), order="list")
    assert plan.prediction is not None
    assert plan.prediction.hidden("dp") > 0.93
    assert plan.prediction.hidden("dp_shard") > 0.97
    closing = plan.windows[str(plan.orders[0][-1].ref)]
    starts = {op.name for op in plan.once(0) if op.kind is not None}
    assert not closing.actions
    assert starts.isdisjoint(str(item.ref) for item in closing.items)


def test_updates_run_while_later_gradients_are_under_way() -> None:
    plan = stretto.plan(late(zero=1, updates=True), accelerators(), order="list")
    ops = {op.name: op for op in plan.once(0)}
    closing = plan.windows[str(plan.orders[0][-1].ref)]
    targets = [ops[str(item.ref)].target for item in closing.items]
    assert targets.index(UPDATE) < len(targets) - 1 - targets[::-1].index(WAIT)


def test_one_run_may_gather_and_scatter(late_job: Job) -> None:
    """Both are of one stage and microbatch, as the window's order has it."""
    job = with_once(late(zero=1), choose_schedule(late_job))
    before, after = (list(job.stages[0].ops[phase]) for phase in (BEFORE, AFTER))
    guests = Guests(begins=[before], leads=[after])
    window = with_guests(job, make_window(job, Action(0, Phase.F, 0)), "0F first last", 0, guests)
    assert window.shares == window.bound((0, *guests.microbatches)) == (0, 1, 1)


def test_a_last_run_may_use_what_the_device_has(late_job: Job) -> None:
    plain = stretto.plan(late_job, accelerators(), order="captured")
    free = stretto.plan(late_job, accelerators(memory_bytes=80 * 10**9))
    assert peak(free) > peak(plain)
    # As much as is there, and no order is lost for want of more.
    for nbytes in (peak(plain), peak(free) - 1, peak(free)):
        plan = stretto.plan(late_job, accelerators(memory_bytes=nbytes))
        assert peak(plan) <= nbytes
        assert hidden(plan) >= hidden(plain)
    assert hidden(plan) == hidden(free)


def test_reductions_beside_the_work_of_another_rank_are_hidden() -> None:
    """The last rank ends its last backward first, and then only waits."""
    plan = stretto.plan(late(pp=2, microbatches=4), accelerators())
    found = plan.prediction
    assert found is not None
    assert found.exposed_axis_us["dp"][1] == 0.0
    assert found.comm_axis_us["dp"][1] > 0.0
    assert found.bubble_us[1] > 0.0
    for rank in range(plan.ranks):
        parts = found.compute_us[rank] + found.exposed_us[rank] + found.bubble_us[rank]
        assert parts == pytest.approx(found.step_us)
