"""What a Runner computes on an accelerator is what the plain model computes there.

All ranks are threads of this process and share one device, so that any layout can be tested on one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.backend import grouped_adapter
from stretto.config import Parallel
from stretto.models.gpt import GPT, GPTConfig, next_token_sum
from stretto.models.moe import MoEConfig, MoEGPT, moe_token_sum
from tests.clusters import cores
from tests.parallelize.equality import assert_plan_is_plain

pytestmark = pytest.mark.gpu

VOCAB, CONTEXT, ROWS = 64, 32, 8
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def gpt() -> nn.Module:
    return GPT(GPTConfig(vocab_size=VOCAB, layers=2, hidden=64, heads=4, context=CONTEXT), seed=3)


def moe(capacity: float | None) -> nn.Module:
    config = MoEConfig(
        vocab_size=VOCAB,
        layers=2,
        hidden=64,
        heads=4,
        context=CONTEXT,
        experts=4,
        top_k=2,
        expert_ratio=2.0,
        capacity_factor=capacity,
        shared_experts=1,
    )
    return MoEGPT(config, seed=3)


def batch() -> Tensor:
    made = torch.randint(0, VOCAB, (ROWS, CONTEXT + 1), generator=torch.Generator().manual_seed(4))
    return made.cuda()


def assert_equals(model: nn.Module, loss: Any, parallel: Parallel, dtype: torch.dtype) -> None:
    model = model.to("cuda", dtype)
    job = stretto.capture(model, batch(), loss=loss, parallel=parallel)
    assert job.device == "cuda"
    plan = stretto.plan(job, cores(latency_us=20.0, link_gbps=0.05))
    assert_plan_is_plain(plan, model, loss, batch(), TOLERANCE[dtype], least=1e-3)


LAYOUTS = [
    Parallel(),
    Parallel(pp=2, microbatches=4),
    Parallel(pp=2, microbatches=4, schedule="zb-h1", recompute="selective"),
    Parallel(tp=2, microbatches=2),
    Parallel(tp=2, sequence_parallel=True, microbatches=2, recompute="full"),
    Parallel(dp=2, tp=2, pp=2, microbatches=2, ampipe_degree=1),
]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_a_gpt(parallel: Parallel) -> None:
    assert_equals(gpt(), next_token_sum, parallel, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpt_in_other_dtypes(dtype: torch.dtype) -> None:
    """Kernels of attention are others than in float64."""
    assert_equals(gpt(), next_token_sum, LAYOUTS[-1], dtype)


WITH_EXPERTS = [
    Parallel(),
    Parallel(ep=2, dp=2, ep_buffer=4.0),
    Parallel(ep=2, dp=2, pp=2, microbatches=2, schedule="zb-h1", ep_buffer=4.0),
    Parallel(ep=2, dp=2, ampipe_degree=2, ampipe_capacity="whole", ep_buffer=4.0),
    Parallel(ep=2, dp=2, pp=2, microbatches=2, ampipe_degree=2, ampipe_capacity="whole", ep_buffer=4.0),
    Parallel(ep=2, dp=2, pipe_experts_multi_data=2, ep_buffer=4.0),
]


@pytest.mark.parametrize("capacity", [None, 100.0])
@pytest.mark.parametrize("parallel", WITH_EXPERTS, ids=str)
def test_experts(parallel: Parallel, capacity: float | None) -> None:
    assert_equals(moe(capacity), moe_token_sum, parallel, torch.float64)


@pytest.mark.parametrize("capacity", [None, 100.0])
def test_experts_in_half_precision(capacity: float | None) -> None:
    """Dropless experts have one kernel for all groups."""
    assert_equals(moe(capacity), moe_token_sum, WITH_EXPERTS[-2], torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_grouped_products(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    ends = torch.tensor([5, 5, 21, 24], device="cuda")
    x = torch.randn(32, 48, device="cuda", dtype=dtype, requires_grad=True)
    w = torch.randn(4, 48, 64, device="cuda", dtype=dtype, requires_grad=True)
    made = grouped_adapter.grouped_mm(x, w, ends)
    g = torch.randn_like(made)
    made.backward(g)
    got = made.detach(), x.grad, w.grad
    x2, w2 = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    parts = x2[:24].split([5, 0, 16, 3])
    want = torch.cat([part @ w2[k] for k, part in enumerate(parts)] + [x2.new_zeros(8, 64)])
    want.backward(g.double())
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for one, other in zip(got, (want.detach(), x2.grad, w2.grad), strict=True):
        assert one is not None
        assert other is not None
        assert (one.double() - other).norm() <= tolerance * other.norm()
