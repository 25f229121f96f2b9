"""Where the model is cut: balance, names, and each refusal."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.capturing.graph import Traced
from stretto.capturing.split import layer_names, op_cost, split
from stretto.capturing.stages import cut
from stretto.capturing.trace import trace
from stretto.ir.action import Phase
from stretto.ir.program import Job
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from tests.capturing.zoo import Chain, mean_square, rows
from tests.cells import slow
from tests.runtime.equality import (
    assert_equal,
    batch_of,
    job_of,
    loss_of,
    lowered,
    model_of,
    plain,
    run,
    traced,
)


def loads(job: Job) -> list[float]:
    return [sum(op_cost(op) for ops in stage.ops.values() for op in ops) for stage in job.stages]


@functools.cache
def twelve() -> Traced:
    """Equal blocks and a small vocabulary."""
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=128, layers=12, hidden=256, heads=4, context=256), seed=0)
    return trace(model, torch.zeros(1, 257, dtype=torch.int64), next_token_loss)


@pytest.mark.parametrize("stages", [2, 3, 4, 6])
def test_automatic_stages_are_balanced(stages: int) -> None:
    """No stage takes over a fifth more than its share."""
    job = cut(twelve(), split(twelve(), stages), stages, 1)
    assert max(loads(job)) <= 1.2 * sum(loads(job)) / stages
    forward = [edge for edge in job.edges if edge.source < edge.target]
    assert len(forward) == stages - 1, "one activation between neighbours, at the cheapest place"


def test_a_large_head_is_counted() -> None:
    """The last stage has fewer blocks when it also has a vocabulary's worth of work."""
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=16_384, layers=8, hidden=256, heads=4, context=256), seed=0)
    found = trace(model, torch.zeros(1, 257, dtype=torch.int64), next_token_loss)
    job = cut(found, split(found, 2), 2, 1)
    blocks = [
        {op.module.split(".")[1] for op in s.ops[Phase.F] if "blocks." in op.module} for s in job.stages
    ]
    assert len(blocks[0]) > len(blocks[1])


def test_names_begin_stages() -> None:
    job = job_of(traced("gpt", torch.float32), 3, 2, ["blocks.1", "norm"])
    kept = {p.name: p.stages for p in job.parameters}
    assert kept["embedding.weight"] == kept["blocks.0.mlp.up.weight"] == (0,)
    assert kept["blocks.1.attention.qkv.weight"] == kept["blocks.2.mlp.down.weight"] == (1,)
    assert kept["norm.weight"] == kept["head.weight"] == (2,)


def test_names_alone_say_how_many_stages() -> None:
    parallel = stretto.Parallel(pp=1, microbatches=2, split=["layers.1", "layers.3"])
    job = stretto.capture(Chain(), rows(), mean_square, parallel)
    assert len(job.stages) == 3


@functools.cache
def chain() -> Traced:
    return trace(Chain(), rows(), mean_square, microbatches=2)


@pytest.mark.parametrize(
    ("how", "stages", "message"),
    [
        (["layer.2"], 2, "'layer.2', which the forward never enters; did you mean 'layers.2'?"),
        (["zzz"], 2, "split names the module 'zzz', which the forward never enters"),
        (["layers.2", "layers.1"], 3, "in the order of execution, each once: layers.2, layers.1"),
        (["layers.1", "layers.1"], 3, "in the order of execution, each once"),
        (["layers.1"], 3, "split names 1 modules, which makes 2 stages, but the pipeline has 3"),
        ("even", 2, "split = 'even': 'even' is no word of a stage"),
        ("auto", 0, "a model needs at least one stage, not 0"),
        ("auto", 100, "parts that can be stages, fewer than the 100 asked for; use fewer pipeline stages"),
    ],
)
def test_refusals(how, stages: int, message: str) -> None:
    with pytest.raises(stretto.UsageError, match=re.escape(message)):
        split(chain(), stages, how)


def test_cheap_shared_values_are_made_where_they_are_used() -> None:
    """Masks and rotary tables are no messages; a draw is made once."""
    job = job_of(traced("llama", torch.float32), 4, 2)
    assert all(edge.target == edge.source + 1 for edge in job.edges if edge.source < edge.target)
    assert sum(any("cos" in op.target for op in stage.ops[Phase.F]) for stage in job.stages) >= 3


def kept(job: Job) -> list[set[str]]:
    """The parameters of each stage."""
    return [
        {parameter.name for parameter in job.parameters if stage.index in parameter.stages}
        for stage in job.stages
    ]


def captured(model: nn.Module, batch: Any, loss: Any, split: str, **more: Any) -> Job:
    stages = split.count("|") + 1
    return stretto.capture(model, batch, loss, stretto.Parallel(pp=stages, split=split, **more))


