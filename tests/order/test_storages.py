"""The memory that a window's items make and read is what their ops allocate, parts of tuples on their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stretto
from stretto.ir.action import Action, Phase
from stretto.ir.costs import Costs, Link
from stretto.ir.program import Job
from stretto.ir.storage import makes
from stretto.order.depend import WindowGraph, make_graph
from stretto.schedule.windows import make_window


@pytest.fixture(scope="module")
def job() -> Job:
    """A layer norm's op returns the result, a mean and a deviation."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))
    batch = {"x": torch.randn(4, 8)}
    return stretto.capture(model, batch, lambda model, mb: model(mb["x"]).square().mean(), stretto.Parallel())


def graph_of(job: Job, phase: Phase) -> WindowGraph:
    op_us = {(0, op.name): 1.0 for ops in job.stages[0].ops.values() for op in ops}
    costs = Costs(op_us, {}, Link(0.0, 1.0), 0.0, "made up")
    return make_graph(job, costs, make_window(job, Action(0, phase, 0)), (0,))


@pytest.mark.parametrize("phase", [Phase.F, Phase.B])
def test_what_ops_allocate_is_counted_once(job: Job, phase: Phase) -> None:
    ops = [op for sub in phase.programs for op in job.stages[0].ops[sub]]
    assert phase is Phase.B or any(len(makes(op)) > 1 for op in ops), "else the test shows nothing"
    graph = graph_of(job, phase)
    allocated = sorted(storage.nbytes for storage in graph.storages if storage.maker >= 0)
    assert allocated == sorted(nbytes for op in ops for _, nbytes in makes(op) if nbytes)


def test_a_tuple_is_made_by_its_op_and_kept_part_by_part(job: Job) -> None:
    graph = graph_of(job, Phase.F)
    of_norm = next(k for k, node in enumerate(graph.nodes) if "norm" in str(node.item.ref))
    parts = [storage for storage in graph.storages if storage.maker == of_norm]
    assert sorted((s.nbytes, s.kept) for s in parts) == [(16, True), (16, True), (128, True)], (
        "the backward reads all three"
    )
