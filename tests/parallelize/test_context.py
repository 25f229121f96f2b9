"""Context parallelism: ranks share the sequence of every sample, and give what the plain model gives."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from benchmarks import context_described
from stretto.capturing import capture
from stretto.capturing.evaluation import capture_evaluation
from stretto.config import Parallel
from stretto.errors import UsageError
from stretto.ir.action import Phase
from stretto.ir.placed_programs import differing_in
from stretto.ir.program import Job, Op
from stretto.ir.timeline import SpanKind
from stretto.models.build import huggingface_sum
from stretto.models.gpt import next_token_loss
from stretto.models.moe import moe_token_sum
from stretto.parallelize.layout import layout_of
from stretto.passes.step import SEARCH_S
from stretto.runtime.local import run_threads
from stretto.simulating import simulate
from stretto.verifying import verify
from tests.cells import slow
from tests.clusters import cores
from tests.parallelize import mixtures
from tests.parallelize.equality import (
    MODELS,
    SMALL,
    assert_plan_is_plain,
    loss_of,
    small,
    step_of,
)
from tests.parallelize.equality import gpt as _gpt
from tests.runtime.equality import from_transformers, huggingface_loss

LENGTH = 16
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}


def gpt(**changes: Any) -> nn.Module:
    return _gpt(context=LENGTH, **changes)


def batch_of(rows: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids, labels = (torch.randint(0, 61, (rows, LENGTH), generator=generator) for _ in range(2))
    labels[:, 2] = -100
    return {"input_ids": ids, "labels": labels}


GPTS = {
    "gpt": gpt,
    "gpt tied, learned positions": lambda: gpt(tie_embeddings=True, positions="learned"),
    "llama of products, biases": lambda: small(
        "LlamaForCausalLM", attn_implementation="eager", attention_bias=True, num_key_value_heads=2
    ),
}


def context(**given: Any) -> Parallel:
    return Parallel(**{"microbatches": 2, "cp": 2, "cp_kind": "ring", **given})


def collectives(job: Job) -> Counter[tuple[str, str]]:
    """(axis, kind) -> how many a microbatch has."""
    return Counter((op.lane, op.kind.name) for op in ops_of(job) if op.kind is not None)


def ops_of(job: Job) -> list[Op]:
    return [op for stage in job.stages for ops in stage.ops.values() for op in ops]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("gpt", {}),
        slow("gpt", {"cp": 4}),
        ("gpt", {"cp": 4, "cp_kind": "gathered"}),
        slow("llama", {"cp": 4, "cp_kind": "ulysses"}),
        ("llama", {"cp_kind": "ulysses", **SP}),
        ("llama, fewer heads of keys", {"cp_kind": "gathered", **SP}),
        slow("gpt tied, learned positions", {"dp": 2}),
        slow("llama, fewer heads of keys", {}),
        slow("gpt2", {"tp": 2}),
        ("gemma2", {}),  # attention of products and a softmax
        ("llama of products, biases", {}),  # only the bias reads the sum of the values' gradients
        slow("llama", SP),
        ("llama, fewer heads of keys", {"tp": 4, "sequence_parallel": True}),
        slow("gpt", {"pp": 2, "schedule": "1f1b"}),
        ("gpt", {"pp": 2, "schedule": "interleaved-1f1b", "stages": 4, **SP}),
        ("llama", {"pp": 2, "schedule": "zb-h2", "recompute": "selective"}),
        slow("gpt", {"recompute": "full"}),
        ("llama, fewer heads of keys", {"ampipe_degree": 2}),
        ("gpt", {"ampipe_degree": 3, "cp_kind": "gathered"}),
        ("gpt", {"ampipe_degree": 2, "cp_kind": "ulysses"}),
    ],
    ids=str,
)
def test_plans_are_verified_and_equal_the_plain_model(name: str, how: dict[str, Any]) -> None:
    model, batch = (MODELS | GPTS)[name]().double(), batch_of(4 * how.get("dp", 1))
    plan = stretto.plan(capture(model, batch, loss_of(name), context(**how)), cores(), order="list")
    in_float32 = name in ("gemma2", "llama of products, biases")  # its softmax
    tolerance = 1e-6 if in_float32 else 1e-10
    assert_plan_is_plain(plan, model, loss_of(name), batch, tolerance)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("gathered", {"all_gather": 1, "reduce_scatter": 1}),
        ("ring", {"permute_next": 3 + 2 * 3}),  # keys each way, and their gradients
        ("ulysses", {"all_to_all": 2 * 4}),
    ],
)
def test_keys_and_values_move_once_each_way(kind: str, wanted: dict[str, int]) -> None:
    """Those of shared heads are not repeated before; the loss and what it counts are summed."""
    heads = 4 if kind == "ulysses" else 2
    model = small("LlamaForCausalLM", num_key_value_heads=heads)
    job = capture(model, batch_of(), huggingface_loss, context(cp=4, cp_kind=kind))
    layers = SMALL["num_hidden_layers"]
    found = {("cp", kind): layers * count for kind, count in wanted.items()}
    assert collectives(job) == {**found, ("cp", "all_reduce"): 2}
    if kind == "ring":
        started = [op for op in ops_of(job) if op.kind is not None]
        sent = {spec.numel for op in started for spec in op.outputs if spec is not None}
        assert sent == {1, 2 * heads * 4 * 2 * 8}  # rows, heads, tokens, features of keys and values


@pytest.mark.parametrize("kind", ["gathered", "ring"])
def test_keys_and_values_move_once_for_all_chunks(kind: str) -> None:
    model = small("LlamaForCausalLM", num_key_value_heads=2)
    one, two = (
        collectives(
            capture(model, batch_of(), huggingface_loss, context(cp=4, cp_kind=kind, ampipe_degree=n))
        )
        for n in (1, 2)
    )
    assert one == two


@pytest.mark.parametrize("kind", ["gathered", "ring", "ulysses"])
def test_chunks_do_not_wait_for_each_other_behind_their_keys(kind: str) -> None:
    """What the first block makes of a chunk comes of half of its attention, and of all its keys."""
    job = capture(gpt(), batch_of(), next_token_loss, context(cp=4, cp_kind=kind, ampipe_degree=2))
    above: dict[str, set[str]] = {}
    for op in ops_of(job):
        above[op.name] = {op.name}.union(*(above.get(name, set()) for name in op.uses))
    kernels = {op.name for op in ops_of(job) if "attention" in op.target and "backward" not in op.target}
    first = {name for name in kernels if not (above[name] & kernels) - {name}}
    mlp = [op for op in job.stages[0].ops[Phase.F] if op.module.startswith("blocks.0.mlp.") and op.flops]
    seen = list({frozenset(above[op.name] & first) for op in mlp})
    assert len(seen) == 2
    assert seen[0].isdisjoint(seen[1])
    assert seen[0] | seen[1] == first


@pytest.mark.parametrize(
    ("tokens", "heads", "kind"), [(4096, 4, "gathered"), (8192, 4, "ring"), (4096, 1, "ring")]
)
def test_a_ring_is_chosen_where_steps_hide_its_messages(tokens: int, heads: int, kind: str) -> None:
    with torch.device("meta"):
        model = small("LlamaForCausalLM", max_position_embeddings=tokens, num_key_value_heads=heads)
    ids = torch.empty(2, tokens, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    job = capture(model, batch, huggingface_loss, context(cp_kind="auto"))
    assert (("cp", "permute_next") in collectives(job)) == (kind == "ring")


def test_a_ring_keeps_two_blocks_of_keys_and_values() -> None:
    """The third message goes once the kernels are done that read the first block, under the second step's."""
    needs: dict[str, set[str]] = {}
    for op in ops_of(capture(gpt(), batch_of(), next_token_loss, context(cp=4))):
        needs[op.name] = {op.name}.union(*(needs.get(name, set()) for name in op.uses))
    sent = [name.removesuffix("_pair_3") for name in needs if name.endswith("_pair_3")]
    assert len(sent) == 2 * 2  # layers, each way
    for attention in sent:
        first, second = ({f"{attention}_chunk_0_step_{k}{tile}" for tile in ("", "_1")} for k in (1, 2))
        assert needs.keys() >= first | second
        assert needs[f"{attention}_pair_3"] & (first | second) == first


