"""A rank's steps by one plan, on the tensors of its Runner: what a Runner has of each of its plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from stretto.batch.constants import watch_model
from stretto.errors import UsageError
from stretto.ir.integers import numbers_read
from stretto.ir.plan import Plan
from stretto.runtime.compile import Compiler
from stretto.runtime.counting import UnequalMeans
from stretto.runtime.fit import explaining_failed_ops
from stretto.runtime.memory_adapter import MemoryMeter
from stretto.runtime.rank import RankState
from stretto.runtime.rank_tensors import RankTensors
from stretto.runtime.record import Marks
from stretto.runtime.step_graph import StepGraph
from stretto.runtime.step_metrics import StepMetrics
from stretto.runtime.transport import ThreadTransport, Transport


class PlanSteps:
    """The walk of one plan, and what is known of its last step."""

    def __init__(
        self,
        plan: Plan,
        tensors: RankTensors,
        transport: Transport,
        seed: int,
        compiler: Compiler | None,
        model: nn.Module | None,
    ) -> None:
        """Opens the plan's communicators, of which those of an earlier plan are open: every rank must call
        it. model: None where it was dropped."""
        self.plan, self.tensors = plan, tensors
        self._transport, self._compiler = transport, compiler
        transport.open(plan.communicators, tensors.device, plan.mesh)
        self.state = RankState(
            plan, transport, tensors.device, tensors.compute, tensors.buffers, seed, compiler
        )
        if compiler is not None:
            transport.all_gather(None)  # so that no rank's first collective waits while another compiles
        self.metrics = StepMetrics(plan, transport, self.state.watch.returned, tensors.device)
        self.numbers = numbers_read(plan.job)
        self._means = UnequalMeans(plan.job, tensors.device, transport.rank)
        self._values = None if model is None else watch_model(model, plan.job.read, plan.job.trains)
        self.graph: StepGraph | None = None
        self.last: Marks | None = None
        self.peak_bytes = 0

    def replay(self, other: StepGraph | None) -> StepGraph:
        """Later steps are replayed (`stretto.runtime.step_graph`). other: of another plan, whose memory is
        used."""
        self.graph = StepGraph(self.state, self.tensors.parameters, other)
        return self.graph

    @property
    def replays(self) -> bool:
        """Whether the last step was replayed."""
        return self.graph is not None and self.graph.replays

    def check(self) -> None:
        """Raises UsageError where what the step has read of Python is another now."""
        if self._values is not None:
            self._values.check()
        if self.plan.job.watch is not None:
            self.plan.job.watch.check()

    def step(self, leaves: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of a batch, whose gradients are in `state.grads` then."""
        if self.last is None:
            self.state.divisor.check(leaves, self._transport)
        self._means.look(leaves)
        if self.graph is not None and self.graph.records and self.last is not None:
            self.last = self.state.clock.read(self.last)  # not hours later, when they are asked for
        # The first step makes what is made on first use; threads among it would be of the lane's class.
        with (
            explaining_failed_ops(self._transport.rank) if self.plan.edited else nullcontext(),
            self._metered(),
            nullcontext() if self.last is None else self._transport.during_step(),
        ):
            loss = self.state.step(leaves) if self.graph is None else self.graph.step(leaves)
        self.state.watch.end()
        if not self.replays:
            self.last = self.state.marks
        return loss

    @contextmanager
    def _metered(self) -> Iterator[None]:
        """Know the step's peak memory, by counting tensors during the first step."""
        if self.last is not None:
            yield
            return
        tensors = self.tensors
        kept = (*tensors.compute.values(), *tensors.parameters.values(), *tensors.buffers.values())
        meter = MemoryMeter(kept)
        with meter, nullcontext() if self._compiler is None else self._compiler.metered(meter):
            yield
        self.peak_bytes = meter.peak_bytes


def check_graph(device: torch.device, transport: Transport, world: int) -> None:
    """Raises UsageError where a step cannot be replayed."""
    if device.type != "cuda":
        raise UsageError(
            "cuda_graph=True replays what an accelerator was given, and this Runner computes on a "
            "processor: leave it out"
        )
    if world > 1 and isinstance(transport, ThreadTransport):
        raise UsageError(
            "cuda_graph=True records what one process gives its accelerator, and the ranks of this "
            "run are threads of one: start processes, or leave it out"
        )
