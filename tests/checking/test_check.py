"""`check` finds plans of tensor parallelism that train another model, which nothing else can see."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stretto
from stretto.capturing import capture
from stretto.checking import compare
from stretto.checking.compare import LOW_PRECISION_TOLERANCE, TOLERANCE, Difference
from stretto.cli.train import make
from stretto.config import Parallel, ParallelSettings, load_settings
from stretto.errors import RunError, UsageError
from stretto.ir.program import Job
from stretto.models.gpt import GPT, Block, GPTConfig, next_token_loss
from stretto.models.moe import MoEConfig, MoEGPT, moe_token_sum
from stretto.parallelize.styles import GPT2_PLAN
from stretto.planning.make_plan import make_plan
from stretto.price.cluster import described_costs
from tests.clusters import cores
from tests.parallelize.equality import SMALL, batch_of, gpt, gpt2
from tests.runtime.equality import from_transformers, huggingface_loss
from tests.synthetic import make_job

torch.set_num_threads(1)

SPREAD = Parallel(tp=2, microbatches=2)
SLICED = Parallel(tp=2, sequence_parallel=True, microbatches=2)


@pytest.mark.parametrize(
    ("model", "loss"),
    [(gpt, next_token_loss), pytest.param(gpt2, huggingface_loss, marks=pytest.mark.slow)],
    ids=["gpt", "gpt2"],
)
def test_right_plans_pass(model: Any, loss: Any) -> None:
    found = stretto.check(model(), batch_of(), loss, Parallel(pp=2, tp=2, sequence_parallel=True))
    assert found.tolerance == TOLERANCE
    assert found.world == 4
    assert len(found.differences) == 1 + len(list(model().parameters()))
    assert 0 < found.differences[0].relative < 1e-12, "all that differs is rounding"
    assert "0 of" in str(found)


def test_the_callers_model_and_batch_stay_as_they_are() -> None:
    model, batch = gpt(layers=1), batch_of()
    state, given = copy.deepcopy(model.state_dict()), copy.deepcopy(batch)
    stretto.check(model, batch, next_token_loss, SLICED)
    assert all(p.dtype is torch.float32 and p.grad is None for p in model.parameters())
    assert model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, given[name]) for name, value in batch.items())


def test_a_packed_matrix_that_is_called_colwise_is_right() -> None:
    plan = {**GPT2_PLAN, "transformer.h.*.attn.c_attn": "colwise"}
    assert not stretto.check(gpt2(n_layer=1), batch_of(), huggingface_loss, SPREAD, tp_plan=plan).wrong


class Shifted(Block):
    """Adds the token before, in the block's own code."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + F.pad(x, (0, 0, 1, 0))[:, :-1])


def test_code_of_a_block_that_mixes_tokens_is_right() -> None:
    model = GPT(GPTConfig(vocab_size=64, layers=1, hidden=32, heads=4, context=8), seed=3)
    model.blocks = nn.ModuleList([Shifted(model.config)])
    for parallel in (SPREAD, SLICED):
        assert not stretto.check(model, batch_of(), next_token_loss, parallel).wrong


class Normed(nn.Module):
    """A norm over features that ranks share, between the two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.tp_plan = {"inner": "colwise", "outer": "rowwise"}
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.outer(F.layer_norm(self.inner(x), self.inner(x).shape[-1:]))
        return found


def squares(model: nn.Module, x: Tensor) -> Tensor:
    value: Tensor = (model(x) - 1).square().mean()
    return value


def test_a_sum_over_features_that_ranks_share_is_right() -> None:
    assert not stretto.check(Normed(), torch.randn(4, 6), squares, SPREAD).wrong


class Counting(nn.Module):
    """Computes something else from its third call on, which capture does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x @ self.weight * (1 if self.calls < 3 else 2)


def test_a_model_that_differs_on_one_rank_too() -> None:
    with pytest.raises(RunError, match="on one rank it differs, too"):
        stretto.check(Counting(), torch.randn(4, 6), squares, Parallel(dp=2, microbatches=2))


def test_dropout_is_compared_in_evaluation() -> None:
    found = stretto.check(gpt(dropout=0.5, layers=1), batch_of(), next_token_loss, SPREAD)
    assert found.evaluated
    assert not found.wrong
    assert "in evaluation" in str(found)


