"""Experts, and blocks in chunks, whose ranks share matrices and the sequence too: the step is the plain
model's."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import CaptureError, UsageError
from stretto.ir.program import Job, Op, Shard
from stretto.models.build import huggingface_sum
from stretto.models.gpt import next_token_loss
from stretto.models.moe import MoEGPT, moe_token_sum
from stretto.planning.make_plan import make_plan
from stretto.price.cluster import described_costs
from stretto.runtime import Runner, run_threads
from stretto.train.clip import GradientClip
from tests.clusters import cores
from tests.parallelize import test_experts_of_transformers as of_transformers
from tests.parallelize.equality import assert_plan_is_plain, batch_of, gpt
from tests.parallelize.test_ampipe import by_chunks
from tests.parallelize.test_experts import DROPLESS, FEW, assert_equals, batch, model_of, plain, together
from tests.runtime.equality import from_transformers

WIDE = 4.0
"""Of `ep_buffer`, so that none of the few rows is without room."""


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [DROPLESS, FEW])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_the_step_is_that_of_the_plain_model(
    degree: int, ep: int, sequence: bool, pp: int, capacity: float | None
) -> None:
    assert_equals(model_of(capacity, shared=1, dense_every=2), layout(degree, ep, sequence, pp))


def layout(degree: int, ep: int, sequence: bool, pp: int) -> Parallel:
    more = {"ampipe_degree": degree, "ampipe_capacity": "whole", "ep_buffer": WIDE}
    parallel = Parallel(tp=2, ep=ep, dp=ep, pp=pp, microbatches=pp, sequence_parallel=sequence)
    return parallel.model_copy(update=more)


def test_a_block_in_chunks_of_slices() -> None:
    """A corner of the grid, for every run."""
    config = replace(model_of(DROPLESS, shared=1).config, layers=1)
    assert_equals(MoEGPT(config, seed=3).double(), layout(2, 2, True, 1))


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    "more",
    [
        {"schedule": "zb-h1"},
        {"recompute": "full"},
        {"recompute": "selective"},
        {"recompute": "gathers"},
        {"split_ops": True},
        {"pipe_experts_multi_data": 2},
    ],
    ids=str,
)
def test_it_goes_with_all_else(sequence: bool, more: dict[str, Any]) -> None:
    if more == {"recompute": "gathers"} and not sequence:
        pytest.skip("there is nothing that is gathered")
    parallel = Parallel(
        tp=2, ep=2, dp=2, pp=2, microbatches=4, ampipe_degree=2, sequence_parallel=sequence, ep_buffer=WIDE
    )
    assert_equals(model_of(DROPLESS, shared=1), parallel.model_copy(update=more))


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_capacities_of_chunks_are_those_of_a_plain_model_by_chunks(sequence: bool) -> None:
    model = model_of(FEW, shared=1, dense_every=2)
    parallel = Parallel(tp=2, ep=2, dp=2, ampipe_degree=2, sequence_parallel=sequence)
    assert_equals(model, parallel, expected=by_chunks(model, 2))


@pytest.mark.parametrize(
    ("degree", "sequence", "pp"),
    [
        pytest.param(*cell, marks=pytest.mark.slow)
        for cell in [(2, False, 1), (3, True, 1), (2, True, 2), (4, True, 1), (3, False, 2)]
    ],
)
def test_dense_blocks_in_chunks(degree: int, sequence: bool, pp: int) -> None:
    model = gpt().double()
    parallel = Parallel(tp=2, pp=pp, microbatches=2, ampipe_degree=degree, sequence_parallel=sequence)
    job = capture(model, batch_of(), next_token_loss, parallel)
    plan = make_plan(job, described_costs(job, cores(latency_us=20.0, link_gbps=0.05)))
    assert_plan_is_plain(plan, model, next_token_loss, batch_of())


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, marks=pytest.mark.slow)
        for name, how in [
            ("qwen3 moe", {"ep": 2, "sequence_parallel": True, "ampipe_degree": 2}),
            ("qwen3 moe", {"ep": 2}),
            ("qwen3 moe", {"ep": 1, "ampipe_degree": 3}),
            ("qwen3 moe", {"ep": 1, "sequence_parallel": True, "ampipe_degree": 3}),
            ("mixtral", {"ep": 2, "ampipe_degree": 2}),
            ("mixtral", {"ep": 1, "sequence_parallel": True}),
            ("deepseek v3", {"ep": 2, "ampipe_degree": 2}),
        ]
    ],
    ids=str,
)
def test_models_of_transformers(name: str, how: dict[str, Any]) -> None:
    """By their own plans for both. Mixtral's router computes in float32, too, and adds gradients in it."""
    pytest.importorskip("transformers")
    kind, sizes, tolerance = of_transformers.MODELS[name]
    tolerance = 1e-6 if name == "mixtral" else tolerance
    sizes = {**of_transformers.SIZES, **sizes, "num_key_value_heads": 2}
    model = from_transformers(kind, **sizes).double()
    given = of_transformers.batch()
    job = capture(model, given, huggingface_sum, Parallel(tp=2, dp=2, **how))
    names = [p.name for p in job.parameters if "experts." in p.name and "shared" not in p.name]
    assert names
    spread = {p.name: {shard.axis for shard in p.shards} for p in job.parameters}
    assert all(spread[n] == ({"tp", "ep"} if how["ep"] > 1 else {"tp"}) for n in names)
    plan = make_plan(job, described_costs(job, cores(latency_us=20.0, link_gbps=0.05)))
    loss, grads = together(plan, model, given)
    want_loss, want = of_transformers.plain(model, 2)
    assert abs(loss - want_loss) <= 1e-6 * abs(want_loss)
    assert grads.keys() == want.keys()
    for key, grad in want.items():
        assert (grads[key] - grad).norm() <= tolerance * max(float(grad.norm()), 1e-3), key


