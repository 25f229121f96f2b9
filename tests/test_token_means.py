"""A step whose loss is a sum over a count is that of the full batch, however it is cut: microbatches,
stages, copies and parts may count as unequally as they like. Compared with the plain model on one batch."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stretto
from stretto.capturing import capture
from stretto.capturing.evaluation import capture_evaluation
from stretto.config import Parallel
from stretto.ir.serialize import plan_from_text, plan_to_text
from stretto.runtime import run_threads
from stretto.runtime.rehearse import rehearse
from stretto.schedule.once import with_once
from tests.capturing.zoo import Chain, mean_square, rows
from tests.runtime.equality import (
    SMALL,
    assert_equal,
    from_transformers,
    lowered,
    plain,
    plan_of,
    run,
    run_sharded,
)

torch.set_num_threads(1)

ROWS, SEQUENCE, VOCAB = 8, 10, 62
LENGTHS = (10, 2, 7, 3, 10, 9, 1, 1)
"""Labels that count, by row; the last microbatch of all has none once they are shifted."""
SPREAD = Parallel(pp=2, dp=2, microbatches=4)


@functools.cache
def llama() -> nn.Module:
    sizes = {**SMALL, "vocab_size": VOCAB, "num_key_value_heads": 2, "num_hidden_layers": 1}
    return from_transformers("LlamaForCausalLM", **sizes, tie_word_embeddings=True).double()


def batch_of(lengths: tuple[int, ...] = LENGTHS, **more: Any) -> dict[str, Any]:
    ids = torch.randint(0, VOCAB, (len(lengths), SEQUENCE), generator=torch.Generator().manual_seed(5))
    labels = ids.masked_fill(torch.arange(SEQUENCE) >= torch.tensor(lengths)[:, None], -100)
    return {"input_ids": ids, "labels": labels, **more}


def shifted(batch: Any) -> Tensor:
    labels: Tensor = batch["labels"][:, 1:]
    return labels


def summed(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    logits = model(batch["input_ids"]).logits[:, :-1]
    labels = shifted(batch)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def full_mean(model: nn.Module, batch: Any) -> Tensor:
    """What `summed` means, by PyTorch's own mean over the full batch."""
    logits = model(batch["input_ids"]).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), shifted(batch).flatten())


def in_own_dtype(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None) -> Tensor:
    """The loss of `transformers` but for its upcast to float32."""
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
    how = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(logits.view(-1, vocab_size), labels, reduction=how)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def assert_equals(
    plan: Any, model: nn.Module, batch: Any, loss: Any, expected: Any, tolerance: float
) -> None:
    assert_equal(run_sharded(plan, model, batch), plain(model, expected, loss), tolerance)


def test_unequal_labels_equal_one_batch() -> None:
    """Under all axes, and recomputed; `tests/test_equality.py` has each layout and schedule."""
    parallel = Parallel(pp=2, dp=2, tp=2, sequence_parallel=True, microbatches=4, recompute="full")
    job = capture(llama(), batch_of(), summed, parallel)
    assert_equals(lowered(job, parallel.schedule), llama(), batch_of(), full_mean, batch_of(), 1e-10)


