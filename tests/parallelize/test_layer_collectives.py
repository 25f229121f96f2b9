"""What a layer sends: number and bytes of collectives, for each model and layout, are those of a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.models.gpt import next_token_loss
from stretto.models.moe import moe_token_sum
from tests.cells import slow
from tests.parallelize.equality import SMALL, batch_of, gpt, gpt2, small
from tests.parallelize.mixtures import batch as mixture_batch
from tests.parallelize.mixtures import model_of
from tests.parallelize.test_tensor_equality import collectives
from tests.runtime.equality import from_transformers, huggingface_loss

TP: dict[str, Any] = {"tp": 2}
SP: dict[str, Any] = {**TP, "sequence_parallel": True}
EP: dict[str, Any] = {**TP, "ep": 2, "dp": 2}
EP_SP: dict[str, Any] = {**EP, **SP}


def mixtral(layers: int, experts: str) -> nn.Module:
    sizes = {**SMALL, "num_hidden_layers": layers, "num_local_experts": 4, "num_experts_per_tok": 2}
    return from_transformers(
        "MixtralForCausalLM", **{**sizes, "tie_word_embeddings": False}, experts_implementation=experts
    )


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "gpt": lambda layers: gpt(layers=layers),
    "gpt, dropout": lambda layers: gpt(layers=layers, dropout=0.3),
    "gpt2": lambda layers: gpt2(n_layer=layers),
    "llama": lambda layers: small("LlamaForCausalLM", num_hidden_layers=layers),
    "llama, one head of keys": lambda layers: small(
        "LlamaForCausalLM", num_hidden_layers=layers, num_key_value_heads=1
    ),
    "qwen2": lambda layers: small("Qwen2ForCausalLM", num_hidden_layers=layers),
    "gemma2": lambda layers: small(
        "Gemma2ForCausalLM", num_hidden_layers=layers, head_dim=8, layer_types=["full_attention"] * layers
    ),
    "mixtral": lambda layers: mixtral(layers, "batched_mm"),
    "mixtral, grouped": lambda layers: mixtral(layers, "grouped_mm"),
    "moe": lambda layers: model_of(None, layers=layers).float(),
    "moe, capacity": lambda layers: model_of(0.5, layers=layers).float(),
}

TABLE: dict[str, tuple[tuple[dict[str, Any], int, int], ...]] = {
    **dict.fromkeys(
        ("gpt", "gpt, dropout", "gpt2", "llama", "llama, one head of keys", "qwen2", "gemma2"),
        ((TP, 4, 8_192), (SP, 8, 16_384)),
    ),
    **dict.fromkeys(
        ("mixtral", "mixtral, grouped"),
        ((TP, 5, 8_320), (SP, 9, 16_512), (EP, 10, 20_576), (EP_SP, 14, 24_672)),
    ),
    "moe": ((TP, 5, 12_672), (SP, 9, 24_960), (EP, 10, 30_944), (EP_SP, 14, 37_088)),
    "moe, capacity": ((TP, 5, 12_672), (SP, 9, 24_960), (EP, 9, 12_480), (EP_SP, 13, 18_624)),
}
"""(layout, collectives, bytes) a layer and microbatch, counted when forwards of modules were replaced to be
those of Megatron-LM: the most that a layer may send. Bytes are of what each op is given."""

HUGGINGFACE = set(TABLE) - {"gpt", "gpt, dropout", "moe", "moe, capacity"}

FAST = (("moe", SP), ("mixtral, grouped", TP), ("gpt, dropout", SP))

CELLS = [
    (name, *cell) if (name, cell[0]) in FAST else slow(name, *cell)
    for name, cells in TABLE.items()
    for cell in cells
]


def sent(name: str, layout: dict[str, Any], layers: int) -> Counter[tuple[str, int]]:
    is_own = name.startswith("moe")
    own_loss = moe_token_sum if is_own else next_token_loss
    loss = huggingface_loss if name in HUGGINGFACE else own_loss
    batch = mixture_batch() if is_own else batch_of(4)
    job = capture(MODELS[name](layers), batch, loss, Parallel(microbatches=2, **layout))
    return Counter(collectives(job))


@pytest.mark.filterwarnings("error:.*no rule computes on slices:UserWarning")
@pytest.mark.parametrize(("name", "layout", "count", "nbytes"), CELLS, ids=str)
def test_a_layer_sends_no_more_than_the_table_says(
    name: str, layout: dict[str, Any], count: int, nbytes: int
) -> None:
    fewer, more = (sent(name, layout, layers) for layers in (2, 3))
    a_layer = {key: more[key] - fewer[key] for key in more | fewer}
    assert sum(a_layer.values()) <= count
    assert sum(number * size for (_, size), number in a_layer.items()) <= nbytes
