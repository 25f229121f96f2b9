"""Shared by the tests that compare a plan's numbers with the plain model's: tiny models, cases, comparison.

A model is traced once for a dtype and reused for all stages, microbatches and schedules: the trace depends
on one microbatch's shape alone. Costs are made up: only the order of work depends on them.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stretto.capturing.graph import Traced
from stretto.capturing.split import place, split
from stretto.capturing.stages import cut
from stretto.capturing.trace import trace
from stretto.ir.action import Schedule
from stretto.ir.costs import Costs, Link
from stretto.ir.plan import Plan
from stretto.ir.program import Job
from stretto.models.gpt import GPT, GPTConfig, cross_entropy, inputs_and_targets, next_token_loss
from stretto.planning.lower import lower
from stretto.planning.make_plan import make_plan
from stretto.planning.schedules import choose_schedule
from stretto.runtime import Runner, run_threads
from stretto.runtime.rank_tensors import join
from stretto.runtime.transport import ThreadTransport

torch.set_num_threads(1)
"""Ranks are threads of one process here, and machines that test are small."""

VOCAB = 61
SEQUENCE = 7
"""Tokens that a tiny model reads; odd, so that no dim is a multiple of another by accident."""

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Relative, by the norm of each gradient."""

Loss = Callable[[nn.Module, Any], Tensor]


def huggingface_loss(model: nn.Module, batch: Tensor | Mapping[str, Tensor]) -> Tensor:
    """The mean of which `models.build.huggingface_sum` is the sum."""
    inputs, targets = inputs_and_targets(batch)
    output = model(input_ids=inputs, use_cache=False)
    loss = cross_entropy(output.logits, targets)
    balance = getattr(output, "aux_loss", None)
    if balance is None or not model.training:
        return loss
    return loss + model.config.router_aux_loss_coef * balance  # type: ignore[union-attr]


def own_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss that a model of `transformers` takes itself, as its users do; always in float32."""
    loss: Tensor = model(**batch).loss
    return loss


def gpt(tied: bool, **changes: Any) -> GPT:
    config = GPTConfig(vocab_size=VOCAB, layers=3, hidden=16, heads=2, context=16, tie_embeddings=tied)
    return GPT(config.model_copy(update=changes), seed=3)


DEEPSEEK_V3: dict[str, Any] = {
    "moe_intermediate_size": 12,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
"""A small one of two layers, one of them dense."""


def from_transformers(name: str, **config: Any) -> nn.Module:
    """A causal language model of `transformers` with fresh, large weights (gradients far from zero)."""
    import transformers

    kind = getattr(transformers, name)
    torch.manual_seed(11)
    model = kind(kind.config_class(**config))
    assert isinstance(model, nn.Module)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model.train()


SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: gpt(False),
    "gpt tied": lambda: gpt(True),
    "llama": lambda: from_transformers("LlamaForCausalLM", **SMALL, tie_word_embeddings=False),
    "llama tied": lambda: from_transformers("LlamaForCausalLM", **SMALL, tie_word_embeddings=True),
    "gpt2": lambda: from_transformers(
        "GPT2LMHeadModel",
        vocab_size=VOCAB,
        n_embd=16,
        n_layer=3,
        n_head=2,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "qwen2": lambda: from_transformers("Qwen2ForCausalLM", **SMALL, tie_word_embeddings=False),
}


def tokens(rows: int, *, columns: int = SEQUENCE, seed: int = 5) -> Tensor:
    return torch.randint(0, VOCAB, (rows, columns), generator=torch.Generator().manual_seed(seed))


def batch_of(name: str, rows: int, seed: int = 5) -> Any:
    """A batch that the named model reads."""
    if name.startswith("gpt") and name != "gpt2":
        return tokens(rows, columns=SEQUENCE + 1, seed=seed)
    ids = tokens(rows, seed=seed)
    return {"input_ids": ids, "labels": ids.clone()}


def loss_of(name: str, dtype: torch.dtype) -> Loss:
    """In float64 a loss that keeps it; in float32 the model's own."""
    if name.startswith("gpt") and name != "gpt2":
        return next_token_loss
    return huggingface_loss if dtype is torch.float64 else own_loss