class Noisy(Counting):
    def forward(self, x: Tensor) -> Tensor:
        return x @ F.dropout(self.weight, 0.5)


def test_refusals() -> None:
    with pytest.raises(UsageError, match="draws random numbers in evaluation too"):
        stretto.check(Noisy(), torch.randn(4, 6), squares, Parallel())
    with pytest.raises(UsageError, match="meta device"):
        stretto.check(gpt().to("meta"), batch_of(), next_token_loss, SPREAD)
    with pytest.raises(UsageError, match="128 are too many"):
        stretto.check(gpt(), batch_of(), next_token_loss, Parallel(dp=64, tp=2))
    broken = gpt()
    with torch.no_grad():
        next(broken.parameters()).fill_(float("nan"))
    with pytest.raises(UsageError, match="loss is nan"):
        stretto.check(broken, batch_of(), next_token_loss, SPREAD)


def test_models_that_compute_in_float32_have_a_wider_tolerance() -> None:
    sizes = {**SMALL, "num_hidden_layers": 1, "head_dim": 8, "sliding_window": 4}
    model = from_transformers("Gemma2ForCausalLM", **sizes, attn_implementation="eager")
    found = stretto.check(model, batch_of(), huggingface_loss, SPREAD)
    assert found.tolerance == LOW_PRECISION_TOLERANCE
    model = gpt(layers=1)
    assert stretto.check(model, batch_of(), next_token_loss, SPREAD, tolerance=1e-3).tolerance == 1e-3


SETTINGS = """
model = { kind = "gpt", layers = 1, hidden = 32, heads = 4, context = 16, vocab_size = 64 }
data = { sequence_length = 8 }
parallel = { tp = 2, microbatches = 2 }
training = { global_batch = 8, steps = 1 }
"""


@pytest.mark.filterwarnings("ignore:the tensor-parallel plan:UserWarning")
def test_from_settings(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SETTINGS)
    found = make(load_settings(path, ["parallel.sequence_parallel=true", "parallel.recompute=full"]))
    assert found.world == 2
    assert not found.wrong
    with pytest.raises(UsageError, match=r"unknown style 'columnwise'"):
        make(load_settings(path, ['parallel.tp_plan={"blocks.*.attention.qkv" = "columnwise"}']))


def mixture(capacity: float | None, layers: int = 2) -> MoEGPT:
    config = MoEConfig(
        vocab_size=32,
        layers=layers,
        hidden=16,
        heads=2,
        context=12,
        experts=4,
        expert_ratio=1.5,
        capacity_factor=capacity,
    )
    return MoEGPT(config, seed=3)