@pytest.mark.slow
def test_a_long_sequence_hides_its_ring_and_takes_no_more_memory_than_its_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four layers of an 8B Llama: 131,072 tokens over cp = 8 and tp = 8, beside 16,384 over tp alone."""
    monkeypatch.delenv(SEARCH_S, raising=False)
    alone, shared = (context_described.planned(4, cp) for cp in (1, 8))
    assert len(shared.orders) == 1  # one program for all ranks, so that their work is even
    timeline = simulate(shared)
    sent, exposed = (
        context_described.ring_us(timeline, kind) for kind in (SpanKind.MESSAGE, SpanKind.EXPOSED)
    )
    assert sent > 0.0
    assert exposed <= 0.05 * sent
    block = context_described.TOKENS * 2 * 128 * 2  # of keys and values of one head, bf16
    peaks = [max(simulate(plan).peak_bytes) for plan in (alone, shared)]
    # Two of keys and values, and two of their gradients, in float32.
    assert peaks[1] - peaks[0] <= 2 * block + 2 * 2 * block


def attention_flops(job: Job) -> int:
    return sum(op.flops for op in ops_of(job) if "attention" in op.target)


def test_nothing_behind_the_diagonal_is_computed() -> None:
    """A rank's own keys are causal; of all others it meets half with half."""
    full = attention_flops(capture(gpt(), batch_of(), next_token_loss, Parallel(microbatches=2)))
    job = capture(gpt(), batch_of(), next_token_loss, context(cp=4))
    assert attention_flops(job) == full // 16 * (1 + 3 / 2)