def own_mean(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def with_count(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "num_items_in_batch": stretto.replicated(int((shifted(batch) != -100).sum()))}


def keyword(model: nn.Module, batch: Any) -> Tensor:
    """The step's number of tokens, another in every step, is given in full to every microbatch, and the step
    is the mean over microbatches."""
    return own_mean(model, batch) * (SPREAD.microbatches * SPREAD.dp)


def counted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Divided by one the loss of `transformers` is a sum, which goes beside the count."""
    return model(**batch, num_items_in_batch=1).loss, (shifted(batch) != -100).sum()


@pytest.mark.parametrize("loss", [keyword, pytest.param(counted, marks=pytest.mark.slow)])
def test_transformers_own_losses(loss: Any) -> None:
    model = copy.deepcopy(llama())
    model.loss_function = in_own_dtype  # type: ignore[assignment]
    given = with_count if loss is keyword else dict
    job = capture(model, given(batch_of()), loss, SPREAD)
    assert job.replicated == (("num_items_in_batch",) if loss is keyword else ())
    plan = lowered(job, "1f1b")
    for batch in (batch_of(), batch_of((9, 9, 9, 9, 2, 3, 4, 5))):
        assert_equals(plan, model, given(batch), own_mean, batch, 1e-10)


def weighted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """A mean with weights, of classes and of rows."""
    of_row = batch["weights"][batch["kind"]]
    return (model(batch["x"]).square().sum(1) * of_row).sum(), of_row.sum()


def weighted_batch(weights: Any) -> dict[str, Any]:
    kind = torch.tensor([0, 1, 2, 2, 1, 0, 0, 0])
    return {"x": rows(), "kind": kind, "weights": weights}


def test_counts_may_be_sums_of_weights_that_change() -> None:
    first, later = (torch.tensor(w, dtype=torch.float64) for w in ((0.5, 0.1, 2.0), (3.0, 0.7, 0.3)))
    job = capture(
        Chain(), weighted_batch(stretto.replicated(first)), weighted, Parallel(pp=2, dp=2, microbatches=2)
    )
    plan = plan_from_text(plan_to_text(lowered(job, "1f1b")))
    assert with_once(plan.job, plan.schedule) == with_once(job, plan.schedule) == plan.job

    def mean(model: nn.Module, batch: Any) -> Tensor:
        total, count = weighted(model, batch)
        return total / count

    for weights in (first, later):
        given = weighted_batch(stretto.replicated(weights))
        assert_equals(plan, Chain(), given, mean, weighted_batch(weights), 1e-10)


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(pp=2, dp=2, microbatches=2)], ids=["one", "four"])
def test_counts_may_be_numbers(parallel: Parallel) -> None:
    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        out = model(batch)
        return out.square().sum(), out.numel()

    job = capture(Chain(), rows(), loss, parallel)
    assert_equals(lowered(job, "1f1b"), Chain(), rows(), mean_square, rows(), 1e-12)


def test_numbers_of_python_keep_their_precision_and_kind() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["x"]).square().mean() * batch["scale"]

    model, x = Chain(), rows()
    job = capture(model, {"x": x, "scale": stretto.replicated(0.3)}, loss, Parallel(pp=2, microbatches=2))
    plan = lowered(job, "1f1b")
    for scale in (0.3, 0.7, 2):  # an integer is one of its kind
        found = run_sharded(plan, model, {"x": x, "scale": stretto.replicated(scale)}).loss
        assert abs(float(found) - float(mean_square(model, x).detach()) * scale) < 1e-12
    half = capture(
        Chain().float(),
        {"x": x.float(), "scale": stretto.replicated(0.3)},
        loss,
        Parallel(),
        precision="bf16",
    )
    assert str(dict(half.batch)["scale"]) == "float64[]"


def test_a_step_that_counts_nothing_has_the_loss_of_pytorchs_mean_of_nothing() -> None:
    nothing = batch_of((1,) * ROWS)
    job = capture(llama(), nothing, summed, Parallel(pp=2, microbatches=4))
    found = run_threads(
        lowered(job, "1f1b"),
        lambda _: copy.deepcopy(llama()),
        lambda runner: (runner.step(nothing), {n: p.grad for n, p in runner.named_parameters()}),
    )
    want = plain(llama(), nothing, full_mean)
    assert want.loss.isnan()
    assert all(told.isnan() for told, _ in found)
    ignored = [*want.grads.values(), *(grad for _, grads in found for grad in grads.values())]
    assert all(grad is not None and not grad.any() for grad in ignored)


def test_evaluation_weighs_alike() -> None:
    model = llama()
    job = capture(model, batch_of(), summed, Parallel(pp=2, microbatches=4))
    held_out = capture_evaluation(model, batch_of(), summed, job)
    assert held_out.count == job.count
    found = run(plan_of(held_out), model, batch_of()).loss
    assert abs(found - plain(model, batch_of(), full_mean).loss) < 1e-12


def test_a_rehearsal_makes_up_what_is_given_whole() -> None:
    job = capture(
        Chain(), weighted_batch(stretto.replicated(torch.rand(3))), weighted, Parallel(pp=2, microbatches=4)
    )
    assert rehearse(plan_of(job), 1, steps=1).step_us > 0
