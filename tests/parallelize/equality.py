"""A planned step beside the plain model's, in float64: rows of (model, layout, expectation) are compared so.

Ranks are threads. A sharded gradient is put together from its parts; what several ranks have must be the
same on each, bit by bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stretto.ir.plan import Plan
from stretto.ir.program import Job
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.runtime.local import run_threads
from stretto.runtime.rank_tensors import pieces_of
from stretto.runtime.runner import Runner
from tests.runtime.equality import from_transformers, huggingface_loss, lowered

Loss = Callable[[nn.Module, Any], Any]
"""A mean over a microbatch, or (sum, count)."""

Grads = dict[str, Tensor]

TOLERANCE = 1e-10


def plain_step(model: nn.Module, loss: Loss, batch: Any, pieces: int) -> tuple[Tensor, Grads]:
    """Loss and gradients of a step of so many microbatches, one by one, by PyTorch alone: the mean of their
    means, or the sum over the count."""
    own = copy.deepcopy(model)
    if isinstance(batch, Tensor):
        found = [loss(own, part) for part in batch.chunk(pieces)]
    else:
        found = [loss(own, {k: v.chunk(pieces)[m] for k, v in batch.items()}) for m in range(pieces)]
    if isinstance(found[0], tuple):
        total = torch.stack([value for value, _ in found]).sum() / sum(int(count) for _, count in found)
    else:
        total = torch.stack(found).mean()
    total.backward()
    return total.detach(), {name: p.grad for name, p in own.named_parameters() if p.grad is not None}


def step_of(plan: Plan, model: nn.Module, batch: Any) -> tuple[Tensor, Grads]:
    """Loss and full gradients of one step of a plan."""

    def work(runner: Runner) -> tuple[Tensor, Grads]:
        loss = runner.step(batch)
        return loss, {name: p.grad for name, p in runner.named_parameters() if p.grad is not None}

    results = run_threads(plan, lambda _: copy.deepcopy(model), work)
    parameters = {p.name: p for p in plan.job.parameters}
    grads: Grads = {}
    seen: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    for rank, (loss, of_rank) in enumerate(results):
        assert torch.equal(loss, results[0][0]), "ranks have different losses"
        for name, grad in of_rank.items():
            full = grads.setdefault(name, torch.full_like(model.get_parameter(name), torch.nan))
            at = plan.mesh.coordinates(rank)
            for offsets, box in pieces_of(grad, parameters[name], plan.job, at):
                first = seen.setdefault((name, offsets), box)
                assert torch.equal(first, box), f"{name} differs between ranks that share it"
                full[tuple(slice(o, o + n) for o, n in zip(offsets, box.shape, strict=True))] = box
    return results[0][0], grads


def step(job: Job, model: nn.Module, batch: Any, schedule: str = "1f1b") -> tuple[Tensor, Grads]:
    """The same of a job, by orders that are neither searched for nor proved."""
    return step_of(lowered(job, schedule), model, batch)


def assert_plan_is_plain(
    plan: Plan,
    model: nn.Module,
    loss: Loss,
    batch: Any,
    tolerance: float = TOLERANCE,
    *,
    expected: nn.Module | None = None,
    least: float = 0.0,
) -> None:
    """The step's loss and every gradient are the plain model's.

    tolerance: relative, by the norm of each gradient, or by `least` of a smaller one. expected: instead of
    the model itself, one that is to give the same.
    """
    job = plan.job
    pieces = job.microbatches * math.prod(job.size(axis) for axis in job.data_axes)
    want_loss, want = plain_step(expected or model, loss, batch, pieces)
    value, grads = step_of(plan, model, batch)
    assert abs(value - want_loss) <= tolerance * abs(want_loss)
    tied = {p.name: p.tied_to for p in job.parameters}
    found = {tied[name]: grad for name, grad in grads.items()}
    assert found.keys() == {tied[name] for name in want}
    for name, grad in want.items():
        got = found[tied[name]]
        assert got.shape == grad.shape, name
        assert (got - grad).norm() <= tolerance * max(float(grad.norm()), least), name


def assert_plain(job: Job, model: nn.Module, loss: Loss, batch: Any, tolerance: float = TOLERANCE) -> None:
    """The same of a job, by orders that are neither searched for nor proved."""
    assert_plan_is_plain(lowered(job, "1f1b"), model, loss, batch, tolerance)


# Models without experts.

VOCAB, SEQUENCE, ROWS = 64, 8, 4
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def gpt(**changes: Any) -> nn.Module:
    config = {"vocab_size": VOCAB, "layers": 2, "hidden": 32, "heads": 4, "context": SEQUENCE, **changes}
    return GPT(GPTConfig(**config), seed=3)


def gpt2(**changes: Any) -> nn.Module:
    config = {
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 16,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    return from_transformers("GPT2LMHeadModel", **{**config, **changes})


def small(name: str, **changes: Any) -> nn.Module:
    """A model of `transformers` of these sizes, or of changed ones."""
    return from_transformers(name, **{**SMALL, "tie_word_embeddings": False, **changes})


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt,
    "gpt tied, learned positions": lambda: gpt(tie_embeddings=True, positions="learned"),
    "llama": lambda: small("LlamaForCausalLM"),
    "llama tied": lambda: small("LlamaForCausalLM", tie_word_embeddings=True),
    "llama, fewer heads of keys": lambda: small("LlamaForCausalLM", num_key_value_heads=2),
    "qwen2": lambda: small("Qwen2ForCausalLM"),
    "qwen3": lambda: small("Qwen3ForCausalLM", head_dim=8),
    "gemma2": lambda: from_transformers(
        "Gemma2ForCausalLM", **SMALL, head_dim=8, sliding_window=4, attn_implementation="eager"
    ),
    "gpt2": gpt2,
    "gpt2, vocabulary that cannot be spread": lambda: gpt2(vocab_size=61),
}


def batch_of(rows: int = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids, labels = (torch.randint(0, 61, (rows, SEQUENCE), generator=generator) for _ in range(2))
    labels[:, 2] = -100
    return {"input_ids": ids, "labels": labels}


def loss_of(name: str) -> Loss:
    return next_token_loss if name.startswith("gpt") and not name.startswith("gpt2") else huggingface_loss
