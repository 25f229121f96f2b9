"""A model whose experts are shared by ranks: its step is the plain model's, whatever else is spread.

Capacity and routers' losses are of one microbatch of one copy, so the plain model is given those one by one.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import RunError, UsageError
from stretto.ir.plan import Plan
from stretto.models.moe import MoEConfig, MoEGPT, Routed, moe_token_sum
from stretto.planning.make_plan import make_plan
from stretto.price.flat import described_costs
from stretto.runtime import Runner, run_threads
from stretto.runtime.rank_tensors import pieces_of
from tests.clusters import cores

VOCAB, CONTEXT, ROWS = 32, 12, 8
DROPLESS, FEW, ALL = None, 0.5, 100.0
"""Capacities: no limit; of which rows are dropped; of which none are."""

Grads = dict[str, Tensor]


@functools.cache
def model_of(capacity: float | None, shared: int = 0, dense_every: int = 0) -> MoEGPT:
    config = MoEConfig(
        vocab_size=VOCAB,
        layers=2,
        hidden=16,
        heads=2,
        context=CONTEXT,
        experts=4,
        top_k=2,
        expert_ratio=1.5,
        capacity_factor=capacity,
        shared_experts=shared,
        dense_every=dense_every,
    )
    return MoEGPT(config, seed=3).double()


def batch() -> Tensor:
    return torch.randint(0, VOCAB, (ROWS, CONTEXT + 1), generator=torch.Generator().manual_seed(4))


def plain(model: nn.Module, pieces: int) -> tuple[Tensor, Grads]:
    own = copy.deepcopy(model)
    parts = [moe_token_sum(own, part) for part in batch().chunk(pieces)]
    loss = torch.stack([total for total, _ in parts]).sum() / sum(int(count) for _, count in parts)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in own.named_parameters() if p.grad is not None}


def plan_of(model: nn.Module, parallel: Parallel) -> Plan:
    job = capture(model, batch(), moe_token_sum, parallel)
    return make_plan(job, described_costs(job, cores(latency_us=20.0, link_gbps=0.05)))


def together(plan: Plan, model: nn.Module, given: Any) -> tuple[Tensor, Grads]:
    """The loss, and gradients with those of what is spread put together."""

    def work(runner: Runner) -> tuple[Tensor, Grads]:
        loss = runner.step(given)
        return loss, {name: p.grad for name, p in runner.named_parameters() if p.grad is not None}

    found = run_threads(plan, lambda _: copy.deepcopy(model), work)
    grads: Grads = {}
    seen: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    parameters = {p.name: p for p in plan.job.parameters}
    for rank, (_, of_rank) in enumerate(found):
        for name, grad in of_rank.items():
            whole = grads.setdefault(name, torch.full_like(model.get_parameter(name), torch.nan))
            at = plan.mesh.coordinates(rank)
            for offsets, box in pieces_of(grad, parameters[name], plan.job, at):
                first = seen.setdefault((name, offsets), box)
                assert torch.equal(first, box), f"copies of {name} differ"
                whole[tuple(slice(o, o + n) for o, n in zip(offsets, box.shape, strict=True))] = box
    assert all(torch.equal(loss, found[0][0]) for loss, _ in found)
    return found[0][0], grads


def assert_equals(
    model: nn.Module, parallel: Parallel, tolerance: float = 1e-10, expected: nn.Module | None = None
) -> None:
    loss, grads = together(plan_of(model, parallel), model, batch())
    want_loss, want = plain(expected or model, parallel.microbatches * parallel.dp)
    assert abs(loss - want_loss) <= tolerance * abs(want_loss)
    assert grads.keys() == want.keys()
    for name, grad in want.items():
        assert grads[name].shape == grad.shape, name
        assert (grads[name] - grad).norm() <= tolerance * max(float(grad.norm()), 1e-3), name


CAPACITIES = (DROPLESS, FEW, ALL)
FAST = {
    Parallel(ep=2, dp=2): (ALL,),
    Parallel(ep=4, dp=4, microbatches=2): (DROPLESS,),
    Parallel(ep=2, dp=4): (FEW,),
    Parallel(ep=2, dp=2, pp=2, microbatches=2): (),
    Parallel(ep=2, dp=2, pp=2, microbatches=4, schedule="zb-h1"): (DROPLESS,),
    Parallel(dp=2, pp=2, microbatches=2): (FEW,),
}
"""Every capacity, and every layout with one of them, of two that differ in the schedule one."""


@pytest.mark.parametrize(
    ("parallel", "capacity"),
    [
        pytest.param(parallel, capacity, marks=[] if capacity in fast else [pytest.mark.slow])
        for parallel, fast in FAST.items()
        for capacity in CAPACITIES
    ],
    ids=str,
)
def test_it_gives_the_values_of_the_plain_model(capacity: float | None, parallel: Parallel) -> None:
    parallel = parallel.model_copy(update={"ep_buffer": 4.0})
    assert_equals(model_of(capacity, shared=1), parallel)


def test_dropless_is_a_capacity_that_serves_all() -> None:
    one, other = model_of(DROPLESS), model_of(ALL)
    assert plain(one, 2)[0] == pytest.approx(float(plain(other, 2)[0]), rel=1e-12)


@pytest.mark.parametrize(
    ("ep", "dp", "said"), [(3, 3, "that divides them, such as 2"), (2, 3, "give dp = 4")]
)
def test_what_does_not_fit_is_refused(ep: int, dp: int, said: str) -> None:
    with pytest.raises((UsageError, ValueError), match=said):
        capture(model_of(ALL), batch(), moe_token_sum, Parallel(ep=ep, dp=dp))


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UsageError, match="no plan for expert parallelism"):
        capture(nn.Linear(2, 2), torch.zeros(4, 2), lambda m, x: m(x).sum(), Parallel(ep=2, dp=2))


def one_sided() -> MoEGPT:
    """All tokens go to the experts of the first rank."""
    model = copy.deepcopy(model_of(DROPLESS))
    for block in model.blocks:
        router = block.mlp.router
        router.forward = functools.partial(_to_the_first, router.forward)
    return model


def _to_the_first(forward: Any, x_ND: Tensor) -> Routed:
    routed = forward(x_ND)
    chosen = torch.tensor([0, 1]).expand_as(routed.chosen)
    return Routed(chosen, routed.weights, routed.losses)


def test_every_token_to_one_ranks_experts() -> None:
    assert_equals(one_sided(), Parallel(ep=2, dp=2, ep_buffer=2.0))


def test_what_finds_no_room_is_an_error_that_says_what_would_do() -> None:
    plan = plan_of(one_sided(), Parallel(ep=2, dp=2, ep_buffer=1.5))
    with pytest.raises(
        RunError, match=r"give ep_buffer = 2.0 or more, leave ep_buffer out .* ep_overflow = 'drop'"
    ):
        together(plan, one_sided(), batch())


def test_what_finds_no_room_may_be_dropped() -> None:
    plan = plan_of(one_sided(), Parallel(ep=2, dp=2, ep_buffer=1.5, ep_overflow="drop"))
    loss, _ = together(plan, one_sided(), batch())
    assert torch.isfinite(loss)
    assert loss != plain(one_sided(), 2)[0]
