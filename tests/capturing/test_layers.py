"""Which modules are layers, and where a text of stages cuts a model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.capturing.layers import layer_names
from stretto.capturing.trace import trace
from stretto.ir.action import Phase
from stretto.ir.program import Job
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from tests.runtime.equality import MODELS, assert_equal, batch_of, loss_of, lowered, model_of, plain, run


def held(job: Job) -> list[set[str]]:
    """The parameters of each stage."""
    return [
        {parameter.name for parameter in job.parameters if stage.index in parameter.stages}
        for stage in job.stages
    ]


def captured(model: nn.Module, batch: Any, loss: Any, split: str, **more: Any) -> Job:
    stages = split.count("|") + 1
    return stretto.capture(model, batch, loss, stretto.Parallel(pp=stages, split=split, **more))


@pytest.mark.parametrize(
    ("name", "blocks", "before", "after"),
    [
        ("gpt", "blocks", {"embedding.weight"}, {"norm.weight", "norm.bias", "head.weight"}),
        ("llama", "model.layers", {"model.embed_tokens.weight"}, {"model.norm.weight", "lm_head.weight"}),
        (
            "gpt2",
            "transformer.h",
            {"transformer.wte.weight", "transformer.wpe.weight"},
            {"transformer.ln_f.weight", "transformer.ln_f.bias", "lm_head.weight"},
        ),
    ],
)
def test_transformers(name: str, blocks: str, before: set[str], after: set[str]) -> None:
    model, batch = model_of(name, torch.float64), batch_of(name, 2)
    layers = {f"{blocks}.{k}" for k in range(3)}
    assert layer_names(model) == layers
    job = captured(model, batch, loss_of(name, torch.float64), "E||tt|t|L", microbatches=2)
    found = held(job)
    of_layer = [{n for n, _ in model.named_parameters() if n.startswith(f"{blocks}.{k}.")} for k in range(3)]
    known = {n for n, _ in model.named_parameters()}
    tied = {"lm_head.weight"} - known  # of a tie the first name counts
    assert found[0] <= {n for n in known if not n.startswith(blocks)}
    assert before & known <= found[0]
    assert found[1] == set()
    assert all(not ops for ops in job.stages[1].ops.values())
    assert of_layer[0] | of_layer[1] <= found[2]
    assert of_layer[2] <= found[3]
    assert not found[4] & {n for n in known if n.startswith(blocks)}
    assert (after & known) - tied <= found[4]
    assert not [edge for edge in job.edges if 1 in (edge.source, edge.target)]


class Block(nn.Module):
    """A layer with modules of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.inner(x)
        return found


class Stack(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Twice(nn.Module):
    """Calls its layers several times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[0]):
            x = block(x)
        return x


class Pairs(nn.Module):
    """Layers in a list of lists, whose inner lists nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for first, second in self.pairs:
            x = second(first(x))
        return x


class Shared(nn.Module):
    """Layers that share a module, which has the first one's name."""

    def __init__(self) -> None:
        super().__init__()
        common = Block()
        self.blocks = nn.ModuleList(Around(nn.Linear(4, 4), common) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Around(nn.Module):
    def __init__(self, own: nn.Module, common: nn.Module) -> None:
        super().__init__()
        self.own, self.common = own, common

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.own(self.common(self.own(x)))
        return found


def blocks(count: int) -> list[Block]:
    return [Block() for _ in range(count)]


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        (Stack(blocks(3)), "blocks.0 blocks.1 blocks.2"),
        (nn.Sequential(nn.Linear(4, 4), *blocks(2), nn.Linear(4, 4)), "1 2"),
        (nn.Sequential(nn.Linear(4, 4), Stack(blocks(2)), nn.Linear(4, 4)), "1.blocks.0 1.blocks.1"),
        (nn.Sequential(nn.Sequential(*blocks(2)), nn.Sequential(*blocks(1)), nn.ReLU()), "0.0 0.1 1.0"),
        (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), "0 2"),
        (
            Stack([nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4), nn.Tanh())]),
            "blocks.0 blocks.1",
        ),
        (Pairs(), "pairs.0.0 pairs.0.1 pairs.1.0 pairs.1.1"),
        (Stack([Block()]), "blocks.0"),
        (nn.Linear(4, 4), ""),
    ],
)
def test_which_modules_are_layers(model: nn.Module, layers: str) -> None:
    assert layer_names(model) == set(layers.split())
    x = torch.randn(2, 4)
    found = trace(model, x, square)
    assert found.layers == set(layers.split()), "the trace tells them"