@pytest.mark.parametrize("kind", ["ring", "gathered"])
def test_a_window_meets_and_sends_what_it_sees(kind: str) -> None:
    """Of four ranks, a block of two tokens sees that before it: of the rank before, or of the one behind.
    What sees nothing is not computed, and a ring sends nothing there."""
    layers = SMALL["num_hidden_layers"]
    model = small("MistralForCausalLM", sliding_window=3).double()
    full = attention_flops(capture(model, batch_of(), huggingface_loss, Parallel(microbatches=2)))
    job = capture(model, batch_of(), huggingface_loss, context(cp=4, cp_kind=kind))
    assert attention_flops(job) == full // 16 * (1 + 2 / 4)  # own keys, and half of half with two ranks
    if kind == "ring":
        found = collectives(job)  # keys each way, and their gradients
        assert found["cp", "permute_next"] == found["cp", "permute_previous"] == layers * (2 + 1)
    assert_plan_is_plain(stretto.plan(job, cores(), order="list"), model, huggingface_loss, batch_of())


def test_tokens_that_are_one_more_than_the_sequence() -> None:
    """Inputs and targets are slices of them."""
    tokens = torch.randint(0, 61, (4, 9), generator=torch.Generator().manual_seed(3))
    model = gpt().double()
    job = capture(model, tokens, next_token_loss, context())
    embedded = next(op for op in ops_of(job) if op.target == "aten.embedding.default")
    assert embedded.outputs[0] is not None
    assert embedded.outputs[0].shape[:2] == (2, 4)
    assert_plan_is_plain(stretto.plan(job, cores(), order="list"), model, next_token_loss, tokens)


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch, use_cache=False).loss  # type: ignore[no-any-return]


def padded() -> dict[str, Tensor]:
    mask = torch.ones(4, LENGTH, dtype=torch.int64)
    mask[1, 11:] = 0
    return {**batch_of(), "attention_mask": mask}


