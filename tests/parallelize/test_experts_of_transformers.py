"""Mixtures of experts of `transformers`, unmodified: shared by ranks by their own plan, and in chunks."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.models.build import huggingface_sum
from stretto.parallelize.expert_plan import experts_in
from stretto.planning.make_plan import make_plan
from stretto.price.cluster import described_costs
from tests.clusters import cores
from tests.parallelize.test_experts import together
from tests.runtime.equality import DEEPSEEK_V3, from_transformers

pytest.importorskip("transformers")

VOCAB, SEQUENCE, ROWS = 32, 12, 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "num_experts_per_tok": 2,
    "experts_implementation": "batched_mm",  # grouped products have no float64
}
MODELS: dict[str, tuple[str, dict[str, Any], float]] = {
    "mixtral": ("MixtralForCausalLM", {"num_key_value_heads": 1, "num_local_experts": 4}, 1e-10),
    "qwen3 moe": (
        "Qwen3MoeForCausalLM",
        {"num_key_value_heads": 1, "num_experts": 4, "moe_intermediate_size": 12, "head_dim": 8},
        1e-10,
    ),
    "deepseek v3": (
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 2,
            **DEEPSEEK_V3,
        },
        1e-6,  # its router computes in float32
    ),
}


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (ROWS, SEQUENCE + 1), generator=torch.Generator().manual_seed(4))
    return {"input_ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}


def plain(model: nn.Module, pieces: int) -> tuple[Tensor, dict[str, Tensor]]:
    own = copy.deepcopy(model)
    chunks = {name: leaf.chunk(pieces) for name, leaf in batch().items()}
    parts = [huggingface_sum(own, {name: leaf[k] for name, leaf in chunks.items()}) for k in range(pieces)]
    loss = torch.stack([total for total, _ in parts]).sum() / sum(int(count) for _, count in parts)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in own.named_parameters() if p.grad is not None}


class Planned(nn.Module):
    """A model whose plan for experts is where `transformers` has it: its own, or that of a config."""

    def __init__(self, plan: dict[str, str], own: bool) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([nn.ModuleDict({"experts": nn.Linear(2, 2)}) for _ in range(2)])
        self.config = SimpleNamespace(base_model_ep_plan=None if own else plan)
        self.base_model = self.model
        self.ep_plan = {f"model.{pattern}": style for pattern, style in plan.items()} if own else {}


@pytest.mark.parametrize("style", ["ep_dispatch_experts", "moe_tp_experts", "gather"])
@pytest.mark.parametrize("own", [True, False])
def test_plans_of_all_versions_are_read(style: str, own: bool) -> None:
    plan = {
        "layers.*.gate": "ep_router",
        "layers.*.experts.weight": "grouped_gemm",
        "layers.*.experts": style,
    }
    assert experts_in(Planned(plan, own)) == ("model.layers.0.experts", "model.layers.1.experts")


@pytest.mark.parametrize("degree", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    # Its routers and experts are Mixtral's, by other names.
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n == "qwen3 moe" else ()) for n in MODELS],
)
def test_it_gives_the_values_of_the_plain_model(name: str, degree: int) -> None:
    kind, sizes, tolerance = MODELS[name]
    model = from_transformers(kind, **{**SIZES, **sizes}).double()
    parallel = Parallel(ep=2, dp=2, ampipe_degree=degree, ep_buffer=2.0)
    job = capture(model, batch(), huggingface_sum, parallel)
    plan = make_plan(job, described_costs(job, cores(latency_us=20.0, link_gbps=0.05)))
    loss, grads = together(plan, model, batch())
    want_loss, want = plain(model, 2)
    assert abs(loss - want_loss) <= tolerance * abs(want_loss)
    assert grads.keys() == want.keys()
    for key, grad in want.items():
        assert (grads[key] - grad).norm() <= tolerance * max(float(grad.norm()), 1e-3), key


@pytest.mark.slow
def test_a_router_draws_the_same_however_its_experts_are_shared() -> None:
    """PhiMoE's, in training. The model alone draws from another generator: it is compared in evaluation."""
    sizes = {"num_key_value_heads": 1, "num_local_experts": 4, "router_jitter_noise": 0.01}
    model = from_transformers("PhimoeForCausalLM", **{**SIZES, **sizes}).double()

    def of(**how: Any) -> tuple[Tensor, dict[str, Tensor]]:
        job = capture(model, batch(), huggingface_sum, Parallel(dp=2, **how))
        drawing = [op for stage in job.stages for ops in stage.ops.values() for op in ops if op.random]
        assert bool(drawing) is model.training
        plan = make_plan(job, described_costs(job, cores(latency_us=20.0, link_gbps=0.05)))
        return together(plan, model, batch())

    def assert_equal(want: tuple[Tensor, dict[str, Tensor]], **how: Any) -> None:
        loss, grads = of(**how)
        assert abs(loss - want[0]) <= 1e-10 * abs(want[0])
        for key, grad in want[1].items():
            assert (grads[key] - grad).norm() <= 1e-10 * max(float(grad.norm()), 1e-3), key

    copies = of()
    for how in ({"ep": 2}, {"ep": 2, "ampipe_degree": 2}):
        assert_equal(copies, **how)
    assert_equal(plain(model.eval(), 2), ep=2)
