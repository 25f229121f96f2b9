"""Fewer heads of keys than ranks: each rank holds one whole, and ranks that share it train it as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import StrettoError, UsageError
from stretto.ir.program import Job, Shard
from stretto.models.build import huggingface_loss
from stretto.parallelize.tensor import TensorParallel, tensor_parallel
from tests.parallelize.equality import SMALL, assert_plain, batch_of
from tests.runtime.equality import from_transformers

pytestmark = [
    pytest.mark.filterwarnings("ignore:the tensor-parallel plan of:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is not sharded over tp:UserWarning"),
]


@pytest.fixture(autouse=True)
def norms_compute_in_the_dtype_that_they_get(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of `transformers` compute in float32, to which they round gradients: addends otherwise than
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
"""Tolerances where norms, or the softmax, compute in float32, so that sums in another order tell."""

LEAN = (
    ("llama", 1, {"tp": 2}),
    ("llama", 2, {"tp": 4, "sequence_parallel": True}),
    ("qwen2", 2, {"tp": 4, "pp": 2}),
    ("qwen3", 1, {"tp": 2, "pp": 2, "sequence_parallel": True}),
    ("qwen3", 2, {"tp": 4}),
)

GRID = [
    (kind, heads, {"tp": tp, "pp": pp, "sequence_parallel": sequence})
    for kind in KINDS
    for heads, tp in ((1, 2), (1, 4), (2, 2), (2, 4))
    for pp in (1, 2)
    for sequence in (False, True)
]


def equals_plain(model: nn.Module, layout: dict[str, Any], tolerance: float = 1e-10) -> Job:
    job = capture(model, batch_of(), huggingface_loss, Parallel(microbatches=2, **layout))
    assert_plain(job, model, huggingface_loss, batch_of(), tolerance)
    return job


@pytest.mark.parametrize(("kind", "heads", "layout"), LEAN, ids=str)
def test_shared_heads_equal_the_plain_model(kind: str, heads: int, layout: dict[str, Any]) -> None:
    job = equals_plain(KINDS[kind](heads), layout)
    (keys,) = (p for p in job.parameters if p.name == "model.layers.1.self_attn.k_proj.weight")
    assert keys.shards == (Shard("tp", 0, copies=layout["tp"] // heads),)
    assert keys.spec.shape == (8, 32), "a head on each rank"
    assert keys.partial == ("tp",)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "heads", "layout"), GRID, ids=str)
def test_all_of_them(kind: str, heads: int, layout: dict[str, Any]) -> None:
    equals_plain(KINDS[kind](heads), layout, ROUNDED.get(kind, 1e-10))


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_with_copies_of_the_data_and_more_ranks(sequence: bool) -> None:
    model = hf("Qwen3ForCausalLM", 2, 8, head_dim=4)
    equals_plain(model, {"tp": 4, "dp": 2, "sequence_parallel": sequence})
    equals_plain(model, {"tp": 8, "sequence_parallel": sequence})


def test_the_model_is_left_as_it_was() -> None:
    model = KINDS["llama"](1)
    attention = model.model.layers[0].self_attn  # type: ignore[union-attr, index]
    before = {k: v for k, v in attention.__dict__.items() if isinstance(v, int)}
    capture(model, batch_of(), huggingface_loss, Parallel(tp=2, microbatches=2))
    assert {k: v for k, v in attention.__dict__.items() if isinstance(v, int)} == before


# Own models.


class Attention(nn.Module):
    """Grouped-query attention as people write it: heads are counted, and keys repeated."""

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


class Counted(Attention):
    """The same; how often keys are repeated follows from the counts, and keys and values are one matrix."""

    def __init__(self, hidden: int, queries: int, heads: int) -> None:
        super().__init__(hidden, queries, heads)
        del self.wk, self.wv, self.n_rep
        self.wkv = nn.Linear(hidden, 2 * heads * self.head_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q = self.wq(x).view(rows, tokens, -1, self.head_dim).transpose(1, 2)
        pair = self.wkv(x).view(rows, tokens, 2, self.n_kv_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        k, v = (one.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1) for one in pair.unbind())
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
        self.blocks = nn.ModuleList(Block(kind(32, queries, heads)) for _ in range(2))
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


def styles(*colwise: str, row: str = "wo", **more: str) -> dict[str, str]:
    """A plan of an own model: names in its attention, `:K` with them."""
    inside = {name.partition(":")[0]: "colwise" + name[len(name.partition(":")[0]) :] for name in colwise}
    inside |= {row: "rowwise", **more}
    return {**ENDS, **{f"blocks.*.attention.{name}": style for name, style in inside.items()}}


OWN = {
    "counted": (Attention, styles("wq", "wk", "wv")),
    "counted, and the user names counts": (
        Attention,
        {**styles("wq", "wk", "wv"), "blocks.*.attention": "attributes:n_heads,n_kv_heads"},
    ),
    "keys and values in one matrix": (Counted, styles("wq", wkv="packed_colwise:2")),
    "the user says how many": (Unnamed, styles("a", "b:{K}", "c:{K}", row="o")),
}


def own_plan(name: str, heads: int) -> dict[str, str]:
    return {key: style.replace("{K}", str(heads)) for key, style in OWN[name][1].items()}


@pytest.mark.parametrize(
    ("name", "heads", "tp", "sequence"),
    [
        pytest.param(
            name, heads, tp, sequence, marks=() if (heads, tp, sequence) == cell else pytest.mark.slow
        )
        for name, cell in zip(OWN, ((2, 4, True), (1, 2, False), (2, 4, False), (2, 4, False)), strict=True)
        for heads, tp in ((1, 2), (2, 4), (1, 4))
        for sequence in (False, True)
    ],
)
def test_own_models_equal_the_plain_model(name: str, heads: int, tp: int, sequence: bool) -> None:
    model = Model(OWN[name][0], 4, heads).double()
    parallel = Parallel(tp=tp, sequence_parallel=sequence, microbatches=2)
    batch = batch_of() | {"labels": batch_of()["input_ids"]}
    job = capture(model, batch, loss_of_own, parallel, tp_plan=own_plan(name, heads))
    assert any(p.shards[0].copies == tp // heads for p in job.parameters if p.shards)
    assert_plain(job, model, loss_of_own, batch)


WHOLE = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "replicated",
    "model.layers.*.self_attn.v_proj": "replicated",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}


KEYS_OF_ALL = "model.layers.*.self_attn"
MORE = {
    "and counts": {KEYS_OF_ALL: "attributes:num_key_value_groups"},
    "alone": {},
    "put together": {f"{KEYS_OF_ALL}.{name}_proj": "colwise_gather_output" for name in ("k", "v")},
}


@pytest.mark.parametrize(
    "more", [pytest.param("and counts", marks=pytest.mark.slow), "alone", "put together"]
)
def test_one_head_of_keys_that_a_plan_holds_whole_is_exact(more: str) -> None:
    model = KINDS["llama"](1)
    parallel = Parallel(tp=2, microbatches=2)
    job = capture(model, batch_of(), huggingface_loss, parallel, tp_plan={**WHOLE, **MORE[more]})
    assert_plain(job, model, huggingface_loss, batch_of())


# Refusals.


def refused(make: Callable[[], Any], *texts: str, kind: type[StrettoError] = UsageError) -> None:
    with pytest.raises(kind) as caught:
        make()
    for text in texts:
        assert text in str(caught.value), str(caught.value)


def spread(model: nn.Module, size: int, plan: dict[str, str] | None = None) -> TensorParallel:
    return tensor_parallel(model, size, sequence=False, plan=plan)


def test_heads_of_which_ranks_cannot_have_whole_ones() -> None:
    refused(
        lambda: spread(hf("LlamaForCausalLM", 3, 12, hidden_size=48), 4),
        "layers.0.self_attn.k_proj makes 3 heads of keys or values for 12 of queries",
        "cannot be sharded over tp = 4",
        "give tp = 3 or 6",
    )
    refused(lambda: spread(hf("LlamaForCausalLM", 2, 6, hidden_size=48), 3), "give tp = 2 or 6")


def test_several_heads_of_keys_that_a_plan_holds_whole() -> None:
    refused(
        lambda: spread(KINDS["llama"](2), 2, WHOLE),
        "k_proj makes 2 heads of keys or values that every rank would have replicated",
        "give it the style 'colwise'",
    )


def test_queries_keys_and_values_in_one_matrix() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.num_kv_heads = 4, 1
            self.qkv, self.out = nn.Linear(32, 48), nn.Linear(32, 32)

    refused(
        lambda: spread(Fused(), 2, {"qkv": "packed_colwise:3", "out": "rowwise"}),
        "qkv: 4 heads of queries and 2 x 1 of keys and values in one matrix are not 3 equal blocks",
        "'colwise_gather_output'",
    )


def test_styles_that_do_not_fit() -> None:
    model = Model(Unnamed, 4, 2)
    refused(lambda: spread(model, 4, styles("a", "b:3", row="o")), "16 output features are not 3 equal heads")
    refused(lambda: spread(model, 4, styles("a", "b:x", row="o")), "must name how many heads", "colwise:2")


def test_heads_that_nobody_is_known_to_make() -> None:
    class SelfAttention(Unnamed):
        def __init__(self, *sizes: int) -> None:
            super().__init__(*sizes)
            self.kv_heads = 3  # which fits no matrix

    refused(
        lambda: spread(Model(SelfAttention, 4, 2), 2, styles("a", "b", "c", row="o")),
        "blocks.0.attention has 3 heads of keys",
        "'blocks.0.attention.k': 'colwise:3'",
    )
