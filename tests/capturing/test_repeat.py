"""Equal layers, traced twice and repeated, give the trace that all layers give; others are traced whole."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.models.build import huggingface_loss
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.parallelize.layout import layout_of

transformers = pytest.importorskip("transformers")
tracing = importlib.import_module("stretto.capturing.trace")

TOKENS = torch.arange(4 * 17).reshape(4, 17) % 64


def both(
    model: nn.Module, loss: Any, batch: Tensor, caplog: Any, tp: int = 1, sp: bool = False
) -> tuple[bool, str]:
    """Whether the two ways agree, and why layers were not repeated ("" when they were)."""
    how = layout_of(model, stretto.Parallel(tp=tp, sequence_parallel=sp))
    caplog.set_level(logging.DEBUG, logger=tracing.__name__)
    caplog.clear()
    repeated = tracing.trace(model, batch, loss, layout=how)
    reason = " ".join(record.getMessage() for record in caplog.records if record.name == tracing.__name__)
    whole = tracing.trace(model, batch, loss, layout=how, equal_layers=False)
    return repr(repeated) == repr(
        whole
    ), reason  # as text: vocabularies are masked with nan, unequal to itself


def huggingface(kind: str, layers: int, **more: Any) -> nn.Module:
    if kind == "GPT2":
        config = transformers.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=layers, n_head=4, n_positions=32, **more
        )
        return transformers.GPT2LMHeadModel(config).train()  # type: ignore[no-any-return]
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{kind}Config")(vocab_size=64, num_hidden_layers=layers, **shape, **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config).train()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("layers", "positions", "tied", "dropout", "tp", "sp"),
    [
        (4, "rotary", False, 0.0, 1, False),
        (7, "learned", True, 0.1, 2, True),
        *(
            pytest.param(*model, *spread, marks=pytest.mark.slow)
            for model, spread in (
                ((4, "rotary", False, 0.0), (2, False)),
                ((4, "rotary", False, 0.0), (2, True)),
                ((7, "learned", True, 0.1), (2, False)),
                ((7, "learned", True, 0.1), (1, False)),
            )
        ),
    ],
)
def test_gpt(layers: int, positions: Any, tied: bool, dropout: float, tp: int, sp: bool, caplog: Any) -> None:
    config = GPTConfig(64, layers, 32, 4, 16, positions=positions, tie_embeddings=tied, dropout=dropout)
    assert both(GPT(config), next_token_loss, TOKENS, caplog, tp, sp) == (True, "")


@pytest.mark.parametrize(
    ("tp", "sp"),
    [*(pytest.param(*spread, marks=pytest.mark.slow) for spread in ((2, False), (2, True))), (1, False)],
)
@pytest.mark.parametrize(
    "kind", [*(pytest.param(k, marks=pytest.mark.slow) for k in ("Llama", "Qwen2")), "GPT2"]
)
def test_huggingface(kind: str, tp: int, sp: bool, caplog: Any) -> None:
    assert both(huggingface(kind, 6), huggingface_loss, TOKENS, caplog, tp, sp) == (True, "")


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("GPT2", {"scale_attn_by_inverse_layer_idx": True}, "reads scaling"),
        pytest.param(
            "Gemma2", {"sliding_window": 4, "head_dim": 8}, "reads sliding_window", marks=pytest.mark.slow
        ),
    ],
)
def test_models_whose_layers_differ_are_traced_whole(
    kind: str, settings: dict[str, Any], reason: str, caplog: Any
) -> None:
    same, told = both(huggingface(kind, 6, **settings), huggingface_loss, TOKENS, caplog)
    assert same
    assert reason in told


class Stack(nn.Module):
    """Six equal layers; subclasses do something with them that repeating must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class DividesByCount(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            x = layer(x) / len(self.layers) * (2 if at == 4 else 1)
        return x


class AddsResidual(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class CallsOneTwice(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.layers[5](x))


class PenalisesWeights(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + sum(p.square().sum() for p in self.layers.parameters())


class Ties(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers[5].weight = self.layers[0].weight


class Skips(Stack):
    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.layers[:3]:
            x = torch.tanh(layer(x))
            kept.append(x)
        for layer in self.layers[3:]:
            x = torch.tanh(layer(x + kept.pop()))
        return x


class Indexed(nn.Linear):
    """A layer whose index decides what it does, in one place only."""

    at = -1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if self.at == 4 else 1.0)


class ReadsIndex(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Indexed(8, 8) for _ in range(6))
        for at, layer in enumerate(self.layers):
            layer.at = at


class WritesInput(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        return super().forward(x)


class Writes(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WritesInput(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = x * 1.0
            x = layer(y) + y
        return x


class Norms(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(6))


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch)
    return out.square().mean()


@pytest.mark.parametrize(
    ("model", "repeats"),
    [
        (Stack, True),
        (DividesByCount, True),
        (AddsResidual, False),  # the order of a sum of gradients
        (Skips, False),
        (CallsOneTwice, False),
        (PenalisesWeights, False),
        (Ties, True),  # the four layers between the tied two are equal
        (ReadsIndex, False),
        (Writes, False),
        (Norms, False),
    ],
)
def test_what_a_model_does_with_its_layers(model: type[nn.Module], repeats: bool, caplog: Any) -> None:
    same, reason = both(model(), mean_square, torch.randn(4, 8), caplog)
    assert same
    assert (reason == "") is repeats, reason


def test_the_model_is_as_it_was_afterwards() -> None:
    model = ReadsIndex()
    before = [dict(layer.__dict__) for layer in model.layers]
    tracing.trace(model, torch.randn(4, 8), mean_square)
    assert [dict(layer.__dict__) for layer in model.layers] == before
    assert Indexed.at == -1
    assert [layer.at for layer in model.layers] == list(range(6))
