"""Models with adapters of `peft` in float64, each of whose gradients is far from zero."""

from __future__ import annotations

from typing import Any

import peft
import torch
from torch import Tensor, nn

from tests.runtime.equality import from_transformers

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "head_dim": 8,
    "decoder_sparse_step": 1,
    "experts_implementation": "batched_mm",
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
OF_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

BATCH = torch.randint(0, 64, (8, 8), generator=torch.Generator().manual_seed(5))


def llama() -> nn.Module:
    return from_transformers("LlamaForCausalLM", **SIZES)


def mixture() -> nn.Module:
    return from_transformers("Qwen3MoeForCausalLM", **SIZES, **EXPERTS)


def gpt2() -> nn.Module:
    sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return from_transformers("GPT2LMHeadModel", **sizes, **off)


def with_adapter(model: nn.Module, rank: int = 2, **config: Any) -> nn.Module:
    of_peft: Any = peft  # whose types are not those of what it takes
    lora = of_peft.LoraConfig(r=rank, lora_alpha=4, task_type="CAUSAL_LM", **config)
    made: nn.Module = of_peft.get_peft_model(model, lora)
    return spread(made)


def spread(model: nn.Module) -> nn.Module:
    """B of an adapter begins with zeros, and then A has no gradient."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.double().train()


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
