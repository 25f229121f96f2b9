"""Routers that score experts by themselves and balance loads by a bias: the plain model's steps, and the
router of DeepSeek-V3 in transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.models.moe import MoEConfig, MoEGPT, Router, balance_loads, moe_token_sum
from stretto.runtime import Runner, run_threads
from tests.parallelize.mixtures import batch, planned
from tests.parallelize.zero import put_together

STEPS, RATE, LEARNING_RATE = 3, 0.05, 0.2
"""The rate is such that other experts are chosen in the second step."""

LAYOUTS: list[dict[str, Any]] = [
    {"pp": 2, "microbatches": 2},
    {"tp": 2, "sequence_parallel": True, "microbatches": 2},
    {"ep": 2, "dp": 2, "microbatches": 2},
    {"ep": 2, "dp": 2, "ampipe_degree": 2, "microbatches": 2},
    {"dp": 2, "zero": 3, "microbatches": 2},
]


def model() -> MoEGPT:
    config = MoEConfig(
        vocab_size=32,
        layers=3,
        hidden=16,
        heads=2,
        context=12,
        experts=8,
        top_k=2,
        expert_ratio=1.5,
        capacity_factor=0.0,
        dense_first=1,
        router="sigmoid",
        bias_rate=RATE,
        scaling=2.5,
        groups=4,
        top_groups=2,
        aux_weight=0.0,
    )
    return MoEGPT(config, seed=3).double()


def plain(pieces: int) -> tuple[MoEGPT, dict[str, Tensor]]:
    own = model()
    metrics: dict[str, Tensor] = {}
    for _ in range(STEPS):
        own.zero_grad()
        losses, counts, metrics = [], 0, {}
        for part in batch().chunk(pieces):
            loss, count, given = moe_token_sum(own, part)
            losses.append(loss)
            counts += int(count)
            for name, (load, how) in given.items():
                assert how == "sum"
                metrics[name] = metrics.get(name, 0) + load.double()
        (torch.stack(losses).sum() / counts).backward()
        with torch.no_grad():
            for parameter in own.parameters():
                assert parameter.grad is not None
                parameter -= LEARNING_RATE * parameter.grad
        balance_loads(own.named_buffers(), metrics, RATE)
    return own, metrics


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_steps_are_the_plain_models(layout: dict[str, Any]) -> None:
    want, metrics = plain(layout["microbatches"] * layout.get("dp", 1))
    assert {*metrics} == {"violation.1", "violation.2"}
    assert any(buffer.count_nonzero() for _, buffer in want.named_buffers())
    plan = planned(capture(model(), batch(), moe_token_sum, Parallel(**layout)))

    def work(runner: Runner) -> tuple[Any, ...]:
        optimizer = torch.optim.SGD(runner.parameters(), lr=LEARNING_RATE)
        for _ in range(STEPS):
            _, returned = runner.step(batch())
            optimizer.step()
            optimizer.zero_grad()
            balance_loads(runner.named_buffers(), returned, RATE)
        kept = {name: parameter.detach() for name, parameter in runner.named_parameters()}
        return (runner.coordinates, kept), dict(runner.named_buffers()), returned

    results = run_threads(plan, lambda _: model(), work)
    biases: dict[str, Tensor] = {}
    for _, buffers, returned in results:
        torch.testing.assert_close(returned, metrics, rtol=1e-10, atol=1e-10)
        for name, buffer in buffers.items():
            assert torch.equal(biases.setdefault(name, buffer), buffer), name
    for name, buffer in want.named_buffers():
        if name.endswith("bias"):
            assert torch.equal(biases[name], buffer), name
    found = put_together(want, plan, [kept for kept, _, _ in results])
    for name, parameter in want.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-10, atol=1e-10)


def test_the_bias_stays_fine_where_the_model_computes_in_bf16() -> None:
    job = capture(model().float(), batch(), moe_token_sum, Parallel(), precision="bf16")

    def work(runner: Runner) -> list[torch.dtype]:
        runner.step(batch())
        return [buffer.dtype for name, buffer in runner.named_buffers() if name.endswith("router.bias")]

    assert run_threads(planned(job), lambda _: model().float(), work) == [[torch.float32] * 2]


def test_the_router_is_that_of_deepseek() -> None:
    transformers = pytest.importorskip("transformers")
    their_config = transformers.DeepseekV3Config(
        hidden_size=16,
        n_routed_experts=8,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    theirs = modeling_deepseek_v3.DeepseekV3TopkRouter(their_config)
    config = MoEConfig(
        vocab_size=32, hidden=16, experts=8, top_k=4, router="sigmoid", groups=4, top_groups=2, scaling=2.5
    )
    own = Router(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        own.weight.normal_(generator=generator)
        theirs.weight.copy_(own.weight)
        assert own.bias is not None
        own.bias.normal_(std=0.3, generator=generator)
        theirs.e_score_correction_bias.copy_(own.bias)
    x = torch.randn(64, 16, generator=generator)
    _, weights, chosen = theirs(x)
    routed = own(x)
    assert torch.equal(routed.chosen.sort().values, chosen.sort().values)
    order, theirs_order = routed.chosen.argsort(), chosen.argsort()
    torch.testing.assert_close(routed.weights.gather(1, order), weights.gather(1, theirs_order))
    assert torch.equal(routed.load, torch.bincount(chosen.flatten(), minlength=8))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bias_rate": 0.1}, "are of router = 'sigmoid'"),
        ({"router": "sigmoid", "groups": 3}, "groups = 3 must divide experts = 8"),
        ({"router": "sigmoid", "groups": 8, "top_groups": 1}, "give more top_groups"),
        ({"dense_first": 8}, "leaves none of layers = 8 with experts"),
    ],
)
def test_settings_that_do_not_fit(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MoEConfig(vocab_size=8, experts=8, top_k=2, **given)
