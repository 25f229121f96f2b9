"""Tensor and sequence parallelism keep the plain model's numbers: loss and every gradient, in float64."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.ir.program import Job
from stretto.models.gpt import next_token_loss
from tests.cells import slow
from tests.parallelize.equality import MODELS, TOLERANCE, assert_plain, batch_of, gpt, gpt2, loss_of
from tests.runtime.equality import huggingface_loss

TOLERANCES = {"gemma2": 1e-6}
"""Its norms compute in float32, whatever the dtype, so that regrouped sums may differ in its last bit."""

FULL = {"tp": 2, "sequence_parallel": True, "pp": 2, "dp": 2}

FAST: list[tuple[str, dict[str, Any]]] = [
    *((name, FULL) for name in ("gpt tied, learned positions", "llama, fewer heads of keys")),
    ("gpt2", {"tp": 2, "sequence_parallel": True}),
    ("gpt", {"tp": 4}),
    ("gpt", {"dp": 4, "microbatches": 1}),
]
SLOW: list[tuple[str, dict[str, Any]]] = [
    *((name, FULL) for name in ("gpt", "llama", "qwen2", "gpt2")),
    ("gpt", {"tp": 2}),
    ("gpt", {"tp": 4, "pp": 2, "sequence_parallel": True}),
    ("gpt", {"tp": 4, "pp": 2}),
    *(
        (name, {"tp": 4, "sequence_parallel": True})
        for name in ("gpt", "llama tied", "qwen3", "gemma2", "gpt2")
    ),
    *((name, {"tp": 2, "pp": 2}) for name in ("llama", "qwen2", "gpt2, vocabulary that cannot be spread")),
    ("gemma2", FULL),
    ("gpt2, vocabulary that cannot be spread", FULL),
    ("gpt", {"tp": 2, "pp": 2, "ampipe_degree": 2}),
    ("gpt", {"tp": 2, "ampipe_degree": 3, "sequence_parallel": True}),
]


@pytest.mark.filterwarnings("ignore:.*is not sharded over tp:UserWarning")
@pytest.mark.parametrize(
    ("name", "layout"),
    [*FAST, *(slow(*row) for row in SLOW)],
    ids=str,
)
def test_a_step_is_that_of_the_plain_model(name: str, layout: dict[str, Any]) -> None:
    model = MODELS[name]().double()
    job = capture(model, batch_of(), loss_of(name), Parallel(**{"microbatches": 2, **layout}))
    assert_plain(job, model, loss_of(name), batch_of(), TOLERANCES.get(name, TOLERANCE))


def test_the_model_is_left_as_it_was() -> None:
    model = gpt2(n_layer=1)
    before = {name: (id(p), p.shape) for name, p in model.named_parameters()}
    forwards = {name: "forward" in module.__dict__ for name, module in model.named_modules()}
    capture(model, batch_of(), huggingface_loss, Parallel(tp=2, sequence_parallel=True, microbatches=2))
    assert {name: (id(p), p.shape) for name, p in model.named_parameters()} == before
    assert {name: "forward" in module.__dict__ for name, module in model.named_modules()} == forwards


@pytest.mark.parametrize(
    ("sequence", "layers"), [(False, 1), (True, 2), pytest.param(False, 3, marks=pytest.mark.slow)]
)
def test_collectives_are_as_many_as_megatron_has(sequence: bool, layers: int) -> None:
    """Two all-reduces a layer and direction (arXiv 1909.08053), and those of the vocabulary: embedding, and
    gradient of the head's input. With a sharded sequence an all-gather and a reduce-scatter for each
    (arXiv 2205.05198). The cross-entropy has one gather; Megatron-LM's has three all-reduces."""
    parallel = Parallel(tp=2, microbatches=2, sequence_parallel=sequence)
    job = capture(gpt(layers=layers), batch_of(), next_token_loss, parallel)
    kinds = Counter(kind for kind, _ in collectives(job))
    reductions = 4 * layers + 2
    if sequence:
        assert kinds == {"all_gather": reductions + 1, "reduce_scatter": reductions}
    else:
        assert kinds == {"all_reduce": reductions, "all_gather": 1}


def collectives(job: Job) -> list[tuple[str, int]]:
    """(kind, bytes) of all that a microbatch starts."""
    ops = [op for stage in job.stages for program in stage.ops.values() for op in program]
    return [(op.collective.kind, op.collective.nbytes) for op in ops if op.collective is not None]


def test_a_sequence_of_one_row_is_gathered_without_copies() -> None:
    """With one row the gathered dim is contiguous: what a collective gives and takes are views."""
    model = gpt(layers=1)
    job = capture(model, batch_of(2), next_token_loss, Parallel(tp=2, sequence_parallel=True, microbatches=2))
    made = {op.name: op for stage in job.stages for ops in stage.ops.values() for op in ops}
    users: dict[str, list[str]] = {}
    for op in made.values():
        for name in op.uses:
            users.setdefault(name, []).append(op.target)
    for op in made.values():
        if op.target == "comm.wait" and made[op.uses[0]].target == "comm.all_gather":
            assert not {"aten.clone.default", "aten.cat.default"} & set(users[op.name])
