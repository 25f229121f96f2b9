"""Layouts by passes: one trace of the plain model serves all, with all that a step has beside a loss."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.capturing import capture, captures
from stretto.capturing.captures import Captures
from stretto.capturing.evaluation import capture_evaluation
from stretto.config import Parallel
from stretto.errors import UsageError
from stretto.models.build import huggingface_sum
from stretto.models.gpt import next_token_loss
from stretto.parallelize.layout import layout_of
from stretto.runtime.local import run_threads
from tests.clusters import cores
from tests.parallelize.equality import (
    MODELS,
    SMALL,
    assert_plan_is_plain,
    batch_of,
    gpt,
    loss_of,
    small,
)
from tests.parallelize.test_tensor_equality import collectives
from tests.runtime.equality import from_transformers, huggingface_loss

TP, SP = {"tp": 2}, {"tp": 2, "sequence_parallel": True}


def by_passes(**given: Any) -> Parallel:
    return Parallel(**{"microbatches": 2, **given}, layouts="passes")


@pytest.mark.parametrize("name", ["gpt", "gpt tied, learned positions", "llama", "gpt2"])
@pytest.mark.parametrize("layout", [TP, SP, {**SP, "pp": 2}], ids=str)
def test_plans_are_verified_and_equal_the_plain_model(name: str, layout: dict[str, Any]) -> None:
    model = MODELS[name]().double()
    plan = stretto.plan(capture(model, batch_of(), loss_of(name), by_passes(**layout)), cores(), order="list")
    assert_plan_is_plain(plan, model, loss_of(name), batch_of())


@pytest.mark.parametrize(
    "how",
    [
        {"recompute": "gathers"},
        {"recompute": "full"},
        {"recompute": "selective"},
        {"split_ops": True},
        {"pp": 2, "schedule": "zb-h2"},
    ],
    ids=str,
)
def test_what_comes_after_the_layout_knows_it(how: dict[str, Any]) -> None:
    model = gpt().double()
    job = capture(model, batch_of(), next_token_loss, by_passes(**SP, **how))
    assert_plan_is_plain(stretto.plan(job, cores(), order="list"), model, next_token_loss, batch_of())


@pytest.mark.parametrize("sequence", [False, True])
def test_experts_that_tensor_parallel_ranks_share_equal_the_plain_model(sequence: bool) -> None:
    sizes = {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
    model = from_transformers("MixtralForCausalLM", **sizes, experts_implementation="batched_mm").double()
    job = capture(model, batch_of(), huggingface_loss, by_passes(tp=2, sequence_parallel=sequence))
    assert_plan_is_plain(stretto.plan(job, cores(), order="list"), model, huggingface_loss, batch_of())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_half_precision_is_planned_with_the_collectives_of_patched_modules(device: str) -> None:
    """For a CUDA that need not be here."""
    found = [
        capture(gpt(), batch_of(), next_token_loss, how, precision="bf16", device=device)
        for how in (Parallel(**SP, microbatches=2), by_passes(**SP))
    ]
    patched, passes = (sorted(collectives(job)) for job in found)
    assert passes == patched
    stretto.plan(found[1], cores(), order="list")


@pytest.mark.parametrize("heads", [1, 2])
def test_plans_of_shared_heads_are_verified(heads: int) -> None:
    model = small("LlamaForCausalLM", num_key_value_heads=heads).double()
    job = capture(model, batch_of(), huggingface_loss, by_passes(tp=4, sequence_parallel=True))
    assert_plan_is_plain(stretto.plan(job, cores(), order="list"), model, huggingface_loss, batch_of())


BERT = {
    "bert.encoder.layer.*.attention.self.query": "colwise",
    "bert.encoder.layer.*.attention.self.key": "colwise",
    "bert.encoder.layer.*.attention.self.value": "colwise",
    "bert.encoder.layer.*.attention.output.dense": "rowwise",
    "bert.encoder.layer.*.intermediate.dense": "colwise",
    "bert.encoder.layer.*.output.dense": "rowwise",
}


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:the tensor-parallel plan of:UserWarning")
@pytest.mark.parametrize("layout", [TP, {"tp": 4, "pp": 2}], ids=str)
def test_an_encoder_with_a_mask_equals_the_plain_model(layout: dict[str, Any]) -> None:
    """Its norms are behind the residuals, and its head is tied to its table. A bias of keys has no gradient:
    a softmax does not see what all scores have alike."""
    sizes = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = from_transformers("BertForMaskedLM", **{**sizes, **dropouts, "pad_token_id": 0}).double()
    mask = torch.ones(4, 8, dtype=torch.int64)
    mask[1, 6:] = 0
    batch = {**batch_of(), "attention_mask": mask}
    job = capture(model, batch, own_loss, by_passes(**layout), tp_plan=BERT)
    plan = stretto.plan(job, cores(), order="list")
    assert_plan_is_plain(plan, model, own_loss, batch, least=1e-3)


@pytest.mark.parametrize("layout", [TP, {**SP, "dp": 2}], ids=str)
def test_a_sum_is_divided_by_the_count_of_all_tokens(layout: dict[str, Any]) -> None:
    model, batch = small("LlamaForCausalLM").double(), batch_of(8)
    batch["labels"][0] = -100
    job = capture(model, batch, huggingface_sum, by_passes(**layout))
    assert job.count is not None
    plan = stretto.plan(job, cores(), order="list")
    assert_plan_is_plain(plan, model, huggingface_sum, batch)


@pytest.mark.parametrize("layout", [TP, {**SP, "pp": 2}], ids=str)
def test_an_evaluation_is_laid_out_as_its_training(layout: dict[str, Any]) -> None:
    model = gpt().double()
    parallel = by_passes(**layout)
    training = capture(model, batch_of(), next_token_loss, parallel)
    job = capture_evaluation(model, batch_of(), next_token_loss, training, layout=layout_of(model, parallel))
    plan = stretto.plan(job, cores(), order="list")
    found = run_threads(plan, lambda _: copy.deepcopy(model), lambda runner: runner.step(batch_of()).item())
    halves = [{key: value.chunk(2)[k] for key, value in batch_of().items()} for k in range(2)]
    expected = sum(next_token_loss(model, half).item() for half in halves) / 2
    assert found == pytest.approx([expected] * len(found), rel=1e-12)


class Watched(nn.Module):
    """Whose code observes what is partial on ranks, and what is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x).relu()
        stretto.observe("features", inner.sum())
        stretto.observe("highest", inner.amax(), "max")
        return self.down(inner)  # type: ignore[no-any-return]


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def test_what_is_observed_is_that_of_all_ranks() -> None:
    torch.manual_seed(0)
    model, x = Watched().double(), torch.randn(4, 8, dtype=torch.float64)
    job = capture(model, x, square, by_passes(tp=2), tp_plan={"up": "colwise", "down": "rowwise"})
    plan = stretto.plan(job, cores(), order="list")

    def work(runner: Any) -> Any:
        runner.step(x)
        return runner.observed()

    inner = model.up(x).relu()
    for found in run_threads(plan, lambda _: copy.deepcopy(model), work):
        features, highest = (next(one for one in found if one.name == n) for n in ("features", "highest"))
        assert features.mean == pytest.approx([inner.sum().item()])
        assert highest.mean == pytest.approx([inner.amax().item()])


def test_a_model_is_traced_once_for_all_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[Any] = []
    own = captures.trace

    def counted(*args: Any, **kwargs: Any) -> Any:
        traces.append(args)
        return own(*args, **kwargs)

    monkeypatch.setattr(captures, "trace", counted)
    kept = Captures(gpt(), batch_of(), next_token_loss)
    for layout in (TP, SP, {"tp": 4}, {**SP, "pp": 2}):
        kept.job(by_passes(**layout))
    assert len(traces) == 1


def test_a_sequence_that_ranks_cannot_share_is_refused() -> None:
    model, batch = gpt(context=7), {key: value[:, :7] for key, value in batch_of().items()}
    with pytest.raises(UsageError, match="a sequence of 7 cannot be sharded equally over tp = 2"):
        capture(model, batch, next_token_loss, by_passes(**SP))


@pytest.mark.parametrize("given", [{"ep": 2, "dp": 2}, {"ampipe_degree": 2}, {"ampipe_degree": "auto"}])
def test_what_passes_do_not_lay_out_yet_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(
        UsageError, match='is not laid out by layouts = "passes" yet; give layouts = "patched"'
    ):
        by_passes(**given)
