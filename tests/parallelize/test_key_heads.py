"""Fewer heads of keys than ranks: each rank has a full one, and ranks that share it train it as one."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stretto
from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import UsageError
from stretto.ir.action import Phase
from stretto.ir.program import Job, Shard
from stretto.runtime.rank_tensors import part_of
from stretto.runtime.runner import Runner
from stretto.schedule.once import around_starts
from stretto.train.clip import GradientClip
from stretto.verifying import plan_faults
from tests.clusters import cores
from tests.parallelize.equality import SMALL, assert_plain, assert_plan_is_plain, batch_of
from tests.runtime.equality import from_transformers, huggingface_loss, lowered, plain

pytestmark = [
    pytest.mark.filterwarnings("ignore:the tensor-parallel plan of:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is not sharded over tp:UserWarning"),
]


@pytest.fixture(autouse=True)
def norms_compute_in_the_dtype_that_they_get(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of `transformers` compute in float32, to which they round gradients: partial sums otherwise than
    sums."""
    from transformers.models.qwen3 import modeling_qwen3

    def forward(self: Any, x: Tensor) -> Tensor:
        out: Tensor = self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return out

    monkeypatch.setattr(modeling_qwen3.Qwen3RMSNorm, "forward", forward)


def hf(name: str, heads: int, queries: int = 4, **changes: Any) -> nn.Module:
    sizes = {**SMALL, "num_attention_heads": queries, "num_key_value_heads": heads}
    return from_transformers(name, **{**sizes, "tie_word_embeddings": False, **changes}).double()


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "llama": lambda heads: hf("LlamaForCausalLM", heads),
    "llama, eager attention": lambda heads: hf("LlamaForCausalLM", heads, attn_implementation="eager"),
    "qwen2": lambda heads: hf("Qwen2ForCausalLM", heads),  # has biases
    "qwen3": lambda heads: hf("Qwen3ForCausalLM", heads, head_dim=8),  # has norms of keys
    "gemma2": lambda heads: hf("Gemma2ForCausalLM", heads, head_dim=8, attn_implementation="eager"),
}

ROUNDED = {"gemma2": 1e-6, "llama, eager attention": 1e-6}
"""Tolerances where norms, or the softmax, compute in float32, so that the order of sums shows."""

LEAN = (
    ("llama", 1, {"tp": 2}),
    ("qwen3", 2, {"tp": 4, "sequence_parallel": True}),
)

GRID = [
    ("llama", 2, {"tp": 4, "sequence_parallel": True}),
    ("qwen2", 2, {"tp": 4, "pp": 2}),
    ("qwen3", 1, {"tp": 2, "pp": 2, "sequence_parallel": True}),
    ("qwen3", 2, {"tp": 4}),
    ("llama", 2, {"tp": 2, "pp": 2}),
    ("llama", 1, {"tp": 4, "pp": 2, "sequence_parallel": True}),
    ("llama, eager attention", 1, {"tp": 2, "sequence_parallel": True}),
    ("llama, eager attention", 2, {"tp": 4, "pp": 2}),
    ("qwen2", 1, {"tp": 4, "sequence_parallel": True}),
    ("qwen2", 2, {"tp": 2, "pp": 2, "sequence_parallel": True}),
    ("qwen3", 1, {"tp": 4, "pp": 2}),
    ("qwen3", 2, {"tp": 4, "dp": 2, "sequence_parallel": True}),
    ("gemma2", 1, {"tp": 2, "pp": 2}),
    ("gemma2", 2, {"tp": 4, "sequence_parallel": True}),
]


def equals_plain(model: nn.Module, layout: dict[str, Any], tolerance: float = 1e-10) -> Job:
    job = capture(model, batch_of(), huggingface_loss, Parallel(microbatches=2, **layout))
    assert_plain(job, model, huggingface_loss, batch_of(), tolerance)
    return job


