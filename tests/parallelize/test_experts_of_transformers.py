"""Mixtures of experts of `transformers`, unmodified: shared by ranks by their own plans, and in chunks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.models.build import huggingface_sum
from stretto.parallelize.expert_plan import experts_in
from tests.parallelize.equality import assert_plan_is_plain, plain_step, planned, step_of
from tests.runtime.equality import DEEPSEEK_V3, from_transformers

pytest.importorskip("transformers")

VOCAB, SEQUENCE, ROWS = 32, 12, 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "num_experts_per_tok": 2,
    "experts_implementation": "batched_mm",  # grouped products have no float64
}
MODELS: dict[str, tuple[str, dict[str, Any], float]] = {
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}, 1e-10),
    "qwen3 moe": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "moe_intermediate_size": 12, "head_dim": 8},
        1e-10,
    ),
    # Its router computes in float32.
    "deepseek v3": ("DeepseekV3ForCausalLM", {"num_key_value_heads": 2, **DEEPSEEK_V3}, 1e-6),
}


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (ROWS, SEQUENCE + 1), generator=torch.Generator().manual_seed(4))
    return {"input_ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}


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


def slow(*cell: Any) -> Any:
    return pytest.param(*cell, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("mixtral", {"ep": 2, "ampipe_degree": 2}),
        ("deepseek v3", {"ep": 2, "ampipe_degree": 2}),
        slow("qwen3 moe", {"ep": 2, "ampipe_degree": 2}),
        *(slow(name, {"ep": 2}) for name in MODELS),
        # By their plans for tp as well.
        slow("qwen3 moe", {"tp": 2, "ep": 2, "sequence_parallel": True, "ampipe_degree": 2}),
        slow("qwen3 moe", {"tp": 2, "ep": 2}),
        slow("qwen3 moe", {"tp": 2, "ampipe_degree": 3}),
        slow("qwen3 moe", {"tp": 2, "sequence_parallel": True, "ampipe_degree": 3}),
        slow("mixtral", {"tp": 2, "ep": 2, "ampipe_degree": 2}),
        slow("mixtral", {"tp": 2, "sequence_parallel": True}),
        slow("deepseek v3", {"tp": 2, "ep": 2, "ampipe_degree": 2}),
    ],
    ids=str,
)
def test_a_step_is_that_of_the_plain_model(name: str, how: dict[str, Any]) -> None:
    kind, sizes, tolerance = MODELS[name]
    if "tp" in how:
        sizes = {**sizes, "num_key_value_heads": 2}
        # Mixtral's router computes in float32, too, and adds gradients in it.
        tolerance = 1e-6
    model = from_transformers(kind, **{**SIZES, **sizes}).double()
    buffer = {} if "tp" in how or how.get("ep") is None else {"ep_buffer": 2.0}
    job = capture(model, batch(), huggingface_sum, Parallel(dp=2, **how, **buffer))
    experts = [p for p in job.parameters if "experts." in p.name and "shared" not in p.name]
    assert experts
    assert all({s.axis for s in p.shards} == {"tp", "ep"} & how.keys() for p in experts)
    assert_plan_is_plain(planned(job), model, huggingface_sum, batch(), tolerance, least=1e-3)


@pytest.mark.slow
def test_a_router_draws_the_same_however_its_experts_are_shared() -> None:
    """PhiMoE's, in training. The model alone draws from another generator: it is compared in evaluation."""
    sizes = {"num_local_experts": 4, "router_jitter_noise": 0.01}
    model = from_transformers("PhimoeForCausalLM", **{**SIZES, **sizes}).double()

    def of(**how: Any) -> tuple[Tensor, dict[str, Tensor]]:
        job = capture(model, batch(), huggingface_sum, Parallel(dp=2, **how))
        drawing = [op for stage in job.stages for ops in stage.ops.values() for op in ops if op.random]
        assert bool(drawing) is model.training
        return step_of(planned(job), model, batch())

    def assert_equal(want: tuple[Tensor, dict[str, Tensor]], **how: Any) -> None:
        loss, grads = of(**how)
        assert abs(loss - want[0]) <= 1e-10 * abs(want[0])
        for key, grad in want[1].items():
            assert (grads[key] - grad).norm() <= 1e-10 * max(float(grad.norm()), 1e-3), key

    copies = of()
    for how in ({"ep": 2}, {"ep": 2, "ampipe_degree": 2}):
        assert_equal(copies, **how)
    assert_equal(plain_step(model.eval(), huggingface_sum, batch(), 2), ep=2)
