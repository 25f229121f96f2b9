"""Where the model is cut: balance, names, and each refusal."""

from __future__ import annotations

import functools
import re

import pytest
import torch

import stretto
from stretto.capturing.graph import Traced
from stretto.capturing.split import op_cost, split
from stretto.capturing.stages import cut
from stretto.capturing.trace import trace
from stretto.ir.action import Phase
from stretto.ir.program import Job
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from tests.capturing.zoo import Chain, mean_square, rows
from tests.runtime.equality import job_of, traced


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
    held = {p.name: p.stages for p in job.parameters}
    assert held["embedding.weight"] == held["blocks.0.mlp.up.weight"] == (0,)
    assert held["blocks.1.attention.qkv.weight"] == held["blocks.2.mlp.down.weight"] == (1,)
    assert held["norm.weight"] == held["head.weight"] == (2,)


def test_names_alone_say_how_many_stages() -> None:
    parallel = stretto.Parallel(pp=1, microbatches=2, split=["layers.1", "layers.3"])
    job = stretto.capture(Chain(), rows(), mean_square, parallel)
    assert len(job.stages) == 3


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
    found = trace(Chain(), rows(), mean_square, microbatches=2)
    with pytest.raises(stretto.UsageError, match=re.escape(message)):
        split(found, stages, how)


def test_cheap_shared_values_are_made_where_they_are_used() -> None:
    """Masks and rotary tables are no messages; a draw is made once."""
    job = job_of(traced("llama", torch.float32), 4, 2)
    assert all(edge.target == edge.source + 1 for edge in job.edges if edge.source < edge.target)
    assert sum(any("cos" in op.target for op in stage.ops[Phase.F]) for stage in job.stages) >= 3
