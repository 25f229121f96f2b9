"""Models of `transformers` that command lines become: they can be built, and have what the flags say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stretto.config import HuggingFaceSettings, TrainSettings
from stretto.convert.megatron import convert
from stretto.files.parse import parse_toml
from stretto.models.build import build_model

LLAMA = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--train-iters 10 --lr 1e-3 --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--ffn-hidden-size 48 --group-query-attention --num-query-groups 2 --rotary-base 500000 "
    "--norm-epsilon 1e-6 --hidden-dropout 0 --attention-dropout 0 --vocab-size 300 "
    "--make-vocab-size-divisible-by 8"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.01"


def built(*texts: str) -> tuple[str, Any]:
    settings = TrainSettings.model_validate(parse_toml(convert([LLAMA, *texts], ranks=1).text))
    assert isinstance(settings.model, HuggingFaceSettings)
    with torch.device("meta"):
        return settings.model.architecture, build_model(settings.model, settings.data.vocab_size, seed=0)


def shape(model: Any, name: str) -> tuple[int, ...]:
    return tuple(dict(model.named_parameters())[name].shape)


@pytest.mark.parametrize(
    ("more", "architecture", "biases"),
    [
        ("--disable-bias-linear", "LlamaForCausalLM", set()),
        (
            "",
            "LlamaForCausalLM",
            {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        ),
        ("--disable-bias-linear --add-qkv-bias", "Qwen2ForCausalLM", {"q_proj", "k_proj", "v_proj"}),
        ("--disable-bias-linear --qk-layernorm --kv-channels 16", "Qwen3ForCausalLM", set()),
        (f"--disable-bias-linear {EXPERTS}", "MixtralForCausalLM", set()),
        (f"--disable-bias-linear --qk-layernorm --kv-channels 16 {EXPERTS}", "Qwen3MoeForCausalLM", set()),
    ],
)
def test_they_can_be_built_with_what_the_flags_say(more: str, architecture: str, biases: set[str]) -> None:
    pytest.importorskip("transformers")
    name, model = built(more)
    assert name == architecture
    config = model.config
    assert config.rms_norm_eps == 1e-6
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
    assert rope["rope_theta"] == 500000.0
    assert config.tie_word_embeddings
    assert len(model.model.layers) == 3
    assert shape(model, "model.embed_tokens.weight") == (304, 32)
    dims = 16 if "--kv-channels" in more else 8
    assert shape(model, "model.layers.0.self_attn.k_proj.weight") == (2 * dims, 32)
    assert shape(model, "model.layers.0.self_attn.q_proj.weight") == (4 * dims, 32)
    names = [name for name, _ in model.named_parameters()]
    assert {name.split(".")[-2] for name in names if name.endswith(".bias")} == biases
    assert any("q_norm" in name for name in names) == ("--qk-layernorm" in more)
    if "--num-experts" in more:
        assert config.output_router_logits
        assert shape(model, "model.layers.0.mlp.experts.down_proj") == (4, 32, 24)
    else:
        assert shape(model, "model.layers.0.mlp.up_proj.weight") == (48, 32)


def test_dense_blocks_of_a_qwen() -> None:
    pytest.importorskip("transformers")
    _, model = built(f"--disable-bias-linear --qk-layernorm {EXPERTS} --moe-layer-freq [0,1,1]")
    assert shape(model, "model.layers.0.mlp.up_proj.weight") == (48, 32)
    assert shape(model, "model.layers.1.mlp.experts.down_proj") == (4, 32, 24)


def test_the_balancing_loss_weighs_what_megatrons_weighs() -> None:
    """Megatron adds, for each block, coefficient x experts x the sum over experts of their share of choices
    times their mean probability. Blocks route alike here, so that transformers' one loss can be compared."""
    pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    _, model = built(f"--disable-bias-linear {EXPERTS}")
    tokens, experts, top_k, blocks, coefficient = 50, 4, 2, 3, 0.01
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probability = logits.softmax(dim=-1)
    chosen = torch.bincount(logits.topk(top_k, dim=-1).indices.flatten(), minlength=experts)
    share = chosen / (tokens * top_k)
    megatron = blocks * coefficient * experts * (share * probability.mean(dim=0)).sum()
    theirs = load_balancing_loss_func((logits,) * blocks, experts, top_k)
    torch.testing.assert_close(model.config.router_aux_loss_coef * theirs, megatron, check_dtype=False)
