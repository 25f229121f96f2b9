"""Adapters of `peft`, as they come: no plan by hand, gradients of the plain model, frozen parameters as they
were, and what is saved loads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from stretto import Parallel, Runner, capture, run_threads
from stretto.errors import UsageError
from stretto.ir.program import Job, Shard
from tests.parallelize.adapted import (
    ATTENTION,
    BATCH,
    MLP,
    OF_EXPERTS,
    gpt2,
    llama,
    loss,
    mixture,
    spread,
    with_adapter,
)
from tests.parallelize.equality import assert_plan_is_plain
from tests.runtime.equality import lowered

PEFT: Any = peft

EP = {"dp": 2, "ep": 2, "ep_buffer": 4.0}
PAIRS: dict[str, dict[str, Any]] = {
    "pp": {"pp": 2, "microbatches": 2, "schedule": "zb-h1"},
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sequence_parallel": True},
    "tp pp": {"tp": 2, "pp": 2, "microbatches": 2},
    "sp pp": {"tp": 2, "sequence_parallel": True, "pp": 2, "microbatches": 2},
    "zero tp": {"dp": 2, "zero": 3, "tp": 2},
    "cp": {"cp": 2},
}
OF_MIXTURES: dict[str, dict[str, Any]] = {
    "ep": EP,
    "ep pp": {**EP, "pp": 2, "microbatches": 2},
    "ep tp": {**EP, "tp": 2},
    "ep sp": {**EP, "tp": 2, "sequence_parallel": True},
    "ep chunks": {**EP, "ampipe_degree": 2},
}
MODELS = {
    "llama": lambda: with_adapter(llama(), target_modules=[*ATTENTION, *MLP]),
    "mixture": lambda: with_adapter(mixture(), target_modules=ATTENTION, target_parameters=OF_EXPERTS),
}
FAST = {("llama", "sp"), ("llama", "tp pp"), ("mixture", "ep pp"), ("mixture", "ep tp")}
CELLS = [
    pytest.param(model, layout, marks=() if (model, layout) in FAST else pytest.mark.slow)
    for model in MODELS
    for layout in (PAIRS if model == "llama" else {**PAIRS, **OF_MIXTURES})
]


def captured(model: nn.Module, of: Any = loss, **layout: Any) -> Job:
    return capture(model, BATCH, of, Parallel(**layout))


def assert_equals(model: nn.Module, **layout: Any) -> Job:
    """Gradients are those of the plain model, and of nothing that is frozen."""
    job = captured(model, **layout)
    assert_plan_is_plain(lowered(job, layout.get("schedule", "1f1b")), model, loss, BATCH, least=1e-6)
    frozen = {n for n, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    assert frozen == {p.name for p in job.parameters if p.frozen}
    return job


@pytest.mark.parametrize(("model", "layout"), CELLS)
def test_gradients_are_the_plain_models(model: str, layout: str) -> None:
    assert_equals(MODELS[model](), **{**PAIRS, **OF_MIXTURES}[layout])


def shards_of(job: Job, name: str) -> tuple[Shard, ...]:
    return next(p.shards for p in job.parameters if p.name.endswith(name))


def test_what_belongs_to_a_shard_is_sharded_with_it() -> None:
    """A rank has B of its own output features, A of its own input features."""
    job = captured(MODELS["llama"](), tp=2)
    at = "layers.0.self_attn"
    assert shards_of(job, f"{at}.q_proj.lora_B.default.weight") == (Shard("tp", 0),)
    assert shards_of(job, f"{at}.q_proj.lora_A.default.weight") == ()
    assert shards_of(job, f"{at}.o_proj.lora_A.default.weight") == (Shard("tp", 1),)
    assert shards_of(job, f"{at}.o_proj.lora_B.default.weight") == ()


def test_a_rank_has_the_adapters_of_its_own_experts() -> None:
    job = captured(MODELS["mixture"](), **EP)
    at = "layers.0.mlp.experts"  # peft is around it twice, once for each parameter
    assert shards_of(job, f"{at}.base_layer.base_layer.down_proj") == (Shard("ep", 0),)
    assert {shards_of(job, f"{at}.{name}.default.weight") for name in ("lora_A", "base_layer.lora_A")} == {
        (Shard("ep", 0),)
    }
    assert shards_of(job, f"{at}.lora_B.default.weight") == (Shard("ep", 1, blocks=2),)  # (out, rank, expert)


class Around(nn.Module):
    """An adapter of one's own, with names of its own."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.frozen: Any = base
        self.first = nn.Linear(self.frozen.in_features, 2, bias=False)
        self.second = nn.Linear(2, self.frozen.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.second(self.first(x))  # type: ignore[no-any-return]


def own() -> nn.Module:
    model: Any = llama().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Around(layer.self_attn.q_proj)
        layer.mlp.down_proj = Around(layer.mlp.down_proj)
    return spread(model)


def adapted_by(kind: str, **config: Any) -> nn.Module:
    """By another kind of adapter, whose values go off from where they start."""
    model = PEFT.get_peft_model(llama(), getattr(PEFT, f"{kind}Config")(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.double().train()  # type: ignore[no-any-return]


OTHERS = {
    "an adapter of one's own": own,
    "a matrix that packs three, kept transposed": lambda: with_adapter(
        gpt2(), target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True
    ),
    "of embeddings and the head": lambda: with_adapter(
        llama(), target_modules=["embed_tokens", "lm_head", "q_proj"]
    ),
    "magnitudes": lambda: with_adapter(llama(), target_modules=["q_proj", "down_proj"], use_dora=True),
    "scales": lambda: adapted_by(
        "IA3", feedforward_modules=["down_proj"], target_modules=["k_proj", "down_proj"]
    ),
    "rotations": lambda: adapted_by("OFT", r=0, oft_block_size=4, target_modules=["q_proj", "o_proj"]),
    "random matrices": lambda: adapted_by("Vera", r=2, target_modules=["q_proj", "o_proj"]),
    "ranks that are chosen": lambda: adapted_by(
        "AdaLora", init_r=4, total_step=100, tfinal=10, target_modules=["q_proj", "o_proj"]
    ),
    "tokens": lambda: with_adapter(llama(), target_modules=["q_proj"], trainable_token_indices=[3, 5]),
    "biases": lambda: with_adapter(llama(), target_modules=["q_proj", "o_proj"], bias="all", lora_bias=True),
    "copies that train": lambda: with_adapter(
        llama(), target_modules=["q_proj"], modules_to_save=["lm_head"]
    ),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k == "magnitudes" else pytest.mark.slow) for k in OTHERS]
)
def test_other_adapters(kind: str) -> None:
    assert_equals(OTHERS[kind](), tp=2)


def test_a_module_that_a_wrapper_keeps_twice_is_sharded_once() -> None:
    model: Any = own()
    model.again = model.model.embed_tokens
    job = captured(model, tp=2)
    assert shards_of(job, "again.weight") == shards_of(job, "embed_tokens.weight") == (Shard("tp", 0),)


def test_what_is_saved_loads_in_peft_and_the_rest_is_untouched(tmp_path: Path) -> None:
    """After two steps of an optimizer on ranks that have parts."""
    model = with_adapter(mixture(), target_modules=ATTENTION, target_parameters=OF_EXPERTS)
    start = copy.deepcopy(model)

    def trained(runner: Runner) -> dict[str, Tensor]:
        optimizer = torch.optim.AdamW(runner.parameters(), lr=0.05, weight_decay=0.1)
        for _ in range(2):
            runner.step(BATCH)
            optimizer.step()
            optimizer.zero_grad()
        return runner.state_dict(only_on=0)

    plan = lowered(captured(model, **EP, tp=2), "1f1b")
    state = run_threads(plan, lambda _: copy.deepcopy(model), trained)[0]
    optimizer = torch.optim.AdamW(
        (p for p in model.parameters() if p.requires_grad), lr=0.05, weight_decay=0.1
    )
    for _ in range(2):
        for rows in BATCH.chunk(2):
            (loss(model, rows) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    start.save_pretrained(tmp_path, state_dict=state)  # type: ignore[operator]
    assert {path.name for path in tmp_path.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    loaded = PEFT.PeftModel.from_pretrained(mixture().double(), tmp_path).train()
    frozen = dict(start.named_parameters())
    for (name, found), (_, expected) in zip(loaded.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-8, msg=name, check_dtype=False)
        if "lora_" not in name:
            assert torch.equal(expected, frozen[name])


class Mixed(nn.Module):
    """All experts' weights are changed by what they have in common: no expert's by its own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(count))

    def forward(self, weight: Tensor) -> Tensor:
        return torch.einsum("ef,fab->eab", self.mix, weight)


class Mixing(nn.Module):
    """While the experts work, what they have in common is mixed, as `peft` puts its changes there."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts, self.mixed = experts, Mixed(4)

    def get_base_layer(self) -> nn.Module:
        return self.experts

    def forward(self, *given: Tensor) -> Tensor:
        parametrize.register_parametrization(self.experts, "down_proj", self.mixed)
        try:
            with parametrize.cached():
                return self.experts(*given)  # type: ignore[no-any-return]
        finally:
            parametrize.remove_parametrizations(self.experts, "down_proj", leave_parametrized=False)


def test_a_change_of_all_experts_at_once_is_refused_with_ep() -> None:
    model: Any = mixture()
    for layer in model.model.layers:
        layer.mlp.experts = Mixing(layer.mlp.experts)
    model.double()
    with pytest.raises(UsageError, match=r"changes experts of .*mlp\.experts.* by aten.*ep = 2 ranks"):
        captured(model, **EP)
