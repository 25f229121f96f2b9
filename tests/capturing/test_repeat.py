"""Equal layers, traced twice and repeated, give the trace that all layers give; all others are traced."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.capturing.laid_out import laid_out
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.parallelize.layout import layout_of
from tests.cells import but, slow
from tests.runtime.equality import huggingface_loss

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
    repeated = tracing.trace(model, batch, loss, layout=how.traced)
    reason = " ".join(record.getMessage() for record in caplog.records if record.name == tracing.__name__)
    full = tracing.trace(model, batch, loss, layout=how.traced, equal_layers=False)
    if how.by_passes:
        repeated, full = (laid_out(traced, how, model) for traced in (repeated, full))
    return repr(repeated) == repr(
        full
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
        (4, "rotary", True, 0.1, 1, False),
        *(
            slow(*model, *sharded)
            for model, sharded in (
                ((4, "rotary", False, 0.0), (1, False)),
                ((4, "rotary", False, 0.0), (2, False)),
                ((4, "rotary", False, 0.0), (2, True)),
                ((7, "learned", True, 0.1), (2, True)),
                ((7, "learned", True, 0.1), (2, False)),
                ((7, "learned", True, 0.1), (1, False)),
            )
        ),
    ],
)
def test_gpt(layers: int, positions: Any, tied: bool, dropout: float, tp: int, sp: bool, caplog: Any) -> None:
    config = GPTConfig(
        vocab_size=64,
        layers=layers,
        hidden=32,
        heads=4,
        context=16,
        positions=positions,
        tie_embeddings=tied,
        dropout=dropout,
    )
    assert both(GPT(config), next_token_loss, TOKENS, caplog, tp, sp) == (True, "")


@pytest.mark.parametrize(
    ("tp", "sp"),
    [(1, False), slow(2, False), slow(2, True)],
)
@pytest.mark.parametrize("kind", ["GPT2", slow("Llama"), slow("Qwen2")])
def test_huggingface(kind: str, tp: int, sp: bool, caplog: Any) -> None:
    assert both(huggingface(kind, 4), huggingface_loss, TOKENS, caplog, tp, sp) == (True, "")


class Stack(nn.Module):
    """Six layers, and what is done with them."""

    def __init__(self, layers: list[nn.Module], forward: Any) -> None:
        super().__init__()
        self.layers, self.own = nn.ModuleList(layers), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.layers, x)


def chain(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = torch.tanh(layer(x))
    return x


def divides_by_count(layers: Any, x: Tensor) -> Tensor:
    for at, layer in enumerate(layers):
        x = layer(x) / len(layers) * (2 if at == 4 else 1)
    return x


def adds_residual(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = x + layer(x)
    return x


def skips(layers: Any, x: Tensor) -> Tensor:
    kept = []
    for layer in layers[:3]:
        x = torch.tanh(layer(x))
        kept.append(x)
    for layer in layers[3:]:
        x = torch.tanh(layer(x + kept.pop()))
    return x


def writes_between(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        y = x * 1.0
        x = layer(y) + y
    return x


class Indexed(nn.Linear):
    """A layer whose index decides what it does, in one place only."""

    at = -1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if self.at == 4 else 1.0)


class WritesInput(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        return super().forward(x)


def six(make: Any = nn.Linear) -> list[nn.Module]:
    return [make(8, 8) for _ in range(6)]


def indexed() -> list[nn.Module]:
    layers = six(Indexed)
    for at, layer in enumerate(layers):
        layer.at = at  # type: ignore[assignment]
    return layers


def tied() -> list[nn.Module]:
    layers = six()
    layers[5].weight = layers[0].weight
    return layers


STACKS: dict[str, tuple[Any, Any, bool]] = {
    "chain": (six, chain, True),
    "divided by their count": (six, divides_by_count, True),
    "residual": (six, adds_residual, False),  # the order of a sum of gradients
    "skips": (six, skips, False),
    "one called twice": (six, lambda layers, x: chain(layers, layers[5](x)), False),
    "weights penalised": (
        six,
        lambda layers, x: chain(layers, x) + sum(p.square().sum() for p in layers.parameters()),
        False,
    ),
    "tied": (tied, chain, True),  # the four layers between the tied two are equal
    "index read": (indexed, chain, False),
    "input written": (lambda: six(WritesInput), writes_between, False),
    "norms": (lambda: six(lambda m, n: nn.Sequential(nn.Linear(m, n), nn.BatchNorm1d(n))), chain, False),
}


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch)
    return out.square().mean()


@pytest.mark.parametrize(
    "name", but(STACKS, ["divided by their count", "skips", "one called twice", "input written", "norms"])
)
def test_what_a_model_does_with_its_layers(name: str, caplog: Any) -> None:
    make, forward, repeats = STACKS[name]
    same, reason = both(Stack(make(), forward), mean_square, torch.randn(4, 8), caplog)
    assert same
    assert (reason == "") is repeats, reason
