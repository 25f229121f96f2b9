"""What several ranks have must be equal when their Runners are made: all ranks refuse it otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.capturing.evaluation import capture_evaluation
from stretto.ir.plan import Plan
from stretto.models.gpt import next_token_loss
from stretto.runtime.copies import CHUNK, digest
from stretto.runtime.transport import ThreadTransport
from tests.capturing.zoo import BatchNorm, Chain, mean_square, rows
from tests.parallelize.equality import batch_of, gpt
from tests.runtime.equality import lowered, on_ends
from tests.runtime.test_state_dict import told


def plan_for(**layout: Any) -> Plan:
    """Of a GPT with tied embeddings."""
    job = stretto.capture(
        model_of(), batch_of(), next_token_loss, stretto.Parallel(**{"microbatches": 2, **layout})
    )
    return lowered(job, "1f1b")


def model_of(**changes: Any) -> nn.Module:
    return gpt(**{"tie_embeddings": True, **changes}).double()


def said(plan: Plan, models: Sequence[nn.Module]) -> list[str]:
    """What each rank says when it makes its Runner; "" where it makes one."""

    def start(end: ThreadTransport) -> str:
        return told(lambda: stretto.Runner(plan, models[end.rank], transport=end))

    return on_ends(ThreadTransport.group(plan.world), start)


def nudge(tensor: Tensor) -> None:
    """Change the last bit of the first number."""
    with torch.no_grad():
        first = tensor.view(-1)[:1]
        first.copy_(torch.nextafter(first, torch.full_like(first, 9.0)))


@pytest.mark.parametrize(
    ("layout", "changed", "where"),
    [
        pytest.param({"dp": 2}, "blocks.1.mlp.up.weight", "rank 1 than on rank 0", marks=pytest.mark.slow),
        ({"tp": 2}, "norm.weight", "rank 1 than on rank 0"),
        # Of rank 0's own columns, which rank 1 does not keep.
        ({"tp": 2}, "blocks.0.attention.out.weight", "rank 1 than on rank 0"),
        ({"pp": 2, "dp": 2}, "norm.bias", "rank 3 than on rank 2"),
        ({"pp": 2}, "head.weight", "rank 1 than on rank 0"),  # of a tie, which has the first name
    ],
)
def test_a_copy_that_differs_by_one_bit(layout: dict[str, Any], changed: str, where: str) -> None:
    plan = plan_for(**layout)
    models = [model_of() for _ in range(plan.world)]
    nudge(models[-1].get_parameter(changed))
    found = said(plan, models)
    assert found == [found[0]] * plan.world
    name = changed.replace("head", "embedding")
    assert found[0].startswith(f"parameter {name!r} has other values on {where}")


def test_ranks_that_seed_by_rank_or_load_on_one_alone() -> None:
    plan = plan_for(dp=4, microbatches=1)
    models = [model_of() for _ in range(4)]
    for other in models[1:]:
        other.init_weights(4)  # type: ignore[operator]
    found = said(plan, models)
    assert found == [found[0]] * 4
    which = "parameter 'embedding.weight' (and 8 more)"
    assert found[0].startswith(f"{which} has other values on ranks 1, 2, 3 than on rank 0")


def test_equal_copies_train_and_parts_that_come_apart_are_refused() -> None:
    """The second Runner shares the first one's parts, of which no rank has the full tensors any more."""
    plan = plan_for(dp=2, tp=2, microbatches=1)
    models = [model_of() for _ in range(plan.world)]

    def work(runner: stretto.Runner) -> str:
        runner.step(batch_of())
        torch.optim.SGD(runner.parameters(), lr=0.1).step()
        stretto.Runner(plan, models[runner.rank], transport=runner.transport, shares=runner)
        parts = dict(runner.named_parameters())
        if runner.rank == 3:
            nudge(parts["blocks.0.mlp.up.weight"])
        with pytest.raises(stretto.UsageError) as caught:
            stretto.Runner(plan, models[runner.rank], transport=runner.transport, shares=runner)
        return str(caught.value)

    found = stretto.run_threads(plan, models.__getitem__, work)
    assert found == [found[0]] * plan.world
    assert found[0].startswith("parameter 'blocks.0.mlp.up.weight' has other values on rank 3 than on rank 1")


class Scaled(Chain):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8, dtype=torch.float64))

    def act(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale)


def test_a_buffer_that_differs() -> None:
    parallel = stretto.Parallel(dp=2, microbatches=2)
    plan = lowered(stretto.capture(Scaled(), rows(), mean_square, parallel), "1f1b")
    models = [Scaled() for _ in range(2)]
    assert said(plan, models) == ["", ""]
    nudge(models[1].get_buffer("scale"))
    found = said(plan, models)
    assert found == [found[0]] * 2
    assert found[0].startswith("buffer 'scale' has other values on rank 1 than on rank 0")


def test_running_statistics_of_data_parallel_copies_are_their_own() -> None:
    """A Runner that goes on with them, or evaluates with them, is no mistake."""
    models = [BatchNorm() for _ in range(2)]
    parallel = stretto.Parallel(dp=2, microbatches=2)
    job = stretto.capture(models[0], rows(), mean_square, parallel)
    evaluation = capture_evaluation(models[0], rows(), mean_square, job)
    plan, walk = lowered(job, "1f1b"), lowered(evaluation, "1f1b")

    def work(runner: stretto.Runner) -> list[Tensor]:
        runner.step(rows())
        for again in (plan, walk):
            stretto.Runner(again, models[runner.rank], transport=runner.transport)
        return [buffer.clone() for _, buffer in runner.named_buffers()]

    one, other = stretto.run_threads(plan, models.__getitem__, work)
    assert not all(map(torch.equal, one, other))


DTYPES = ["float64", "float32", "bfloat16", "float8_e4m3fn", "int64", "bool", "complex64"]


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES], ids=DTYPES)
def test_a_digest_tells_values_and_not_layouts(dtype: torch.dtype) -> None:
    plain = torch.arange(12.0).view(3, 4)
    changed = plain.clone()
    changed[1, 2] = 0.0
    expected = digest(plain.to(dtype))
    assert digest(plain.to(dtype).clone()) == expected
    assert digest(plain.to(dtype).t().contiguous().t()) == expected
    others = [changed, plain.flip(0), plain.view(4, 3)]
    assert len({expected, *(digest(other.to(dtype)) for other in others)}) == 4


def test_a_digest_of_many_words_or_none() -> None:
    plain = torch.arange(2.0 * CHUNK + 3)
    last, exchanged = plain.clone(), plain.clone()
    last[-1] += 1.0
    exchanged[[5, CHUNK + 5]] = plain[[CHUNK + 5, 5]]
    made = [plain, last, exchanged, torch.zeros(CHUNK), torch.ones(CHUNK), torch.empty(0), torch.empty(0, 3)]
    made += [torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64), torch.full((CHUNK,), -1.0)]
    assert len({digest(tensor) for tensor in made}) == len(made)
    assert digest(plain[::2]) == digest(plain[::2].clone())
