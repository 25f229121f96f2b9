"""Small models with experts: their batch, their plans, and routers that send tokens where a test says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.ir.plan import Plan
from stretto.ir.program import Job
from stretto.models.moe import MoEConfig, MoEGPT, Routed, moe_token_sum
from stretto.parallelize.parts import lengths_of
from stretto.planning.make_plan import make_plan
from stretto.price.cluster import described_costs
from tests.clusters import cores
from tests.parallelize.equality import assert_plan_is_plain, step_of
from tests.runtime.equality import DEEPSEEK_V3

VOCAB, CONTEXT, ROWS, EXPERTS, TOP_K = 32, 12, 8, 4, 2
DROPLESS, FEW, ALL = None, 0.5, 100.0
"""Capacities: no limit; of which rows are dropped; of which none are."""


@cache
def model_of(capacity: float | None, shared: int = 0, dense_every: int = 0, layers: int = 2) -> MoEGPT:
    config = MoEConfig(
        vocab_size=VOCAB,
        layers=layers,
        hidden=16,
        heads=2,
        context=CONTEXT,
        experts=EXPERTS,
        top_k=TOP_K,
        expert_ratio=1.5,
        capacity_factor=capacity,
        shared_experts=shared,
        dense_every=dense_every,
    )
    return MoEGPT(config, seed=3).double()


def batch() -> Tensor:
    return torch.randint(0, VOCAB, (ROWS, CONTEXT + 1), generator=torch.Generator().manual_seed(4))


def captured(model: nn.Module, **how: Any) -> Job:
    return capture(model, batch(), moe_token_sum, Parallel(**how))


def planned(job: Job) -> Plan:
    return make_plan(job, described_costs(job, cores(latency_us=20.0, link_gbps=0.05)))


def plan_of(model: nn.Module, **how: Any) -> Plan:
    return planned(captured(model, **how))


def step(plan: Plan, model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    return step_of(plan, model, batch())


def assert_equals(
    model: nn.Module, tolerance: float = 1e-10, *, expected: nn.Module | None = None, **how: Any
) -> None:
    """A planned step is the plain model's, or that of another one that is to give the same.

    Capacity and routers' losses are of one microbatch of one copy: the plain model computes these one by one.
    """
    plan = plan_of(model, **how)
    assert_plan_is_plain(plan, model, moe_token_sum, batch(), tolerance, expected=expected, least=1e-3)


def by_chunks(model: nn.Module, degree: int) -> nn.Module:
    """The plain model with experts that serve each chunk of a sequence by itself, written out."""
    own = copy.deepcopy(model)
    for module in own.modules():
        if type(module).__name__ == "Experts":
            module.forward = partial(_each_chunk, module.forward, degree)  # type: ignore[method-assign]
    return own


def _each_chunk(forward: Any, degree: int, *rows: Tensor) -> Tensor:
    lengths = lengths_of(CONTEXT, degree)
    parts = [x.view(-1, CONTEXT, x.shape[-1]).split(lengths, dim=1) for x in rows]
    made = [forward(*(p.flatten(0, 1) for p in chunk)) for chunk in zip(*parts, strict=True)]
    full = [m.view(-1, n, m.shape[-1]) for m, n in zip(made, lengths, strict=True)]
    return torch.cat(full, dim=1).flatten(0, 1)


def _of(first: Any, second: Any, n_N: Tensor) -> Tensor:
    return torch.stack([torch.as_tensor(one).expand_as(n_N) for one in (first, second)], dim=1)


def _half(n_N: Tensor) -> Tensor:
    """Every other token's first choice is expert 1; others go round."""
    first = torch.where(n_N % 2 == 0, 1, n_N % EXPERTS)
    return _of(first, (first + 1) % EXPERTS, n_N)


CHOICES: dict[str, Callable[[Tensor], Tensor]] = {
    "half to one": _half,
    "all to one": lambda n_N: _of(2, 2, n_N),
    "all to the first rank": lambda n_N: _of(0, 1, n_N),
    "all to the last rank": lambda n_N: _of(3, 2, n_N),
    "none to one": lambda n_N: _of(n_N % 3, (n_N + 1) % 3, n_N),
    "none to the first rank": lambda n_N: _of(2 + n_N % 2, 3 - n_N % 2, n_N),
}
"""Token -> its experts. Where all go to one, both choices are the same: the most that one can get."""


def routed(capacity: float | None, *choices: str, layers: int = 2) -> MoEGPT:
    """A model whose routers send tokens as `CHOICES` says, one for all blocks or one a block."""
    model = copy.deepcopy(model_of(capacity, shared=1, layers=layers))
    for at, block in enumerate(model.blocks):
        router = block.mlp.router
        router.forward = partial(_route, router.forward, choices[at % len(choices)])
    return model


def _route(forward: Callable[[Tensor], Routed], choice: str, x_ND: Tensor) -> Routed:
    n_N = torch.arange(x_ND.shape[0], device=x_ND.device)
    return forward(x_ND)._replace(chosen=CHOICES[choice](n_N))


# Of `transformers`.

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "num_experts_per_tok": TOP_K,
    "experts_implementation": "batched_mm",  # grouped products have no float64
}
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": EXPERTS}),
    "qwen3 moe": (
        "Qwen3MoeForCausalLM",
        {"num_experts": EXPERTS, "moe_intermediate_size": 12, "head_dim": 8},
    ),
    "deepseek v3": ("DeepseekV3ForCausalLM", DEEPSEEK_V3),
    "phimoe": ("PhimoeForCausalLM", {"num_local_experts": EXPERTS, "router_jitter_noise": 0.01}),
}


def their_batch() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (4, CONTEXT + 1), generator=torch.Generator().manual_seed(4))
    return {"input_ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}
