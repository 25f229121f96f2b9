"""A rank's step as one CUDA graph: recorded once, then replayed, so that the host has next to nothing to do.

A rank that computes less than its host needs to queue it hides nothing, whatever its plan. A plan is one
fixed order of ops, waits and messages on fixed shapes, which is what a graph contains.

    1. The first steps are walked op by op: kernels are chosen, communicators connect.
    2. The walk is recorded, on copies of the batch's leaves. What it makes is in the graph's own memory.
    3. A step copies its batch there and replays. Gradients and loss are the graph's own tensors, so gradients
       that the caller still has from the step before are copied away first. Graphs of several plans share
       their memory.

What a graph cannot contain is refused: ops that draw random numbers, other ones in the next step.
Replayed steps have no marks. Method: NVIDIA's CUDA graphs, as `torch.cuda.graph` records them, calls of NCCL
too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import nn

from stretto.errors import UsageError
from stretto.runtime.rank import RankState
from stretto.runtime.record import HostClock

WALKED = 2
"""Step 1. The first makes what is made on first use; the second is as all that follow, and has marks."""


class StepGraph:
    """Takes the place of `RankState.step`."""

    def __init__(
        self, state: RankState, parameters: Mapping[int, nn.Parameter], other: StepGraph | None = None
    ) -> None:
        """parameters: index in the job -> what the caller's gradients are on. other: of another plan of the
        same Runner, whose memory is used: one is replayed at a time."""
        self._all: list[StepGraph] = [] if other is None else other._all
        self._all.append(self)
        self._state = state
        self._parameters = parameters
        self._walked = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._grads: dict[int, torch.Tensor] = {}
        self._leaves: dict[str, torch.Tensor] = {}

    @property
    def records(self) -> bool:
        """Whether the next step is to be recorded: the last one's marks are the last that there are."""
        return self._walked == WALKED and self._graph is None

    @property
    def replays(self) -> bool:
        """Whether the last step was not walked, and has no marks."""
        return self._graph is not None

    def step(self, leaves: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """As `RankState.step`. Raises UsageError for a step that no graph can contain."""
        if self._walked < WALKED:
            self._walked += 1
            return self._state.step(leaves)
        if self._graph is None:
            self._record(leaves)
        assert self._graph is not None
        for graph in self._all:
            graph._keep()
        for name, leaf in leaves.items():
            self._leaves[name].copy_(leaf)
        self._graph.replay()
        self._state.steps += 1
        self._state.grads = dict(self._grads)
        return self._loss.clone()

    def _record(self, leaves: Mapping[str, torch.Tensor]) -> None:
        state = self._state
        self._leaves = {name: leaf.clone() for name, leaf in leaves.items()}
        clock, state.clock = state.clock, HostClock()  # events within a graph cannot be read
        torch.cuda.empty_cache()  # what the walked steps took, the graph takes again
        graph = torch.cuda.CUDAGraph()
        state.draw = _refuse  # type: ignore[method-assign]
        steps = state.steps
        try:
            # Threads of the communication library look at events of their own meanwhile.
            pool = next((one._graph.pool() for one in self._all if one._graph is not None), None)
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._loss = state.step(self._leaves)
        finally:
            state.steps, state.clock = steps, clock
        self._grads = dict(state.grads)
        self._graph = graph

    def _keep(self) -> None:
        for k, grad in self._grads.items():
            kept = self._parameters[k].grad
            if kept is not None and kept.data_ptr() == grad.data_ptr():
                self._parameters[k].grad = kept.clone()


def _refuse(microbatch: int, op: int) -> NoReturn:
    raise UsageError(
        "cuda_graph=True replays one recorded step, and this one draws random numbers (dropout), which would "
        "be the same in every step: train without dropout, or without cuda_graph"
    )