@functools.cache
def captured(**how: Any) -> Job:
    return capture(model_of(FEW, shared=1), batch(), moe_token_sum, Parallel(**how))


def ops_of(job: Job) -> list[Op]:
    return [op for stage in job.stages for ops in stage.ops.values() for op in ops]


def along_tp(job: Job) -> Counter[str]:
    return Counter(op.target for op in ops_of(job) if op.kind is not None and op.args[-2] == "tp")


def test_experts_are_spread_over_both() -> None:
    parameters = {p.name: p for p in captured(tp=2, ep=2, dp=2).parameters}
    up, down = (parameters[f"blocks.0.mlp.experts.{name}"] for name in ("up", "down"))
    assert up.shards == (Shard("ep", 0), Shard("tp", 2))
    assert down.shards == (Shard("ep", 0), Shard("tp", 1))
    assert up.spec.shape == (2, 16, 12)
    assert up.partial == down.partial == ()
    assert parameters["blocks.0.mlp.router.weight"].shards == ()
    assert parameters["blocks.0.mlp.router.weight"].partial == ()


def test_what_is_spread_over_both_is_gathered_clipped_and_saved() -> None:
    model, job = model_of(FEW, shared=1), captured(tp=2, ep=2, dp=2)
    plan = make_plan(job, described_costs(job, cores(latency_us=20.0, link_gbps=0.05)))

    def work(runner: Runner) -> tuple[float, dict[str, Tensor]]:
        runner.step(batch())
        return float(GradientClip(runner, 0.0)()), runner.state_dict()

    found = run_threads(plan, lambda _: copy.deepcopy(model), work)
    _, grads = plain(model, 2)
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
    for told, state in found:
        assert told == pytest.approx(float(norm), rel=1e-10)
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_a_layer_of_experts_is_summed_as_a_dense_one() -> None:
    """Twice each way and layer, and once the few weights of a token's experts: what shared experts make is
    added before."""
    kinds = along_tp(captured(tp=2, ep=2, dp=2))
    layers, ends = 2, 2  # the embedding, and the gradient of the head's input
    assert kinds == {"comm.all_reduce": 4 * layers + ends + layers, "comm.all_gather": 1}


def test_chunks_sum_and_gather_each_by_itself() -> None:
    """What the order hides under other chunks; a gather of a whole sequence is left to the head alone."""
    shapes = [op.outputs[0].shape for op in ops_of(captured(tp=2, ampipe_degree=2)) if op.kind is not None]
    assert sum(shape[1] == 12 for shape in shapes if len(shape) == 3) == 3  # embedding, head, first attention
    job = captured(tp=2, ampipe_degree=2, sequence_parallel=True)
    gathered = [op.outputs[0].shape for op in ops_of(job) if op.target == "comm.all_gather"]
    assert {shape[1] for shape in gathered if len(shape) == 3} == {3}


class Repeated(nn.Module):
    """A model with a list of experts that is no module of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.up = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) @ self.weight


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"up": "colwise", "weight": "dim:0"}, "the parameter 'weight'.*'experts'"),
        ({"blocks.*.mlp.experts": "experts", "blocks.*.mlp.experts.up": "dim:3"}, "'dim:D', the number"),
        ({"blocks.*.mlp.experts": "experts", "blocks.*.mlp.experts.up": "sequence"}, "'dim:D', the number"),
        (
            {"blocks.*.mlp.experts": "experts", "blocks.*.mlp.experts.up": "dim:2:5"},
            "24 features of 5",
        ),
    ],
)
def test_plans_that_do_not_fit_are_refused(plan: dict[str, str], said: str) -> None:
    model: nn.Module = Repeated() if "weight" in plan else model_of(FEW)
    given = torch.zeros(4, 4) if "weight" in plan else batch()
    with pytest.raises(UsageError, match=said):
        capture(model, given, moe_token_sum, Parallel(tp=2), tp_plan=plan)


def test_a_width_that_is_spread_on_one_side_alone_is_refused() -> None:
    model = model_of(FEW, dense_every=2)
    plan = {pattern: how for pattern, how in model.tp_plan.items() if "shared" not in pattern}
    del plan["blocks.*.mlp.experts.down"]
    with pytest.raises(CaptureError, match=r"blocks\.\*\.mlp\.experts"):
        capture(model, batch(), moe_token_sum, Parallel(tp=2), tp_plan=plan)


def test_a_sequence_that_is_too_short_for_its_chunks_and_slices() -> None:
    with pytest.raises((CaptureError, UsageError), match=r"ampipe_degree = 8 .* give 6 or less"):
        captured(tp=2, ampipe_degree=8, sequence_parallel=True)