def square(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x).square().mean()
    return found


@pytest.mark.parametrize(
    ("model", "split"),
    [
        (Stack(blocks(6)), "E|ttt||tt|tL|"),
        (Stack(blocks(6)), "||Etttttt|L"),
        (nn.Sequential(nn.Linear(4, 4), *blocks(2), nn.Linear(4, 4)), "E|t|t|L"),
        (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), "Et|tL"),
        (Twice(), "E|tt|t|t|L"),
        (Pairs(), "Et|tt|tL"),
        (Shared(), "Et|t|tL"),
    ],
)
def test_numbers_are_the_plain_models(model: nn.Module, split: str) -> None:
    model, x = model.double(), torch.randn(6, 4, dtype=torch.float64)
    job = captured(model, x, square, split, microbatches=3)
    assert_equal(run(lowered(job, "1f1b"), model, x), plain(model, x, square), 1e-10)
    for text, stage in zip(split.split("|"), job.stages, strict=True):
        assert bool(text) >= any(stage.ops.values()), "a stage without words holds nothing"
        assert ("t" in text) <= bool(stage.ops[Phase.F])


def test_a_layer_counts_as_often_as_it_is_called() -> None:
    job = captured(Twice(), torch.randn(2, 4), square, "Et|t|t|tL")
    assert [{name.split(".")[1] for name in names} for names in held(job)] == [{"0"}, {"1"}, {"0"}, {"0"}]


def test_equal_layers_that_are_traced_once_are_cut_alike() -> None:
    config = GPTConfig(vocab_size=30, layers=7, hidden=16, heads=2, context=8)
    model, batch = GPT(config, seed=1), torch.zeros(2, 9, dtype=torch.int64)
    parallel = stretto.Parallel(pp=4, split="E|t*4||t*3,L")
    jobs = [
        stretto.capture(model, batch, next_token_loss, parallel, equal_layers=equal)
        for equal in (True, False)
    ]
    assert jobs[0] == jobs[1]


@pytest.mark.parametrize(
    ("model", "split", "said"),
    [
        (
            Stack(blocks(3)),
            "Et|tL",
            "split = 'embedding,layer|layer,loss' has 2 layers, and the forward of Stack calls 3, blocks.0 "
            "to blocks.2: write 'embedding,layer*2|layer,loss'",
        ),
        (Stack(blocks(3)), "Ettt|ttL", "write 'embedding,layer|layer*2,loss'"),
        (
            nn.Linear(4, 4),
            "E|tL",
            "split = 'embedding|layer,loss' speaks of layers, and Linear has no list of modules",
        ),
    ],
)
def test_other_layers_than_the_model_has(model: nn.Module, split: str, said: str) -> None:
    with pytest.raises(stretto.UsageError, match=re.escape(said)) as refused:
        captured(model, torch.randn(2, 4), square, split)
    written = re.search(r"write '([^']*)'", str(refused.value))
    if written is not None:
        captured(model, torch.randn(2, 4), square, written[1])


def test_stages_that_are_not_as_many_as_the_text_says() -> None:
    with pytest.raises(stretto.UsageError, match=r"split = 'Et\|tttL' has 2 stages, but the pipeline has 3"):
        stretto.capture(
            Stack(blocks(4)), torch.randn(2, 4), square, stretto.Parallel(pp=2, split="Et|tttL"), stages=3
        )


def test_all_models_have_layers() -> None:
    assert all(len(layer_names(make())) == 3 for make in MODELS.values())