def rows_of_tokens() -> Tensor:
    return torch.randint(0, 32, (8, 13), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(
    ("layers", "capacity", "how"),
    [
        (1, None, {"ep": 2, "dp": 2, "ep_buffer": 4.0}),
        (1, 0.5, {"ep": 2, "dp": 4}),
        *(
            pytest.param(2, *row, marks=pytest.mark.slow)
            for row in (
                (None, {"ep": 2, "dp": 2, "ep_buffer": 4.0}),
                (0.5, {"ep": 2, "dp": 4}),
                (None, {"ep": 2, "dp": 2, "pp": 2, "ep_buffer": 4.0, "ampipe_degree": 2}),
                (0.5, {"ep": 2, "dp": 2, "ampipe_degree": 2, "ampipe_capacity": "whole"}),
            )
        ),
    ],
    ids=str,
)
def test_experts_that_ranks_share(layers: int, capacity: float | None, how: dict[str, Any]) -> None:
    """Capacities and routers' losses are of a microbatch, and it is the plain model's microbatches."""
    found = stretto.check(mixture(capacity, layers), rows_of_tokens(), moe_token_sum, Parallel(**how))
    assert found.tolerance == TOLERANCE
    assert found.differences[0].relative < 1e-12


@pytest.mark.slow
def test_a_capacity_of_each_chunk_is_compared_as_one_of_all() -> None:
    how = Parallel(ep=2, dp=2, ampipe_degree=2)
    found = stretto.check(mixture(0.5), rows_of_tokens(), moe_token_sum, how)
    assert found.whole_capacity
    assert not found.wrong
    assert "compared with ampipe_capacity = 'whole'" in str(found)
    with pytest.raises(RunError, match="on one rank it is right: dp = 2 or ep = 2 or ampipe_degree = 2"):
        stretto.check(mixture(0.5), rows_of_tokens(), unlike_in_copies, how)


CHOSEN = Parallel(ep=2, dp=2, ep_buffer=4.0, ampipe_degree="auto")


@pytest.mark.slow
def test_what_planning_may_choose_is_right_in_all_forms() -> None:
    found = stretto.check(mixture(None), rows_of_tokens(), moe_token_sum, CHOSEN)
    assert found.differences[0].relative < 1e-12
    assert "compared in 1, 2 and 4 chunks of the sequence" in str(found)


def test_the_form_that_is_furthest_off_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    off = {1: 0.0, 2: 0.3, 4: 0.1}
    compared: list[int] = []

    def different(job: Job, *_: Any) -> tuple[float, list[Difference]]:
        compared.append(job.chunks)
        return 1.0, [Difference("a", 0.0), Difference("b", off[job.chunks])]

    one = make_job(1, 4)
    forms = replace(one, forms=tuple(replace(one, chunks=chunks) for chunks in (2, 4)))
    monkeypatch.setattr(compare, "capture", lambda *_, **__: forms)
    monkeypatch.setattr(compare, "make_plan", lambda job, *_, **__: job)
    monkeypatch.setattr(compare, "_differences", different)
    found = compare._compare(mixture(None), rows_of_tokens(), moe_token_sum, CHOSEN, None, 1e-9)
    assert compared == [1, 2, 4]
    assert found.forms == "1, 2 and 4 chunks of the sequence"
    assert Difference("b", 0.3) in found.wrong
    assert Difference("a", 0.0) in found.differences


def unlike_in_copies(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor | int]:
    """A loss whose scale comes from the number of experts that a rank has."""
    total, count = moe_token_sum(model, batch)
    return total * model.blocks[0].mlp.experts.up.shape[0], count  # type: ignore[union-attr,index]


def test_a_layout_that_makes_a_difference_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """None does; a comparison that says so stands for one. One rank has nothing of what ranks share."""
    tried: list[ParallelSettings] = []

    def compared(model: Any, batch: Any, loss: Any, parallel: ParallelSettings, *_: Any) -> Any:
        tried.append(parallel)
        return SimpleNamespace(wrong=parallel != Parallel(microbatches=8))

    monkeypatch.setattr(compare, "_compare", compared)
    experts = {"ep": 2, "ep_buffer": 3.0, "ep_overflow": "drop", "pipe_experts": True}
    chunks = {"ampipe_degree": 2, "ampipe_capacity": "whole", "pipe_experts_multi_data": 2}
    shared = {"tp": 2, "sequence_parallel": True, "tp_plan": {"x": "colwise"}}
    parallel = Parallel(pp=2, dp=4, microbatches=2, **experts, **chunks, **shared)
    with pytest.raises(RunError, match="on one rank it is right: pp = 2 or dp = 4 or ep = 2"):
        stretto.check(mixture(0.5), rows_of_tokens(), moe_token_sum, parallel)
    assert tried == [parallel, Parallel(microbatches=8)]


class OneHeadEach(nn.Module):
    """Attention by its own products, of as many heads as ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.tp_plan = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (of(x).unflatten(-1, (-1, 4)).transpose(1, 2) for of in (self.q, self.k, self.v))
        weights = (q @ k.transpose(-1, -2)).softmax(dim=-1)
        made: Tensor = self.o((weights @ v).transpose(1, 2).flatten(2))
        return made


@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_may_have_one_head_and_a_microbatch_one_row(rows: int) -> None:
    """Products of a batch of one, which is a slice of a batch that ranks share."""
    model = OneHeadEach()
    batch = torch.randn(2 * rows, 5, 8)
    how = Parallel(tp=2, microbatches=2)
    found = stretto.check(model, batch, squares, how, tp_plan=model.tp_plan)
    assert not found.wrong
    job = capture(model, batch, squares, how, tp_plan=model.tp_plan)
    make_plan(job, described_costs(job, cores()))  # which proves it