class Encoder(nn.Module):
    """Attention without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(64, 16), nn.Linear(16, 48), nn.Linear(16, 64)

    def forward(self, ids: Tensor) -> Tensor:
        rows, length = ids.shape
        q, k, v = self.qkv(self.embed(ids)).view(rows, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.head(mixed.transpose(1, 2).reshape(rows, length, 16))  # type: ignore[no-any-return]


def each_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


class Packed(Encoder):
    """Tokens see those of their own document that are before them."""

    def forward(self, ids: Tensor, document: Tensor) -> Tensor:
        rows, length = ids.shape
        q, k, v = self.qkv(self.embed(ids)).view(rows, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        at = torch.arange(length, device=ids.device)
        mask = (document[:, None, :, None] == document[:, None, None, :]) & (at[:, None] >= at)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        return self.head(mixed.transpose(1, 2).reshape(rows, length, 16))  # type: ignore[no-any-return]


class Listed(Encoder):
    """Its states are a list of one, as those of a recurrent layer."""

    def forward(self, ids: Tensor) -> Tensor:
        (state,) = torch.zeros(1, ids.shape[0], 64, dtype=self.head.weight.dtype).unbind(0)
        (rows,) = super().forward(ids).split(LENGTH, 1)
        return rows + state.unsqueeze(1)


def packed() -> dict[str, Tensor]:
    ends = torch.tensor([[3, 9], [5, 12], [8, 10], [1, 15]])
    return {**batch_of(), "document": torch.searchsorted(ends, torch.arange(LENGTH).repeat(4, 1))}


def of_documents(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    made = model(batch["input_ids"], batch["document"])
    return nn.functional.cross_entropy(made.flatten(0, 1), batch["labels"].flatten())


def fewer_heads_of_keys() -> nn.Module:
    """With a mask, `transformers` repeats them."""
    return small("MistralForCausalLM", sliding_window=4, num_key_value_heads=2)


MASKS: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Tensor], float]] = {
    "packed": (Packed, of_documents, packed(), 1e-10),
    "none": (Encoder, each_token, batch_of(), 1e-10),
    "none, lists of one": (Listed, each_token, batch_of(), 1e-10),
    "sliding": (lambda: small("MistralForCausalLM", sliding_window=4), huggingface_loss, batch_of(), 1e-10),
    "sliding, fewer heads of keys": (fewer_heads_of_keys, huggingface_loss, batch_of(), 1e-10),
    # Its own loss is in float32.
    "padded": (lambda: small("LlamaForCausalLM"), own_loss, padded(), 1e-5),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    "how",
    [
        {},
        slow({"cp": 4, "cp_kind": "gathered"}),
        slow({"cp": 4}),
        {"cp_kind": "ulysses"},
        slow({"pp": 2, "cp_kind": "gathered"}),
    ],
    ids=str,
)
def test_masks_are_cut_by_rows(name: str, how: dict[str, Any]) -> None:
    make, loss, batch, tolerance = MASKS[name]
    model = make().double()
    job = capture(model, batch, loss, context(**how))
    plan = stretto.plan(job, cores(), order="list")
    assert_plan_is_plain(plan, model, loss, batch, tolerance)


@pytest.mark.filterwarnings("ignore:the tensor-parallel plan of:UserWarning")
def test_an_encoder_with_biases_and_padding_equals_the_plain_model() -> None:
    sizes = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = from_transformers("BertForMaskedLM", **{**sizes, **dropouts, "pad_token_id": 0}).double()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch).loss  # type: ignore[no-any-return]

    plan = stretto.plan(capture(model, padded(), loss, context()), cores(), order="list")
    # Biases of keys have no gradient: their softmax is the same.
    assert_plan_is_plain(plan, model, loss, padded(), least=1e-3)


@pytest.mark.parametrize("how", [{"dp": 2}, slow({}), slow({**SP, "pp": 2})], ids=str)
def test_a_sum_is_divided_by_the_count_of_all_tokens(how: dict[str, Any]) -> None:
    """Some ranks have none that count."""
    model, batch = small("LlamaForCausalLM").double(), batch_of(8)
    batch["labels"][:4, :5] = -100
    job = capture(model, batch, huggingface_sum, context(**how))
    assert job.count is not None
    assert_plan_is_plain(stretto.plan(job, cores(), order="list"), model, huggingface_sum, batch)


@pytest.mark.parametrize("how", [{}, {"dp": 2, "ep": 2}, {"ampipe_degree": 2}], ids=str)
def test_experts_choose_from_the_tokens_of_all_ranks(how: dict[str, Any]) -> None:
    model = mixtures.model_of(mixtures.DROPLESS, layers=1)
    job = capture(model, mixtures.batch(), moe_token_sum, context(**{"microbatches": 1, **how}))
    plan = stretto.plan(job, cores(), order="list")
    assert_plan_is_plain(plan, model, moe_token_sum, mixtures.batch())


def test_ranks_compute_the_experts_of_their_own_tokens() -> None:
    model = mixtures.model_of(mixtures.DROPLESS, layers=1)

    def flops(parallel: Parallel) -> int:
        ops = ops_of(capture(model, mixtures.batch(), moe_token_sum, parallel))
        return sum(op.flops for op in ops if "grouped_mm" in op.target)

    assert flops(context(microbatches=1)) == flops(Parallel()) // 2 > 0


def test_a_mean_is_of_the_tokens_of_all_ranks() -> None:
    model, batch = gpt().double(), batch_of()
    batch["labels"][:, :4] = -100
    plan = stretto.plan(capture(model, batch, next_token_loss, context()), cores(), order="list")
    assert_plan_is_plain(plan, model, next_token_loss, batch)


@pytest.mark.parametrize("how", [{}, {"tp": 2, "pp": 2}], ids=str)
def test_an_evaluation_is_laid_out_as_its_training(how: dict[str, Any]) -> None:
    model = gpt().double()
    parallel = context(**how)
    training = capture(model, batch_of(), next_token_loss, parallel)
    job = capture_evaluation(model, batch_of(), next_token_loss, training, layout=layout_of(model, parallel))
    plan = stretto.plan(job, cores(), order="list")
    found = run_threads(plan, lambda _: copy.deepcopy(model), lambda runner: runner.step(batch_of()).item())
    halves = [{key: value.chunk(2)[k] for key, value in batch_of().items()} for k in range(2)]
    want = sum(next_token_loss(model, half).item() for half in halves) / 2
    assert found == pytest.approx([want] * len(found), rel=1e-12)


class Dropped(nn.Module):
    """Of equal embeddings, dropout alone differs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop, self.head = nn.Embedding(64, 32), nn.Dropout(0.5), nn.Linear(32, 64)
        nn.init.ones_(self.embed.weight)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.drop(self.embed(ids)))  # type: ignore[no-any-return]


