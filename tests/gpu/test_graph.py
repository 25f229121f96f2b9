"""A step that is replayed gives what a step that is walked gives, bit for bit, and takes the host no time."""

from __future__ import annotations

import copy
import statistics
import time

import pytest
import torch

import stretto
from stretto.config import Parallel
from stretto.models.gpt import GPT, GPTConfig, next_token_sum
from stretto.models.moe import moe_token_sum
from tests.gpu.test_numbers import CONTEXT, ROWS, VOCAB, gpt, moe

pytestmark = pytest.mark.gpu


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCAB, (ROWS, CONTEXT + 1), generator=generator).cuda() for _ in range(count)]


@pytest.mark.parametrize("kind", ["gpt", "experts"])
@pytest.mark.parametrize("cleared", [True, False])
def test_it_is_the_walked_step(kind: str, cleared: bool) -> None:
    """cleared: whether gradients are between steps, or add up over two."""
    made = gpt() if kind == "gpt" else moe(1.0)
    loss = next_token_sum if kind == "gpt" else moe_token_sum
    model = made.to("cuda", torch.float32)
    job = stretto.capture(model, batches(1)[0], loss=loss, parallel=Parallel(microbatches=2))
    plan = stretto.plan(job, "h100x1")
    found = []
    for cuda_graph in (False, True):
        own = copy.deepcopy(model)
        runner = stretto.Runner(plan, own, cuda_graph=cuda_graph)
        optimizer = torch.optim.SGD(runner.parameters(), lr=0.1)
        losses = []
        for at, data in enumerate(batches(8)):
            losses.append(runner.step(data).clone())
            if cleared or at % 2:
                optimizer.step()
                optimizer.zero_grad()
        assert "step" in str(runner.report())
        found.append((losses, list(own.parameters())))
    (walked, values), (replayed, others) = found
    assert all(torch.equal(one, other) for one, other in zip(walked, replayed, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(values, others, strict=True))


@pytest.mark.parametrize("cleared", [True, False])
def test_graphs_of_several_shapes_share_memory_and_keep_gradients(cleared: bool) -> None:
    """Each is recorded at its third step; gradients that another graph's replay finds are copied away."""
    model = gpt().to("cuda", torch.float32)
    shapes = (CONTEXT + 1, CONTEXT // 2 + 1)
    given = [data[:, : shapes[at % 2]].contiguous() for at, data in enumerate(batches(12))]
    job = stretto.capture(model, given[0], loss=next_token_sum, parallel=Parallel(microbatches=2))
    plans = [stretto.plan(job, "h100x1"), stretto.plan(job.with_batch(given[1]), "h100x1")]
    found = []
    for cuda_graph in (False, True):
        own = copy.deepcopy(model)
        runner = stretto.Runner(plans, own, cuda_graph=cuda_graph)
        optimizer = torch.optim.SGD(runner.parameters(), lr=0.1)
        losses = []
        for at, data in enumerate(given):
            losses.append(runner.step(data).clone())
            if cleared or at % 2:
                optimizer.step()
                optimizer.zero_grad()
        assert runner.replayed == cuda_graph
        found.append((losses, list(own.parameters())))
    (walked, values), (replayed, others) = found
    assert all(torch.equal(one, other) for one, other in zip(walked, replayed, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(values, others, strict=True))


def test_dropout_is_refused() -> None:
    config = GPTConfig(vocab_size=VOCAB, layers=1, hidden=64, heads=4, context=CONTEXT, dropout=0.1)
    model = GPT(config, seed=1).cuda()
    data = batches(1)[0]
    plan = stretto.plan(stretto.capture(model, data, loss=next_token_sum, parallel=Parallel()), "h100x1")
    runner = stretto.Runner(plan, model, cuda_graph=True)
    runner.step(data)
    runner.step(data)
    with pytest.raises(stretto.UsageError, match="draws random numbers"):
        runner.step(data)


def test_the_host_is_free() -> None:
    """Many small ops: walked, the device waits for the host."""
    config = GPTConfig(vocab_size=512, layers=8, hidden=256, heads=4, context=256)
    model = GPT(config, seed=1).to("cuda", torch.bfloat16)
    data = torch.randint(0, 512, (16, 257), device="cuda")
    job = stretto.capture(model, data, loss=next_token_sum, parallel=Parallel(microbatches=4))
    took: dict[bool, float] = {}
    for cuda_graph in (False, True):
        runner = stretto.Runner(stretto.plan(job, "h100x1"), copy.deepcopy(model), cuda_graph=cuda_graph)
        times = []
        for _ in range(10):
            for parameter in runner.parameters():
                parameter.grad = None
            torch.cuda.synchronize()
            start = time.perf_counter()
            runner.step(data)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        took[cuda_graph] = statistics.median(times[4:])
    print(f"walked {1000 * took[False]:.1f} ms, replayed {1000 * took[True]:.1f} ms")
    assert took[True] < 0.5 * took[False]
