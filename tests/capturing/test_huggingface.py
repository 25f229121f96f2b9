"""Models of `transformers` as they come, captured unmodified: loss and gradients over two stages."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.capturing.trace import trace
from stretto.models.gpt import cross_entropy
from tests.cells import lean, slow
from tests.runtime import equality
from tests.runtime.equality import (
    SEQUENCE,
    VOCAB,
    Result,
    assert_equal,
    evenly,
    from_transformers,
    huggingface_loss,
    job_of,
    own_loss,
    plain,
    plan_of,
    run,
    tokens,
)

SMALL = {**equality.SMALL, "num_hidden_layers": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
ALL_HEADS = {**SMALL, "num_key_value_heads": 2}
ENDS = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0}

MODELS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {**SMALL, "sliding_window": 4},
    "GPTNeoXForCausalLM": {key: value for key, value in SMALL.items() if key != "num_key_value_heads"},
    "OPTForCausalLM": {
        **ENDS,
        "hidden_size": 16,
        "ffn_dim": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
        "word_embed_proj_dim": 16,
        "dropout": 0.0,
        "pad_token_id": 1,
    },
    "PhiForCausalLM": ALL_HEADS,
    "Phi3ForCausalLM": SMALL,
    "Qwen3ForCausalLM": {**SMALL, "head_dim": 8},
    "BloomForCausalLM": {**ENDS, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    "FalconForCausalLM": {**ENDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    "StableLmForCausalLM": ALL_HEADS,
    "Olmo2ForCausalLM": SMALL,
    "MixtralForCausalLM": {
        **SMALL,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "experts_implementation": "batched_mm",
    },
}
"""Those that compute in float64 when they are asked to."""

IN_FLOAT32: dict[str, dict[str, Any]] = {
    "GemmaForCausalLM": {**SMALL, "head_dim": 8},
    "Gemma2ForCausalLM": {**SMALL, "head_dim": 8, "sliding_window": 4},
    "MixtralForCausalLM": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2MoeForCausalLM": {**SMALL, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 8},
    "Qwen3MoeForCausalLM": {**SMALL, **EXPERTS, "head_dim": 8, "num_experts": 4},
    "MambaForCausalLM": {**ENDS, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
}
"""Those with parts that are float32 whatever the model's dtype (Gemma's norms, Mamba's scan, PyTorch's
grouped matrix product for experts)."""

GROUPED = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
"""Older `transformers` (5.17 is one) have no op for the gradient of a grouped product."""

QUICK = ("GPTNeoXForCausalLM", "BloomForCausalLM")
QUICK_IN_FLOAT32 = ("MixtralForCausalLM", "MambaForCausalLM")
"""Each of the others is like one of them, or like those of other tests: for the longer run."""

NOISE = 1e-9
"""Gradients below this part of the largest one are zero but for rounding: biases before a softmax."""


def without_noise(result: Result, against: Result) -> Result:
    largest = max(float(g.norm()) for g in against.grads.values() if g is not None)
    kept = {
        name: grad
        for name, grad in result.grads.items()
        if (want := against.grads[name]) is None or float(want.norm()) > NOISE * largest
    }
    return Result(result.loss, kept)


def check(name: str, config: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    model = from_transformers(name, **config).to(dtype)
    # Mamba's scan is a loop over the tokens.
    ids = tokens(4, columns=4 if name == "MambaForCausalLM" else SEQUENCE)
    batch = {"input_ids": ids, "labels": ids.clone()}
    expected = plain(model, batch, huggingface_loss)
    found = run(
        plan_of(job_of(trace(model, batch, huggingface_loss, microbatches=2), 2, 2), "zb-h1"), model, batch
    )
    assert_equal(without_noise(found, expected), without_noise(expected, expected), tolerance)
    assert len(without_noise(expected, expected).grads) >= len(expected.grads) - 6


@pytest.mark.parametrize("name", lean(MODELS, QUICK))
def test_equal_in_float64(name: str) -> None:
    check(name, MODELS[name], torch.float64, 1e-10)


@pytest.mark.parametrize("name", lean(IN_FLOAT32, QUICK_IN_FLOAT32))
def test_equal_in_float32(name: str) -> None:
    if name in GROUPED and not hasattr(torch.ops.transformers, "grouped_mm_fallback_backward"):
        with pytest.raises(stretto.CaptureError, match="experts_implementation = 'batched_mm'"):
            check(name, IN_FLOAT32[name], torch.float32, 1e-5)
        check(name, {**IN_FLOAT32[name], "experts_implementation": "batched_mm"}, torch.float32, 1e-5)
    else:
        check(name, IN_FLOAT32[name], torch.float32, 1e-5)


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return from_transformers("LlamaForCausalLM", **SMALL, tie_word_embeddings=False)


@pytest.mark.parametrize(
    ("attention", "use_cache"),
    [("eager", True), slow("sdpa", False), slow("eager", False), slow("sdpa", True)],
)
def test_caches_and_attention_implementations(llama: nn.Module, attention: str, use_cache: bool) -> None:
    model = copy.deepcopy(llama)
    model.set_attn_implementation(attention)
    ids = tokens(4)

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return model(**batch, use_cache=use_cache).loss

    batch = {"input_ids": ids, "labels": ids.clone()}
    found = run(plan_of(evenly(trace(model, batch, loss, microbatches=2), 3, 2), "zb-h2"), model, batch)
    assert_equal(found, plain(model, batch, loss), 1e-5)


def test_an_attention_mask_and_labels_that_do_not_count(llama: nn.Module) -> None:
    """Padding on the right, equally long in every microbatch, so that their means weigh the same."""
    mask = torch.ones(4, 7, dtype=torch.int64)
    mask[1::2, 4:] = 0
    ids = tokens(4)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    found = run(plan_of(job_of(trace(llama, batch, own_loss, microbatches=2), 2, 2), "zb-h1"), llama, batch)
    assert_equal(found, plain(llama, batch, own_loss), 1e-5)


def test_embeddings_and_positions_as_inputs(llama: nn.Module) -> None:
    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        output = model(inputs_embeds=batch["embeds"], position_ids=batch["positions"])
        return cross_entropy(output.logits, batch["labels"])

    batch = {
        "embeds": torch.randn(4, 7, 16, generator=torch.Generator().manual_seed(0)),
        "positions": torch.arange(7).repeat(4, 1) + 2,
        "labels": tokens(4),
    }
    found = run(plan_of(evenly(trace(llama, batch, loss, microbatches=2), 2, 2)), llama, batch)
    assert found.grads["model.embed_tokens.weight"] is None
    assert_equal(found, plain(llama, batch, loss), 1e-5)


def test_what_the_configuration_lacks_is_told_with_its_line() -> None:
    model = from_transformers(
        "T5ForConditionalGeneration", vocab_size=VOCAB, d_model=16, d_ff=24, d_kv=8, num_layers=2, num_heads=2
    )
    ids = tokens(2)
    with pytest.raises(stretto.CaptureError, match=r"(?s)cannot capture T5.*decoder_start_token_id"):
        trace(model, {"input_ids": ids, "labels": ids}, own_loss)
