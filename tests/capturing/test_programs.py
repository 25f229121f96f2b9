"""F, I and W: every op in one of them, and each where it must be for its hiding to work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stretto.capturing.graph import Traced
from stretto.capturing.split import place
from stretto.capturing.stages import cut
from stretto.capturing.trace import trace
from stretto.ir.action import Phase
from stretto.ir.flow import PHASES, is_external
from stretto.ir.program import Job, Op
from tests.capturing.zoo import WIDTH
from tests.cells import but
from tests.families import ONE_STAGE
from tests.runtime.equality import (
    MODELS,
    assert_equal,
    assert_same_bits,
    evenly,
    job_of,
    lowered,
    plain,
    plan_of,
    run,
    traced,
)


def check_programs(job: Job, found: Traced) -> None:
    """The properties of every partition."""
    made_by = Counter(op.name for stage in job.stages for ops in stage.ops.values() for op in ops)
    backward = {op.name for op, origin in found.program.ops if origin.backward}
    gone = {op.name for op, _ in found.program.ops} - set(made_by)
    sums = set(made_by) - {op.name for op, _ in found.program.ops}
    assert gone <= {name for name in backward if found_op(found, name).target == "aten.add.Tensor"}
    assert all(made_by[name] == 1 for name in backward - gone), "a backward op is in one place"
    assert all("_part" in name for name in sums)
    grads = {(stage, value) for p in job.parameters for stage, _, value in p.grads}
    for stage in job.stages:
        phase_of = {op.name: phase for phase in PHASES for op in stage.ops[phase]}
        leaving = {e.value for e in job.edges if e.source == stage.index and e.phase is not Phase.F}
        arriving = {e.value: e.user_phase for e in job.edges if e.target == stage.index}
        assert all((name in backward | sums) == (phase is not Phase.F) for name, phase in phase_of.items())
        useful: dict[str, bool] = {}
        seen: set[str] = set()
        for phase in PHASES:
            for op in stage.ops[phase]:
                for name in op.uses:
                    known = is_external(name) or name in seen or name in arriving
                    assert known, f"{op.name} reads {name}, which is made later"
                    if name in phase_of:
                        assert PHASES.index(phase_of[name]) <= PHASES.index(phase)
                    elif name in arriving:
                        assert PHASES.index(arriving[name]) <= PHASES.index(phase)
                seen.add(op.name)
        for phase in (Phase.W, Phase.I):
            for op in reversed(stage.ops[phase]):
                useful[op.name] = useful.get(op.name, False) or op.name in leaving
                for name in op.uses:
                    useful[name] = useful.get(name, False) or useful[op.name]
        if leaving:
            wrong = [op.name for op in stage.ops[Phase.I] if not useful[op.name]]
            assert not wrong, f"I of stage {stage.index} does what only parameter gradients need: {wrong}"
            assert not [op.name for op in stage.ops[Phase.W] if useful[op.name]], "W feeds I"
        assert {value for at, value in grads if at == stage.index} <= set(phase_of)


def found_op(found: Traced, name: str):
    return next(op for op, _ in found.program.ops if op.name == name)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize(
    # The tie of the first is that of another, and blocks are those of a third.
    "name",
    but(MODELS, ["llama tied", "qwen2", "gpt2"]),
)
def test_models_are_cut_into_three_programs(name: str, stages: int) -> None:
    found = traced(name, torch.float32)
    for job in (job_of(found, stages, 2), evenly(found, stages, 2)):
        check_programs(job, found)


def test_matrix_products_of_weight_gradients_are_w() -> None:
    """In a middle stage each matrix has one product in F, one in I and one in W. Nothing leaves stage 0, but
    the gradient still has to go through its layers; the products of weights wait in W."""
    first, middle, _ = job_of(traced("gpt", torch.float32), 3, 2, ["blocks.1", "blocks.2"]).stages
    assert {phase: products(middle.ops[phase]) for phase in PHASES} == dict.fromkeys(PHASES, 4)
    assert products(first.ops[Phase.W]) == 4
    assert any(op.target == "aten.embedding_dense_backward.default" for op in first.ops[Phase.W])


def products(ops: Sequence[Op]) -> int:
    return sum(op.target in ("aten.mm.default", "aten.addmm.default") for op in ops)


class Random(nn.Module):
    """A graph of layers in which each node takes some earlier ones, and a few layers come twice."""

    def __init__(self, wires: list[tuple[int, int, int]]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.wires = wires
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)).double()

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for layer, one, other in self.wires:
            a, b = values[one % len(values)], values[other % len(values)]
            values.append(torch.tanh(self.layers[layer](a)) + (a * b if layer % 2 else b))
        return torch.stack(values[1:]).mean(0)


any_graph = given(
    wires=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 8), st.integers(0, 8)), min_size=3, max_size=8
    ),
    stages=st.integers(1, 4),
    data=st.data(),
)


@any_graph
@settings(max_examples=4, derandomize=True)
def test_any_graph_cut_anywhere(wires: list[tuple[int, int, int]], stages: int, data: st.DataObject) -> None:
    check_graph(wires, stages, data)


@pytest.mark.slow
@any_graph
@settings(max_examples=40)
def test_many_graphs_cut_anywhere(
    wires: list[tuple[int, int, int]], stages: int, data: st.DataObject
) -> None:
    check_graph(wires, stages, data)


def check_graph(wires: list[tuple[int, int, int]], stages: int, data: st.DataObject) -> None:
    """Whatever the graph and the cut: the properties keep, the proof accepts, the numbers are right."""
    model = Random(wires)
    batch = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).reshape(4, WIDTH)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    found = trace(model, batch, loss, microbatches=4)
    origins = [origin for _, origin in found.program.ops]
    places = sorted({at.segment for at in origins if not at.backward and at.segment})
    cuts = sorted(data.draw(st.sets(st.sampled_from(places), min_size=stages - 1, max_size=stages - 1)))
    job = cut(found, place(found, stages, cuts), stages, 4)
    check_programs(job, found)
    expected = plain(model, batch, loss)
    first = run(plan_of(job, "zb-h2"), model, batch)
    assert_equal(first, expected, 1e-10)
    assert_same_bits(run(lowered(job, data.draw(st.sampled_from(ONE_STAGE))), model, batch), first)


class _Attends(nn.Module):
    """Four heads of queries, two of keys and values. own: each head of queries gets a copy of its own."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own, self.w = own, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.w(x).view(x.shape[0], 6, 4, 8).transpose(1, 2)
        k = v = q[:, ::2]
        if self.own:
            k = v = k.repeat_interleave(2, dim=1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.own)


def test_heads_that_share_keys_count_the_same_work_as_heads_with_keys_of_their_own() -> None:
    x = torch.ones(2, 24, 8)
    counted = []
    for own in (False, True):
        found = trace(_Attends(own), x, lambda model, batch: model(batch).square().mean(), microbatches=1)
        counted.append([op.flops for op, _ in found.program.ops if "scaled_dot_product" in op.target])
    product = 2 * 2 * 4 * 6 * 6 * 8  # multiply and add, batch, heads, rows, keys, width
    assert counted == [[2 * product, 5 * product]] * 2