@pytest.mark.parametrize(
    ("name", "blocks", "first"),
    [
        ("gpt", "blocks", {"embedding.weight"}),
        slow("llama", "model.layers", {"model.embed_tokens.weight"}),
        ("gpt2", "transformer.h", {"transformer.wte.weight", "transformer.wpe.weight"}),
    ],
)
def test_transformers(name: str, blocks: str, first: set[str]) -> None:
    model, batch = model_of(name, torch.float64), batch_of(name, 2)
    assert layer_names(model) == {f"{blocks}.{k}" for k in range(3)}
    job = captured(model, batch, loss_of(name, torch.float64), "E||tt|t|L", microbatches=2)
    known = [n for n, _ in model.named_parameters()]
    of_layer = [{n for n in known if n.startswith(f"{blocks}.{k}.")} for k in range(3)]
    last = set(known) - first - set().union(*of_layer)
    before, empty, two, one, after = kept(job)
    assert first <= before
    assert not empty | set().union(*job.stages[1].ops.values())
    assert of_layer[0] | of_layer[1] <= two
    assert of_layer[2] <= one
    assert last <= after
    assert not (before | after) & set().union(*of_layer)
    assert not [edge for edge in job.edges if 1 in (edge.source, edge.target)]


class Block(nn.Module):
    """A layer with modules of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Model(nn.Module):
    """Modules in a list, and the order in which they are called."""

    def __init__(self, modules: Sequence[nn.Module], order: Callable[[Any], Iterable[nn.Module]]) -> None:
        super().__init__()
        self.blocks, self.order = nn.ModuleList(modules), order

    def forward(self, x: Tensor) -> Tensor:
        for block in self.order(self.blocks):
            x = block(x)
        return x


def stack(modules: Sequence[nn.Module]) -> Model:
    return Model(modules, iter)


def twice() -> Model:
    """Calls its layers several times."""
    return Model(blocks(2), lambda own: (own[0], own[1], own[0], own[0]))


def pairs() -> Model:
    """Layers in a list of lists, whose inner lists no one calls."""
    pairs = [nn.ModuleList(blocks(2)) for _ in range(2)]
    return Model(pairs, lambda own: (block for pair in own for block in pair))


class Around(nn.Module):
    def __init__(self, own: nn.Module, common: nn.Module) -> None:
        super().__init__()
        self.own, self.common = own, common

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.common(self.own(x)))


def shared() -> Model:
    """Layers that share a module, which has the first one's name."""
    common = Block()
    return Model([Around(nn.Linear(4, 4), common) for _ in range(3)], iter)


def blocks(count: int) -> list[Block]:
    return [Block() for _ in range(count)]


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        (stack(blocks(3)), "blocks.0 blocks.1 blocks.2"),
        (nn.Sequential(nn.Linear(4, 4), *blocks(2), nn.Linear(4, 4)), "1 2"),
        (nn.Sequential(nn.Linear(4, 4), stack(blocks(2)), nn.Linear(4, 4)), "1.blocks.0 1.blocks.1"),
        (nn.Sequential(nn.Sequential(*blocks(2)), nn.Sequential(*blocks(1)), nn.ReLU()), "0.0 0.1 1.0"),
        (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), "0 2"),
        (
            stack([nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4), nn.Tanh())]),
            "blocks.0 blocks.1",
        ),
        (pairs(), "blocks.0.0 blocks.0.1 blocks.1.0 blocks.1.1"),
        (stack([Block()]), "blocks.0"),
        (nn.Linear(4, 4), ""),
    ],
)
def test_which_modules_are_layers(model: nn.Module, layers: str) -> None:
    assert layer_names(model) == set(layers.split())
    x = torch.randn(2, 4)
    found = trace(model, x, square)
    assert found.layers == set(layers.split()), "the trace tells them"


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize(
    ("model", "split"),
    [
        (stack(blocks(6)), "E|ttt||tt|tL|"),
        slow(stack(blocks(6)), "||Etttttt|L"),
        (nn.Sequential(nn.Linear(4, 4), *blocks(2), nn.Linear(4, 4)), "E|t|t|L"),
        slow(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), "Et|tL"),
        (twice(), "E|tt|t|t|L"),
        (pairs(), "Et|tt|tL"),
        (shared(), "Et|t|tL"),
    ],
)
def test_numbers_are_the_plain_models(model: nn.Module, split: str) -> None:
    model, x = model.double(), torch.randn(6, 4, dtype=torch.float64)
    job = captured(model, x, square, split, microbatches=3)
    assert_equal(run(lowered(job, "1f1b"), model, x), plain(model, x, square), 1e-10)
    for text, stage in zip(split.split("|"), job.stages, strict=True):
        assert bool(text) >= any(stage.ops.values()), "a stage without words has nothing"
        assert ("t" in text) <= bool(stage.ops[Phase.F])


def test_a_layer_counts_as_often_as_it_is_called() -> None:
    job = captured(twice(), torch.randn(2, 4), square, "Et|t|t|tL")
    assert [{name.split(".")[1] for name in names} for names in kept(job)] == [{"0"}, {"1"}, {"0"}, {"0"}]


@pytest.mark.parametrize(
    ("model", "split", "said"),
    [
        (stack(blocks(3)), "Et|tL", "calls 3, blocks.0 to blocks.2: write 'embedding,layer*2|layer,loss'"),
        slow(stack(blocks(3)), "Ettt|ttL", "write 'embedding,layer|layer*2,loss'"),
        (nn.Linear(4, 4), "E|tL", "speaks of layers, and Linear has no list of modules"),
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
            stack(blocks(4)), torch.randn(2, 4), square, stretto.Parallel(pp=2, split="Et|tttL"), stages=3
        )
