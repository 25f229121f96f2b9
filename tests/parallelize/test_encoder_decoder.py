"""Models of an encoder and a decoder under tp: attention across both, and a residual stream for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto import Parallel, capture
from stretto.ir.program import Job
from tests.parallelize.equality import assert_plan_is_plain
from tests.runtime.equality import from_transformers, lowered


def t5(**more: Any) -> nn.Module:
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    ends = {"pad_token_id": 0, "decoder_start_token_id": 0, "dropout_rate": 0.0}
    return from_transformers("T5ForConditionalGeneration", **sizes, **ends, **more)


def bart() -> nn.Module:
    sides = {
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 24))
    }
    sizes = {"vocab_size": 64, "d_model": 16, "max_position_embeddings": 32, "dropout": 0.0}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    return from_transformers("BartForConditionalGeneration", **sides, **sizes, **ends)


Styles = dict[str, str]


def plan(prefix: str, attention: tuple[str, ...], names: tuple[str, ...], mlp: Styles) -> Styles:
    """names: of queries, keys, values and the output."""
    styles = dict(zip(names, ("colwise", "colwise", "colwise", "rowwise"), strict=True))
    result = {f"{prefix}{which}.{n}": style for which in attention for n, style in styles.items()}
    return result | {f"{prefix}{n}": style for n, style in mlp.items()}


MLP = {"DenseReluDense.wi": "colwise", "DenseReluDense.wo": "rowwise"}
GATED = {"DenseReluDense.wi_0": "colwise", "DenseReluDense.wi_1": "colwise", "DenseReluDense.wo": "rowwise"}
OF_T5 = ("q", "k", "v", "o")
OF_BART = ("q_proj", "k_proj", "v_proj", "out_proj")


def of_t5(mlp: Styles) -> Styles:
    encoder = plan("encoder.block.*.layer.*.", ("SelfAttention",), OF_T5, mlp)
    return encoder | plan("decoder.block.*.layer.*.", ("SelfAttention", "EncDecAttention"), OF_T5, mlp)


FC = {"fc1": "colwise", "fc2": "rowwise"}
MODELS: dict[str, tuple[Any, dict[str, str]]] = {
    "t5": (t5, of_t5(MLP)),
    "gated t5": (lambda: t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False), of_t5(GATED)),
    "bart": (
        bart,
        plan("model.encoder.layers.*.", ("self_attn",), OF_BART, FC)
        | plan("model.decoder.layers.*.", ("self_attn", "encoder_attn"), OF_BART, FC),
    ),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sequence_parallel": True},
    "sp pp": {"tp": 2, "sequence_parallel": True, "pp": 2, "microbatches": 2},
}
FAST = {("t5", "sp"), ("bart", "tp")}


def batch(words: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    given, target = (torch.randint(3, 64, (4, n), generator=generator) for n in (8, words))
    return {"given": given, "target": target}


def loss(model: nn.Module, mb: dict[str, Tensor]) -> Tensor:
    shifted = F.pad(mb["target"][:, :-1], (1, 0))
    logits = model(input_ids=mb["given"], decoder_input_ids=shifted, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), mb["target"].flatten())


def assert_equals(job: Job, model: nn.Module, given: dict[str, Tensor]) -> None:
    """Biases of keys have no gradient but rounding."""
    assert_plan_is_plain(lowered(job, "1f1b"), model, loss, given, least=1e-4)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=() if (kind, layout) in FAST else pytest.mark.slow)
        for kind in MODELS
        for layout in LAYOUTS
    ],
)
def test_a_step_is_the_plain_models(kind: str, layout: str) -> None:
    make, tp_plan = MODELS[kind]
    model = make().double()
    job = capture(model, batch(6), loss, Parallel(**LAYOUTS[layout]), tp_plan=tp_plan)
    assert_equals(job, model, batch(6))


def test_ranks_share_the_sequence_that_they_can_share_equally() -> None:
    """The decoder has seven words: each rank has them all."""
    make, tp_plan = MODELS["bart"]
    model = make().double()
    job = capture(model, batch(7), loss, Parallel(**LAYOUTS["sp"]), tp_plan=tp_plan)
    assert_equals(job, model, batch(7))