def test_draws_differ_between_the_parts_of_a_sequence() -> None:
    job = capture(Dropped(), batch_of(), each_token, context())
    drawn = [op.name for op in ops_of(job) if op.random]
    assert drawn
    assert differing_in(job, "cp").issuperset(drawn)


def test_chunks_draw_what_a_rank_draws() -> None:
    """Attention drops as well: on a processor, by ops of its own."""
    model = gpt(dropout=0.3).double()
    (want, grads), (found, others) = (
        step_of(
            stretto.plan(
                capture(model, batch_of(), next_token_loss, context(ampipe_degree=n)), cores(), order="list"
            ),
            model,
            batch_of(),
        )
        for n in (1, 2)
    )
    assert torch.allclose(found, want, rtol=1e-12)
    for name, grad in grads.items():
        assert torch.allclose(others[name], grad, rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cp": 3}, "a sequence of 16 cannot be shared equally by 3 ranks"),
        ({"cp": 8}, "a sequence of 16 cannot be shared equally by 8 ranks, in 16 blocks of two tokens"),
        ({"cp": 8, "cp_kind": "ulysses"}, "has 4 heads on a rank, which 8 ranks cannot share equally"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        capture(gpt(), batch_of(), next_token_loss, context(**given))


@pytest.mark.parametrize("kind", ["ring", "gathered", "ulysses"])
@pytest.mark.parametrize("name", ["flash", "efficient", "dropped"])
def test_kernels_of_accelerators_are_laid_out(name: str, kind: str) -> None:
    """For a CUDA that need not be here."""
    changes = {"sliding_window": 4} if name == "efficient" else {}
    if name == "dropped":
        changes["attention_dropout"] = 0.1
    model = small("MistralForCausalLM", num_key_value_heads=4, **changes)
    how = context(cp_kind=kind, tp=2)
    job = capture(model, batch_of(), huggingface_loss, how, precision="bf16", device="cuda")
    plan = stretto.plan(job, cores(), order="list")
    verify(plan)
    kernels = {op.target for op in ops_of(job) if "attention" in op.target}
    assert len(kernels) == 2
    assert all(("efficient" if name == "efficient" else "flash") in target for target in kernels)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("name", ["flash", "efficient"])
def test_kernels_of_accelerators_are_laid_out_in_chunks(name: str, kind: str) -> None:
    """Flash attention is causal from the lower right; what has a mask keeps its rows of it."""
    model = small("MistralForCausalLM", sliding_window=4 if name == "efficient" else None)
    how = context(cp_kind=kind, tp=2, ampipe_degree=2)
    job = capture(model, batch_of(), huggingface_loss, how, precision="bf16", device="cuda")
    verify(stretto.plan(job, cores(), order="list"))
    assert len({op.target for op in ops_of(job) if "attention" in op.target}) == 2


def test_a_batch_without_a_sequence_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no leaf of it is \(batch, sequence\) or more: drop cp"):
        capture(nn.Linear(1, 3), torch.ones(4), lambda model, x: model(x[:, None]).sum(), context())
