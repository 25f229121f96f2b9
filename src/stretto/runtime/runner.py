"""`Runner`: one rank's part of a plan, as the public face of the runtime.

runner = Runner(plan, model)                       # under torchrun, after init_process_group
optimizer = torch.optim.AdamW(runner.parameters())
loss = runner.step(batch)                          # gradients are in .grad, as everywhere
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from stretto.capture import tree
from stretto.errors import RunError, UsageError
from stretto.ir.plan import Plan
from stretto.ir.program import TensorSpec
from stretto.ir.timeline import Timeline
from stretto.runtime.compare import Report
from stretto.runtime.memory import MemoryMeter
from stretto.runtime.rank import RankState
from stretto.runtime.record import Marks, build_timeline
from stretto.runtime.torch_transport import TorchTransport
from stretto.runtime.transport import ThreadTransport, Transport


class Runner:
    """Walks a plan's orders for this rank, step after step.

    Holds the parameters and buffers of `model` that this rank's stages use (the model's own tensors, not
    copies), so that the rest of the model may be dropped. Gradients are added to `.grad`.

    plan: the plan; every rank must hold an equal one. model: the model that was captured, with its values;
    it must not be on "meta". transport: how messages travel; `torch.distributed` by default. seed: random
    ops draw from (seed, step, microbatch, op), whatever the schedule.

    Raises UsageError when the world has another size than the plan, or the model does not fit the plan;
    RunError when a rank is lost.
    """

    def __init__(
        self, plan: Plan, model: nn.Module, *, transport: Transport | None = None, seed: int = 0
    ) -> None:
        self.plan = plan
        self.transport = transport if transport is not None else _default_transport(plan)
        self.rank = self.transport.rank
        if self.transport.size != plan.ranks:
            raise UsageError(
                f"the plan is for {plan.ranks} ranks, but {self.transport.size} run: start as many processes "
                f"as the plan has ranks (torchrun --nproc-per-node {plan.ranks}), or plan anew"
            )
        self._adopt(model)
        self.device = next(
            (t.device for t in (*self._parameters.values(), *self._buffers.values())), torch.device("cpu")
        )
        self._compute = self._compute_copies()
        self._agree()
        self.transport.open(plan.communicators)
        dtypes = {k: parameter.dtype for k, parameter in self._parameters.items()}
        self.state = RankState(plan, self.transport, self.device, self._compute, self._buffers, seed, dtypes)
        self._offset_us = self.transport.clock_offset_us()
        self._last: Marks | None = None
        self._peak_bytes = 0

    # Parameters.

    def _adopt(self, model: nn.Module) -> None:
        """Take this rank's parameters and buffers from the model, by name, and check that they fit."""
        stages = set(self.plan.schedule.stages_of(self.rank))
        given = dict(model.named_parameters(remove_duplicate=False))
        held = dict(model.named_buffers(remove_duplicate=False))
        self._parameters: dict[int, nn.Parameter] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        for k, parameter in enumerate(self.plan.job.parameters):
            if stages & set(parameter.stages):
                found = given.get(parameter.name)
                self._check(parameter.name, found, parameter.spec, self.plan.job.param_dtype)
                assert isinstance(found, nn.Parameter)
                self._parameters[k] = found
        for k, buffer in enumerate(self.plan.job.buffers):
            if stages & ({*buffer.stages} | {s for s, _, _ in buffer.updates}):
                found_buffer = held.get(buffer.name)
                self._check(buffer.name, found_buffer, buffer.spec, None)
                assert found_buffer is not None
                self._buffers[k] = found_buffer

    def _check(
        self, name: str, found: torch.Tensor | None, spec: TensorSpec, compute_dtype: str | None
    ) -> None:
        kind = type(found).__name__.lower()
        if found is None:
            raise UsageError(
                f"the plan's stage on rank {self.rank} uses {name!r}, which the model does not have: "
                "give the model that was captured, or capture this one"
            )
        if found.device.type == "meta":
            raise UsageError(
                f"{kind} {name!r} is on the meta device and has no values: initialise the model "
                "(model.to_empty(device=...) and its init) before making a Runner"
            )
        dtype = str(found.dtype).removeprefix("torch.")
        fits = dtype == spec.dtype or (compute_dtype == spec.dtype and found.dtype.is_floating_point)
        if tuple(found.shape) != spec.shape or not fits:
            raise UsageError(
                f"{kind} {name!r} is {dtype}{list(found.shape)}, but the plan was made for "
                f"{spec.dtype}{list(spec.shape)}: capture this model anew"
            )

    def _compute_copies(self) -> dict[int, torch.Tensor]:
        """The tensors that ops read: the parameters, or copies in the dtype of the computation."""
        name = self.plan.job.param_dtype
        self._copies: list[tuple[torch.Tensor, nn.Parameter]] = []
        result: dict[int, torch.Tensor] = {}
        made: dict[int, torch.Tensor] = {}
        for k, parameter in self._parameters.items():
            spec = self.plan.job.parameters[k].spec
            dtype = getattr(torch, spec.dtype)
            if name is None or parameter.dtype is dtype:
                result[k] = parameter.detach()
                continue
            if id(parameter) not in made:
                made[id(parameter)] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                self._copies.append((made[id(parameter)], parameter))
            result[k] = made[id(parameter)]
        return result

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, each once."""
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters with their names in the model, each once, in the model's order."""
        seen: set[int] = set()
        for k, parameter in sorted(self._parameters.items()):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield self.plan.job.parameters[k].name, parameter

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's buffers with their names in the model."""
        for k, buffer in sorted(self._buffers.items()):
            yield self.plan.job.buffers[k].name, buffer

    def owns(self, name: str) -> bool:
        """Whether this rank is the one to count and save the parameter: the first of those that hold it.

        A tied parameter lives on several ranks; its norm counts once, and one copy is saved.
        """
        parameters = {p.name: p for p in self.plan.job.parameters}
        tie = parameters[name].tied_to
        stages = [s for p in parameters.values() if p.tied_to == tie for s in p.stages]
        return min(self.plan.rank_of(s) for s in stages) == self.rank

    # Steps.

    def step(self, batch: Any) -> torch.Tensor:
        """Forward and backward of one batch; gradients are added to `.grad`. Returns the mean loss (0-d).

        batch: a tree like the captured one; every rank is given the whole batch and reads its part.

        Raises UsageError for a batch whose leaves do not fit the plan, RunError when a rank is lost.
        """
        leaves = self._leaves(batch)
        for copy, parameter in self._copies:
            copy.copy_(parameter.detach())
        with self._metered():
            loss = self.state.step(leaves)
        for k, grad in sorted(self.state.grads.items()):
            parameter = self._parameters[k]
            if parameter.grad is not None:
                parameter.grad.add_(grad)
            elif grad.stride() == parameter.stride():
                parameter.grad = grad
            else:
                parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(grad)
        self.state.grads = {}
        self._last = self.state.marks
        self._last.peak_bytes = self._peak_bytes
        return loss

    @contextmanager
    def _metered(self) -> Iterator[None]:
        """Know the step's peak memory: from the allocator, or by counting during the first step."""
        held = (*self._compute.values(), *self._buffers.values())
        if self.device.type == "cuda":
            others = torch.cuda.memory_allocated(self.device) - sum(t.nbytes for t in held)
            torch.cuda.reset_peak_memory_stats(self.device)
            yield
            self._peak_bytes = torch.cuda.max_memory_allocated(self.device) - others
        elif self._last is None:
            with MemoryMeter(held) as meter:
                yield
            self._peak_bytes = meter.peak_bytes
        else:
            yield

    def _leaves(self, batch: Any) -> dict[str, torch.Tensor]:
        leaves = tree.flatten(batch)
        job = self.plan.job
        expected = dict(job.batch)
        if list(leaves) != list(expected):
            raise UsageError(
                f"the batch has leaves {', '.join(leaves) or 'none'}; "
                f"the plan was made for {', '.join(expected)}"
            )
        for name, leaf in leaves.items():
            spec = expected[name]
            want = (spec.shape[0] * job.microbatches, *spec.shape[1:])
            if tuple(leaf.shape) != want:
                raise UsageError(
                    f"batch leaf {name!r} has shape {list(leaf.shape)}; the plan was made for {list(want)} "
                    f"({job.microbatches} microbatches of {spec.shape[0]}): every batch must have that shape"
                )
            dtype = getattr(torch, spec.dtype)
            if leaf.dtype is not dtype and not (leaf.is_floating_point() and dtype.is_floating_point):
                raise UsageError(f"batch leaf {name!r} is {leaf.dtype}; the plan was made for {dtype}")
            leaves[name] = leaf.to(self.device, dtype)
        return leaves

    # What happened.

    def timeline(self) -> Timeline:
        """The last step as measured on all ranks; every rank must call it. Raises RunError before a step."""
        if self._last is None:
            raise RunError("there is no measured step yet: call step(batch) first")
        gathered = self.transport.all_gather((self._last, self._offset_us))
        return build_timeline(self.plan, [m for m, _ in gathered], [offset for _, offset in gathered])

    def report(self) -> Report:
        """Predicted against measured of the last step; every rank must call it. `print` shows a table."""
        return Report(self.plan, self.timeline())

    def _agree(self) -> None:
        """All ranks must hold the same plan; a plan profiled on each rank alone would differ and hang."""
        mine = hash_of(self.plan)
        found = self.transport.all_gather(mine)
        if len(set(found)) > 1:
            told = ", ".join(f"rank {rank}: {digest}" for rank, digest in enumerate(found))
            raise UsageError(
                f"the ranks hold different plans ({told}): plan on one rank and load the file on all, or "
                "call stretto.plan on all ranks after init_process_group, which agrees on the costs"
            )


def hash_of(plan: Plan) -> str:
    """A short digest of what the plan makes ranks do."""
    lines = [str(plan.schedule.family), plan.job.name, str(plan.job.microbatches)]
    lines += [" ".join(map(str, order)) for order in plan.orders]
    lines += [f"{name}: " + " ".join(map(str, w.items)) for name, w in sorted(plan.windows.items())]
    lines += [str(edge) for edge in plan.job.edges]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def _default_transport(plan: Plan) -> Transport:
    if plan.ranks == 1 and not torch.distributed.is_initialized():
        return ThreadTransport.group(1)[0]
    return TorchTransport()