@functools.cache
def model_of(name: str, dtype: torch.dtype) -> nn.Module:
    """The named model; tests copy it and leave it as it is."""
    return MODELS[name]().to(dtype)


@functools.cache
def traced(name: str, dtype: torch.dtype) -> Traced:
    """The trace of one row, whatever the number of microbatches."""
    return trace(model_of(name, dtype), batch_of(name, 1), loss_of(name, dtype), microbatches=1)


def made_up_costs(job: Job, *, latency_us: float = 50.0, bytes_per_us: float = 1000.0) -> Costs:
    """Every op takes 10 us plus its flops; equal links."""
    op_us = {
        (stage.index, op.name): 10.0 + op.flops / 1000.0
        for stage in job.stages
        for ops in stage.ops.values()
        for op in ops
    }
    return Costs(op_us, {}, Link(latency_us, bytes_per_us), 5.0, "made up")


def job_of(found: Traced, stages: int, microbatches: int, how: Any = "auto") -> Job:
    return cut(found, split(found, stages, how), stages, microbatches)


def evenly(found: Traced, stages: int, microbatches: int) -> Job:
    """Cut with no regard to modules and costs: harder than what a user would choose."""
    origins = [origin for _, origin in found.program.ops]
    at = sorted({origin.segment for origin in origins if not origin.backward and origin.segment})
    cuts = [at[len(at) * k // stages] for k in range(1, stages)]
    return cut(found, place(found, stages, cuts), stages, microbatches)


def plan_of(job: Job, schedule: str | Schedule = "1f1b") -> Plan:
    return make_plan(job, made_up_costs(job), schedule=schedule)


def lowered(job: Job, schedule: str | Schedule) -> Plan:
    """The same orders as `plan_of` (but for the waits for sends) with neither proof nor prediction; fast."""
    order = choose_schedule(job, schedule=schedule)
    return lower(job, order, made_up_costs(job))


@dataclass(frozen=True)
class Result:
    """A step's loss and gradients, and the same by rank where a parameter is on several."""

    loss: Tensor
    grads: dict[str, Tensor | None]
    by_rank: tuple[dict[str, Tensor], ...] = ()


def plain(model: nn.Module, batch: Any, loss: Loss) -> Result:
    """Loss and gradients of the model on the full batch, by PyTorch alone."""
    own = copy.deepcopy(model)
    value = loss(own, batch)
    value.backward()
    return Result(value.detach(), {n: p.grad for n, p in own.named_parameters()})


def run(plan: Plan, model: nn.Module, batch: Any, *, seed: int = 0, steps: int = 1) -> Result:
    """The plan's step on ranks that are threads, each with its own copy of the model.

    A parameter on several ranks must have the same gradient on each, bit by bit.
    """

    def work(runner: Runner) -> tuple[Tensor, dict[str, Tensor]]:
        for _ in range(steps):
            loss = runner.step(batch)
        return loss, {n: p.grad for n, p in runner.named_parameters() if p.grad is not None}

    return gather(model, run_threads(plan, lambda _: copy.deepcopy(model), work, seed=seed))


def gather(model: nn.Module, results: list[tuple[Tensor, dict[str, Tensor]]]) -> Result:
    """One result of all ranks' results."""
    first_name: dict[int, str] = {}
    names = {n: first_name.setdefault(id(p), n) for n, p in model.named_parameters(remove_duplicate=False)}
    grads: dict[str, Tensor | None] = {n: None for n, _ in model.named_parameters()}
    for loss, found in results:
        assert torch.equal(loss, results[0][0]), "every rank is told the same loss"
        for name, grad in found.items():
            kept = grads[names[name]]
            assert kept is None or torch.equal(kept, grad), f"{name} differs between ranks"
            grads[names[name]] = grad
    return Result(results[0][0], grads, tuple(found for _, found in results))


def on_ends(ends: Sequence[ThreadTransport], work: Callable[[Any], Any]) -> list[Any]:
    """What `work` gives on each rank, a thread, or the error that it raises."""

    def body(end: ThreadTransport) -> Any:
        torch.set_num_threads(1)
        try:
            return work(end)
        except BaseException as error:
            end.fail(f"rank {end.rank} failed")
            return error

    with ThreadPoolExecutor(len(ends)) as pool:
        return list(pool.map(body, ends))


RankResult = tuple[Mapping[str, int], Tensor, Mapping[str, Tensor]]
"""A rank's coordinates, the step's loss there, and gradients of what the rank has."""


def rank_result(runner: Runner, batch: Any) -> RankResult:
    """One step of a rank."""
    loss = runner.step(batch)
    return runner.coordinates, loss, {n: p.grad for n, p in runner.named_parameters() if p.grad is not None}


def joined(plan: Plan, results: Sequence[RankResult]) -> Result:
    """The step of all ranks: the loss, and full gradients by the first name of a tie.

    Ranks that have the same part of a parameter must have the same gradient, bit by bit."""
    parameters = {p.name: p for p in plan.job.parameters}
    copies: dict[tuple[Any, ...], list[Tensor]] = {}
    for at, loss, grads in results:
        assert torch.equal(loss, results[0][1]), "every rank is told the same loss"
        for name, grad in grads.items():
            over = {*parameters[name].kept, *(shard.axis for shard in parameters[name].shards)}
            others = (place for axis, place in at.items() if axis not in over)
            copies.setdefault((name, *others), []).append(grad)
    found: dict[str, Tensor | None] = {p.tied_to: None for p in plan.job.parameters}
    for (name, *_), parts in copies.items():
        parameter = parameters[name]
        full = join(parts, parameter, plan.job)
        for shard in parameter.shards:
            for rank, part in enumerate(parts):
                first = parts[rank - rank % shard.copies]
                assert torch.equal(part, first), f"{name} differs between ranks that share it"
        kept = found[parameter.tied_to]
        assert kept is None or torch.equal(kept, full), f"{name} differs between copies"
        found[parameter.tied_to] = full
    return Result(results[0][1], found, tuple(dict(grads) for _, _, grads in results))


def run_sharded(plan: Plan, model: nn.Module, batch: Any) -> Result:
    """The plan's step on ranks that are threads, under any layout."""
    work = functools.partial(rank_result, batch=batch)
    return joined(plan, run_threads(plan, lambda _: copy.deepcopy(model), work))


def worst(found: Result, expected: Result) -> tuple[float, str]:
    """The largest relative error, norm-wise, over the loss and all gradients, and where it is."""
    errors = [(float((found.loss - expected.loss).abs() / expected.loss.abs()), "loss")]
    assert found.grads.keys() == expected.grads.keys()
    for name, want in expected.grads.items():
        got = found.grads[name]
        if want is None or got is None:
            assert want is None, f"{name} has no gradient"
            assert got is None, f"{name} has a gradient, but the plain model gives it none"
            continue
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        scale = float(want.norm())
        errors.append((float((got - want).norm()) / scale if scale else float(got.norm()), name))
    return max(errors)


def assert_equal(found: Result, expected: Result, tolerance: float) -> None:
    error, where = worst(found, expected)
    assert error <= tolerance, f"{where} differs by {error:.1e}"


def assert_same_bits(one: Result, other: Result) -> None:
    assert torch.equal(one.loss, other.loss), "loss"
    assert one.grads.keys() == other.grads.keys()
    for name, grad in one.grads.items():
        against = other.grads[name]
        if grad is None or against is None:
            assert grad is against, name
        else:
            assert torch.equal(grad, against), name