@pytest.mark.parametrize(
    ("kind", "heads", "layout"),
    [*LEAN, *(pytest.param(*row, marks=pytest.mark.slow) for row in GRID)],
    ids=str,
)
def test_shared_heads_equal_the_plain_model(kind: str, heads: int, layout: dict[str, Any]) -> None:
    job = equals_plain(KINDS[kind](heads), layout, ROUNDED.get(kind, 1e-10))
    if kind in ("gemma2", "llama, eager attention") and heads == 1:
        return  # gradients of repeated keys are summed at once, and the parameters are replicated
    (keys,) = (p for p in job.parameters if p.name == "model.layers.1.self_attn.k_proj.weight")
    if layout["tp"] > heads:
        assert keys.shards == (Shard("tp", 0, copies=layout["tp"] // heads),)
        assert keys.spec.shape == (8, 32), "a head on each rank"
        assert keys.partial == ("tp",)


@pytest.mark.slow
def test_four_ranks_share_a_head() -> None:
    equals_plain(hf("Qwen3ForCausalLM", 2, 8, head_dim=4), {"tp": 8, "sequence_parallel": True})


def test_the_model_is_left_as_it_was() -> None:
    model = KINDS["llama"](1)
    attention = model.model.layers[0].self_attn  # type: ignore[union-attr, index]
    before = {k: v for k, v in attention.__dict__.items() if isinstance(v, int)}
    capture(model, batch_of(), huggingface_loss, Parallel(tp=2, microbatches=2))
    assert {k: v for k, v in attention.__dict__.items() if isinstance(v, int)} == before


# Own models.


class Attention(nn.Module):
    """Grouped-query attention as users write it: heads are counted, and keys repeated."""

    def __init__(self, hidden: int, queries: int, heads: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.n_rep = queries, heads, queries // heads
        self.head_dim = hidden // queries
        self.wq = nn.Linear(hidden, queries * self.head_dim)
        # Its bias would have no gradient: a softmax does not see what all scores have alike.
        self.wk = nn.Linear(hidden, heads * self.head_dim, bias=False)
        self.wv = nn.Linear(hidden, heads * self.head_dim)
        self.wo = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q = self.wq(x).view(rows, tokens, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(rows, tokens, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(rows, tokens, self.n_kv_heads, self.head_dim).transpose(1, 2)
        k, v = (one.repeat_interleave(self.n_rep, dim=1) for one in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.wo(y.transpose(1, 2).reshape(rows, tokens, -1))
        return out


class Unnamed(nn.Module):
    """Nothing here says what is a head of keys."""

    def __init__(self, hidden: int, queries: int, heads: int) -> None:
        super().__init__()
        self.d = hidden // queries
        self.a, self.b, self.c = (nn.Linear(hidden, n * self.d, n > heads) for n in (queries, heads, heads))
        self.o = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.d)).transpose(1, 2) for f in (self.a, self.b, self.c))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), attention

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.attention(self.norm(x))
        return out


class Model(nn.Module):
    def __init__(self, kind: Callable[[int, int, int], nn.Module], queries: int, heads: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList([Block(kind(32, queries, heads))])
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 64, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def loss_of_own(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


ENDS = {"embed": "vocabulary", "head": "vocabulary", "norm": "sequence", "blocks.*.norm": "sequence"}


def styles(*colwise: str, row: str = "wo") -> dict[str, str]:
    """A plan of an own model: names in its attention."""
    return {
        **ENDS,
        **{f"blocks.*.attention.{n}": "rowwise" if n == row else "colwise" for n in (*colwise, row)},
    }


OWN = {
    "counted": (Attention, styles("wq", "wk", "wv")),
    "no name says what is a head": (Unnamed, styles("a", "b", "c", row="o")),
}


@pytest.mark.parametrize(
    ("name", "heads", "tp", "sequence"),
    [
        ("counted", 2, 4, True),
        ("no name says what is a head", 2, 4, False),
        *(pytest.param(name, 1, 4, at % 2 == 0, marks=pytest.mark.slow) for at, name in enumerate(OWN)),
    ],
)
def test_own_models_equal_the_plain_model(name: str, heads: int, tp: int, sequence: bool) -> None:
    model = Model(OWN[name][0], 4, heads).double()
    parallel = Parallel(tp=tp, sequence_parallel=sequence, microbatches=2)
    batch = batch_of() | {"labels": batch_of()["input_ids"]}
    job = capture(model, batch, loss_of_own, parallel, tp_plan=OWN[name][1])
    shared = any(p.shards[0].copies == tp // heads for p in job.parameters if p.shards)
    assert shared or heads == 1, "of one head of keys that is repeated, the parameters are replicated"
    assert_plain(job, model, loss_of_own, batch)


REPLICATED = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "replicated",
    "model.layers.*.self_attn.v_proj": "replicated",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}


PUT_TOGETHER = {f"model.layers.*.self_attn.{name}_proj": "colwise_gather_output" for name in ("k", "v")}


@pytest.mark.parametrize("more", [{}, PUT_TOGETHER], ids=["alone", "put together"])
def test_one_head_of_keys_that_a_plan_replicates_is_exact(more: dict[str, str]) -> None:
    model = KINDS["llama"](1)
    parallel = Parallel(tp=2, microbatches=2)
    job = capture(model, batch_of(), huggingface_loss, parallel, tp_plan={**REPLICATED, **more})
    assert_plain(job, model, huggingface_loss, batch_of())


class OneMatrix(nn.Module):
    """Queries, keys and values in one matrix, of unequal blocks."""

    def __init__(self, hidden: int, queries: int, heads: int) -> None:
        super().__init__()
        self.d, self.sizes = hidden // queries, [hidden, heads * hidden // queries, heads * hidden // queries]
        self.qkv, self.o = nn.Linear(hidden, sum(self.sizes), bias=False), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            one.unflatten(-1, (-1, self.d)).transpose(1, 2) for one in self.qkv(x).split(self.sizes, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return out


ODD: dict[str, tuple[Callable[[], nn.Module], int, dict[str, str] | None]] = {
    "three heads of four ranks": (lambda: hf("LlamaForCausalLM", 3, 12, hidden_size=48), 4, None),
    "several that a plan replicates": (lambda: KINDS["llama"](2), 2, REPLICATED),
    "one matrix of unequal blocks": (lambda: Model(OneMatrix, 4, 1), 2, styles("qkv", row="o")),
}


@pytest.mark.parametrize("name", ODD)
def test_heads_that_ranks_do_not_share_evenly_equal_the_plain_model(name: str) -> None:
    """They cost more communication, and are right."""
    make, tp, plan = ODD[name]
    model, own = make().double(), name.startswith("one")
    batch = batch_of() | ({"labels": batch_of()["input_ids"]} if own else {})
    loss = loss_of_own if own else huggingface_loss
    job = capture(model, batch, loss, Parallel(tp=tp, microbatches=2), tp_plan=plan)
    assert_plain(job, model, loss, batch)


def test_features_that_ranks_cannot_share_are_refused() -> None:
    model = hf("LlamaForCausalLM", 2, 6, hidden_size=48)
    with pytest.raises(UsageError, match=r"k_proj: 16 features cannot be sharded equally over tp = 3"):
        capture(model, batch_of(), huggingface_loss, Parallel(tp=3, microbatches=2))


# Parts that several ranks keep: plans with them, their reductions, norms, and what ranks start with.


def small_job(**layout: Any) -> tuple[nn.Module, Job]:
    model = hf("Qwen2ForCausalLM", 2)
    return model, capture(model, batch_of(), huggingface_loss, Parallel(microbatches=2, **layout))


def test_plans_are_proved_kept_simulated_and_rehearsed(tmp_path: Path) -> None:
    model, job = small_job(tp=4, pp=2)
    plan = stretto.plan(job, cores(), order="list")
    stretto.verify(plan)
    plan.save(tmp_path / "plan.json")
    again = stretto.load_plan(tmp_path / "plan.json")
    assert again.job.parameters == plan.job.parameters
    assert re.search(
        r'"shards": \[\["tp", 0, 1, \{"copies": 2\}\]\], "partial": \["tp"\]',
        (tmp_path / "plan.json").read_text(),
    )
    assert_plan_is_plain(again, model, huggingface_loss, batch_of())
    timeline = stretto.simulate(plan)
    told = stretto.rehearse(plan, 1, model=model, batch=batch_of(), steps=1)
    assert told.peak_bytes == pytest.approx(timeline.peak_bytes[0], rel=0.1)


def test_a_sum_moves_what_is_counted() -> None:
    """Sums have shared parts side by side, so that one sum over the axis adds up the copies of each."""
    model, job = small_job(tp=4)
    plan = lowered(job, "1f1b")

    def work(runner: Runner) -> dict[str, int]:
        runner.step(batch_of())
        return {name: nbytes for name, nbytes, _ in runner.state.marks.starts}

    counted = {op.label: op.collective.nbytes for op in plan.once(0) if op.collective}
    assert counted
    for moved in stretto.run_threads(plan, lambda _: copy.deepcopy(model), work):
        assert {name: moved[name] for name in counted} == counted


def test_a_sum_of_shared_parts_that_is_left_out_is_refused() -> None:
    _, job = small_job(tp=4)
    plan = lowered(job, "1f1b")
    assert plan_faults(plan) == []
    stage, *others = plan.job.stages
    leads, tails = around_starts(stage.ops[Phase.REDUCE_GRAD])
    gone = {op.name for name in leads if leads[name][-1].lane == "tp" for op in (*leads[name], *tails[name])}
    kept = tuple(op for op in stage.ops[Phase.REDUCE_GRAD] if op.name not in gone)
    stages = (replace(stage, ops={**stage.ops, Phase.REDUCE_GRAD: kept}), *others)
    windows = {
        name: replace(window, items=tuple(item for item in window.items if item.ref not in gone))
        for name, window in plan.windows.items()
    }
    changed = replace(plan, job=replace(plan.job, stages=stages), windows=windows)
    shared = {p.name for p in job.parameters if any(shard.copies > 1 for shard in p.shards)}
    found = {fault.action: fault.what for fault in plan_faults(changed)}
    assert {f"grad/{name}" for name in shared} <= found.keys()
    assert {found[f"grad/{name}"] for name in shared} == {"is never summed over tp"}


def test_clipping_counts_a_shared_head_once() -> None:
    model, job = small_job(tp=4)
    plan = lowered(job, "1f1b")
    expected = plain(model, batch_of(), lambda m, b: huggingface_loss(m, b))
    grads = {name: grad for name, grad in expected.grads.items() if grad is not None}
    norm = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in grads.values()]))
    known = {p.name: p for p in job.parameters}

    def work(runner: Runner) -> Tensor:
        for name, parameter in runner.named_parameters():
            parameter.grad = part_of(grads[name], known[name], job, runner.coordinates).clone()
        found = GradientClip(runner, 0.5)()
        for name, parameter in runner.named_parameters():
            clipped = part_of(grads[name] * 0.5 / (norm + 1e-6), known[name], job, runner.coordinates)
            torch.testing.assert_close(parameter.grad, clipped, rtol=1e-13, atol=0)
        return found

    for found in stretto.run_threads(plan, lambda _: copy.deepcopy(model), work):
        torch.testing.assert_close(found, norm, rtol=1e-14, atol=0)


def test_ranks_that_share_a_head_must_start_alike() -> None:
    model, job = small_job(tp=4)
    models = [copy.deepcopy(model) for _ in range(4)]
    with torch.no_grad():
        models[1].get_parameter("model.layers.0.self_attn.k_proj.weight").add_(1.0)
    with pytest.raises(
        UsageError, match=r"self_attn.k_proj.weight' has other values on rank 1 than on rank 0"
    ):
        stretto.run_threads(lowered(job, "1f1b"), lambda rank: models[rank], lambda runner: None)
